"""Kernels of the same-slot keys of test-time training: one key and value for each row, step and key head.

They are merged into causal attention (`flash.py`) by their log-sum-exp, element by element; see `attention.py`.

Shape suffixes: `Q` and `K` query and key heads, `G` query heads by key head, `d` size of a head, `N` rows.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def row_terms(dout: Tensor, out: Tensor) -> Tensor:
    """Sum of dout * out over each head, [Q, N] in float32."""
    num_rows, q_heads, head_dim = out.shape
    terms = torch.empty(q_heads, num_rows, dtype=torch.float32, device=out.device)
    if num_rows:
        _row_terms[(num_rows,)](
            dout,
            out,
            terms,
            num_rows,
            q_heads,
            head_dim,
            HEADS=triton.next_power_of_2(q_heads),
            BD=triton.next_power_of_2(head_dim),
        )
    return terms


def merge_forward(
    scale: float, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add same-slot keys to an attention output and its log-sum-exp, in place."""
    sizes, constants = _sizes(q, keys, scale), _constants(q, keys)
    padded = constants["MAX_KEYS"]
    if out.shape[0]:
        _merge_forward[(out.shape[0], keys[0].shape[1])](
            q,
            out,
            lse,
            _pad(keys, padded),
            _pad(values, padded),
            *sizes,
            **constants,
        )
    return out, lse


def merge_backward(
    scale: float,
    q: Tensor,
    lse: Tensor,
    row_term: Tensor,
    dout: Tensor,
    dq: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the same-slot terms; their part of the queries' is added to `dq` in place."""
    sizes, constants = _sizes(q, keys, scale), _constants(q, keys)
    padded = constants["MAX_KEYS"]
    dkeys = [torch.empty(k.shape, dtype=k.dtype, device=k.device) for k in keys]
    dvalues = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in values]
    _merge_backward[(dout.shape[0], keys[0].shape[1])](
        q,
        lse,
        row_term,
        dout,
        dq,
        _pad(keys, padded),
        _pad(values, padded),
        _pad(dkeys, padded),
        _pad(dvalues, padded),
        *sizes,
        **constants,
    )
    return dq, dkeys, dvalues


def _sizes(q: Tensor, keys: Sequence[Tensor], scale: float) -> tuple[object, ...]:
    """What both kernels are told about the batch."""
    num_rows, q_heads, head_dim = q.shape
    group = q_heads // keys[0].shape[1]
    return len(keys), num_rows, scale, q.stride(0), keys[0].stride(0), q_heads, group, head_dim


def _constants(q: Tensor, keys: Sequence[Tensor]) -> dict[str, int]:
    group = triton.next_power_of_2(q.shape[1] // keys[0].shape[1])
    block = triton.next_power_of_2(q.shape[2])
    # Few warps, so that a tile's many small sums seldom cross them.
    warps = max(1, group * block // 1024)
    return {"MAX_KEYS": triton.next_power_of_2(len(keys)), "GROUP": group, "BLOCK": block, "num_warps": warps}


def _pad(tensors: Sequence[Tensor], length: int) -> tuple[Tensor, ...]:
    return (*tensors, *[tensors[0]] * (length - len(tensors)))


@triton.jit(do_not_specialize=["N"])
def _row_terms(dout, out, terms, N, Q, d, HEADS: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head, c = tl.arange(0, HEADS), tl.arange(0, BD)
    inside = (head < Q)[:, None] & (c < d)[None, :]
    offset = (row * Q + head[:, None]) * d + c[None, :]
    product = tl.load(dout + offset, mask=inside, other=0.0).to(tl.float32) * tl.load(
        out + offset, mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(terms + head.to(tl.int64) * N + row, tl.sum(product, axis=1), mask=head < Q)


@triton.jit(do_not_specialize=["num_keys", "N"])
def _merge_forward(
    q,
    out,
    lse,
    keys,
    values,
    num_keys,
    N,
    scale,
    q_stride,
    k_stride,
    Q,
    G,
    d,
    MAX_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    head = kv * G + g
    inside = (g < G)[:, None] & (c < d)[None, :]
    query = tl.load(q + row * q_stride + head[:, None] * d + c[None, :], mask=inside, other=0.0).to(tl.float32)
    out_at = out + (row * Q + head[:, None]) * d + c[None, :]
    lse_at = lse + head.to(tl.int64) * N + row
    merged = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(lse_at, mask=g < G, other=0.0)
    for j in tl.static_range(MAX_KEYS):
        if j < num_keys:
            key = tl.load(keys[j] + row * k_stride + kv * d + c, mask=c < d, other=0.0).to(tl.float32)
            value = tl.load(values[j] + row * k_stride + kv * d + c, mask=c < d, other=0.0).to(tl.float32)
            score = tl.sum(query * key[None, :], axis=1) * scale
            top = tl.maximum(total, score)
            more = top + tl.log(tl.exp(total - top) + tl.exp(score - top))
            merged = merged * tl.exp(total - more)[:, None] + tl.exp(score - more)[:, None] * value[None, :]
            total = more
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, total, mask=g < G)


@triton.jit(do_not_specialize=["num_keys", "N"])
def _merge_backward(
    q,
    lse,
    row_term,
    dout,
    dq,
    keys,
    values,
    dkeys,
    dvalues,
    num_keys,
    N,
    scale,
    q_stride,
    k_stride,
    Q,
    G,
    d,
    MAX_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    head = kv * G + g
    inside = (g < G)[:, None] & (c < d)[None, :]
    offset = (row * Q + head[:, None]) * d + c[None, :]
    query = tl.load(q + row * q_stride + head[:, None] * d + c[None, :], mask=inside, other=0.0).to(tl.float32)
    dmerged = tl.load(dout + offset, mask=inside, other=0.0).to(tl.float32)
    at = head.to(tl.int64) * N + row
    term = tl.load(row_term + at, mask=g < G, other=0.0)
    total = tl.load(lse + at, mask=g < G, other=float("inf"))  # probability 0 outside the group
    dquery = tl.load(dq + offset, mask=inside, other=0.0).to(tl.float32)
    kv_offset = (row * (Q // G) + kv) * d + c
    for j in tl.static_range(MAX_KEYS):
        if j < num_keys:
            key = tl.load(keys[j] + row * k_stride + kv * d + c, mask=c < d, other=0.0).to(tl.float32)
            value = tl.load(values[j] + row * k_stride + kv * d + c, mask=c < d, other=0.0).to(tl.float32)
            p = tl.exp(tl.sum(query * key[None, :], axis=1) * scale - total)
            dscore = p * (tl.sum(dmerged * value[None, :], axis=1) - term) * scale
            dquery += dscore[:, None] * key[None, :]
            dkey = tl.sum(dscore[:, None] * query, axis=0)
            dvalue = tl.sum(p[:, None] * dmerged, axis=0)
            tl.store(dkeys[j] + kv_offset, dkey.to(dout.dtype.element_ty), mask=c < d)
            tl.store(dvalues[j] + kv_offset, dvalue.to(dout.dtype.element_ty), mask=c < d)
    tl.store(dq + offset, dquery.to(dq.dtype.element_ty), mask=inside)
