"""Warns of data that a run can be made with and that tells little."""

import logging

from eagle3_lightning.options import BatchOptions, PromptOptions

_FEW_SAMPLES = 5
_log = logging.getLogger(__name__)


def warn_of_few_held_out(prompts: PromptOptions, num_val: int) -> None:
    """Warn where a share was to be held out and is too small to tell anything; no share at all was asked for.

    Args:
        prompts: of the run.
        num_val: samples that are held out.
    """
    if prompts.val or not prompts.val_fraction or num_val >= _FEW_SAMPLES:
        return
    _log.warning(
        "%s held out (data.prompts.val_fraction = %s), so %s: name held-out prompts with data.prompts.val, raise "
        "val_fraction, or give more prompts",
        f"only {num_val} of the samples {'is' if num_val == 1 else 'are'}" if num_val else "no sample is",
        prompts.val_fraction,
        "the validation's figures are rough" if num_val else "there is no validation and no simulated tau",
    )


def warn_of_little_data(batch: BatchOptions, num_samples: int, num_rows: int) -> None:
    """Warn where one pass over everything is less than the calibration asks for.

    Args:
        batch: of the run.
        num_samples: that the calibration has seen.
        num_rows: token rows of theirs.
    """
    if num_rows < batch.calibration_tokens:
        _log.warning(
            "the whole data set is %d sample%s of %d tokens, less than data.batch.calibration_tokens = %d: the draft "
            "sees the same text again and again, and may learn it by heart. Give more prompts",
            num_samples,
            "" if num_samples == 1 else "s",
            num_rows,
            batch.calibration_tokens,
        )
