"""Formats, files, splits, order, and the prompts that cannot be used."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from toy_target import make_target, make_tokenizer

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import (
    BatchOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    TargetOptions,
)
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.order import Permutation, SampleOrder
from eagle3_lightning.prompts.records import RecordError, name_faults, parse_record
from eagle3_lightning.prompts.setup import open_prompts
from eagle3_lightning.prompts.sources import open_source
from eagle3_lightning.prompts.split import Split, _hash
from eagle3_lightning.stream.messages import Dropped, Submit
from eagle3_lightning.target import inspect_target

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


def test_equal_faults_are_told_once():
    faults = ["/d/a.jsonl, line 1: no `content`", "/d/a.jsonl, line 4: not JSON: x", "/d/a.jsonl, line 7: no `content`"]
    expected = "/d/a.jsonl, line 1: no `content` (and a.jsonl, line 7); /d/a.jsonl, line 4: not JSON: x"
    assert name_faults(faults) == expected


# ---- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [USER, REPLY]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [USER, REPLY]},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, REPLY]},
    ],
)
def test_chat_formats_mean_the_same(raw):
    assert parse_record(raw, "f, line 1").messages == [USER, REPLY]


def test_text_ids_and_names():
    assert parse_record({"text": "plain", "id": 7}, "f, line 1").text == "plain"
    assert parse_record({"text": "plain", "id": 7}, "f, line 1").name == "7"
    record = parse_record({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, "f, line 9")
    assert (record.ids, record.loss_mask, record.name) == ([1, 2, 3], [False, True, True], "f, line 9")


def test_field_mapping_names_the_keys_of_the_data_set():
    raw = {"dialog": [USER, REPLY], "text": None}
    with pytest.raises(RecordError, match=r"f, line 1: it has none of the keys .* \(it has \['dialog', 'text'\]\)"):
        parse_record(raw, "f, line 1")
    assert parse_record(raw, "f, line 1", {"messages": "dialog"}).messages == [USER, REPLY]


def test_system_and_tools_of_sharegpt():
    turns = [{"from": "human", "value": "Hi"}]
    raw = {"system": "Be brief.", "conversations": turns, "tools": '[{"type": "function"}]'}
    record = parse_record(raw, "f")
    assert record.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert record.tools == [{"type": "function"}]


def test_tool_arguments_become_objects_and_reasoning_gets_both_names():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Let me see."}
    (parsed,) = parse_record({"messages": [message]}, "f").messages
    assert parsed["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert parsed["reasoning"] == parsed["reasoning_content"] == "Let me see."
    assert parsed["content"] == ""


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([1], "expected a JSON object and found list"),
        ({"messages": "Hi"}, "`messages` must be a list of messages and is 'Hi'"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\]: expected a message with `role` and `content`"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\]: `content` is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and audio are not supported"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, r"lone surrogate U\+D800 at character 1"),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, r"conversations\[0\]: `from` is 'alien'"),
        ({"ids": [1, -2]}, "`ids` must be a list of token ids"),
        ({"ids": [1, True]}, "`ids` must be a list of token ids"),
        ({"ids": [1, 2], "loss_mask": [1]}, "`loss_mask` must hold 2 zeros and ones"),
        ({"text": 5}, "`text` must be text and is 5"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "the arguments of the call to f are not JSON"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used_say_why(raw, problem):
    with pytest.raises(RecordError, match=problem) as caught:
        parse_record(raw, "data.jsonl, line 3")
    assert str(caught.value).startswith("data.jsonl, line 3")


# ---- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_permutation_is_a_bijection_and_follows_its_key(size):
    assert sorted(Permutation(size, "a")[i] for i in range(size)) == list(range(size))
    if size > 16:
        assert [Permutation(size, "a")[i] for i in range(size)] != [Permutation(size, "b")[i] for i in range(size)]


def test_permutation_shuffles():
    size = 10_000
    values = [Permutation(size, "key")[i] for i in range(size)]
    neighbors = sum(abs(a - b) < 100 for a, b in pairwise(values))
    assert 100 < neighbors < 300  # 2 % of the steps of a random order are shorter than 1 % of the size


def test_each_epoch_has_each_row_once_in_another_order():
    order = SampleOrder([5, 7], None, seed=3)
    epochs = [[order[e * 12 + i] for i in range(12)] for e in range(3)]
    rows = [(0, r) for r in range(5)] + [(1, r) for r in range(7)]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] == [SampleOrder([5, 7], None, seed=3)[i] for i in range(12)]
    assert epochs[0] != [SampleOrder([5, 7], None, seed=4)[i] for i in range(12)]


def test_weights_are_shares_of_the_epoch_and_rows_come_evenly():
    order = SampleOrder([10, 90], [0.5, 0.5], seed=0)
    assert order.epoch_size == 100
    drawn = [order[i] for i in range(900)]
    for epoch in range(9):
        assert sum(source == 0 for source, _ in drawn[100 * epoch : 100 * (epoch + 1)]) == 50
    small = [row for source, row in drawn if source == 0]
    large = [row for source, row in drawn if source == 1]
    assert all(small.count(row) == 45 for row in range(10))
    assert all(large.count(row) == 5 for row in range(90))


# ---- files ---------------------------------------------------------------------------------------------------------


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_a_file_by_number_with_blank_lines_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "0"}\n\n{"text": "1"}\n{"text": "2"}\n   \n\n{"text": "3"}')
    source = open_source(SourceOptions(str(path)), "opt")
    assert [source.read(i).text for i in range(len(source))] == ["0", "1", "2", "3"]
    assert source.read(3).where == f"{path}, line 8"


def test_many_rows_keep_few_offsets(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_lightning.prompts.files._MAX_OFFSETS", 16)
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": "x" * (i % 50) + str(i)} for i in range(1000)))
    source = open_source(SourceOptions(str(path)), "opt", Split(0.1).trained)
    assert len(source._offsets) <= 17
    kept = [source.read(i).text.lstrip("x") for i in range(len(source))]
    held = open_source(SourceOptions(str(path)), "opt", Split(0.1).held_out)
    others = [held.read(i).text.lstrip("x") for i in range(len(held))]
    assert sorted(map(int, kept + others)) == list(range(1000))
    assert 60 < len(others) < 140


def test_rows_of_a_split_are_the_lines_of_that_split_however_many(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"id": "{i}", "text": "row {i}"}}\n' + "\n" * (i % 7 == 0) for i in range(20_000)))
    sides = [open_source(SourceOptions(str(file)), "o", keep) for keep in (Split(0.1).trained, Split(0.1).held_out)]
    names = [[source.read(row).name for row in range(len(source))] for source in sides]
    assert all(ordered == sorted(ordered, key=int) for ordered in names)
    assert sorted(map(int, names[0] + names[1])) == list(range(20_000))
    assert 1_800 < len(names[1]) < 2_200
    with pytest.raises(IndexError):
        sides[1].read(len(sides[1]))


def test_the_split_of_a_row_does_not_depend_on_its_neighbors(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(300)]
    few, many = write_jsonl(tmp_path / "few.jsonl", rows[100:200]), write_jsonl(tmp_path / "many.jsonl", reversed(rows))
    sources = [open_source(SourceOptions(str(path)), "o", Split(0.2).held_out) for path in (few, many)]
    held = [{source.read(i).text for i in range(len(source))} for source in sources]
    assert held[0] == {text for text in held[1] if 100 <= int(text.split()[1]) < 200}
    assert held[0]


def test_a_json_array_is_read_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "0"}, {"nothing": 1}, {"text": "2"}]))
    source = open_source(SourceOptions(str(path)), "opt")
    assert source.read(2).text == "2"
    assert source.faults.first == [f"{path}, item 2: it has none of the keys ids, input_ids, token_ids, messages, "
                                   "conversations, prompt, text (it has ['nothing']); say which key is which with the "
                                   "source's `fields`"]  # fmt: skip


def test_fingerprint_follows_the_rows(tmp_path):
    def fingerprint(name, rows):
        path = write_jsonl(tmp_path / name, [{"text": row} for row in rows])
        return open_source(SourceOptions(str(path)), "o").fingerprint()

    assert fingerprint("a.jsonl", "01") == fingerprint("b.jsonl", "01") != fingerprint("c.jsonl", "02")


# ---- requests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TargetOptions(str(make_target(tmp_path_factory.mktemp("target"))))


def open_all(target, train, val=(), mode="generate", max_new_tokens=20, max_model_len=200, pack_tokens=200, **prompts):
    return open_prompts(
        target, inspect_target(target), PromptOptions(list(train), list(val), **prompts),
        SamplingOptions(mode=mode, max_new_tokens=max_new_tokens, temperature=prompts.pop("temperature", 0.0)),
        EngineOptions(max_model_len=max_model_len), QueueOptions(), BatchOptions(pack_tokens=pack_tokens), seed=0,
    )  # fmt: skip


def test_a_generate_request_ends_with_the_generation_prompt(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "q", "messages": [USER, REPLY, USER, REPLY]}])
    request = open_all(target, [path], val_fraction=0.0)["train"][0]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    chat = ChatTokenizer(inspect_target(target), {})
    assert chat.decode(request.prompt_ids) == text + "<|im_start|>assistant\n"
    assert (request.name, request.spans, request.max_new_tokens, request.seed) == ("q", [], 20, None)


def test_a_prefill_request_supervises_every_assistant_turn(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, REPLY, USER, REPLY, USER]}])
    request = open_all(target, [path], mode="prefill", val_fraction=0.0)["train"][0]
    chat = ChatTokenizer(inspect_target(target), {})
    assert [chat.decode(request.prompt_ids[a:b]) for a, b in request.spans] == ["Hello<|im_end|>"] * 2
    assert request.max_new_tokens == 0
    assert chat.decode(request.prompt_ids).endswith("Hello<|im_end|>\n")  # the last user turn needs no states


def test_prompts_are_the_same_in_every_run_and_the_validation_set_in_every_seed(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"question {i}"} for i in range(200)])
    one, two = (open_all(target, [path], val_fraction=0.1) for _ in range(2))
    assert [one["train"][i] for i in range(150)] == [two["train"][i] for i in range(150)]
    held = {tuple(one["val"][i].prompt_ids) for i in range(one["val"].epoch_size)}
    trained = {tuple(one["train"][i].prompt_ids) for i in range(one["train"].epoch_size)}
    assert len(held) + len(trained) == 200
    assert not held & trained


def sides(target, rows, path, **options):
    """Texts that are held out, and those that are trained on."""
    streams = open_all(target, [write_jsonl(path, rows)], **options)
    chat = ChatTokenizer(inspect_target(target), {})
    return [
        {chat.decode(streams[name][i].prompt_ids) for i in range(streams[name].epoch_size)}
        if name in streams
        else set()
        for name in ("val", "train")
    ]


def test_of_few_prompts_at_least_one_is_held_out(target, tmp_path):
    """At 0.1 % none of 60 hashes is low enough; with the same rows it is the same prompt, in whatever order."""
    rows = [{"prompt": f"question {i}"} for i in range(60)]
    held, trained = sides(target, rows, tmp_path / "a.jsonl", val_fraction=1e-6)
    assert (len(held), len(trained), held & trained) == (1, 59, set())
    assert sides(target, rows[::-1], tmp_path / "b.jsonl", val_fraction=1e-6)[0] == held
    assert sides(target, rows, tmp_path / "c.jsonl", val_fraction=0.0)[0] == set()  # as it was asked for
    assert sides(target, rows[:9], tmp_path / "d.jsonl", val_fraction=1e-6)[0] == set()  # a handful
    alike = rows[:1] * 20  # all rows have the least hash: none would be left to train on
    assert len(sides(target, alike, tmp_path / "e.jsonl", val_fraction=1e-9)[0]) == 0


def test_a_row_that_cannot_be_used_is_not_the_one_to_hold_out(target, tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(60)]
    least = min(_hash(json.dumps(row).encode()) for row in rows)
    long = ({"prompt": f"{n} " + "x" * 500} for n in range(10_000))
    rows.append(next(row for row in long if _hash(json.dumps(row).encode()) < least))
    held, trained = sides(target, rows[:-1], tmp_path / "a.jsonl", val_fraction=1e-9)
    assert (len(held), len(trained)) == (1, 59)
    streams = open_all(target, [write_jsonl(tmp_path / "b.jsonl", rows)], val_fraction=1e-9)
    assert [(name, stream.epoch_size) for name, stream in streams.items()] == [("train", 61)]


def test_requests_of_sampled_answers_have_seeds_of_their_own(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"question {i}"} for i in range(50)])
    streams = open_prompts(target, inspect_target(target), PromptOptions([path], val_fraction=0.0),
                           SamplingOptions(temperature=1.0, max_new_tokens=8), EngineOptions(), QueueOptions(),
                           BatchOptions(), seed=0)  # fmt: skip
    seeds = [streams["train"][i].seed for i in range(100)]
    assert len(set(seeds)) == 100


def test_one_bad_line_in_many_is_named_and_dropped(target, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(8000)]
    lines[7000] = lines[7000][:-3]
    path.write_text("\n".join(lines))
    stream = open_all(target, [path], val_fraction=0.0)["train"]
    assert "1 of 8000 rows" in caplog.text
    assert f"{path}, line 7001: it is not JSON" in caplog.text
    made = [stream[i] for i in range(8000)]
    dropped = [m for m in made if isinstance(m, Dropped)]
    assert [(d.reason, f"{path}, line 7001" in d.detail) for d in dropped] == [("bad_record", True)]
    assert all(isinstance(m, Submit) for m in made if m not in dropped)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "the file is empty"),
        ("\n  \n", "the file is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', r"1 of 2 rows cannot be used: .*a.jsonl, line 2: it is not JSON"),
        ('{"question": "a"}\n', r"1 of 1 rows cannot be used: .*line 1: it has none of the keys"),
        ('[{"prompt": "a"}, ', "it starts like a JSON array and is not JSON"),
        ('{"prompt": "%s"}\n' % ("long " * 100), r"none of the first 1 .* \(1 too_long\): .*line 1: prompt of "),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "the conversation has no user turn to answer"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', "lone surrogate"),
        ('{"ids": [1, 2, 99999]}\n', "token id 99999 is not in the target's vocabulary of 258"),
    ],
)  # fmt: skip
def test_files_that_leave_nothing_are_refused(target, tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        open_all(target, [path], val_fraction=0.0)
    assert "data.prompts.train" in str(caught.value)
    assert str(path) in str(caught.value)


def test_bad_validation_files_are_named_as_such(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    with pytest.raises(ConfigError, match=r"data.prompts.val = .*there is no such file"):
        open_all(target, [path], [tmp_path / "b.jsonl"])


def test_a_conversation_without_an_assistant_turn_is_dropped_in_prefill_mode(target, tmp_path):
    rows = [{"messages": [USER, REPLY]}] * 9 + [{"id": "q", "messages": [USER]}]
    stream = open_all(target, [write_jsonl(tmp_path / "a.jsonl", rows)], mode="prefill", val_fraction=0.0)["train"]
    dropped = [m for m in (stream[i] for i in range(10)) if isinstance(m, Dropped)]
    assert [(d.name, d.reason) for d in dropped] == [("q", "empty_mask")]
    with pytest.raises(ConfigError, match=r"none of the first 1 samples can be used \(1 empty_mask\)"):
        open_all(target, [write_jsonl(tmp_path / "b.jsonl", rows[9:])], mode="prefill", val_fraction=0.0)


def test_lengths_decide_before_anything_is_made(target, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"ids": [1] * n} for n in (50, 51, 52, 53)])
    stream = open_all(target, [path], val_fraction=0.0, max_new_tokens=10, max_model_len=62)["train"]
    kept = sorted(len(m.prompt_ids) for m in (stream[i] for i in range(4)) if isinstance(m, Submit))
    assert kept == [50, 51, 52]
    stream = open_all(target, [path], val_fraction=0.0, max_new_tokens=10, pack_tokens=59)["train"]
    kept = sorted(len(m.prompt_ids) for m in (stream[i] for i in range(4)) if isinstance(m, Submit))
    assert kept == [50, 51]  # 51 + 10 tokens have 60 states and 59 slots
    stream = open_all(target, [path], val_fraction=0.0, mode="prefill", pack_tokens=51)["train"]
    kept = sorted(len(m.prompt_ids) for m in (stream[i] for i in range(4)) if isinstance(m, Submit))
    assert kept == [50, 51, 52]


def test_a_template_that_refuses_roles_out_of_order(tmp_path):
    template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    target = TargetOptions(str(make_target(tmp_path / "t", make_tokenizer(template=template))))
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, USER]}])
    with pytest.raises(ConfigError, match=r"line 1: the chat template refuses .* \(roles must alternate\)"):
        open_all(target, [path], val_fraction=0.0)


def test_a_tokenizer_that_cannot_be_loaded(tmp_path):
    path = make_target(tmp_path / "t")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        open_all(TargetOptions(str(path)), [write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])])


def test_sources_are_mixed_by_weight(target, tmp_path):
    big = write_jsonl(tmp_path / "big.jsonl", [{"id": f"b{i}", "prompt": f"b {i}"} for i in range(90)])
    small = write_jsonl(tmp_path / "small.jsonl", [{"id": f"s{i}", "prompt": f"s {i}"} for i in range(10)])
    mixed = [SourceOptions(str(big), weight=3.0), SourceOptions(str(small), weight=1.0)]
    stream = open_all(target, mixed, val_fraction=0.0)["train"]
    names = [stream[i].name for i in range(stream.epoch_size)]
    assert len(names) == 100
    assert sum(name.startswith("s") for name in names) == 25
    assert all(2 <= names.count(f"s{i}") <= 3 for i in range(10))
    with pytest.raises(ConfigError, match=r"small.jsonl'.*it has no weight and other sources have one"):
        open_all(target, [mixed[0], str(small)], val_fraction=0.0)


def test_a_stream_beside_a_file_resumes_where_it_was(target, tmp_path):
    lines = tmp_path / "lines"
    lines.mkdir()
    write_jsonl(lines / "train.jsonl", [{"id": f"l{i}", "prompt": f"l {i}"} for i in range(40)])
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": f"a{i}", "prompt": f"a {i}"} for i in range(60)])
    mixed = [SourceOptions(str(lines), streaming=True, weight=1.0), SourceOptions(str(file), weight=1.0)]
    stream = open_all(target, mixed, val_fraction=0.0)["train"]
    whole = [request.name for request in stream.requests(0, 150)]
    assert [request.name for request in stream.requests(100, 150)] == whole[100:]
    assert sum(name.startswith("l") for name in whole[:60]) == 30
    with pytest.raises(ConfigError, match="it is mixed with a stream, whose size nobody knows"):
        open_all(target, [SourceOptions(str(lines), streaming=True), str(file)], val_fraction=0.0)


def test_a_split_of_a_stream(target, tmp_path):
    lines = tmp_path / "lines"
    lines.mkdir()
    write_jsonl(lines / "train.jsonl", [{"id": f"l{i}", "prompt": f"l {i}"} for i in range(60)])
    streams = open_all(target, [SourceOptions(str(lines), streaming=True)], val_fraction=0.2)
    held = {request.name for request in streams["val"].requests(0, 30)}
    trained = {request.name for request in streams["train"].requests(0, 100)}
    assert len(held | trained) == 60
    assert not held & trained
