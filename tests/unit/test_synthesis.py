"""The filters of the prompts that a target writes. That it writes them is an integration test."""
# ruff: noqa: RUF001

import random
from itertools import islice

import pytest
from toy_target import make_target, make_tokenizer

from eagle3_lightning.errors import ConfigError, ProducerError, SampleError
from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.options import EngineOptions, SynthesisOptions, TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.filters import PromptFilter, is_loop
from eagle3_lightning.prompts.synthesis import Demand, SynthesisReport, collect, judge, synthesize_prompts
from eagle3_lightning.stream.messages import Dropped, Sampling
from eagle3_lightning.target import inspect_target


def ids_of(text):
    return [hash(word) % 50_000 for word in text.split()]


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat " * 12,
        "1 2 3 4 " * 30,
        "no no no no no no no no no no no no",
        "はい はい はい はい はい はい はい はい はい はい はい はい",
    ],
)
def test_loops_are_found_in_any_language(text):
    assert is_loop(ids_of(text), text)


@pytest.mark.parametrize(
    "text",
    [
        "Write a function that sorts a list of numbers without using the built-in sort, and explain how fast it is.",
        "Напиши короткое письмо другу о том, как прошло лето, и пригласи его в гости на выходные.",
        "What is 12 + 12?",
        "Yes",
    ],
)
def test_plain_questions_are_not_loops(text):
    assert not is_loop(ids_of(text), text)


def test_duplicates_exact_and_near():
    filters = PromptFilter(min_tokens=2)

    def refuse(text):
        return filters.refuse(ids_of(text), text)

    base = "Write a short story about a dog that learns to fly over the old town at night"
    assert refuse(base) is None
    assert refuse(base.upper()) == "duplicate"
    assert refuse(base + " please") == "duplicate"
    assert refuse("Write a SHORT story: about (a dog) that learns to fly") == "duplicate"
    assert refuse("Write a short poem about rivers and the people who live beside them in spring") is None
    assert refuse("Hi") == "short"


def test_the_first_forty_characters_are_said_once():
    filters = PromptFilter(min_tokens=2)
    beginning = "I am planning a trip to Italy with my family"
    assert filters.refuse(list(range(30)), f"{beginning} and want to see Rome.") is None
    assert filters.refuse(list(range(30, 60)), f"{beginning}, so where is the best pasta?") == "duplicate"


def test_a_thousand_different_questions_pass():
    words = [f"w{i}" for i in range(3000)]
    rng = random.Random(0)
    filters = PromptFilter(min_tokens=4)
    texts = [" ".join(rng.choices(words, k=rng.randint(6, 40))) for _ in range(1000)]
    assert all(filters.refuse(ids_of(text), text) is None for text in texts)


VICUNA = (
    "{% for m in messages %}{{ ('USER: ' if m['role'] == 'user' else 'ASSISTANT: ') + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def chat_of(path, template=None):
    tokenizer = make_tokenizer(template=template) if template else make_tokenizer()
    return ChatTokenizer(inspect_target(TargetOptions(str(make_target(path / "t", tokenizer)))), {})


def judged(chat, text, finish_reason="length"):
    ids = chat.encode(text) + ([0] if finish_reason == "stop" else [])
    return judge(ids, finish_reason, chat, chat.user_turn(), PromptFilter(min_tokens=4))


def test_a_turn_ends_with_the_token_that_the_template_puts_there(tmp_path):
    chat = chat_of(tmp_path)
    turn = chat.user_turn()
    assert (chat.decode(turn.opening), chat.decode(list(turn.stop_ids))) == ("<|im_start|>user\n", "<|im_end|>")
    assert turn.closing == ""
    assert judged(chat, " Why is the sky blue?\n", "stop") == ("Why is the sky blue?", None)
    assert judged(chat, "Why is the sky", "length")[1] == "unfinished"
    assert judged(chat, "Hi", "stop")[1] == "short"
    assert judged(chat, "Why <|im_start|>user is it blue?", "stop")[1] == "markup"


def test_a_turn_that_ends_with_plain_words_is_cut_there(tmp_path):
    chat = chat_of(tmp_path, VICUNA)
    turn = chat.user_turn()
    assert (chat.decode(turn.opening), turn.stop_ids, turn.closing) == ("USER:", (), "ASSISTANT:")
    assert judged(chat, " Why is it? ASSISTANT: Because. USER: and") == ("Why is it?", None)
    assert judged(chat, " Why is it blue")[1] == "unfinished"


def test_a_template_that_hides_the_users_words_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not show the user's words"):
        chat_of(tmp_path, "{{ messages | length }}").user_turn()


def test_no_more_is_asked_for_than_is_missing():
    demand = Demand([1, 2], SynthesisOptions(num_prompts=20), Sampling())
    requests = demand.requests()
    first = [request.index for request in islice(requests, 33)]  # 20 missing at a yield of 1, with a quarter and 8 more
    assert first == list(range(33))
    report = SynthesisReport()
    for number in range(32):
        report.count(None if number % 2 else "unfinished")
    demand.update(report)  # 16 kept of 32: 4 are missing, and every other one is usable
    more = [request.index for request in islice(requests, 9)]
    assert more == list(range(33, 42))
    demand.end()
    assert len(list(requests)) == 0
    assert str(report).startswith("16 of 32 kept; thrown away: 16 unfinished")


class Nothing:
    """A queue whose every sample was lost."""

    def get(self, stream):
        return Dropped(stream, 0, "self", "aborted", "vLLM ended it")


def test_a_target_that_writes_nothing_usable_is_given_up_with_its_counts(tmp_path):
    chat, options, said = chat_of(tmp_path), SynthesisOptions(num_prompts=100), []
    with pytest.raises(SampleError, match=r"too few usable prompts: 0 of 256 kept; thrown away: 256 aborted, 0 unf"):
        collect(Nothing(), chat, chat.user_turn(), options, Demand([1], options, Sampling()), said.append)


def test_the_log_has_the_name_of_what_is_written(tmp_path, monkeypatch):
    """Two files in one directory, and a run's own vllm.log, are not mixed."""
    logs = []

    class NotStarted(Extractor):
        def start(self):
            logs.append(self.log_path)
            raise ProducerError("not in this test")

    monkeypatch.setattr("eagle3_lightning.extract.supervisor.Extractor", NotStarted)
    target = TargetOptions(str(make_target(tmp_path / "target")))
    for name in ("one.jsonl", "two.jsonl", "three"):
        with pytest.raises(ProducerError):
            synthesize_prompts(
                target, inspect_target(target), SynthesisOptions(num_prompts=1), EngineOptions(), tmp_path / name
            )
    assert logs == [tmp_path / f"{name}.vllm.log" for name in ("one", "two", "three")]
