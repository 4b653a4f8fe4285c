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
        ("run_dir: ''", "FILE: --run_dir = '': it is empty. Name a file or a directory."),
        (
            "trainer:\n\tmax_steps: 3\n",
            "FILE: line 2, column 1: it is not YAML (while scanning for the next token found character that cannot "
            "start any token). Indent with spaces, not with tabs.",
        ),
        (
            "trainer: {max_steps: 3",
            "FILE: line 2, column 1: it is not YAML (while parsing a flow mapping, did not find",
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
        (["--config", "/nowhere.yaml"], "--config: File does not exist: '/nowhere.yaml'."),
        (
            ["--trainer.max_step", "10"],
            "--trainer.max_step: there is no such option. Did you mean --trainer.max_steps?",
        ),
        (["--run-dri=x"], "--run_dri: there is no such option. Did you mean --run_dir?"),
        (
            ["--max_steps=3", "--qqqq"],
            "--max_steps: there is no such option. Did you mean --trainer.max_steps? --qqqq: ",
        ),
        (
            ["--model.optim.name", "admw"],
            "model.optim.name = 'admw': it must be of type Literal['adamw', 'muon']. Did ",
        ),
        (["--run_dir="], "--run_dir = '': it is empty. Name a file or a directory."),
        (["--run_dir", ""], "--run_dir = '': it is empty."),
        (["--data.cache.dir="], "data.cache.dir = '': it is empty."),
        (["--acceptance.prompts="], "acceptance.prompts = '': it is empty."),
        (["--data.cache", "{dir: ''}"], "data.cache.dir = '': it is empty."),
        (["--target.path="], "target.path = '': it is empty. Name a"),
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
        (["fit", "--target.path", "x"], "--run_dir"),
        (["fit", "--target.path", "x", "--run_dir", "/nowhere/y"], "data.prompts.train"),
        (["bench"], "--draft, --prompts"),
        (["report"], "RUN"),
    ],
)
def test_what_is_required_is_called_so(capsys: pytest.CaptureFixture[str], arguments: list[str], names: str) -> None:
    assert refusal(capsys, arguments).startswith(f"eagle3 {arguments[0]}: {names}: required and not given. Give ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exprot"], "eagle3: there is no command 'exprot'. Did you mean export?"),
        (["prompts", "previw"], "eagle3 prompts: there is no command 'previw'. Did you mean preview?"),
        (["bench", "--drft", "x"], "eagle3 bench: --drft: there is no such option. Did you mean --draft?"),
        (["bench", "--draft="], "eagle3 bench: --draft = '': it is empty. Name a file or a directory."),
        (["export", "--ckpt=", "--out=x"], "eagle3 export: --ckpt = '': it is empty. Name a file or a directory."),
        (["bench", "--draft=x", "--prompts", ""], "eagle3 bench: --prompts = '': it is empty. Name a file or"),
        (
            ["prompts", "preview", "--target.paht=x"],
            "eagle3 prompts preview: --target.paht: there is no such option. Did",
        ),
    ],
)
def test_the_nearest_name_is_asked_for(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert refusal(capsys, arguments).startswith(message)


def test_a_question_is_the_end_of_a_message(fit: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, [*fit, "--trainer.max_step", "1"]).endswith("max_steps?")


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
    first = "eagle3 validate: --ckpt_path = None: there is nothing to validate without a checkpoint."
    assert line == f"{first} {remedy.removesuffix('.')}; or a draft as --model.init_from."
    line = refusal(capsys, [*validate, "--model.init_from", str(tmp_path)])
    assert line.startswith(f"eagle3 validate: model.init_from = '{tmp_path}': there is no config.json")
    line = refusal(capsys, [*validate, "--ckpt_path", "last"])
    assert "there is no checkpoint" in line
    assert line.endswith(remedy)
    checkpoint = tmp_path / "some.ckpt"
    checkpoint.write_bytes(b"")
    (tmp_path / "run").write_text("")  # what the lock refuses
    assert "it is a file" in refusal(capsys, [*validate, "--ckpt_path", str(checkpoint)])
