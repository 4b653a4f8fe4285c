"""Refuses to go on from a checkpoint at which the run's end has been reached already."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from eagle3_lightning.errors import ConfigError


def check_unfinished(saved: Mapping[str, Any], ckpt_path: str, trainer: Trainer) -> None:
    """Refuse a resume that would start vLLM, train nothing and write the run's export and figures anew.

    Args:
        saved: what the checkpoint holds.
        ckpt_path: its name, for messages.
        trainer: of the run that is about to begin.

    Raises:
        ConfigError: trainer.max_steps, max_epochs or max_time is reached.
    """
    steps, epochs = int(saved.get("global_step", 0)), _epochs(saved)
    behind = f"this run is finished, {ckpt_path} stands behind"
    if 0 <= trainer.max_steps <= steps:
        raise _finished("trainer.max_steps", trainer.max_steps, f"{behind} step {steps}", ckpt_path)
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs:
        raise _finished("trainer.max_epochs", trainer.max_epochs, f"{behind} epoch {epochs}", ckpt_path)
    # A Timer ends a run only behind these two, as Lightning's own loop has it.
    if steps < (trainer.fit_loop.min_steps or 0) or epochs < (trainer.fit_loop.min_epochs or 0):
        return
    for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):  # type: ignore[attr-defined]
        left_s, state = timer.time_remaining(), (saved.get("callbacks") or {}).get(timer.state_key) or {}
        passed_s = state.get("time_elapsed", {}).get("train", 0.0)
        if left_s is not None and left_s <= passed_s:
            problem = f"{behind} {timedelta(seconds=round(passed_s))} of training"
            raise _finished("trainer.max_time", str(timedelta(seconds=round(left_s))), problem, ckpt_path)


def _finished(option: str, value: Any, problem: str, ckpt_path: str) -> ConfigError:
    remedy = f"Raise {option} to train on; `eagle3 export --ckpt {ckpt_path} --out DIR` writes its draft once more."
    return ConfigError(option, value, problem, remedy)


def _epochs(saved: Mapping[str, Any]) -> int:
    """Passes that the checkpoint has behind it, one that its last batch has just ended included."""
    loop = (saved.get("loops") or {}).get("fit_loop") or {}
    current = loop.get("epoch_progress", {}).get("current", {})
    ready, processed = int(current.get("ready", 0)), int(current.get("processed", 0))
    at_last_batch = bool(loop.get("epoch_loop.batch_progress", {}).get("is_last_batch", False))
    return processed + (at_last_batch and processed < ready)
