"""Leaves vLLM its cores where both compute on the CPU: threads of both on one core wait for each other all the time."""

import os

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from eagle3_lightning.datamodule import HiddenStateDataModule

_VARIABLE = "OMP_NUM_THREADS"


class ThreadsCallback(Callback):
    """Sets torch's number of threads for a fit on the CPU with a vLLM beside it, unless OMP_NUM_THREADS is set."""

    def __init__(self) -> None:
        """See what the user has set, before Lightning sets the variable for several ranks."""
        self._is_given = _VARIABLE in os.environ

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on every rank behind the data's `setup`, which has started vLLM if a sample is missing."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if stage != "fit" or self._is_given or not on_cpu or not isinstance(data, HiddenStateDataModule):
            return
        if not data.makes_samples:
            return
        cores = len(os.sched_getaffinity(0))
        number = trainer_threads(cores, data.engine.cpu_threads, trainer.world_size)
        torch.set_num_threads(number)
        of_ranks = f" on each of {trainer.world_size} ranks" if trainer.world_size > 1 else ""
        rank_zero_info(
            f"torch trains with {number} {'thread' if number == 1 else 'threads'}{of_ranks}: vLLM computes on the same "
            f"{cores} cores, with data.engine.cpu_threads = {data.engine.cpu_threads} ({_VARIABLE} sets another number)"
        )


def trainer_threads(cores: int, cpu_threads: int | None, ranks: int) -> int:
    """Threads for each rank, at least one.

    Args:
        cores: that this process may run on.
        cpu_threads: vLLM's; None, where vLLM takes as many as there are cores, leaves half of them.
        ranks: of the trainer, all on this host.
    """
    left = cores - cpu_threads if cpu_threads is not None else cores // 2
    return max(1, left // ranks)
