"""Triton kernels of the training step's element-wise parts, for CUDA; each reads and writes its data once.

Shape suffixes: `N` rows, `H` width of a row, `W` width of the MLP, `Q` and `K` query and key
heads, `d` size of a head. Arithmetic is float32. Sizes that vary from batch to batch (rows) are plain run-time
arguments that no kernel is specialized on, so that nothing is compiled again when they change.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor


def norm_forward(x: Tensor, y: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + y (x itself without y), its RMSNorm, and one over its RMS; a missing weight is all ones."""
    num_rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed, inverse = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if num_rows:
        _norm_forward[(num_rows,)](
            x,
            x if y is None else y,
            x if weight is None else weight,
            total,
            normed,
            inverse,
            width,
            eps,
            HAS_Y=y is not None,
            HAS_WEIGHT=weight is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return total, normed, inverse


def norm_backward(
    total: Tensor, inverse: Tensor, weight: Tensor, dtotal: Tensor | None, dnormed: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the normed rows' input and of the weight."""
    num_rows, width = total.shape
    programs = min(num_rows, _num_programs(total))
    dx = torch.empty_like(total)
    partial = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        total,
        inverse,
        weight,
        total if dtotal is None else dtotal,
        dnormed,
        dx,
        partial,
        num_rows,
        width,
        HAS_DTOTAL=dtotal is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return dx, partial.sum(dim=0)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    product = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_forward[(num_rows, triton.cdiv(width, 1024))](gate_up, product, width, BLOCK=1024)
    return product


def swiglu_backward(gate_up: Tensor, dproduct: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up again, in the place of `dproduct`, and the gradient of gate and up."""
    num_rows, width = dproduct.shape
    dgate_up = torch.empty_like(gate_up)
    _swiglu_backward[(num_rows, triton.cdiv(width, 1024))](gate_up, dproduct, dgate_up, width, BLOCK=1024)
    return dproduct, dgate_up


def rope_forward(
    x: Tensor, table: Tensor | None, shifted: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, turned: int
) -> Tensor:
    """(x + table[shifted]) by heads [N, heads, d], the first `turned` of them rotated; no index means row for row."""
    num_rows, head_dim = x.shape[0], cos.shape[1]
    heads = x.shape[1] // head_dim
    out = torch.empty(num_rows, heads, head_dim, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(head_dim)
    _rope_forward[(num_rows, triton.cdiv(heads, 8))](
        x,
        x if table is None else table,
        x if shifted is None else shifted,
        cos,
        sin,
        out,
        heads,
        turned,
        head_dim,
        rotary_dim // 2,
        HAS_TABLE=table is not None,
        HAS_INDEX=shifted is not None,
        HEADS=8,
        BLOCK=block,
    )
    return out


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Gradient of the rows before `rope_forward`, [N + 1, heads * d] with a last row of zeros."""
    num_rows, q_heads, head_dim = dq.shape
    kv_heads = dk.shape[1]
    heads = q_heads + 2 * kv_heads
    dx = torch.empty(num_rows + 1, heads * head_dim, dtype=dq.dtype, device=dq.device)
    dx[num_rows].zero_()
    block = triton.next_power_of_2(head_dim)
    if num_rows:
        _rope_backward[(num_rows, triton.cdiv(heads, 8))](
            dq, dk, dv, cos, sin, dx, q_heads, kv_heads, head_dim, rotary_dim // 2, HEADS=8, BLOCK=block
        )
    return dx


def scale_columns(x: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """out = x * factor column by column, in out's dtype; both may be slices of wider matrices, and the same one."""
    rows, width = x.shape
    _scale_columns[(rows, triton.cdiv(width, 2048))](
        x,
        x if factor is None else factor,
        out,
        width,
        x.stride(0),
        out.stride(0),
        HAS_FACTOR=factor is not None,
        BLOCK=2048,
    )


def folded_norm_backward(weight: Tensor, gradient: Tensor, norm: Tensor) -> Tensor:
    """Gradient of a norm folded into the columns of `weight`; makes the weight's own gradient final, in place."""
    rows, width = weight.shape
    parts = min(rows, 64)
    partial = torch.empty(parts, width, dtype=torch.float32, device=weight.device)
    _folded_norm_backward[(parts, triton.cdiv(width, 256))](
        weight, gradient, norm, partial, rows, width, weight.stride(0), gradient.stride(0), BLOCK=256, num_warps=1
    )
    return partial.sum(dim=0)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def _num_programs(x: Tensor) -> int:
    return 8 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


@triton.jit
def _norm_forward(
    x, y, weight, total, normed, inverse, H, eps, HAS_Y: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    value = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        value += tl.load(y + row * H + h, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * H + h, stored, mask=inside)
        value = stored.to(tl.float32)  # the backward pass sees the rounded sum
    r = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    tl.store(inverse + row, r)
    value *= r
    if HAS_WEIGHT:
        value *= tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * H + h, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def _norm_backward(
    total, inverse, weight, dtotal, dnormed, dx, partial, N, H, HAS_DTOTAL: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    inside = h < H
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(program, N, tl.num_programs(0)):
        row = program.to(tl.int64) + (i - program)
        r = tl.load(inverse + row)
        hat = tl.load(total + row * H + h, mask=inside, other=0.0).to(tl.float32) * r
        dy = tl.load(dnormed + row * H + h, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * hat
        dy *= w
        grad = r * (dy - hat * (tl.sum(dy * hat, axis=0) / H))
        if HAS_DTOTAL:
            grad += tl.load(dtotal + row * H + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * H + h, grad.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program.to(tl.int64) * H + h, dweight, mask=inside)


@triton.jit
def _swiglu_forward(gate_up, product, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < W
    gate = tl.load(gate_up + row * 2 * W + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * W + W + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + row * W + i, (gate * tl.sigmoid(gate) * up).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, dproduct, dgate_up, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < W
    gate = tl.load(gate_up + row * 2 * W + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * W + W + i, mask=inside, other=0.0).to(tl.float32)
    dp = tl.load(dproduct + row * W + i, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dtype = dgate_up.dtype.element_ty
    tl.store(dproduct + row * W + i, (silu * up).to(dtype), mask=inside)
    tl.store(dgate_up + row * 2 * W + i, (dp * up * (sigmoid + silu * (1 - sigmoid))).to(dtype), mask=inside)
    tl.store(dgate_up + row * 2 * W + W + i, (dp * silu).to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["shifted"])
def _rope_forward(
    x,
    table,
    shifted,
    cos,
    sin,
    out,
    heads,
    turned,
    d,
    half,
    HAS_TABLE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(c < half, c + half, tl.where(c < 2 * half, c - half, c))
    inside = (head < heads) & (c < d)
    value = tl.load(x + row * heads * d + head * d + c, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + row * heads * d + head * d + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_TABLE:
        source = row
        if HAS_INDEX:
            source = tl.load(shifted + row).to(tl.int64)
        value += tl.load(table + source * heads * d + head * d + c, mask=inside, other=0.0).to(tl.float32)
        other += tl.load(table + source * heads * d + head * d + partner, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * d + c, mask=c < d, other=0.0)
    sine = tl.load(sin + row * d + c, mask=c < d, other=0.0)
    value = tl.where(head < turned, value * cosine + other * sine, value)
    tl.store(out + row * heads * d + head * d + c, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_backward(dq, dk, dv, cos, sin, dx, Q, K, d, half, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(c < half, c + half, tl.where(c < 2 * half, c - half, c))
    heads = Q + 2 * K
    inside = (head < heads) & (c < d)
    is_q, is_k, is_v = inside & (head < Q), inside & (head >= Q) & (head < Q + K), inside & (head >= Q + K)
    q_at, k_at, v_at = dq + (row * Q + head) * d, dk + (row * K + head - Q) * d, dv + (row * K + head - Q - K) * d
    value = tl.load(q_at + c, mask=is_q, other=0.0).to(tl.float32) + tl.load(k_at + c, mask=is_k, other=0.0).to(
        tl.float32
    )
    other = tl.load(q_at + partner, mask=is_q, other=0.0).to(tl.float32) + tl.load(
        k_at + partner, mask=is_k, other=0.0
    ).to(tl.float32)
    cosine = tl.load(cos + row * d + c, mask=c < d, other=0.0)
    sine = tl.load(sin + row * d + c, mask=c < d, other=0.0)
    value = value * cosine - other * sine + tl.load(v_at + c, mask=is_v, other=0.0).to(tl.float32)
    tl.store(dx + row * heads * d + head * d + c, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _scale_columns(x, factor, out, H, x_stride, out_stride, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    value = tl.load(x + row * x_stride + h, mask=inside, other=0.0)
    if HAS_FACTOR:
        value *= tl.load(factor + h, mask=inside, other=0.0)
    tl.store(out + row * out_stride + h, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _folded_norm_backward(weight, gradient, norm, partial, N, H, w_stride, g_stride, BLOCK: tl.constexpr):
    part, h = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    factor = tl.load(norm + h, mask=inside, other=0.0)
    dnorm = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(part, N, tl.num_programs(0)):
        row = part.to(tl.int64) + (i - part)
        g = tl.load(gradient + row * g_stride + h, mask=inside, other=0.0)
        dnorm += g * tl.load(weight + row * w_stride + h, mask=inside, other=0.0)
        tl.store(gradient + row * g_stride + h, g * factor, mask=inside)
    tl.store(partial + part.to(tl.int64) * H + h, dnorm, mask=inside)
