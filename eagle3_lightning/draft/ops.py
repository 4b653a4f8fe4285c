"""The element-wise parts of a decoder layer, each with its backward written out.

On CUDA they are Triton kernels (`kernels.py`), one pass over memory each; elsewhere plain torch, computing in float32
inside for the half-precision types. Writing the backward out keeps what is saved small: a norm keeps its input, the MLP
its two pre-activations, nothing else.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lightning.draft.linear import CastWeight, fused, wide_dtype
from eagle3_lightning.draft.rope import rotate


def unweighted_norm(x: Float[Tensor, "... H"], eps: float) -> Float[Tensor, "... H"]:
    """RMSNorm without its weight, of rows that need no gradient; the weight is folded into the matrix behind it."""
    if fused(x):
        from eagle3_lightning.draft.kernels import norm_forward

        return norm_forward(x.reshape(-1, x.shape[-1]), None, None, eps)[1].view(x.shape)
    wide = x.to(wide_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Float[Tensor, "N H"], weight: Float[Tensor, " H"], eps: float) -> Float[Tensor, "N H"]:
    """RMSNorm in x's dtype, with statistics in float32 (Zhang and Sennrich 2019)."""
    return _Norm.apply(x, None, weight, eps)[1]


def add_rms_norm(
    x: Float[Tensor, "N H"], y: Float[Tensor, "N H"], weight: Float[Tensor, " H"], eps: float
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
    """The sum `x + y` and its RMSNorm."""
    return _Norm.apply(x, y, weight, eps)


def swiglu_linear(gate_up: Float[Tensor, "N 2I"], down: CastWeight) -> Float[Tensor, "N H"]:
    """`(silu(gate) * up) @ down^T`; the product is made again in the backward pass instead of kept."""
    return _SwigluLinear.apply(gate_up, down.matrix, down.gradients)


def add_rows(x: Float[Tensor, "N C"], added: "Added") -> Float[Tensor, "N C"]:
    """`x + table[shifted]`."""
    return _AddRows.apply(x, *added)


def take_rows(x: Float[Tensor, "M ..."], rows: Int[Tensor, " N"]) -> Float[Tensor, "N ..."]:
    """`x[rows]` for rows that are all different, which spares the backward pass from adding up."""
    return _TakeRows.apply(x, rows)


def rope_heads(
    x: Float[Tensor, "N C"],
    cos: Float[Tensor, "N d"],
    sin: Float[Tensor, "N d"],
    rotary_dim: int,
    heads: tuple[int, ...],
    added: "Added | None" = None,
) -> tuple[Tensor, ...]:
    """Split rows into queries, keys and values and turn queries and keys.

    Args:
        x: projected rows.
        cos: cosines of each row's position.
        sin: signed sines, see `Rope`.
        rotary_dim: channels of a head that are turned.
        heads: query, key and value heads; values are not turned.
        added: rows of a table to add first.
    """
    table, shifted, unshifted = (None, None, None) if added is None else added
    return _RopeHeads.apply(x, cos, sin, rotary_dim, heads, table, shifted, unshifted)


class Added(NamedTuple):
    """Rows of a table that are added to other rows.

    Attributes:
        table: [T, C].
        shifted: row of the table for each row; None is row for row.
        unshifted: for each row of the table, the row that reads it, or N if none does: the inverse turns the backward's
            scatter into a gather, without atomics and with the same sum every time.
    """

    table: Tensor
    shifted: Tensor | None
    unshifted: Tensor | None


class _Norm(torch.autograd.Function):
    """(x, y) -> (x + y, norm(x + y)); without y, (x, norm(x))."""

    @staticmethod
    def forward(ctx, x, y, weight, eps):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.added = y is not None
        if fused(x):
            from eagle3_lightning.draft.kernels import norm_forward

            total, normed, inverse = norm_forward(x, y, weight, eps)
            ctx.save_for_backward(total, inverse, weight)
            return total.view_as(total) if y is None else total, normed
        total = x if y is None else x + y
        wide = total.to(wide_dtype(total.dtype))
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(total, inverse, weight)
        normed = (wide * inverse * weight).to(total.dtype)
        if y is None:
            total = total.view_as(total)
        return total, normed

    @staticmethod
    def backward(ctx, dtotal, dnormed):  # type: ignore[no-untyped-def]
        total, inverse, weight = ctx.saved_tensors
        dx, dweight = dtotal, None
        if dnormed is not None and fused(dnormed):
            from eagle3_lightning.draft.kernels import norm_backward

            dx, dweight = norm_backward(total, inverse, weight, dtotal, dnormed.contiguous())
        elif dnormed is not None:
            wide = total.to(inverse.dtype) * inverse
            dwide = dnormed.to(inverse.dtype)
            dweight = (dwide * wide).sum(dim=0) if ctx.needs_input_grad[2] else None
            dwide = dwide * weight
            dx = inverse * (dwide - wide * (dwide * wide).mean(dim=-1, keepdim=True))
            dx = (dx if dtotal is None else dx + dtotal).to(total.dtype)
        return dx, dx if ctx.added else None, dweight, None


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, matrix, gradients):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up, matrix)
        ctx.gradients = gradients
        if fused(gate_up):
            from eagle3_lightning.draft.kernels import swiglu_forward

            return swiglu_forward(gate_up) @ matrix.t()
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up) @ matrix.t()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        gate_up, matrix = ctx.saved_tensors
        dproduct = dy @ matrix
        if fused(gate_up):
            from eagle3_lightning.draft.kernels import swiglu_backward

            product, dgate_up = swiglu_backward(gate_up, dproduct)
            if ctx.gradients is not None:
                ctx.gradients.add(dy, product)
            return dgate_up, None, None
        gate, up = gate_up.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        if ctx.gradients is not None:
            ctx.gradients.add(dy, silu * up)
        dgate_up = torch.empty_like(gate_up)
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(dproduct, silu, out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(dproduct.mul_(up), gate))
        return dgate_up, None, None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, shifted, unshifted):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(unshifted)
        return x + (table if shifted is None else table[shifted])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (unshifted,) = ctx.saved_tensors
        if unshifted is None:
            return dy, dy, None, None
        return dy, torch.cat([dy, dy.new_zeros(1, dy.shape[1])])[unshifted], None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


class _RopeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, rotary_dim, heads, table, shifted, unshifted):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin, unshifted)
        ctx.rotary_dim, ctx.added = rotary_dim, table is not None
        turned = heads[0] + heads[1]
        if fused(x):
            from eagle3_lightning.draft.kernels import rope_forward

            split = rope_forward(x, table, shifted, cos, sin, rotary_dim, turned)
            return split.split(heads, dim=1)
        if table is not None:
            x = x + (table if shifted is None else table[shifted])
        split = x.view(x.shape[0], sum(heads), -1)
        rotated = rotate(split[:, :turned], cos, sin, rotary_dim).to(x.dtype)
        return *(part.contiguous() for part in rotated.split(heads[:2], dim=1)), split[:, turned:].contiguous()

    @staticmethod
    def backward(ctx, dq, dk, dv):  # type: ignore[no-untyped-def]
        cos, sin, unshifted = ctx.saved_tensors
        if fused(dq):
            from eagle3_lightning.draft.kernels import rope_backward

            padded = rope_backward(dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin, ctx.rotary_dim)
        else:
            parts = [rotate(d, cos, -sin, ctx.rotary_dim).to(d.dtype).flatten(1) for d in (dq, dk)]
            dx = torch.cat([*parts, dv.flatten(1)], dim=1)
            padded = torch.cat([dx, dx.new_zeros(1, dx.shape[1])]) if unshifted is not None else dx
        dx = padded[: dq.shape[0]]
        dtable = None
        if ctx.added:
            dtable = dx if unshifted is None else padded.index_select(0, unshifted)
        return dx, None, None, None, None, dtable, None, None
