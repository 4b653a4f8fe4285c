"""Says at the start how large the draft is, in one line."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor


class DraftSizeCallback(Callback):
    """In place of Lightning's table, whose rows are the metrics' and whose FLOPs are 0 here."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print it."""
        rank_zero_info(size_line(pl_module))


def size_line(module: LightningModule) -> str:
    """What is trained of a module and what is frozen in it."""
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen = [*(p for p in module.parameters() if not p.requires_grad), *module.buffers()]
    return (
        f"the draft has {sum(p.numel() for p in trained):,} parameters to train ({_mib(trained):,.1f} MiB); frozen "
        f"beside them, the target's embeddings first of all: {_mib(frozen):,.1f} MiB"
    )


def _mib(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / 2**20
