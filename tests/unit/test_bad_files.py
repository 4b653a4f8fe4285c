"""Files that are broken, foreign or in the wrong place: one message that names them, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_target import make_target

from eagle3_lightning import cli
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import CONFIG_FILE, PROVENANCE_FILE, WEIGHTS_FILE, read_export
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.prompts.files import JsonlSource, JsonSource
from eagle3_lightning.serve.bench import BenchOptions, _Runner, check_summary, measure
from eagle3_lightning.serve.messages import Task
from eagle3_lightning.trained import load_module

DEEP = "[" * 200_000 + "]" * 200_000
GOOD_CONFIG = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"verifier": {"name_or_path": "x"}, "proposal_methods": [{"speculative_tokens": 3}]},
    "transformer_layer_config": {"hidden_size": 16, "vocab_size": 100},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = make_target(tmp_path_factory.mktemp("target"))
    options = (TargetOptions(str(target)), DraftOptions(draft_vocab_size=64), LossOptions(ttt_steps=2), OptimOptions())
    module = Eagle3Module(*options)
    saved: dict[str, Any] = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(saved)
    return saved


def write_checkpoint(kind: str, good: dict[str, Any], file: Path) -> None:
    record = dict(good["eagle3"])
    contents: dict[str, Any] = {
        "tensor": torch.zeros(3),
        "list": [1, 2],
        "foreign": {"state_dict": {}},
        "no hyper_parameters": {k: v for k, v in good.items() if k != "hyper_parameters"},
        "no state_dict": {k: v for k, v in good.items() if k != "state_dict"},
        "empty hyper_parameters": good | {"hyper_parameters": {}},
        "odd hyper_parameters": good | {"hyper_parameters": [1]},
        "odd option": good | {"hyper_parameters": good["hyper_parameters"] | {"loss": {"ttt_steps": "many"}}},
        "missing weights": good | {"state_dict": {}},
        "odd weights": good | {"state_dict": dict.fromkeys(good["state_dict"], 1)},
        "record is text": good | {"eagle3": "yes"},
        "record is empty": good | {"eagle3": {}},
        "record lacks a key": good | {"eagle3": {k: v for k, v in record.items() if k != "draft"}},
        "record is odd": good | {"eagle3": record | {"draft": 3}},
    }
    if kind in contents:
        torch.save(contents[kind], file)
        return
    torch.save(good, file)
    whole = file.read_bytes()
    file.write_bytes({"garbage": b"\x80\x02garbage" * 50, "empty": b"", "truncated": whole[: len(whole) // 2]}[kind])


KINDS = [
    "garbage", "empty", "truncated", "tensor", "list", "foreign", "no hyper_parameters", "no state_dict",
    "empty hyper_parameters", "odd hyper_parameters", "odd option", "missing weights", "odd weights",
    "record is text", "record is empty", "record lacks a key", "record is odd",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_checkpoint_is_named(kind: str, checkpoint: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "bad.ckpt"
    write_checkpoint(kind, checkpoint, file)
    with pytest.raises(ConfigError) as caught:
        load_module(file)
    if kind != "odd option":  # which the option's own check may name
        assert caught.value.option == "--ckpt" and caught.value.value == str(file)
        assert caught.value.remedy == "Give a .ckpt that eagle3 fit wrote."


@pytest.mark.parametrize("record", ["yes", {}, {"target_fingerprint": "x"}])
def test_a_bad_record_is_refused_on_resume(record: object, checkpoint: dict[str, Any]) -> None:
    module = Eagle3Module(
        TargetOptions(checkpoint["hyper_parameters"]["target"]["path"]),
        DraftOptions(draft_vocab_size=64),
        LossOptions(),
        OptimOptions(),
    )
    with pytest.raises(ConfigError, match="eagle3"):
        module.on_load_checkpoint(checkpoint | {"eagle3": record})


def make_export(directory: Path, config: object = None, provenance: str | None = None, weights: bool = True) -> Path:
    directory.mkdir()
    text = config if isinstance(config, str) else json.dumps(GOOD_CONFIG | dict(config or {}))  # type: ignore[call-overload]
    (directory / CONFIG_FILE).write_text(text)
    if provenance is not None:
        (directory / PROVENANCE_FILE).write_text(provenance)
    if weights:
        (directory / WEIGHTS_FILE).write_bytes(b"")
    return directory


def proposing(tokens: object) -> dict[str, object]:
    speculators = {"verifier": {"name_or_path": "x"}, "proposal_methods": [{"speculative_tokens": tokens}]}
    return {"speculators_config": speculators}


@pytest.mark.parametrize(
    "config",
    ["{", "[]", "3", DEEP, proposing("many"), proposing(None), proposing(0), {"speculators_config": {}},
     {"speculators_config": {"verifier": {"name_or_path": "x"}, "proposal_methods": {}}},
     {"transformer_layer_config": {"hidden_size": 16}}],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_broken_export_config_is_named(config: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        read_export(make_export(tmp_path / "draft", config), "--draft")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", '{"target_fingerprint": 3}', DEEP], ids=lambda v: v[:30])
def test_a_broken_provenance_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=PROVENANCE_FILE):
        read_export(make_export(tmp_path / "draft", provenance=text), "--draft")


def test_a_draft_without_weights_is_refused_before_vllm(tmp_path: Path) -> None:
    draft = make_export(tmp_path / "draft", weights=False)
    with pytest.raises(ConfigError, match=WEIGHTS_FILE):
        measure(BenchOptions(draft, [tmp_path / "prompts.jsonl"]))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", DEEP.encode()], ids=["cut", "list", "binary", "deep"])
def test_a_broken_summary_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="summary"):
        check_summary(file)


def test_the_place_of_a_summary_is_checked(tmp_path: Path) -> None:
    for file in (tmp_path / "missing" / "summary.json", tmp_path):
        with pytest.raises(ConfigError, match="--summary"):
            check_summary(file)
    check_summary(tmp_path / "new.json")
    (tmp_path / "summary.json").write_text("{}")
    check_summary(tmp_path / "summary.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"{"),
        ("summary.json", b"[1]"),
        ("summary.json", b"\xff\xfe"),
        ("summary.json", b'{"steps": "many", "served_acceptance_length": 2}'),
        ("summary.json", b'{"acceptance_per_position": ["a"]}'),
        ("summary.json", b'{"export_dir": 3}'),
        ("logs/version_0/metrics.csv", b"epoch,loss\n1,2\n"),
        ("logs/version_0/metrics.csv", b"step,loss\nx,2\n"),
        ("logs/version_0/metrics.csv", b"step,loss\n1,x\n"),
        ("logs/version_0/metrics.csv", b"step,loss\n1,2,3\n"),
        ("logs/version_0/metrics.csv", b"loss,step\n1\n"),
        ("logs/version_0/metrics.csv", b"\xff\xfe\x00\x01"),
    ],
)
def test_report_names_a_broken_file(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "RUN", "--out", "/nonexistent/r.html"],
        ["prompts", "preview", "--target.path", "x", "--prompts.train", "y", "--html", "/nonexistent/x.html"],
        ["prompts", "synthesize", "--target.path", "x", "--out", "/nonexistent/a/new.jsonl"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_an_output_that_cannot_be_written(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 1}')
    assert cli.main([str(tmp_path) if argument == "RUN" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert arguments[-1] in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [["fit"], ["validate"], ["prompts", "preview"], ["prompts", "synthesize"]], ids=" ".join
)
def test_a_binary_config(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert cli.main([*command, "--config", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(FileNotFoundError(2, "No such file", "/a/b"), 1), (OSError("odd"), 1), (OSError(), 1)],
)
def test_an_unforeseen_os_error_is_one_line(
    error: OSError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("eagle3_lightning.report.main", fail)
    assert cli.main(["report", "x"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith("eagle3 report: ") and len(printed.splitlines()) == 1
    assert error.filename is None or error.filename in printed


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")])
def test_a_programming_error_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("eagle3_lightning.report.main", fail)
    with pytest.raises(type(error)):
        cli.main(["report", "x"])


def test_deep_json_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "hello"}}\n{DEEP}\n{{"prompt": {DEEP}}}\n')
    source = JsonlSource(file, "--prompts")
    assert source.faults.count == 2
    assert "line 2" in source.faults.first[0] and "line 3" in source.faults.first[1]


def test_a_deep_json_array_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(DEEP)
    with pytest.raises(ConfigError, match="nested too deeply"):
        JsonSource(file, "--prompts")


def test_a_log_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.touch()
    options = BenchOptions(make_export(tmp_path / "draft"), [tmp_path / "prompts.jsonl"], log_dir=file)
    with pytest.raises(ConfigError, match="--log_dir"):
        _Runner(options, "target", [3], [Task("one", [[1, 2]], 1)], 8, lambda label, progress: None)
