"""KL divergence to the teacher over the draft vocabulary, fused with the head.

The gradient of the logits is formed in the forward pass, chunk by chunk: logits of a chunk of rows, their KL and
gradient q - p in place, the gradient of the states (and of a trained head) from it, and the chunk is gone. No [rows,
draft vocabulary] tensor of the draft ever exists.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lightning.draft.linear import CastWeight, fused, wide_dtype

# Rows of logits at once. On the CPU a chunk should stay in the cache; on a GPU it should fill the device.
_CHUNK_ELEMENTS_CPU = 1 << 21
_CHUNK_ELEMENTS_CUDA = 1 << 27


@dataclass(frozen=True)
class Teacher:
    """The target's distribution over the draft vocabulary at each supervised slot.

    Kept as the logits that its matrix product gave, in that dtype, with their log-sum-exp in float32: half the memory
    of float32 probabilities, and nothing is rounded a second time as bf16 probabilities would be.

    Attributes:
        logits: [supervised slots, D].
        lse: log-sum-exp of each row.
        negentropy: sum of p log p of each row.
    """

    logits: Float[Tensor, "S D"]
    lse: Float[Tensor, " S"]
    negentropy: Float[Tensor, " S"]


@dataclass(frozen=True)
class HeadOutput:
    """What the head gives for every scored (step, row) pair.

    Attributes:
        loss: sum of weight * KL, differentiable.
        kl: KL of each pair in nats, detached.
        best: draft vocabulary index of the draft's best token, if it was asked for.
    """

    loss: Float[Tensor, ""]
    kl: Float[Tensor, " R"]
    best: Int[Tensor, " R"] | None


@torch.no_grad()
def teach(
    last: Float[Tensor, "S H"], head: Float[Tensor, "D H"], scale: float = 1.0, softcap: float | None = None
) -> Teacher:
    """The teacher of supervised slots, renormalized over the draft vocabulary.

    Args:
        last: the target's last hidden states after its final norm, in the compute dtype.
        head: the target's lm_head rows of the draft vocabulary, in the compute dtype.
        scale: the target's own factor on its logits.
        softcap: the target's own cap * tanh(logits / cap).
    """
    logits = last @ head.t()
    if scale != 1.0:
        logits *= scale
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if fused(logits):
        from eagle3_lightning.draft.kl import teacher_statistics

        return Teacher(logits, *teacher_statistics(logits))
    lse = torch.empty(logits.shape[0], dtype=wide_dtype(logits.dtype), device=logits.device)
    negentropy = torch.empty_like(lse)
    for rows in _chunks(logits.shape[0], logits.shape[1], logits.device):
        wide = logits[rows].to(lse.dtype)
        log_p = torch.log_softmax(wide, dim=-1)
        lse[rows] = wide[:, 0] - log_p[:, 0]
        negentropy[rows] = (log_p.exp() * log_p).sum(dim=-1)
    return Teacher(logits, lse, negentropy)


def head_kl(
    states: Float[Tensor, "R H"],
    head: CastWeight,
    teacher: Teacher,
    teacher_of_row: Int[Tensor, " R"],
    weight: Float[Tensor, " R"],
    want_best: bool = False,
) -> HeadOutput:
    """Head, softmax, KL and their gradients for every scored pair.

    Args:
        states: normed draft states, in the compute dtype.
        head: the draft's lm_head.
        teacher: distributions of the supervised slots.
        teacher_of_row: row of `teacher` for each state.
        weight: factor on each row's KL.
        want_best: also return the draft's best token.
    """
    loss, kl, best = _HeadKL.apply(states, head.matrix, head.gradients, teacher, teacher_of_row, weight, want_best)
    return HeadOutput(loss, kl, best if want_best else None)


class _HeadKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, matrix, gradients, teacher, teacher_of_row, weight, want_best):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[0] or gradients is not None
        kl = torch.empty(states.shape[0], dtype=wide_dtype(states.dtype), device=states.device)
        best = torch.empty(states.shape[0] if want_best else 0, dtype=torch.long, device=states.device)
        dstates = torch.empty_like(states) if wanted else None
        chunk_kl = _chunk_kl_cuda if fused(states) else _chunk_kl
        for rows in _chunks(states.shape[0], matrix.shape[0], states.device):
            logits = states[rows] @ matrix.t()
            if want_best:
                torch.argmax(logits, dim=-1, out=best[rows])
            kl[rows], dlogits = chunk_kl(logits, teacher, teacher_of_row[rows], weight[rows], wanted)
            if dstates is not None:
                assert dlogits is not None
                torch.mm(dlogits, matrix, out=dstates[rows])
                if gradients is not None:
                    gradients.add(dlogits, states[rows])
        ctx.save_for_backward(dstates)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(kl, best)
        return torch.dot(kl, weight), kl, best

    @staticmethod
    def backward(ctx, dloss, *_):  # type: ignore[no-untyped-def]
        (dstates,) = ctx.saved_tensors
        if ctx.gradients is not None:
            ctx.gradients.finish().mul_(dloss)
        if fused(dstates):  # several times faster than a product with a scalar on the device
            from eagle3_lightning.draft.kernels import scale_columns

            scale_columns(dstates, dloss.float().expand(dstates.shape[1]).contiguous(), dstates)
        else:
            dstates = dstates * dloss.to(dstates.dtype)
        return dstates, None, None, None, None, None, None


def _chunk_kl(
    logits: Tensor, teacher: Teacher, teacher_of_row: Tensor, weight: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """KL of a chunk of rows and, if wanted, the gradient of its logits."""
    lse = teacher.lse[teacher_of_row, None]
    p = teacher.logits[teacher_of_row].to(lse.dtype).sub_(lse).exp_()
    log_q = torch.log_softmax(logits, dim=-1, dtype=lse.dtype)
    kl = teacher.negentropy[teacher_of_row] - torch.linalg.vecdot(p, log_q)
    return kl, log_q.exp_().sub_(p).mul_(weight[:, None]).to(logits.dtype) if wanted else None


def _chunk_kl_cuda(
    logits: Tensor, teacher: Teacher, teacher_of_row: Tensor, weight: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The same in one kernel; the gradient takes the place of the logits."""
    from eagle3_lightning.draft.kl import kl_rows

    kl = kl_rows(logits, teacher.logits, teacher.lse, teacher.negentropy, teacher_of_row, weight, wanted)
    return kl, logits


def _chunks(num_rows: int, width: int, device: torch.device) -> list[slice]:
    limit = _CHUNK_ELEMENTS_CUDA if device.type == "cuda" else _CHUNK_ELEMENTS_CPU
    step = max(32, limit // width // 32 * 32)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
