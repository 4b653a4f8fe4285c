"""`eagle3 fit` and `eagle3 validate`: LightningCLI with fixed classes, one target, one run directory.

`target` and `run_dir` are given once and linked to everything that needs them. Each callback that a run cannot do
without has a group of its own (`checkpoint`, `export`, `acceptance`, ...); others go to `trainer.callbacks`.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.callbacks.acceptance import AcceptanceCallback
from eagle3_lightning.callbacks.data_summary import DataSummaryCallback
from eagle3_lightning.callbacks.draft_size import DraftSizeCallback
from eagle3_lightning.callbacks.export import ExportCallback
from eagle3_lightning.callbacks.preview import PreviewCallback
from eagle3_lightning.callbacks.progress import ProgressCallback
from eagle3_lightning.callbacks.run_config import RunConfigCallback
from eagle3_lightning.callbacks.termination import TerminationCallback
from eagle3_lightning.callbacks.threads import ThreadsCallback
from eagle3_lightning.callbacks.throughput import ThroughputCallback
from eagle3_lightning.checkpoints import WholeFileIO, read_checkpoint
from eagle3_lightning.datamodule import HiddenStateDataModule
from eagle3_lightning.errors import ConfigError, Eagle3Error, OptionsError
from eagle3_lightning.loggers import begin_wandb, complete_logger, end_wandb, wandb_loggers
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.optim import run_clock, schedule
from eagle3_lightning.options import TargetOptions
from eagle3_lightning.ranks import ddp
from eagle3_lightning.resume import check_unfinished
from eagle3_lightning.run_directory import CHECKPOINTS, RunLock, check_run_dir
from eagle3_lightning.trainer_checks import (
    check_accelerator,
    check_any,
    check_attention,
    check_checkpoint_numbers,
    check_fit,
    check_monitors,
)
from eagle3_lightning.usage import Usage

# What Lightning says of itself in every run, by the logger that says it.
_NOISE = {
    "lightning.pytorch.utilities.rank_zero": "Tip: For seamless",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "`weights_only` was not set",
}
TRAINER_DEFAULTS = {
    "max_epochs": -1,  # the end is trainer.max_steps, or max_epochs if it is given
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # the data module shards by itself
}


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 fit ...` or `eagle3 validate ...`."""
    lock, termination = RunLock(), TerminationCallback()  # new ones for each run: they remember
    try:
        termination.listen()
        cli = make_cli(Eagle3CLI, argv, lock, termination=termination)
    finally:
        lock.release()
        termination.end()
    for logger in wandb_loggers(cli.trainer):
        end_wandb(logger)
    return 0


def make_cli(
    kind: "type[Eagle3CLI]",
    argv: Sequence[str],
    lock: RunLock,
    trainer_class: type[Trainer] = Trainer,
    termination: TerminationCallback | None = None,
) -> "Eagle3CLI":
    """Parse the options and do what the command says.

    Args:
        kind: of the command line.
        argv: the command and its options.
        lock: of the run's directory.
        trainer_class: whose methods are the commands.
        termination: what signals do; like the data's summary, it has no options, hence no group.
    """
    # LightningCLI 2.6 calls functions that jsonargparse has renamed; its users cannot do anything about it.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for name, noise in _NOISE.items():
        logging.getLogger(name).addFilter(lambda record, noise=noise: noise not in record.getMessage())  # type: ignore[misc]
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")  # Lightning's use of torch, likewise
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # in every resume
    return kind(
        Eagle3Module,
        HiddenStateDataModule,
        lock=lock,
        trainer_class=trainer_class,
        save_config_callback=RunConfigCallback,
        trainer_defaults=TRAINER_DEFAULTS
        | {"callbacks": [termination or TerminationCallback(), DataSummaryCallback(), ThreadsCallback()]},
        seed_everything_default=0,
        parser_class=_Parser,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "eagle3"},
        args=list(argv),
    )


class _Parser(StrictParser, LightningArgumentParser):
    """LightningCLI's parser without abbreviations."""

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        """Add them; a logger needs no `save_dir`, which `complete_logger` fills in."""
        added = super().add_class_arguments(theclass, *args, **kwargs)
        if isinstance(theclass, type) and issubclass(theclass, Logger):
            for action in self._actions:
                if action.dest == "save_dir" and action.required:
                    action.required = False
                    self.set_defaults(save_dir=".")
        return list(added)


class Eagle3CLI(LightningCLI):
    """See the module's docstring."""

    def __init__(self, *args: Any, lock: RunLock, **kwargs: Any) -> None:
        """Parse, check, run.

        Args:
            args: LightningCLI's.
            lock: taken on the run's directory; the caller releases it.
            kwargs: LightningCLI's.
        """
        self._lock = lock
        super().__init__(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Trainer methods that are commands, each with the arguments that are not options."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
            "validate": {"model", "dataloaders", "datamodule", "weights_only"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the shared groups and link them."""
        parser.add_argument(
            "--run_dir", type=Path, required=True, help="directory of this run: checkpoints, logs, export; new or empty"
        )
        parser.add_class_arguments(TargetOptions, "target")
        for option in fields(TargetOptions):
            for group in ("model", "data"):
                parser.link_arguments(f"target.{option.name}", f"{group}.target.{option.name}")
        parser.link_arguments("run_dir", "data.run_dir")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.link_arguments("run_dir", "trainer.default_root_dir")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_last": True,
                "checkpoint.filename": "step{step}",
                "checkpoint.auto_insert_metric_name": False,
                # Else the next last.ckpt becomes last-v1.ckpt where the resumed run did not know of the first.
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.link_arguments("run_dir", "checkpoint.dirpath", compute_fn=_checkpoint_dir)
        for callback, key in (
            (AcceptanceCallback, "acceptance"),
            (ExportCallback, "export"),
            (ThroughputCallback, "throughput"),
            (ProgressCallback, "progress"),
            (PreviewCallback, "preview"),
        ):
            parser.add_lightning_class_args(callback, key)
        for key in ("export", "preview"):
            parser.link_arguments("run_dir", f"{key}.run_dir")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Say of a checkpoint what `check_checkpoint` takes; Lightning's help offers `best`, `hpc` and `registry`."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = "checkpoint to load: a file, or `last` for the last one of --run_dir"
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what `main` was given (LightningCLI would warn that it is not the command line's own list)."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as it was given.

        LightningCLI would put the checkpoint's hyperparameters over it, explicit flags included. A checkpoint that does
        not fit the configuration is refused when it is loaded.
        """

    def _set_seed(self) -> None:
        """Seed, with a number that is out of range refused in one line."""
        with in_one_line():
            super()._set_seed()

    def instantiate_classes(self) -> None:
        """Make model, data and trainer, with what Lightning refuses told in one line."""
        with in_one_line():
            super().instantiate_classes()

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Leave out callbacks that the options turn off, which Lightning would refuse; write checkpoints whole."""
        unwanted = (
            *((ProgressCallback,) if config["enable_progress_bar"] is False else ()),
            *((ModelCheckpoint,) if config["enable_checkpointing"] is False else ()),
        )
        plugins = config.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(WholeFileIO())
        kept = [entry for entry in callbacks if not isinstance(entry, unwanted)]
        changed: dict[str, Any] = {"plugins": plugins, "enable_model_summary": False}
        if config["enable_model_summary"] is not False:
            kept.append(DraftSizeCallback())
        if config["strategy"] == "ddp":
            changed["strategy"] = ddp()
        return super()._instantiate_trainer({**config, **changed}, kept)

    def after_instantiate_classes(self) -> None:
        """Have refused before vLLM is started what Lightning and the callbacks come to only later."""
        check_attention(self.model, self.trainer)
        if self.subcommand == "fit":
            validated = [f"val/{name}" for name in self.model.val_metrics.names]
            check_monitors(self.trainer, validated)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            check_callback(callback, self.trainer, self.model, str(self.subcommand))
            if isinstance(callback, AcceptanceCallback):
                callback.check_engine(self.datamodule.engine)
        if self.subcommand == "fit":
            schedule(self.model.optim_options, self.trainer.max_steps, run_clock(self.trainer))
        if (ckpt_path := self.config[self.subcommand].ckpt_path) is not None:
            saved = read_checkpoint(ckpt_path, "--ckpt_path")
            try:
                self.model.on_load_checkpoint(saved)
            except ConfigError as error:
                if error.option != "ckpt_path":
                    raise
                problem = f"{error.problem}: {error.value}"
                remedy = f"{error.remedy.removesuffix('.')}, or start a new run."
                raise ConfigError("--ckpt_path", str(ckpt_path), problem, remedy) from error
            if self.subcommand == "fit":
                check_unfinished(saved, ckpt_path, self.trainer)
        else:
            self.model.check_start()
        self.datamodule.check()  # before the loggers begin
        for logger in wandb_loggers(self.trainer):
            begin_wandb(logger)

    def before_instantiate_classes(self) -> None:
        """Check what spans several groups, and complete the loggers."""
        config = self.config[self.subcommand]
        validation = self.subcommand == "validate"
        (check_any if validation else check_fit)(config.trainer)
        check_accelerator(config.trainer)
        check_checkpoint_numbers(config.checkpoint)
        starts = config.model.init_from is not None
        config.ckpt_path = check_checkpoint(config.ckpt_path, config.run_dir, needed=validation and not starts)
        rank_zero_only(self._lock.acquire)(config.run_dir)
        if not validation:
            rank_zero_only(check_run_dir)(config.run_dir, config.ckpt_path)
        config.trainer.logger = complete_logger(config.trainer.logger, config.run_dir, validation)


def _checkpoint_dir(run_dir: Path | None) -> Path | None:
    return run_dir and run_dir / CHECKPOINTS  # None: links are computed before a missing --run_dir is reported


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn what Lightning raises for options that it refuses, or has no package for, into an error without a traceback.

    Raises:
        OptionsError: it refused them. JSONARGPARSE_DEBUG leaves its exception as it is.
    """
    try:
        yield
    except Eagle3Error:
        raise
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        if os.environ.get("JSONARGPARSE_DEBUG"):
            raise
        text = Usage({}).explain(str(error)) or f"the options cannot be used: {' '.join(str(error).split())}"
        raise OptionsError(text) from error


def check_callback(callback: Callback, trainer: Trainer, module: LightningModule, stage: str) -> None:
    """Have one of our callbacks check its options, which Lightning does only after the data module's `setup`.

    Raises:
        ConfigError: an option that the callback cannot use, under the name that it has here.
    """
    if not isinstance(callback, ExportCallback | AcceptanceCallback):
        return
    try:
        callback.setup(trainer, module, stage)
    except ConfigError as error:
        if error.option != "--vllm-version":  # its name in `eagle3 export`
            raise
        raise ConfigError("export.vllm_version", error.value, error.problem, error.remedy) from error


def check_checkpoint(ckpt_path: Any, run_dir: Path, needed: bool = False) -> str | None:
    """The checkpoint to load as a file, or None.

    Lightning's own `last` starts a new run silently where there is no checkpoint; here it is an error.

    Args:
        ckpt_path: as given.
        run_dir: of the run.
        needed: whether the command does nothing without one.

    Raises:
        ConfigError: there is no such checkpoint, or none is named where one is needed.
    """
    remedy = "Name a checkpoint file, or `last` for the last one of --run_dir."
    if ckpt_path is None:
        if needed:
            remedy = f"{remedy.removesuffix('.')}; or a draft as --model.init_from."
            raise ConfigError("--ckpt_path", None, "there is nothing to validate without a checkpoint", remedy)
        return None
    file = run_dir / CHECKPOINTS / "last.ckpt" if str(ckpt_path) == "last" else Path(ckpt_path)
    if not file.is_file():
        raise ConfigError(
            "--ckpt_path",
            str(ckpt_path),
            f"there is no checkpoint {file}",
            remedy if needed else "Name a checkpoint file, or leave --ckpt_path out to start a new run.",
        )
    return str(file)
