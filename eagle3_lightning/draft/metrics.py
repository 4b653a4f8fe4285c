"""How good a draft is: losses, accuracies by step, and the acceptance length that greedy serving would show."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric

from eagle3_lightning.draft.plan import UnrollPlan


@dataclass(frozen=True)
class Scores:
    """What one batch adds; `T` slots, `K` steps.

    Attributes:
        kl: KL of every scored pair, in the plan's order.
        right: whether step k of slot t found the teacher's best token; False where it is not scored.
        scored: whether step k of slot t is supervised.
        doc: document of each slot.
        in_vocab: for each supervised slot, whether the teacher's best token is in the draft vocabulary.
        agrees: for each supervised slot whose next token is known, whether that is the teacher's best.
    """

    kl: Float[Tensor, " R"]
    right: Bool[Tensor, "K T"]
    scored: Bool[Tensor, "K T"]
    doc: Int[Tensor, " T"]
    in_vocab: Bool[Tensor, " S"]
    agrees: Bool[Tensor, " A"]


def scores(
    plan: UnrollPlan,
    kl: Float[Tensor, " R"],
    best: Int[Tensor, " R"],
    teacher_best: Int[Tensor, " S"],
    target_of_draft: Int[Tensor, " D"],
    in_draft: Bool[Tensor, " V"],
    ids: Int[Tensor, " T"],
    doc: Int[Tensor, " T"],
) -> Scores:
    """Lay the head's results out by step and slot.

    Args:
        plan: of the batch.
        kl: of each scored pair.
        best: the draft's best token of each, in the draft vocabulary.
        teacher_best: the teacher's best token of each supervised slot, in the target's whole vocabulary.
        target_of_draft: the target token of each draft token.
        in_draft: whether a target token is in the draft vocabulary.
        ids: token of each slot.
        doc: document of each slot.
    """
    flat_slots = torch.arange(plan.num_steps, device=ids.device)[:, None] * plan.num_slots + plan.rows
    where = flat_slots.flatten()[plan.pairs]
    flat = torch.zeros(2, plan.num_steps * plan.num_slots, dtype=torch.bool, device=ids.device)
    flat[0, where] = target_of_draft[best] == teacher_best[plan.teacher_of_pair]
    flat[1, where] = True
    right, scored = flat.view(2, plan.num_steps, plan.num_slots)
    doc, ids = doc[: plan.num_slots], ids[: plan.num_slots]
    known = doc[plan.supervised] == doc[(plan.supervised + 1).clamp(max=max(plan.num_slots - 1, 0))]
    known &= plan.supervised + 1 < plan.num_slots
    following = ids[(plan.supervised + 1)[known]]
    return Scores(kl, right, scored, doc, in_draft[teacher_best], following == teacher_best[known])


class DraftMetrics(Metric):
    """Sums over batches and ranks; `compute` gives means by name.

    - `loss`: as trained on, without the decay: KL summed over steps and supervised slots, by supervised slot.
    - `loss_k`: mean KL of step k (from 1) over the slots scored at it.
    - `full_acc_k`: steps 1 .. k all right, over slots at which all of them are scored.
    - `cond_acc_k`: step k right, over those of these slots at which the steps before it are.
    - `tau`: tokens by round of greedy drafting, the bonus token included (`walk`).
    - `teacher_oov`: supervised slots whose teacher's best token the draft cannot propose.
    - `greedy_agreement`: supervised slots whose next token is the teacher's best; 1 if the text is the target's own
      greedy output, and only then does `tau` foretell serving.
    """

    full_state_update = False

    kl: Tensor
    scored: Tensor
    full: Tensor
    full_of: Tensor
    cond_of: Tensor
    advanced: Tensor
    rounds: Tensor
    supervised: Tensor
    in_vocab: Tensor
    agrees: Tensor
    agrees_of: Tensor

    def __init__(self, num_steps: int, decay: float = 1.0) -> None:
        """Start with nothing counted.

        Args:
            num_steps: K.
            decay: weight of step k in `loss` is decay ** k.
        """
        super().__init__()
        self.num_steps, self.decay = num_steps, decay
        for name in ("kl", "scored", "full", "full_of", "cond_of"):
            self.add_state(name, torch.zeros(num_steps, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("advanced", "rounds", "supervised", "in_vocab", "agrees", "agrees_of"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Scores) -> None:
        """Add a batch."""
        by_step = torch.arange(self.num_steps, device=scores.kl.device)
        counts = scores.scored.sum(dim=1)
        step_of_pair = torch.repeat_interleave(by_step, counts, output_size=scores.kl.shape[0])
        self.kl.index_add_(0, step_of_pair, scores.kl.double())
        self.scored += counts
        chained = scores.scored.cumprod(dim=0).bool()  # this step and all before it are scored
        full = (scores.right & chained).cumprod(dim=0).bool()
        before = torch.cat([torch.ones_like(full[:1]), full[:-1]])
        self.full += full.sum(dim=1)
        self.full_of += chained.sum(dim=1)
        self.cond_of += (chained & before).sum(dim=1)
        visited = walk(full.sum(dim=0), scores.scored[0], scores.doc)
        self.rounds += visited.sum()
        self.advanced += (full.sum(dim=0) + 1)[visited].sum()
        self.supervised += scores.in_vocab.numel()
        self.in_vocab += scores.in_vocab.sum()
        self.agrees += scores.agrees.sum()
        self.agrees_of += scores.agrees.numel()

    @property
    def names(self) -> list[str]:
        """What `compute` gives."""
        steps = range(1, self.num_steps + 1)
        by_step = [f"{name}_{k}" for k in steps for name in ("loss", "full_acc", "cond_acc")]
        return ["loss", "tau", "teacher_oov", "greedy_agreement", *by_step]

    def compute(self) -> dict[str, Tensor]:
        """Means by name, NaN where nothing was counted."""
        decay = self.decay ** torch.arange(self.num_steps, device=self.kl.device, dtype=torch.float64)
        named = {"loss": (self.kl * decay).sum() / self.supervised, "tau": self.advanced / self.rounds}
        named["teacher_oov"] = 1 - self.in_vocab / self.supervised
        named["greedy_agreement"] = self.agrees / self.agrees_of
        for k in range(self.num_steps):
            named[f"loss_{k + 1}"] = self.kl[k] / self.scored[k]
            named[f"full_acc_{k + 1}"] = self.full[k] / self.full_of[k]
            named[f"cond_acc_{k + 1}"] = self.full[k] / self.cond_of[k]
        return {name: value.float() for name, value in named.items()}


def walk(accepted: Int[Tensor, " T"], supervised: Bool[Tensor, " T"], doc: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """The slots at which greedy serving would draft.

    From a document's first supervised slot, go on one slot behind the last accepted one, over what is not supervised to
    the next slot that is, to the document's end. Found by doubling: after i rounds, every slot within 2 ** i jumps is
    marked.

    Args:
        accepted: how many drafted tokens in a row are right from this slot on.
        supervised: at step 0.
        doc: document of each slot.
    """
    num_slots = len(doc)
    end = num_slots  # one slot behind the last stands for "no more"
    slots = torch.arange(num_slots + 1, device=doc.device)
    next_supervised = torch.where(supervised, slots[:end], end)
    next_supervised = torch.cat([next_supervised.flip(0).cummin(0).values.flip(0), slots[end:]])
    doc = torch.cat([doc, doc.new_full((1,), -2)])
    jump = next_supervised[(slots[:end] + accepted + 1).clamp(max=end)]
    jump = torch.where(doc[jump] == doc[:end], jump, end)
    jump = torch.cat([jump, slots[end:]])
    first = torch.ones(num_slots, dtype=torch.bool, device=doc.device)
    first[1:] = doc[1:end] != doc[: end - 1]
    start = next_supervised[:end]
    visited = torch.zeros(num_slots + 1, dtype=torch.int32, device=doc.device)
    visited.scatter_(0, torch.where(first & (doc[start] == doc[:end]), start, end), 1)
    for _ in range(max(num_slots, 1).bit_length()):
        visited = visited.scatter_reduce(0, jump, visited, "amax")
        jump = jump[jump]
    return visited[:end].bool()
