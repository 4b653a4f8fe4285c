"""A fit of the toy module on one or two CPU ranks, for test_module_ddp.py.

    python ddp_fit.py TARGET OUT NUM_RANKS ACCUMULATE

Every rank gets its own micro-batches, uneven and one of them without supervision; with one rank, they come one after
the other. Rank 0 writes weights and metrics. Lightning starts the second rank by running this file again.
"""

import sys
from pathlib import Path

import torch
from test_module import Samples, Stream, make_module, make_trainer
from torch.utils.data import DataLoader

from eagle3_lightning.batch import Eagle3Batch

# Two optimizer steps of three micro-batches for each of two ranks.
MASKS = [
    [[False] * 9 + [True]], [[True] * 12, [False, True, True]],
    [[False] * 3 + [True] * 4], [[False] * 8],  # the second rank has nothing to learn here
    [[True] * 5], [[False] * 2 + [True] * 9],
    [[False] * 6 + [True] * 3], [[True] * 7],
    [[True] * 15], [[False] * 4 + [True]],
    [[True] * 3, [False] * 5 + [True] * 6], [[True] * 4],
]  # fmt: skip


class RankedSamples(Samples):
    """Micro-batch i goes to rank i % world size."""

    def train_dataloader(self) -> DataLoader[Eagle3Batch]:
        assert self.trainer is not None
        return DataLoader(Stream(self.batches[self.trainer.global_rank :: self.trainer.world_size]), batch_size=None)


def main(target: Path, out: Path, num_ranks: int, accumulate: int) -> None:
    torch.set_num_threads(1)
    module = make_module(target, loss={"ttt_steps": 3}, draft={"train_head": True})
    data = RankedSamples(module, MASKS)
    trainer = make_trainer(
        out.parent,
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        max_epochs=1,
    )
    trainer.fit(module, datamodule=data)
    if trainer.global_rank == 0:
        torch.save(
            {
                "weights": module.draft.state_dict(),
                "totals": module.totals,
                "steps": trainer.global_step,
                "metrics": {name: float(v) for name, v in trainer.logged_metrics.items()},
            },
            out,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
