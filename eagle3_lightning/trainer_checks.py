"""Refuses options of the Trainer that Lightning takes and then divides by, ignores, or refuses in its loop alone."""

import math
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer

from eagle3_lightning.checks import COUNT, NOT_NEGATIVE, Range, check_number
from eagle3_lightning.errors import ConfigError

# Option -> where it must lie, and the default that messages name.
_NUMBERS: dict[str, tuple[Range, Any]] = {
    "accumulate_grad_batches": (COUNT, 1),
    "check_val_every_n_epoch": (COUNT, 1),
    "gradient_clip_val": (NOT_NEGATIVE, None),
    "log_every_n_steps": (NOT_NEGATIVE, 10),
    "min_epochs": (NOT_NEGATIVE, None),
    "min_steps": (NOT_NEGATIVE, None),
    "num_sanity_val_steps": (Range(-1), 0),
}
_ALL_OF_THEM = "Give a whole number of batches, or leave it out for all of them."


def check_fit(trainer: Any) -> None:
    """Refuse what a fit cannot do; of the shape of the run, not of the machine.

    Args:
        trainer: its options, parsed.

    Raises:
        ConfigError: a number that makes no sense, or a run without a step or without an end.
    """
    check_barebones(trainer)
    for name, (allowed, default) in _NUMBERS.items():
        check_number(f"trainer.{name}", trainer[name], allowed, default)
    _check_batches(trainer)
    _check_end(trainer)
    if trainer.num_nodes > 1:
        raise ConfigError(
            "trainer.num_nodes", trainer.num_nodes, "all ranks share memory with vLLM", "Train on one host."
        )


def check_barebones(trainer: Any) -> None:
    """Refuse Lightning's trainer without callbacks.

    Raises:
        ConfigError: it is asked for.
    """
    if trainer.barebones:
        raise ConfigError(
            "trainer.barebones",
            True,
            "a run needs its callbacks",
            "Turn things off one by one, as with trainer.enable_progress_bar.",
        )


def _check_batches(trainer: Any) -> None:
    """Refuse shares of an epoch, whose number of batches nobody knows: answers have any length."""
    for name in ("limit_train_batches", "overfit_batches", "val_check_interval"):
        value = trainer[name]
        if isinstance(value, float) and value not in (0.0, 1.0):
            raise ConfigError(f"trainer.{name}", value, "an epoch has no number of batches beforehand", _ALL_OF_THEM)
    if isinstance(trainer.val_check_interval, int | float):
        check_number("trainer.val_check_interval", trainer.val_check_interval, COUNT)


def _check_end(trainer: Any) -> None:
    """Refuse a run that trains nothing, or would not end."""
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if trainer[name] == 0:
            raise ConfigError(f"trainer.{name}", trainer[name], "nothing would be trained", "Give at least 1.")
    if _seconds(trainer.max_time) <= 0:
        raise ConfigError(
            "trainer.max_time", trainer.max_time, "nothing would be trained", "Give some time, as DD:HH:MM:SS."
        )
    if trainer.max_steps < 0 and trainer.max_epochs in (None, -1) and trainer.max_time is None:
        raise ConfigError(
            "trainer.max_steps",
            trainer.max_steps,
            "the run would never end",
            "Set trainer.max_steps, trainer.max_epochs or trainer.max_time.",
        )


def _seconds(max_time: Any) -> float:
    """Of trainer.max_time, as Lightning reads it; endless where there is none or Lightning will refuse it."""
    try:
        left_s = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError, ValueError):
        return math.inf
    return math.inf if left_s is None else left_s
