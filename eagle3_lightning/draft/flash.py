"""Attention of test-time training as Triton kernels.

Causal attention over packed documents: a suffix of each document's slots attends to all of them.

After FlashAttention 2 (Dao 2023), with three things that the draft needs and torch's own build does not give: queries
that are fewer than keys without padding, key heads shared by query heads without expanding their gradients, and a
backward pass that takes the log-sum-exp and row term of a softmax over *more* than these keys. No size is compiled in
but the head's.

Shape suffixes: `Q` and `K` query and key heads, `G` query heads by key head, `d` size of a head, `N` rows.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_lightning.draft.plan import Spans

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)  # a hidden score; finite, so that a block that hides all of a row leaves no NaN


class Tiles(NamedTuple):
    """Rows and keys of a program's tile, and how it is pipelined."""

    rows: int
    keys: int
    stages: int
    warps: int


def flash_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Output [N, Q, d] and log-sum-exp [Q, N]; `window` 0 is all keys."""
    num_rows, q_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q_heads, num_rows, dtype=torch.float32, device=q.device)
    tiles = _tiles_forward(q)
    if num_rows:
        _forward[_grid(q_heads, spans.longest_q, tiles.rows, spans)](
            q,
            k,
            v,
            out,
            lse,
            spans.starts_q,
            spans.starts_k,
            num_rows,
            scale,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            window,
            q_heads,
            q_heads // k.shape[1],
            head_dim,
            BM=tiles.rows,
            BN=tiles.keys,
            BD=triton.next_power_of_2(head_dim),
            HAS_WINDOW=window > 0,
            num_stages=tiles.stages,
            num_warps=tiles.warps,
        )
    return out, lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    row_term: Tensor,
    spans: Spans,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given each row's log-sum-exp and its sum of dout * out, both [Q, N]."""
    num_rows, q_heads, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    shared = (
        spans.starts_q,
        spans.starts_k,
        num_rows,
        scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        window,
        q_heads,
        q_heads // k.shape[1],
        head_dim,
    )
    fixed = {"BD": triton.next_power_of_2(head_dim), "HAS_WINDOW": window > 0}
    tiles = _tiles_keys(q)
    _backward_keys[_grid(k.shape[1], spans.longest_k, tiles.keys, spans)](
        q,
        k,
        v,
        dout,
        lse,
        row_term,
        dk,
        dv,
        *shared,
        BM=tiles.rows,
        BN=tiles.keys,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
        **fixed,
    )
    tiles = _tiles_queries(q)
    if num_rows:
        _backward_queries[_grid(q_heads, spans.longest_q, tiles.rows, spans)](
            q,
            k,
            v,
            dout,
            lse,
            row_term,
            dq,
            *shared,
            BM=tiles.rows,
            BN=tiles.keys,
            num_stages=tiles.stages,
            num_warps=tiles.warps,
            **fixed,
        )
    return dq, dk, dv


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
    num_rows, q_heads, head_dim = out.shape
    kv_heads = keys[0].shape[1]
    group, block = triton.next_power_of_2(q_heads // kv_heads), triton.next_power_of_2(head_dim)
    padded = triton.next_power_of_2(len(keys))
    if num_rows:
        _merge_forward[(num_rows, kv_heads)](
            q,
            out,
            lse,
            _pad(keys, padded),
            _pad(values, padded),
            len(keys),
            num_rows,
            scale,
            q.stride(0),
            keys[0].stride(0),
            q_heads,
            q_heads // kv_heads,
            head_dim,
            MAX_KEYS=padded,
            GROUP=group,
            BLOCK=block,
            num_warps=_merge_warps(group * block),
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
    num_rows, q_heads, head_dim = dout.shape
    kv_heads = keys[0].shape[1]
    dkeys = [torch.empty(k.shape, dtype=k.dtype, device=k.device) for k in keys]
    dvalues = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in values]
    group, block = triton.next_power_of_2(q_heads // kv_heads), triton.next_power_of_2(head_dim)
    padded = triton.next_power_of_2(len(keys))
    _merge_backward[(num_rows, kv_heads)](
        q,
        lse,
        row_term,
        dout,
        dq,
        _pad(keys, padded),
        _pad(values, padded),
        _pad(dkeys, padded),
        _pad(dvalues, padded),
        len(keys),
        num_rows,
        scale,
        q.stride(0),
        keys[0].stride(0),
        q_heads,
        q_heads // kv_heads,
        head_dim,
        MAX_KEYS=padded,
        GROUP=group,
        BLOCK=block,
        num_warps=_merge_warps(group * block),
    )
    return dq, dkeys, dvalues


def _grid(heads: int, longest: int, tile: int, spans: Spans) -> tuple[int, int, int]:
    """Heads, documents, tiles: tiles last, so that the heaviest of all heads and documents start first."""
    return heads, spans.starts_k.shape[0] - 1, max(1, triton.cdiv(longest, tile))


def _merge_warps(tile: int) -> int:
    """Few, so that a tile's many small sums seldom cross warps."""
    return max(1, tile // 1024)


def _pad(tensors: Sequence[Tensor], length: int) -> tuple[Tensor, ...]:
    return (*tensors, *[tensors[0]] * (length - len(tensors)))


def _tiles_forward(q: Tensor) -> Tiles:
    head_dim = q.shape[-1]
    if _small(q):
        return Tiles(64, 32, 2, 4)
    return Tiles(128, 128, 3, 4) if head_dim <= 64 else Tiles(128, 64, 3, 8)


def _tiles_keys(q: Tensor) -> Tiles:
    if _small(q):
        return Tiles(32, 32, 1, 4)
    return Tiles(64, 64, 3, 4) if q.shape[-1] <= 64 else Tiles(64, 128, 2, 8)


def _tiles_queries(q: Tensor) -> Tiles:
    if _small(q):
        return Tiles(32, 32, 1, 4)
    return Tiles(64, 64, 3, 4) if q.shape[-1] <= 64 else Tiles(128, 64, 3, 8)


def _small(q: Tensor) -> bool:
    """Whether the large tiles do not fit: wide heads, or a GPU with less shared memory than an A100."""
    properties = torch.cuda.get_device_properties(q.device)
    return q.shape[-1] > 128 or properties.shared_memory_per_block_optin < 160 * 1024  # type: ignore[attr-defined]


@triton.jit
def _document(starts_q, starts_k):
    """First row, rows, first slot and slots of the program's document."""
    doc = tl.program_id(1)
    q0, k0 = tl.load(starts_q + doc).to(tl.int64), tl.load(starts_k + doc).to(tl.int64)
    q_len = (tl.load(starts_q + doc + 1) - q0).to(tl.int32)
    return q0, q_len, k0, (tl.load(starts_k + doc + 1) - k0).to(tl.int32)


@triton.jit
def _seen(own, key, window, HAS_WINDOW: tl.constexpr):
    """Whether rows whose own key is `own` see keys `key`."""
    seen = key <= own
    if HAS_WINDOW:
        seen = seen & (key > own - window)
    return seen


@triton.jit
def _forward_tile(
    tile,
    peak,
    mass,
    acc,
    key_at,
    value_at,
    n,
    k_len,
    own,
    scale,
    k_stride,
    v_stride,
    window,
    d: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    i, c = tl.arange(0, BN), tl.arange(0, BD)
    key = n + i
    inside = (key < k_len)[:, None] & (c < d)[None, :]
    keys = tl.load(key_at + n * k_stride.to(tl.int64) + i[:, None] * k_stride + c[None, :], mask=inside, other=0.0)
    score = tl.dot(tile, tl.trans(keys)) * (scale * LOG2E)
    if MASKED:
        score = tl.where(_seen(own[:, None], key[None, :], window, HAS_WINDOW), score, LOW)
    higher = tl.maximum(peak, tl.max(score, axis=1))
    p = tl.exp2(score - higher[:, None])
    kept = tl.exp2(peak - higher)
    values = tl.load(value_at + n * v_stride.to(tl.int64) + i[:, None] * v_stride + c[None, :], mask=inside, other=0.0)
    acc = tl.dot(p.to(values.dtype), values, acc * kept[:, None])
    return higher, mass * kept + tl.sum(p, axis=1), acc


@triton.jit(do_not_specialize=["N", "window"])
def _forward(
    q,
    k,
    v,
    out,
    lse,
    starts_q,
    starts_k,
    N,
    scale,
    q_stride,
    k_stride,
    v_stride,
    window,
    Q: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    head, m = tl.program_id(0), (tl.num_programs(2) - 1 - tl.program_id(2)) * BM  # the rows that see most go first
    if m >= q_len:
        return
    row, c = m + tl.arange(0, BM), tl.arange(0, BD)
    inside = (row < q_len)[:, None] & (c < d)[None, :]
    tile = tl.load(q + (q0 + row)[:, None] * q_stride + head * d + c[None, :], mask=inside, other=0.0)
    key_at, value_at = k + k0 * k_stride + head // G * d, v + k0 * v_stride + head // G * d
    behind = k_len - q_len
    own = row + behind
    begin, all_seen = 0, (m + behind + 1) // BN * BN  # keys before `all_seen` are seen by every row of the tile
    if HAS_WINDOW:
        begin = tl.maximum(0, m + behind - window + 1) // BN * BN
        all_seen = begin
    peak = tl.full([BM], LOW, dtype=tl.float32)
    mass, acc = tl.zeros([BM], dtype=tl.float32), tl.zeros([BM, BD], dtype=tl.float32)
    for n in range(begin, all_seen, BN):
        peak, mass, acc = _forward_tile(
            tile,
            peak,
            mass,
            acc,
            key_at,
            value_at,
            n,
            k_len,
            own,
            scale,
            k_stride,
            v_stride,
            window,
            d,
            False,
            HAS_WINDOW,
            BN,
            BD,
        )
    for n in range(all_seen, tl.minimum(k_len, m + BM + behind), BN):
        peak, mass, acc = _forward_tile(
            tile,
            peak,
            mass,
            acc,
            key_at,
            value_at,
            n,
            k_len,
            own,
            scale,
            k_stride,
            v_stride,
            window,
            d,
            True,
            HAS_WINDOW,
            BN,
            BD,
        )
    tl.store(
        out + ((q0 + row)[:, None] * Q + head) * d + c[None, :],
        (acc / mass[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )
    tl.store(lse + head.to(tl.int64) * N + q0 + row, (peak + tl.log2(mass)) * LN2, mask=row < q_len)


@triton.jit
def _keys_tile(
    keys,
    values,
    dkey,
    dvalue,
    q,
    dout,
    lse,
    row_term,
    head,
    m,
    q0,
    q_len,
    behind,
    key,
    N,
    scale,
    q_stride,
    window,
    Q: tl.constexpr,
    d: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    i, c = tl.arange(0, BM), tl.arange(0, BD)
    row = m + i
    inside = (row < q_len)[:, None] & (c < d)[None, :]
    first, at = q0 + m, head * N.to(tl.int64) + q0 + m
    queries = tl.load(q + first * q_stride + head * d + i[:, None] * q_stride + c[None, :], mask=inside, other=0.0)
    log_mass = tl.load(lse + at + i, mask=row < q_len, other=float("inf")) * LOG2E  # probability 0 beyond the document
    p = tl.exp2(tl.dot(keys, tl.trans(queries)) * (scale * LOG2E) - log_mass[None, :])  # [BN, BM]
    p = tl.where(_seen((row + behind)[None, :], key[:, None], window, HAS_WINDOW), p, 0.0)
    rows = tl.load(dout + (first * Q + head) * d + i[:, None] * (Q * d) + c[None, :], mask=inside, other=0.0)
    dvalue = tl.dot(p.to(rows.dtype), rows, dvalue)
    term = tl.load(row_term + at + i, mask=row < q_len, other=0.0)
    dscore = p * (tl.dot(values, tl.trans(rows)) - term[None, :])
    return tl.dot(dscore.to(queries.dtype), queries, dkey), dvalue


@triton.jit(do_not_specialize=["N", "window"])
def _backward_keys(
    q,
    k,
    v,
    dout,
    lse,
    row_term,
    dk,
    dv,
    starts_q,
    starts_k,
    N,
    scale,
    q_stride,
    k_stride,
    v_stride,
    window,
    Q: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    kv, n = tl.program_id(0), tl.program_id(2) * BN
    if n >= k_len:
        return
    key, c = n + tl.arange(0, BN), tl.arange(0, BD)
    inside = (key < k_len)[:, None] & (c < d)[None, :]
    keys = tl.load(k + (k0 + key)[:, None] * k_stride + kv * d + c[None, :], mask=inside, other=0.0)
    values = tl.load(v + (k0 + key)[:, None] * v_stride + kv * d + c[None, :], mask=inside, other=0.0)
    dkey, dvalue = tl.zeros([BN, BD], dtype=tl.float32), tl.zeros([BN, BD], dtype=tl.float32)
    behind = k_len - q_len
    begin = tl.maximum(0, n - behind) // BM * BM  # the first row that sees a key of the tile
    end = q_len
    if HAS_WINDOW:
        end = tl.minimum(q_len, n + BN + window - behind)
    tiles = tl.maximum(0, tl.cdiv(end - begin, BM))
    for i in range(G * tiles):  # one loop over query heads and rows, so that its pipeline never drains between heads
        head, m = kv * G + i // tiles, begin + i % tiles * BM
        dkey, dvalue = _keys_tile(
            keys,
            values,
            dkey,
            dvalue,
            q,
            dout,
            lse,
            row_term,
            head,
            m,
            q0,
            q_len,
            behind,
            key,
            N,
            scale,
            q_stride,
            window,
            Q,
            d,
            HAS_WINDOW,
            BM,
            BD,
        )
    offset = ((k0 + key)[:, None] * (Q // G) + kv) * d + c[None, :]
    tl.store(dk + offset, (dkey * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + offset, dvalue.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _queries_tile(
    tile,
    dtile,
    dquery,
    log_mass,
    term,
    key_at,
    value_at,
    n,
    k_len,
    own,
    scale,
    k_stride,
    v_stride,
    window,
    d: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    i, c = tl.arange(0, BN), tl.arange(0, BD)
    key = n + i
    inside = (key < k_len)[:, None] & (c < d)[None, :]
    keys = tl.load(key_at + n * k_stride.to(tl.int64) + i[:, None] * k_stride + c[None, :], mask=inside, other=0.0)
    p = tl.exp2(tl.dot(tile, tl.trans(keys)) * (scale * LOG2E) - log_mass[:, None])
    if MASKED:
        p = tl.where(_seen(own[:, None], key[None, :], window, HAS_WINDOW), p, 0.0)
    values = tl.load(value_at + n * v_stride.to(tl.int64) + i[:, None] * v_stride + c[None, :], mask=inside, other=0.0)
    dscore = p * (tl.dot(dtile, tl.trans(values)) - term[:, None])
    return tl.dot(dscore.to(keys.dtype), keys, dquery)


@triton.jit(do_not_specialize=["N", "window"])
def _backward_queries(
    q,
    k,
    v,
    dout,
    lse,
    row_term,
    dq,
    starts_q,
    starts_k,
    N,
    scale,
    q_stride,
    k_stride,
    v_stride,
    window,
    Q: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    head, m = tl.program_id(0), (tl.num_programs(2) - 1 - tl.program_id(2)) * BM
    if m >= q_len:
        return
    row, c = m + tl.arange(0, BM), tl.arange(0, BD)
    inside = (row < q_len)[:, None] & (c < d)[None, :]
    offset = ((q0 + row)[:, None] * Q + head) * d + c[None, :]
    tile = tl.load(q + (q0 + row)[:, None] * q_stride + head * d + c[None, :], mask=inside, other=0.0)
    dtile = tl.load(dout + offset, mask=inside, other=0.0)
    at = head.to(tl.int64) * N + q0 + row
    log_mass = tl.load(lse + at, mask=row < q_len, other=float("inf")) * LOG2E
    term = tl.load(row_term + at, mask=row < q_len, other=0.0)
    key_at, value_at = k + k0 * k_stride + head // G * d, v + k0 * v_stride + head // G * d
    behind = k_len - q_len
    own = row + behind
    begin, all_seen = 0, (m + behind + 1) // BN * BN
    if HAS_WINDOW:
        begin = tl.maximum(0, m + behind - window + 1) // BN * BN
        all_seen = begin
    dquery = tl.zeros([BM, BD], dtype=tl.float32)
    for n in range(begin, all_seen, BN):
        dquery = _queries_tile(
            tile,
            dtile,
            dquery,
            log_mass,
            term,
            key_at,
            value_at,
            n,
            k_len,
            own,
            scale,
            k_stride,
            v_stride,
            window,
            d,
            False,
            HAS_WINDOW,
            BN,
            BD,
        )
    for n in range(all_seen, tl.minimum(k_len, m + BM + behind), BN):
        dquery = _queries_tile(
            tile,
            dtile,
            dquery,
            log_mass,
            term,
            key_at,
            value_at,
            n,
            k_len,
            own,
            scale,
            k_stride,
            v_stride,
            window,
            d,
            True,
            HAS_WINDOW,
            BN,
            BD,
        )
    tl.store(dq + offset, (dquery * scale).to(dq.dtype.element_ty), mask=inside)


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
