"""Linear layers whose weight is used several times in one unroll.

The weight is cast once (with others that read the same input, as one matrix), and the gradient of every use is added up
in one float32 buffer that becomes the parameter's gradient. Autograd would instead make a gradient in the compute dtype
for each use, add them in that dtype, and cast the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_SOON = 1 << 62  # a sequence number above that of any node


class GradientSum:
    """Sums dy^T x over the uses of one cast weight, in float32."""

    def __init__(self, buffer: Float[Tensor, "out in"]) -> None:
        """Start an empty sum in `buffer`, uninitialized float32 memory (or float64 for float64 weights)."""
        self.buffer = buffer
        self._empty = True

    def add(self, dy: Float[Tensor, "N out"], x: Float[Tensor, "N in"]) -> None:
        """Add one use: inputs `x` and the gradient `dy` of the outputs."""
        beta = 0.0 if self._empty else 1.0
        self._empty = False
        if dy.dtype == self.buffer.dtype:
            torch.addmm(self.buffer, dy.t(), x, beta=beta, out=self.buffer)
        elif dy.is_cuda:  # the product is accumulated and stored in float32, never rounded to the compute dtype
            torch.addmm(self.buffer, dy.t(), x, out_dtype=self.buffer.dtype, beta=beta, out=self.buffer)
        elif beta:
            self.buffer.add_(dy.t() @ x)
        else:
            self.buffer.copy_(dy.t() @ x)

    def finish(self) -> Tensor:
        """The sum, zeros if there was no use."""
        return self.buffer.zero_() if self._empty else self.buffer


@dataclass(frozen=True)
class CastWeight:
    """A weight in the compute dtype, connected to its parameters, and where the gradients of its uses go.

    Attributes:
        matrix: [out, in].
        gradients: None if the weight is frozen.
    """

    matrix: Float[Tensor, "out in"]
    gradients: GradientSum | None


def cast_weight(weights: Sequence[Tensor], dtype: torch.dtype) -> CastWeight:
    """One matrix from weights that read the same input, stacked along their outputs."""
    return cast_columns(weights, dtype, (weights[0].shape[1],))[0]


def cast_columns(
    weights: Sequence[Float[Tensor, "out in"]],
    dtype: torch.dtype,
    widths: Sequence[int],
    scale: Float[Tensor, " width"] | None = None,
    norm: Float[Tensor, " width"] | None = None,
) -> list[CastWeight]:
    """Matrices that each read some of the input columns, from weights stacked along their outputs.

    Args:
        weights: parameters that share their input.
        dtype: the compute dtype.
        widths: columns of each matrix; they add up to the input width.
        scale: a constant factor on each column of the *first* matrix.
        norm: a trained factor on each column of the first matrix: the weight of a norm whose input needs no gradient,
            so that neither the normed input times its weight nor a gradient for it is ever formed.
    """
    if not any(w.requires_grad for w in weights):
        stacked = _stack(weights, dtype, None if scale is None and norm is None else _product(scale, norm), widths[0])
        return [CastWeight(m, None) for m in stacked.split(list(widths), dim=1)]
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    buffer = torch.empty(rows, columns, dtype=weights[0].dtype, device=weights[0].device)
    sums = [GradientSum(part) for part in buffer.split(list(widths), dim=1)]
    matrices = _Cast.apply(buffer, sums, dtype, tuple(widths), scale, norm, *weights)
    # Autograd runs the newest ready node first, and this one is older than all uses: without a higher number all
    # weights would get their gradients at the very end, and DDP could not reduce the first while it computes the last.
    if matrices[0].grad_fn is not None:
        matrices[0].grad_fn._set_sequence_nr(_SOON)
    return [CastWeight(m, s) for m, s in zip(matrices, sums, strict=True)]


def linear(x: Float[Tensor, "N in"], weight: CastWeight) -> Float[Tensor, "N out"]:
    """`x @ weight^T`, its weight gradient added to the weight's sum."""
    return _Linear.apply(x, weight.matrix, weight.gradients)


def _product(scale: Tensor | None, norm: Tensor | None) -> Tensor:
    if scale is None or norm is None:
        return norm if scale is None else scale  # type: ignore[return-value]
    return scale * norm


def _stack(weights: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None, width: int) -> Tensor:
    """The weights under each other in `dtype`, their first `width` columns multiplied by `factor`."""
    if factor is None and len(weights) == 1:
        return weights[0].to(dtype)
    rows = [w.shape[0] for w in weights]
    stacked = torch.empty(sum(rows), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for part, w in zip(stacked.split(rows), weights, strict=True):
        if factor is None:
            part.copy_(w)
        else:
            _scale_columns(w[:, :width], factor, part[:, :width])
            part[:, width:].copy_(w[:, width:])
    return stacked


def _scale_columns(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * factor, column by column."""
    if fused(x):
        from eagle3_lightning.draft.kernels import scale_columns

        scale_columns(x, factor, out)
    else:
        torch.mul(x, factor, out=out)


def _folded_norm_backward(weight: Tensor, gradient: Tensor, norm: Tensor) -> Tensor:
    """Gradient of a norm folded into the columns of `weight`; makes the weight's own gradient final, in place."""
    if fused(weight):
        from eagle3_lightning.draft.kernels import folded_norm_backward

        return folded_norm_backward(weight, gradient, norm)
    dnorm = (weight * gradient).sum(dim=0)
    gradient.mul_(norm)
    return dnorm


def fused(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor."""
    return x.is_cuda and x.dtype != torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of a dtype are kept in: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Cast(torch.autograd.Function):
    """Parameters to matrices; backward, when every use is done, hands the sums to the parameters."""

    @staticmethod
    def forward(ctx, buffer, sums, dtype, widths, scale, norm, *weights):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)  # the uses return no gradient: they write to the sums
        ctx.buffer, ctx.sums, ctx.widths, ctx.scale = buffer, sums, widths, scale
        ctx.rows = [w.shape[0] for w in weights]
        ctx.save_for_backward(norm, *weights)
        factor = None if scale is None and norm is None else _product(scale, norm)
        stacked = _stack(weights, dtype, factor, widths[0])
        if stacked is weights[0]:
            stacked = stacked.view_as(stacked)
        return tuple(stacked.split(list(widths), dim=1)) if len(widths) > 1 else (stacked,)

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]
        norm, *weights = ctx.saved_tensors
        first, *_rest = [s.finish() for s in ctx.sums]
        dnorm = None
        if ctx.scale is not None:
            _scale_columns(first, ctx.scale, first)
        if norm is not None:
            dnorm = torch.zeros_like(norm)
            for w, g in zip(weights, first.split(ctx.rows), strict=True):
                dnorm += _folded_norm_backward(w[:, : ctx.widths[0]], g, norm)
        return None, None, None, None, None, dnorm, *ctx.buffer.split(ctx.rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix, gradients):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x if gradients is not None else None, matrix)
        ctx.gradients = gradients
        return x @ matrix.t()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, matrix = ctx.saved_tensors
        dx = dy @ matrix if ctx.needs_input_grad[0] else None
        if ctx.gradients is not None:
            ctx.gradients.add(dy, x)
        return dx, None, None
