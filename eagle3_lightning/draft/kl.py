"""Triton kernels over the draft vocabulary, for CUDA: the teacher's statistics, and KL with its gradient in one pass.

Shape suffix: `D` draft vocabulary. Arithmetic is float32; nothing is specialized on the number of rows.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

_VOCAB_BLOCK = 2048
LOG2E = tl.constexpr(1.4426950408889634)


def teacher_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and sum of p log p of each row."""
    num_rows, width = logits.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    negentropy = torch.empty_like(lse)
    if num_rows:
        _teacher_statistics[(num_rows,)](logits, lse, negentropy, width, BLOCK=_VOCAB_BLOCK, num_warps=16)
    return lse, negentropy


def kl_rows(
    logits: Tensor,
    teacher: Tensor,
    lse: Tensor,
    negentropy: Tensor,
    teacher_of_row: Tensor,
    weight: Tensor,
    wanted: bool,
) -> Tensor:
    """KL of each row; the logits become weight * (q - p) if wanted."""
    kl = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _kl_rows[(logits.shape[0],)](
        logits,
        teacher,
        lse,
        negentropy,
        teacher_of_row,
        weight,
        kl,
        logits.shape[1],
        WANTED=wanted,
        BLOCK=_VOCAB_BLOCK,
        num_warps=16,
    )
    return kl


@triton.jit
def _logits_tile(at, start, D, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    c = start + tl.arange(0, BLOCK)
    if MASKED:
        return tl.load(at + c, mask=c < D, other=float("-inf")).to(tl.float32)
    return tl.load(at + c).to(tl.float32)


@triton.jit
def _moments_tile(mass, moment, at, start, highest, D, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    z = _logits_tile(at, start, D, MASKED, BLOCK) - highest
    p = tl.exp2(z * LOG2E)
    if MASKED:
        z = tl.where(start + tl.arange(0, BLOCK) < D, z, 0.0)
    return mass + p, moment + p * z


@triton.jit
def _teacher_statistics(logits, lse, negentropy, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at, whole = logits + row * D, D // BLOCK * BLOCK
    top = _logits_tile(at, whole, D, True, BLOCK)
    for start in range(0, whole, BLOCK):
        top = tl.maximum(top, _logits_tile(at, start, D, False, BLOCK))
    highest = tl.max(top, axis=0)
    mass, moment = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    mass, moment = _moments_tile(mass, moment, at, whole, highest, D, True, BLOCK)
    for start in range(0, whole, BLOCK):
        mass, moment = _moments_tile(mass, moment, at, start, highest, D, False, BLOCK)
    total = tl.sum(mass, axis=0)
    tl.store(lse + row, highest + tl.log(total))
    tl.store(negentropy + row, tl.sum(moment, axis=0) / total - tl.log(total))


@triton.jit
def _kl_tile(mass, cross, at, teacher_at, start, highest, teacher_lse, D, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    z = _logits_tile(at, start, D, MASKED, BLOCK) - highest
    p = tl.exp2(_logits_tile(teacher_at, start, D, MASKED, BLOCK) * LOG2E - teacher_lse * LOG2E)
    mass += tl.exp2(z * LOG2E)
    if MASKED:
        z = tl.where(start + tl.arange(0, BLOCK) < D, z, 0.0)
    return mass, cross + p * z


@triton.jit
def _gradient_tile(at, teacher_at, start, draft_lse, teacher_lse, factor, D, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    q = tl.exp2(_logits_tile(at, start, D, MASKED, BLOCK) * LOG2E - draft_lse * LOG2E)
    p = tl.exp2(_logits_tile(teacher_at, start, D, MASKED, BLOCK) * LOG2E - teacher_lse * LOG2E)
    c = start + tl.arange(0, BLOCK)
    gradient = (factor * (q - p)).to(at.dtype.element_ty)
    if MASKED:
        tl.store(at + c, gradient, mask=c < D)
    else:
        tl.store(at + c, gradient)


@triton.jit(do_not_specialize_on_alignment=["teacher_of_row", "weight"])
def _kl_rows(
    logits, teacher, lse, negentropy, teacher_of_row, weight, kl, D, WANTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(teacher_of_row + row).to(tl.int64)
    teacher_lse = tl.load(lse + source)
    at, teacher_at = logits + row * D, teacher + source * D
    whole = D // BLOCK * BLOCK
    top = _logits_tile(
        at, whole, D, True, BLOCK
    )  # the maximum first, alone: a pass costs less than an exponential more
    for start in range(0, whole, BLOCK):
        top = tl.maximum(top, _logits_tile(at, start, D, False, BLOCK))
    highest = tl.max(top, axis=0)
    mass, cross = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    mass, cross = _kl_tile(mass, cross, at, teacher_at, whole, highest, teacher_lse, D, True, BLOCK)
    for start in range(0, whole, BLOCK):
        mass, cross = _kl_tile(mass, cross, at, teacher_at, start, highest, teacher_lse, D, False, BLOCK)
    draft_lse = tl.log(tl.sum(mass, axis=0))  # less the maximum, as `cross` is
    tl.store(kl + row, tl.load(negentropy + source) - tl.sum(cross, axis=0) + draft_lse)
    if WANTED:
        factor = tl.load(weight + row)
        _gradient_tile(at, teacher_at, whole, draft_lse + highest, teacher_lse, factor, D, True, BLOCK)
        for start in range(0, whole, BLOCK):
            _gradient_tile(at, teacher_at, start, draft_lse + highest, teacher_lse, factor, D, False, BLOCK)
