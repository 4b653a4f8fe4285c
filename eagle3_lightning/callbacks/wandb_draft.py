"""The exported draft in W&B: as an artifact of the run, or as its path where it is too large to send."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from eagle3_lightning.loggers import wandb_loggers, wandb_may_fail

ARTIFACT_TYPE = "draft"
MIB = 2**20


def record_draft(trainer: Trainer, directory: Path, alias: str, max_mib: float, facts: dict[str, Any]) -> None:
    """Tell every W&B logger of a draft; offline, `wandb sync` sends it later.

    Args:
        trainer: its loggers.
        directory: the export.
        alias: what distinguishes it from the run's other drafts: `last` or `best`.
        max_mib: a larger one is not sent.
        facts: stored with the artifact.
    """
    size_mib = sum(file.stat().st_size for file in directory.iterdir()) / MIB
    for logger in wandb_loggers(trainer):
        run = logger.experiment
        named = {"path": str(directory), "size_mib": round(size_mib, 1), "artifact": size_mib <= max_mib}
        run.summary.update({f"draft_{alias}": {**named, **facts}})
        if named["artifact"]:
            import wandb

            artifact = wandb.Artifact(f"draft-{run.id}", type=ARTIFACT_TYPE, metadata=facts)
            artifact.add_dir(str(directory))
            with wandb_may_fail(f"the draft in {directory}"):
                run.log_artifact(artifact, aliases=[alias])
