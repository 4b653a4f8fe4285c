"""Test-time training: the draft reads the target's features once, and then its own, as it will when it serves."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.loss import HeadOutput, Teacher, head_kl, teach
from eagle3_lightning.draft.model import Eagle3Draft, Unroll
from eagle3_lightning.draft.ops import take_rows
from eagle3_lightning.draft.plan import UnrollPlan
from eagle3_lightning.options import LossOptions

# Picking the scored states out and spreading their gradients again costs as much as the head does on a few of them.
_GATHER_BELOW = 0.97


def ttt_loss(
    draft: Eagle3Draft,
    batch: Eagle3Batch,
    plan: UnrollPlan,
    options: LossOptions,
    dtype: torch.dtype,
    teacher_head: Float[Tensor, "D H"] | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    want_best: bool = False,
) -> HeadOutput:
    """KL to the teacher, summed over every scored step of every slot (Li et al. 2025, EAGLE-3, section 3.2).

    Args:
        draft: the draft.
        batch: packed documents, on the draft's device.
        plan: of the batch, likewise.
        options: decay, attention and recomputation.
        dtype: of the matrix products and of what is kept for the backward pass.
        teacher_head: the target's lm_head rows of the draft vocabulary; None if the draft's frozen head is just these.
        logit_scale: the target's own factor on its logits.
        logit_softcap: the target's own soft cap.
        want_best: also return the draft's best tokens.
    """
    with torch.autocast(batch.ids.device.type, enabled=False):  # every product says its dtype itself
        run = Unroll(draft, batch, plan, dtype, options.attention)
        head = run.head.matrix.detach() if teacher_head is None else teacher_head.to(dtype)
        teacher = teach(batch.teacher[plan.supervised].to(dtype), head, logit_scale, logit_softcap)
        features = run.fuse()  # step 0 starts from the target's own features
        states: list[Tensor] = []
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        for k in range(plan.num_steps):
            state, features, key, value = _step(run, options.checkpoint_steps, k, features, keys, values)
            states.append(state)
            keys.append(key)
            values.append(value)
        return _head(torch.cat(states), run, teacher, plan, options.ttt_decay, want_best)


def _head(states: Tensor, run: Unroll, teacher: Teacher, plan: UnrollPlan, decay: float, want_best: bool) -> HeadOutput:
    """KL of the scored pairs among all states [K * N, H]."""
    weight = torch.cat([teacher.lse.new_full((n,), decay**k) for k, n in enumerate(plan.pairs_per_step)])
    if plan.num_pairs < _GATHER_BELOW * len(states):
        states = take_rows(states, plan.pairs)
        return head_kl(states, run.head, teacher, plan.teacher_of_pair, weight, want_best)
    everywhere = weight.new_zeros(len(states)).index_copy_(0, plan.pairs, weight)
    out = head_kl(states, run.head, teacher, plan.teacher_of_row, everywhere, want_best)
    return HeadOutput(out.loss, out.kl[plan.pairs], None if out.best is None else out.best[plan.pairs])


def _step(run: Unroll, recompute: bool, *args: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    if recompute and torch.is_grad_enabled():
        k, features, keys, values = args
        return checkpoint(
            run.step, k, features, list(keys), list(values), use_reentrant=False, preserve_rng_state=False
        )
    return run.step(*args)
