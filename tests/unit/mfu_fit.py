"""A fit of the toy module on one or two CPU ranks that counts its FLOPs, for test_throughput.py.

python mfu_fit.py TARGET OUT NUM_RANKS
"""

import json
import sys
from pathlib import Path

import torch
from ddp_fit import MASKS, RankedSamples
from test_module import make_module, make_trainer

from eagle3_lightning.callbacks.throughput import ThroughputCallback

PEAK_TFLOPS = 1e-3


class Closed(RankedSamples):
    """Batches without a producer behind them."""

    is_open = False


def main(target: Path, out: Path, num_ranks: int) -> None:
    torch.set_num_threads(1)
    module = make_module(target, loss={"ttt_steps": 3})
    accumulate = len(MASKS) // num_ranks  # one optimizer step of all of them
    trainer = make_trainer(
        out.parent,
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        accumulate_grad_batches=accumulate,
        callbacks=[ThroughputCallback(PEAK_TFLOPS)],
    )
    trainer.fit(module, datamodule=Closed(module, MASKS))
    if trainer.global_rank == 0:
        out.write_text(json.dumps({name: float(value) for name, value in trainer.logged_metrics.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
