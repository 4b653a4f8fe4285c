"""A refused option is one line: the file, the option, its value, what is wrong with it and what to do."""

from pathlib import Path

import lightning  # noqa: F401 - its log handler keeps the stderr of the moment: not one that a test captures and closes
import pytest
import toy_target
import yaml

from eagle3_lightning.cli import main
from eagle3_lightning.usage import Usage


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target.make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def fit(target: Path, tmp_path: Path) -> list[str]:
    """A fit that is refused for its one warm-up step too many, if for nothing before that."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    return [
        *["fit", "--run_dir", str(tmp_path / "run"), "--target.path", str(target), "--model.draft.draft_vocab_size=64"],
        *["--trainer.max_steps=1", "--data.prompts.train", str(prompts)],
    ]


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle3")]
    return line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: 5", "FILE: data = 5: it is a group of options and takes no value. Write its options below it"),
        ("model: {loss: [1]}", "FILE: model.loss = [1]: it is a group of options and takes no value."),
        (
            "model: {draft: {draft_vocabulary: 5}}",
            "FILE: model.draft.draft_vocabulary: there is no such option. Did you",
        ),
        ("trainer: {max_steps: abc}", "FILE: trainer.max_steps = 'abc': it must be of type int."),
        (
            "data: {prompts: {train: [{path: x, wieght: 3}]}}",
            "FILE: data.prompts.train.wieght: there is no such option. Did you mean data.prompts.train.weight?",
        ),
        (
            "data: {prompts: {train: {path: x, wieght: 3}}}",
            "FILE: data.prompts.train.wieght: there is no such option. Did you mean data.prompts.train.weight?",
        ),
        (
            "data: {prompts: {train: {path: x, weight: abc}}}",
            "FILE: data.prompts.train.weight = 'abc': it must be one of: float, null.",
        ),
    ],
)
def test_a_mistake_in_a_file(
    fit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(text)
    line = refusal(capsys, [*fit, "--config", str(file)])
    assert line.startswith(f"eagle3 fit: {message.replace('FILE', str(file))}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.cache.max_gib=-1"], "data.cache.max_gib = -1.0: it must be more than 0. Correct it, or leave it out"),
        (["--trainer.logger", "WandbLog"], "trainer.logger = 'WandbLog': it must be one of: Logger, Iterable[Logger]"),
        (["--data.engine.extra", "5"], "data.engine.extra = 5: it must be of type dict."),
        (["--data.prompts.train", "{weight: 3}"], "data.prompts.train.path: required and not given."),
        (["--data.prompts.train", "{path: x, weight: -3}"], "data.prompts.train.weight = -3.0: a share must be"),
        (["--config", "/nowhere.yaml"], "config: File does not exist: '/nowhere.yaml'."),
    ],
)
def test_a_mistake_in_a_flag(
    fit: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert refusal(capsys, [*fit, *flags]).startswith(f"eagle3 fit: {message}")


def test_the_nearest_class_is_named(fit: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, [*fit, "--trainer.logger", "WandbLog"]).endswith("Did you mean WandbLogger?")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["plan"], "target.path"),
        (["fit"], "target.path"),
        (["fit", "--target.path", "x"], "run_dir"),
        (["fit", "--target.path", "x", "--run_dir", "/nowhere/y"], "data.prompts.train"),
        (["bench"], "draft, prompts"),
        (["report"], "run_dir"),
    ],
)
def test_what_is_required_is_called_so(capsys: pytest.CaptureFixture[str], arguments: list[str], names: str) -> None:
    assert refusal(capsys, arguments).startswith(f"eagle3 {arguments[0]}: {names}: required and not given. Give ")


def test_other_messages_are_left_alone() -> None:
    assert Usage({}).explain("MisconfigurationException: something of Lightning's") is None


@pytest.mark.parametrize("in_file", [False, True])
def test_one_source_needs_no_list(
    fit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], in_file: bool
) -> None:
    source = {"path": "x.jsonl", "weight": 2.0, "fields": {"messages": "dialog"}}
    file = tmp_path / "given.yaml"
    file.write_text(yaml.safe_dump({"data": {"prompts": {"train": source}}}))
    flags = ["--config", str(file)] if in_file else ["--data.prompts.train", yaml.safe_dump(source).strip()]
    assert main([*fit, *flags, "--print_config"]) == 0
    read = yaml.safe_load(capsys.readouterr().out)["data"]["prompts"]["train"]
    assert {key: read[key] for key in source} == source
    assert "x.jsonl: there is no such" in refusal(capsys, [*fit, *flags, "--model.optim.warmup_steps=0"]).replace(
        "'x.jsonl'", "x.jsonl"
    )


@pytest.mark.parametrize("logger", ["TensorBoardLogger", "[TensorBoardLogger]", "[CSVLogger, TensorBoardLogger]"])
def test_loggers_by_name(fit: list[str], capsys: pytest.CaptureFixture[str], logger: str) -> None:
    """Parsed and made: what is refused is the schedule, which is checked behind them."""
    assert "model.optim.warmup_steps = 9" in refusal(
        capsys, [*fit, "--trainer.logger", logger, "--model.optim.warmup_steps=9"]
    )


def test_validate_needs_a_checkpoint_and_the_directory(
    fit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = ["validate", *fit[1:]]
    remedy = "Name a checkpoint file, or `last` for the last one of --run_dir."
    line = refusal(capsys, validate)
    assert line == f"eagle3 validate: --ckpt_path = None: there is nothing to validate without a checkpoint. {remedy}"
    line = refusal(capsys, [*validate, "--ckpt_path", "last"])
    assert "there is no checkpoint" in line
    assert line.endswith(remedy)
    checkpoint = tmp_path / "some.ckpt"
    checkpoint.write_bytes(b"")
    (tmp_path / "run").write_text("")  # what the lock refuses
    assert "it is a file" in refusal(capsys, [*validate, "--ckpt_path", str(checkpoint)])
