"""Several ranks: how they share gradients, and how they wait for what rank 0 does alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from eagle3_lightning.errors import ProducerError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def ddp() -> DDPStrategy:
    """DDP as a fit has it: gradients live in the buckets that are reduced, else each is copied there and back."""
    return DDPStrategy(gradient_as_bucket_view=True)


@contextmanager
def rank_zero_first(trainer: "Trainer", what: str, timeout_s: float) -> Iterator[bool]:
    """Every rank enters at the same point and leaves when rank 0 is through; the body is told whether it is on rank 0.

    A barrier of the strategy would end the run after Lightning's half an hour.

    Args:
        trainer: its ranks.
        what: rank 0 does, for the message.
        timeout_s: longest wait for it.

    Raises:
        ProducerError: rank 0 was not through in time, or a rank is gone.
    """
    if trainer.world_size == 1:
        yield True
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield trainer.is_global_zero
        try:
            dist.barrier(group)
        except RuntimeError as error:
            raise ProducerError(
                f"the ranks did not meet behind {what} of rank 0 within {timeout_s:.0f} s ({error})"
            ) from error
    finally:
        dist.destroy_process_group(group)
