"""Rows without a word are faults, faults are warned of once, and the advice can help."""

import json
from pathlib import Path

import pytest
from test_prompts import open_all, write_jsonl
from toy_target import make_target

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SourceOptions, TargetOptions
from eagle3_lightning.prompts.records import RecordError, parse_record
from eagle3_lightning.prompts.sources import as_sources


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetOptions:
    return TargetOptions(str(make_target(tmp_path_factory.mktemp("target"))))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": ""}, "`prompt` asks for nothing: what the user says is empty"),
        ({"prompt": " \n\t", "response": "yes"}, "`prompt` asks for nothing"),
        ({"prompt": [{"role": "user", "content": ""}]}, "`prompt` asks for nothing"),
        ({"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": " "}]}, "`messages` asks"),
        ({"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "hi"}]}, "`conversations` asks"),
        ({"text": ""}, "`text` is empty"),
        ({"text": " \n"}, "`text` is empty"),
    ],
)
def test_a_row_without_a_word_is_a_fault(row: dict[str, object], problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        parse_record(row, "a.jsonl, line 1")


def test_a_word_is_enough() -> None:
    turns = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "x"},
    ]
    assert parse_record({"messages": turns}, "here").messages is not None
    assert parse_record({"prompt": "?"}, "here").messages is not None
    assert parse_record({"messages": turns[1:2]}, "here").messages is not None  # judged where it is known what for


def test_blank_prompts_are_counted_by_name(target: TargetOptions, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}, {"prompt": "  "}])
    with pytest.raises(ConfigError, match=r"2 of 3 rows cannot be used: .*line 2: `prompt` asks .*\(and .*line 3\)"):
        open_all(target, [path], val_fraction=0.0)


def test_bad_lines_are_warned_of_once(target: TargetOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(100)]
    lines[3], lines[60] = "{", '{"prompt": ""}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    open_all(target, [path], val_fraction=0.0)
    assert caplog.text.count("line 4: it is not JSON") == 1
    assert caplog.text.count("line 61: `prompt` asks") == 1


def test_what_only_the_request_shows_is_warned_of(
    target: TargetOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(100)]
    lines[3], lines[60] = "{", json.dumps({"prompt": "long " * 100})
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    open_all(target, [path], val_fraction=0.0)
    assert caplog.text.count("line 4: it is not JSON") == 1
    assert "1 of the first 100 samples" in caplog.text
    assert "(1 too_long)" in caplog.text


def test_the_advice_can_help(target: TargetOptions, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 3)
    with pytest.raises(ConfigError) as caught:
        open_all(target, [path], val_fraction=0.0)
    assert caught.value.remedy == "Repair them, or name other prompts."  # no share lets all of them go
    path.write_text('{"prompt": "a"}\n{\n')
    with pytest.raises(ConfigError, match=r"raise data.queue.max_dropped_share to train without them"):
        open_all(target, [path], val_fraction=0.0)


@pytest.mark.parametrize("value", ["", ["a.jsonl", " "], SourceOptions("")])
def test_an_empty_source_is_not_the_current_directory(value: str | list[str | SourceOptions] | SourceOptions) -> None:
    with pytest.raises(ConfigError, match=r"^data.prompts.val = '': it is empty. Name a file of prompts"):
        as_sources(value, "data.prompts.val")
