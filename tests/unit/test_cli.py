"""The command line: what it accepts, what it refuses and with which words, and what it imports."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import lightning  # its log handler keeps the stderr of the moment: not one that a test captures and closes
import pytest
import torch
import toy_target
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary

from eagle3_lightning import trainer_cli
from eagle3_lightning.arguments import StrictParser, underscored
from eagle3_lightning.callbacks.draft_size import DraftSizeCallback, size_line
from eagle3_lightning.cli import COMMANDS, main
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.run_directory import RunLock

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
HEAVY = ("torch", "lightning", "transformers", "vllm", "wandb")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration for a toy target, complete up to the engine's start."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "run_dir": str(tmp_path / "run"),
                "target": {"path": str(toy_target.make_target(tmp_path / "target"))},
                "model": {"draft": {"draft_vocab_size": 64}, "optim": {"warmup_steps": 1}},
                "data": {"prompts": {"train": [str(prompts)]}},
                "trainer": {"max_steps": 5},
            }
        )
    )
    return file


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(eval(done.stderr.splitlines()[-1]))


def test_help_loads_nothing_heavy() -> None:
    assert loaded_after("from eagle3_lightning.cli import main; main(['--help'])") == set()
    assert loaded_after("from eagle3_lightning.cli import main; main(['bench', '--help'])") == set()


def test_the_trainer_loads_neither_vllm_nor_wandb() -> None:
    loaded = loaded_after(
        "import eagle3_lightning.trainer_cli, eagle3_lightning.export.command, eagle3_lightning.doctor"
    )
    assert loaded == {"torch", "lightning", "transformers"}


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize("command", [["fit"], ["validate"]], ids=lambda command: command[0])
def test_the_help_on_checkpoints_offers_what_is_taken(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.partition("\n  --ckpt_path CKPT_PATH")[2].partition("\n  --")[0].split())
    assert text.startswith("checkpoint to load: a file, or `last` for the last one of --run_dir (type")
    assert "registry" not in text


@pytest.mark.parametrize("command", [["bench"], ["prompts", "synthesize"]], ids=lambda command: command[-1])
def test_the_engines_help_is_true_where_no_states_are_made(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "The vLLM engine that runs the target" in text
    assert "hidden states" not in text


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.loss.ttt_stepz", "3"], "--model.loss.ttt_stepz"),
        (["--trainer.max_step", "3"], "--trainer.max_step"),  # an abbreviation of max_steps
        (["--model.optim.lr", "fast"], "model.optim.lr"),
        (["--model.target.path", "x"], "target.path"),
        (["--model.loss.ttt_steps", "0"], "model.loss.ttt_steps = 0: it must be at least 1"),
        (["--model.draft.draft_vocab_size", "100000"], "model.draft.draft_vocab_size = 100000"),
        (["--trainer.max_steps=-1"], "trainer.max_steps = -1"),
        (["--trainer.max_steps=-1", "--model.optim.schedule=constant"], "never end"),
        (["--model.optim.warmup_steps", "9"], "model.optim.warmup_steps = 9"),
        (["--target.layers", "[5,3,1]"], "not ascending"),
        (["--target.path", "/nowhere"], "/nowhere"),
        (["--ckpt_path", "last"], "there is no checkpoint"),
        (["--ckpt_path", "/nowhere.ckpt"], "there is no checkpoint"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--data.prompts.train", "[/nowhere.jsonl]"], "no such file"),
        (["--data.prompts.train", "/nowhere.jsonl"], "no such file"),
        (["--export.vllm_version", "abc"], "export.vllm_version = 'abc': it is not a version number"),
        (["--export.vllm_version", "0.19", "--model.draft.fc_norm", "true"], "model.draft.fc_norm = True"),
        (["--export.num_speculative_tokens=-1"], "export.num_speculative_tokens = -1"),
        (["--acceptance.prompts", "/nowhere.jsonl"], "acceptance.prompts = '/nowhere.jsonl'"),
        (["--trainer.accelerator", "tpu"], "trainer.accelerator = 'tpu': torch finds no such device here. Use"),
        (["--trainer.accelerator", "mps"], "trainer.accelerator = 'mps': torch finds no such GPU here. Use one"),
        (["--trainer.devices", "0"], "the options cannot be used"),
        (["--trainer.barebones", "true"], "trainer.barebones = True"),
        (["--trainer.max_steps", "0"], "trainer.max_steps = 0: nothing would be trained"),
        (["--trainer.max_epochs", "0"], "trainer.max_epochs = 0: nothing would be trained"),
        (["--trainer.limit_train_batches", "0"], "trainer.limit_train_batches = 0: nothing would be trained"),
        (["--trainer.limit_train_batches", "0.5"], "trainer.limit_train_batches = 0.5: an epoch has no number"),
        (["--trainer.overfit_batches", "0.5"], "trainer.overfit_batches = 0.5: an epoch has no number"),
        (["--trainer.val_check_interval", "0.5"], "trainer.val_check_interval = 0.5: an epoch has no number"),
        (["--trainer.val_check_interval", "0"], "trainer.val_check_interval = 0: it must be at least 1"),
        (["--trainer.check_val_every_n_epoch", "0"], "trainer.check_val_every_n_epoch = 0: it must be at least 1"),
        (["--trainer.max_time", "00:00:00:00"], "trainer.max_time = '00:00:00:00': nothing would be trained"),
        (["--trainer.max_time", "{seconds: -5}"], "nothing would be trained"),
        (["--trainer.accumulate_grad_batches", "0"], "trainer.accumulate_grad_batches = 0: it must be at least 1"),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val = -1: it must be at least 0"),
        (["--trainer.gradient_clip_val=.nan"], "trainer.gradient_clip_val = nan: it must be at least 0"),
        (["--trainer.log_every_n_steps=0"], "trainer.log_every_n_steps = 0: it must be at least 1"),
        (["--trainer.gradient_clip_algorithm", "value"], "trainer.gradient_clip_algorithm = 'value': gradients are"),
        (["--trainer.accelerator=cpu", "--trainer.precision=16-mixed"], "trainer.precision = '16-mixed': a draft is"),
        (["--trainer.precision", "16"], "trainer.precision = 16: a draft is"),
        (["--trainer.precision", "bf16-true"], "Use one of 32-true, 64-true, bf16-mixed."),
        (
            ["--trainer.accelerator=cpu", "--model.loss.attention=flash"],
            "model.loss.attention = 'flash': it needs CUDA",
        ),
        (["--trainer.num_sanity_val_steps=-2"], "trainer.num_sanity_val_steps = -2: it must be at least -1"),
        (["--trainer.min_steps=-1"], "trainer.min_steps = -1: it must be at least 0"),
        (["--trainer.num_nodes", "2"], "trainer.num_nodes = 2: all ranks share memory with vLLM"),
        (["--seed_everything=-1"], "-1 is not in bounds"),
        (["--checkpoint.every_n_train_steps=-1"], "checkpoint.every_n_train_steps = -1: it must be at least 0"),
        (["--checkpoint.every_n_epochs=-1"], "checkpoint.every_n_epochs = -1: it must be at least 0"),
        (["--checkpoint.save_top_k=-2"], "checkpoint.save_top_k = -2: it must be at least -1"),
        (["--checkpoint.monitor=val/foo"], "checkpoint.monitor = 'val/foo': no such metric is logged at a"),
        (["--checkpoint.monitor=val/los"], "at a validation. Did you mean val/loss? Use one of val/cond_acc_1, "),
        (["--checkpoint.monitor=val/loss_4"], "checkpoint.monitor = 'val/loss_4'"),  # of a draft of three steps
        (["--checkpoint.monitor=train/loss"], "checkpoint.monitor = 'train/loss': it is logged in training"),
        (["--checkpoint.monitor=train/loss", "--checkpoint.every_n_train_steps=15"], "it is logged in training"),
        (
            ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: loss}}]"],
            "trainer.callbacks.EarlyStopping.monitor = 'loss': no such metric",
        ),
        (["--preview.num_samples=-3"], "preview.num_samples = -3: it must be at least 0"),
        (["--progress.every_s=-3"], "progress.every_s = -3.0: it must be at least 0"),
        (["--progress.every_s=.nan"], "progress.every_s = nan: it must be at least 0"),
        (["--throughput.peak_tflops=0"], "throughput.peak_tflops = 0.0: it must be more than 0"),
    ],
)
def test_a_mistake_costs_no_engine_start(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["fit", "--config", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (config.parent / "run" / "vllm.log").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--checkpoint.monitor=val/loss_3"],
        ["--checkpoint.monitor=step", "--checkpoint.mode=max"],
        ["--checkpoint.monitor=train/tau", "--checkpoint.every_n_train_steps=20", "--checkpoint.mode=max"],
        ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: loss, strict: false}}]"],
        ["--trainer.accelerator=cpu", "--trainer.precision=bf16"],
        ["--trainer.precision=32"],
        ["--preview.num_samples=0"],
        ["--progress.every_s=0"],
    ],
)
def test_what_works_is_let_through(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """As far as the schedule, which is checked behind all of them."""
    assert main(["fit", "--config", str(config), *arguments, "--model.optim.warmup_steps", "9"]) == 2
    assert "model.optim.warmup_steps = 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.draft.fc_norm=true"],
            "export.vllm_version = None: no vLLM is installed here to go by, and model.draft",
        ),
        (["--model.draft.fc_norm=true", "--export.vllm_version=0.24.0"], "model.draft.fc_norm = True"),
        (["--model.draft.fc_norm=true", "--export.vllm_version=0.25.0"], "there is no such file"),
        ([], "there is no such file"),
    ],
)
def test_no_serving_vllm_is_assumed(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("eagle3_lightning.callbacks.export.installed", lambda: None)
    assert main(["fit", "--config", str(config), *arguments, "--data.prompts.train", "/nowhere.jsonl"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("states", [False, True])
def test_what_the_bench_refuses_is_refused_before_the_training(
    config: Path, capsys: pytest.CaptureFixture[str], states: bool
) -> None:
    """Stored states need no producer, whose own check would refuse it."""
    place = config.parent / "states"
    place.mkdir()
    sample = {"input_ids": torch.arange(6), "loss_mask": torch.ones(6), "hidden_states": [torch.ones(6, 8)] * 4}
    for number in range(20):
        torch.save(sample, place / f"data_{number}.pt")
    source = [{"path": str(place), "layers": [2, 4, 5], "layer_convention": "vllm"}]
    arguments = ["fit", "--config", str(config), "--acceptance.prompts", str(config.parent / "prompts.jsonl")]
    arguments += ["--data.prompts.train", json.dumps(source)] if states else []
    assert main([*arguments, "--data.engine.extra", "{disable_log_stats: true}"]) == 2
    assert "data.engine.extra.disable_log_stats = True: " in capsys.readouterr().err
    assert not (config.parent / "run" / "logs").exists()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_plain_path_is_the_file_not_the_list_of_its_lines(
    config: Path, capsys: pytest.CaptureFixture[str], split: str, in_file: bool
) -> None:
    prompts = str(config.parent / "prompts.jsonl")
    if in_file:
        values = yaml.safe_load(config.read_text())
        values["data"]["prompts"][split] = prompts
        config.write_text(yaml.safe_dump(values))
    flags = [] if in_file else [f"--data.prompts.{split}", prompts]
    assert main(["fit", "--config", str(config), *flags, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["prompts"][split] == prompts


def test_a_long_value_is_cut_in_the_message() -> None:
    message = str(ConfigError("some.option", "x" * 5000, "it is too long", "Shorten it."))
    assert len(message) < 300
    assert message.endswith("x…: it is too long. Shorten it.")


@pytest.mark.parametrize("option", ["enable_progress_bar", "enable_checkpointing"])
def test_what_the_trainer_turns_off_is_left_out(config: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    # The schedule is checked when the trainer has been made.
    arguments = [f"--trainer.{option}", "false", "--model.optim.warmup_steps", "9"]
    assert main(["fit", "--config", str(config), *arguments]) == 2
    assert "model.optim.warmup_steps = 9" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_says_in_one_line_how_large_the_draft_is(config: Path, wanted: bool) -> None:
    """And not in Lightning's table, with its `Total FLOPs: 0`."""

    class Stop(trainer_cli.Eagle3CLI):
        def after_instantiate_classes(self) -> None:
            raise Made(self.trainer, self.model)

    class Made(BaseException):
        pass

    lock = RunLock()
    arguments = ["fit", "--config", str(config), "--trainer.enable_model_summary", str(wanted).lower()]
    with pytest.raises(Made) as made:
        trainer_cli.make_cli(Stop, arguments, lock)
    lock.release()
    trainer, model = made.value.args
    model.trainer = trainer
    assert not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)
    assert any(isinstance(callback, DraftSizeCallback) for callback in trainer.callbacks) is wanted
    optimized = [p for group in model.configure_optimizers()["optimizer"].param_groups for p in group["params"]]
    assert size_line(model).startswith(f"the draft has {sum(p.numel() for p in optimized):,} parameters to train (")


def test_lightnings_words_about_itself_are_left_out(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["fit", "--config", str(config), "--data.prompts.train", "/nowhere.jsonl"]) == 2
    caplog.set_level("INFO")
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.strategy.connect(lightning.LightningModule())
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always")
        main(["fit", "--config", str(config), "--data.prompts.train", "/nowhere.jsonl"])  # its filters in front
        trainer.save_checkpoint(config.parent / "ckpt" / "a.ckpt")
        ModelCheckpoint(config.parent / "ckpt")._ModelCheckpoint__warn_if_dir_not_empty(config.parent / "ckpt")
    assert "weights_only" not in caplog.text
    assert "GPU available" in caplog.text  # the handler hears what else Lightning says
    assert not any("exists and is not empty" in str(warning.message) for warning in warned)


def test_an_unknown_key_in_a_file_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("draft_vocab_size", "draft_vocabulary"))
    assert main(["fit", "--config", str(config)]) == 2
    assert "draft_vocabulary" in capsys.readouterr().err


def test_a_checkpoint_of_another_target_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "other.ckpt"
    record = {
        "target_fingerprint": "2-" + "0" * 64,
        "target_name": "org/other",
        "draft": {},
        "aux_layers": [],
        "vocab_coverage": 1.0,
    }
    torch.save({"eagle3": record, "state_dict": {}}, checkpoint)
    assert main(["fit", "--config", str(config), "--ckpt_path", str(checkpoint)]) == 2
    assert "belongs to another target" in capsys.readouterr().err
    checkpoint.write_bytes(b"not a checkpoint at all")
    assert main(["fit", "--config", str(config), "--ckpt_path", str(checkpoint)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_used_run_directory_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = config.parent / "run"
    run_dir.mkdir()
    (run_dir / "summary.json").write_text("{}")
    assert main(["fit", "--config", str(config)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [file.name for file in run_dir.iterdir()] == ["summary.json"]


def test_a_printed_configuration_can_be_read_back(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", str(config), "--model.loss.ttt_steps", "4", "--print_config"]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert main(["fit", "--config", str(again), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed)
    assert yaml.safe_load(printed)["model"]["loss"]["ttt_steps"] == 4


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_parses(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", str(file), "--print_config"]) == 0
    given, resolved = yaml.safe_load(file.read_text()), yaml.safe_load(capsys.readouterr().out)
    assert resolved["target"]["path"] == given["target"]["path"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max-new-tokens", "--max_new_tokens"),
        ("--engine.cpu-threads=2", "--engine.cpu_threads=2"),
        ("--target=org/a-b", "--target=org/a-b"),
        ("a-b", "a-b"),
        ("-c", "-c"),
    ],
)
def test_dashes_and_underscores_are_the_same_in_flags_only(given: str, meant: str) -> None:
    assert underscored(given) == meant


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = StrictParser(prog="x")
    parser.add_argument("--max_new_tokens", type=int, default=1)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--max-new", "3"])
    assert stop.value.code == 2
    assert "--max_new" in capsys.readouterr().err
    assert parser.parse_args(["--max-new-tokens", "3"]).max_new_tokens == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "--ckpt", "/nowhere.ckpt", "--out", "{}/out"], "/nowhere.ckpt"),
        (["bench", "--draft", "/nowhere", "--prompts", "{}/p"], "no config.json"),
        (["bench", "--draft", "/nowhere", "--prompts", "{}/p", "--concurrency", "0"], "--concurrency"),
        (
            ["bench", "--draft", "/nowhere", "--prompts", "{}/p", "--num-speculative-tokens", "3", "3"],
            "--num-speculative-tokens",
        ),
        (["bench", "--draft", "/nowhere"], "prompts"),
        (["bench", "--draft", "/nowhere", "--prom", "{}/p"], "--prom"),
    ],
)
def test_other_commands_refuse_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_missing_tokenizer_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (config.parent / "target").glob("tokenizer*"):
        file.unlink()
    assert main(["fit", "--config", str(config)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle3 fit: ")]
    assert "its tokenizer cannot be loaded" in line
    assert line.endswith("Put tokenizer.json and tokenizer_config.json beside the weights.")
