"""Renderings and masks of one template per family, against apply_chat_template, vLLM and marks made by hand.

golden/TEMPLATE.txt holds, under `=== conversation {template arguments}`, the rendered text with what the assistant said
in ⟦ ⟧. The templates were written for these tests from the formats that the model makers document.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from conversations import CONVERSATIONS, TEMPLATES
from toy_target import make_target, make_tokenizer

from eagle3_lightning.options import TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.records import RecordError, parse_record
from eagle3_lightning.target import inspect_target

HERE = Path(__file__).parent
CASES = [(name, conversation, kwargs) for name, t in TEMPLATES.items() for conversation, kwargs in t["cases"]]
IDS = [" ".join([name, conversation, *map(str, kwargs.values())]) for name, conversation, kwargs in CASES]
pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A toy checkpoint for each template."""
    made = {}
    for name, settings in TEMPLATES.items():
        template = (HERE / "templates" / f"{name}.jinja").read_text().rstrip("\n")
        tokenizer = make_tokenizer(settings["specials"], settings.get("plain_added", ()), template, **settings["names"])
        made[name] = make_target(tmp_path_factory.mktemp(name), tokenizer)
    return made


def chat(target, kwargs):
    return ChatTokenizer(inspect_target(TargetOptions(str(target))), kwargs)


def golden(name, conversation, kwargs):
    """Text and marked character ranges."""
    title = f"=== {conversation} {kwargs or ''}".rstrip()
    sections = re.split(r"^(?==== )", (HERE / "golden" / f"{name}.txt").read_text(), flags=re.MULTILINE)
    (body,) = [s.removeprefix(title + "\n") for s in sections if s.startswith(title + "\n")]
    parts = re.split("[⟦⟧]", body.removesuffix("\n"))
    spans, text = [], ""
    for i, part in enumerate(parts):
        if i % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


@pytest.mark.parametrize(("name", "conversation", "kwargs"), CASES, ids=IDS)
def test_rendering_and_mask(targets, name, conversation, kwargs):
    text, marked = golden(name, conversation, kwargs)
    tokenizer = chat(targets[name], kwargs)
    ids, spans = tokenizer.conversation(parse_record(CONVERSATIONS[conversation], "here"))
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(ids[a:b]) for a, b in spans] == [text[a:b] for a, b in marked]
    assert [len(tokenizer.decode(ids[:a])) for a, _ in spans] == [a for a, _ in marked]
    record = CONVERSATIONS[conversation]
    expected = tokenizer._tokenizer.apply_chat_template(
        parse_record(record, "here").messages, tools=record.get("tools"), tokenize=True, return_dict=False, **kwargs
    )
    assert ids == expected


@pytest.mark.parametrize(
    ("name", "end"),
    [("deepseek", "<\uff5cAssistant\uff5c>"), ("gemma", "<end_of_turn>"), ("harmony", "<|end|>"),
     ("kimi", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "[/INST]"), ("qwen3", "<|im_end|>"),
     ("smollm2", "<|im_end|>")],
)  # fmt: skip
def test_a_prompt_that_the_target_writes_stands_where_a_users_would(targets, name, end):
    tokenizer = chat(targets[name], {})
    turn = tokenizer.user_turn()
    assert end in [tokenizer.decode([i]) for i in turn.stop_ids]
    asked = tokenizer.prompt(parse_record({"prompt": "Hi"}, "here"))
    assert asked[: len(turn.opening)] == turn.opening
    behind = tokenizer.decode(asked[len(turn.opening) :]).lstrip()
    assert behind.removeprefix("Hi").lstrip().startswith(end)


@pytest.mark.vllm
def test_prompts_equal_what_vllm_renders(targets):
    requests, ours = [], []
    for name, conversation, kwargs in CASES:
        record = CONVERSATIONS[conversation]
        for end, message in enumerate(record["messages"]):
            if message["role"] != "assistant":
                continue
            part = {"messages": record["messages"][:end], "tools": record.get("tools")}
            ours.append(chat(targets[name], kwargs).prompt(parse_record(part, "here")))
            sent = {"messages": [vllm_message(m) for m in part["messages"]], "tools": part["tools"], "kwargs": kwargs}
            requests.append({"target": str(targets[name]), **sent})
    script = [sys.executable, str(HERE / "vllm_render.py")]
    done = subprocess.run(script, input=json.dumps(requests), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(ours) > 60
    for request, one, other in zip(requests, ours, theirs, strict=True):
        assert one == other, request


def vllm_message(message):
    """As a client sends it: arguments as text, thoughts as `reasoning`."""
    sent = {**message}
    if "reasoning_content" in sent:
        sent["reasoning"] = sent.pop("reasoning_content")
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def test_a_dropped_thinking_block_is_reported(targets, caplog):
    chat(targets["deepseek"], {}).conversation(parse_record(CONVERSATIONS["system"], "data.jsonl, line 4"))
    assert "data.jsonl, line 4: the chat template puts something before this conversation's last answer" in caplog.text
    caplog.clear()
    for name, conversation in (("qwen3", "thinking tools"), ("mistral", "system multi-turn"), ("harmony", "tools")):
        chat(targets[name], {}).conversation(parse_record(CONVERSATIONS[conversation], "here"))
    assert not caplog.text


UNSTABLE = {
    "upper case": "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}",
    "answers left out": "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    "twice": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("template", UNSTABLE.values(), ids=UNSTABLE.keys())
def test_templates_that_cannot_be_explained_are_refused(tmp_path, template):
    tokenizer = chat(make_target(tmp_path, make_tokenizer(template=template)), {})
    with pytest.raises(RecordError, match=r"line 4: the chat template renders messages\[1\] so that its tokens cannot"):
        tokenizer.conversation(parse_record(CONVERSATIONS["multi-turn"], "data.jsonl, line 4"))
    tokenizer.prompt(parse_record(CONVERSATIONS["multi-turn"], "here"))  # generate mode needs no mask


def test_a_token_across_the_border_is_not_supervised():
    """SmolLM2 writes `assistant` + newline; an answer that starts with a newline can share a token with it."""
    target = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
    tokenizer = chat(target, {})
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nHello there"}]
    ids, ((start, end),) = tokenizer.conversation(parse_record({"messages": turns}, "here"))
    plain_turns = {"prompt": "Hi", "response": "Hello there"}
    plain, ((plain_start, plain_end),) = tokenizer.conversation(parse_record(plain_turns, "here"))
    assert tokenizer.decode(plain[plain_start:plain_end]) == "Hello there<|im_end|>"
    assert tokenizer.decode(ids[start:end]).strip() == "Hello there<|im_end|>"
    assert tokenizer.decode(ids[:start]).rstrip("\n").endswith("<|im_start|>assistant")
    assert ids[start:end][-1] == 2


def test_serving_and_training_agree_on_the_first_supervised_slot(targets):
    """Prompt of 5 tokens and answer of 3: supervised are the slots that draft x[6], x[7] and the token after them."""
    from eagle3_lightning.stream.packer import supervised

    ids, spans = [10, 11, 12, 13, 14, 20, 21, 22], [(5, 8)]
    slots = supervised(spans, len(ids))[1:].nonzero().flatten().tolist()
    assert [t + 2 for t in slots] == [6, 7, 8]
