"""What the trainer steps on: one packed micro-batch of hidden states."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lightning.errors import ConfigError

if TYPE_CHECKING:
    from eagle3_lightning.draft.config import DraftConfig
    from eagle3_lightning.draft.plan import UnrollPlan


@dataclass
class Eagle3Batch:
    """Documents laid end to end; `T` slots, `A` auxiliary layers, `H` hidden.

    A document of S tokens x[0..S-1] whose states are known gives S - 1 slots. Slot t carries the token x[t+1] and the
    auxiliary states of x[t]; it drafts x[t+2]. Its teacher is lm_head(last state of x[t+1]), its supervision whether
    x[t+1] belongs to a response. Test-time-training step k uses ids, mask and teacher of slot t + k of its document.

    Attributes:
        ids: x[t+1] of each slot; 0 where `doc` is -1.
        features: auxiliary states of x[t], in the target's dtype, unscaled.
        teacher: the target's last hidden state of x[t+1], *after* its final norm.
        mask: whether slot t is supervised at step 0.
        doc: number of the slot's document in this batch, ascending; -1 for padding at the end.
        pos: 0-based position t of the slot in its document.
        sample_ids: index of each document in the sample stream, for error messages.
        plan: what the unroll does with this batch; the module makes it when the batch moves to its device.
    """

    ids: Int[Tensor, " T"]
    features: Float[Tensor, "T A H"]
    teacher: Float[Tensor, "T H"]
    mask: Bool[Tensor, " T"]
    doc: Int[Tensor, " T"]
    pos: Int[Tensor, " T"]
    sample_ids: list[int]
    plan: "UnrollPlan | None" = None

    @property
    def num_slots(self) -> int:
        """Number of slots T, padding included."""
        return self.ids.shape[0]

    def to(self, *args: object, **kwargs: object) -> "Eagle3Batch":
        """A copy with every tensor moved as `Tensor.to` says (Lightning calls this to move the batch)."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def pin_memory(self) -> "Eagle3Batch":
        """A copy in page-locked memory, so that the move to a GPU does not wait."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of every tensor, the plan's too, until `stream` has done what it is asked to do by then."""
        for part in (self, self.plan):
            for value in vars(part).values() if part is not None else ():
                if isinstance(value, Tensor):
                    value.record_stream(stream)

    def _map(self, fn) -> "Eagle3Batch":  # type: ignore[no-untyped-def]
        moved = {f.name: fn(v) for f in fields(self) if isinstance(v := getattr(self, f.name), torch.Tensor)}
        return replace(self, **moved)


def check_batch(batch: Eagle3Batch, config: "DraftConfig") -> None:
    """Refuse a batch that does not fit the draft.

    Raises:
        ConfigError: names the field, its value and what would do.
    """
    num_slots = batch.ids.shape[0]
    wanted = {
        "features": (num_slots, config.num_aux, config.hidden_size),
        "teacher": (num_slots, config.hidden_size),
        "mask": (num_slots,),
        "doc": (num_slots,),
        "pos": (num_slots,),
    }
    for name, shape in wanted.items():
        if (found := tuple(getattr(batch, name).shape)) != shape:
            raise ConfigError(
                f"batch.{name}",
                found,
                "its shape does not fit the draft and the other fields",
                f"It should be {shape}.",
            )
    if batch.mask.dtype != torch.bool:
        raise ConfigError("batch.mask", batch.mask.dtype, "a mask says yes or no", "Give torch.bool.")
    if num_slots and not 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < config.vocab_size:
        raise ConfigError(
            "batch.ids",
            [int(batch.ids.min()), int(batch.ids.max())],
            f"a token id is outside the target's vocabulary of {config.vocab_size}",
            "Check that the prompts were tokenized for this target.",
        )
