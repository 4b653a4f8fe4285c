"""Writes the resolved configuration into the run's directory and into every logger."""

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger

from eagle3_lightning.loggers import WANDB_ID_FILE
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.provenance import git_state, versions


class RunConfigCallback(SaveConfigCallback):
    """config.yaml for the first start of a run, config_2.yaml for the next one; `--config` takes them back."""

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs, save_to_log_dir=False)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called by Lightning once, on rank 0, before anything is started."""
        text = self.parser.dump(self.config, skip_none=False)
        if stage == "fit":
            run_dir = Path(self.config.run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            free_name(run_dir).write_text(text, encoding="utf-8")
        assert isinstance(pl_module, Eagle3Module)
        origin = {
            "versions": versions(),
            "git": git_state(),
            "target_fingerprint": pl_module.target_info.fingerprint,
        }
        for logger in trainer.loggers:
            logger.log_hyperparams({**yaml.safe_load(text), **origin})
            if isinstance(logger, WandbLogger) and stage == "fit":
                (Path(self.config.run_dir) / WANDB_ID_FILE).write_text(str(logger.version) + "\n", encoding="utf-8")


def free_name(run_dir: Path) -> Path:
    """The first of config.yaml, config_2.yaml, ... that is not there."""
    file, number = run_dir / "config.yaml", 1
    while file.exists():
        number += 1
        file = run_dir / f"config_{number}.yaml"
    return file
