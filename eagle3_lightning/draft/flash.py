"""Causal attention over packed documents as Triton kernels: a suffix of each document's slots attends to all of them.

After FlashAttention 2 (Dao 2023), with three things that the draft needs and torch's own build does not give: queries
that are fewer than keys without padding, key heads shared by query heads without expanding their gradients, and a
backward pass that takes the log-sum-exp and row term of a softmax over *more* than these keys. No size is compiled in
but the head's.

What a loop streams comes by tensor descriptors (TMA from Hopper on). Their tiles may reach past a document's end, into
the next document or past the tensor (zeros there): such keys are hidden by the causal mask, and such rows have
probability 0.

Shape suffixes: `Q` and `K` query and key heads, `G` query heads by key head, `d` size of a head, `N` rows.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    num_rows, q_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q_heads, num_rows, dtype=torch.float32, device=q.device)
    tiles = _tiles_forward(q)
    if num_rows:
        _forward[_grid(q_heads, spans.longest_q, tiles.rows, spans)](
            q,
            _stream(k, tiles.keys),
            _stream(v, tiles.keys),
            out,
            lse,
            *_sizes(q, k, spans, scale, window),
            **_constants(q, tiles, window),
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
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    if not q.shape[0]:
        return dq, dk.zero_(), dv.zero_()
    sizes = _sizes(q, k, spans, scale, window)
    tiles = _tiles_keys(q)
    _backward_keys[_grid(k.shape[1], spans.longest_k, tiles.keys, spans)](
        _stream(q, tiles.rows),
        k,
        v,
        _stream(dout, tiles.rows),
        lse,
        row_term,
        dk,
        dv,
        k.stride(0),
        v.stride(0),
        *sizes,
        **_constants(q, tiles, window),
    )
    tiles = _tiles_queries(q)
    _backward_queries[_grid(q.shape[1], spans.longest_q, tiles.rows, spans)](
        q,
        _stream(k, tiles.keys),
        _stream(v, tiles.keys),
        dout,
        lse,
        row_term,
        dq,
        *sizes,
        **_constants(q, tiles, window),
    )
    return dq, dk, dv


def _stream(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of one head of x [rows, heads, d], at [row, head * d]."""
    block = triton.next_power_of_2(x.shape[2])
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, block])


def _sizes(q: Tensor, k: Tensor, spans: Spans, scale: float, window: int) -> tuple[object, ...]:
    """What all kernels are told about the batch."""
    q_heads = q.shape[1]
    return (
        spans.starts_q,
        spans.starts_k,
        q.shape[0],
        scale,
        q.stride(0),
        window,
        q_heads,
        q_heads // k.shape[1],
        q.shape[2],
    )


def _constants(q: Tensor, tiles: Tiles, window: int) -> dict[str, object]:
    return {
        "BM": tiles.rows,
        "BN": tiles.keys,
        "BD": triton.next_power_of_2(q.shape[2]),
        "HAS_WINDOW": window > 0,
        "num_stages": tiles.stages,
        "num_warps": tiles.warps,
    }


def _grid(heads: int, longest: int, tile: int, spans: Spans) -> tuple[int, int, int]:
    """Heads, documents, tiles: tiles last, so that the heaviest of all heads and documents start first."""
    return heads, spans.starts_k.shape[0] - 1, max(1, triton.cdiv(longest, tile))


def _tiles_forward(q: Tensor) -> Tiles:
    if _small(q):
        return Tiles(64, 32, 2, 4)
    return Tiles(128, 128, 3, 4) if q.shape[-1] <= 64 else Tiles(64, 64, 3, 4)


def _tiles_keys(q: Tensor) -> Tiles:
    if _small(q):
        return Tiles(32, 32, 1, 4)
    return Tiles(64, 64, 3, 4) if q.shape[-1] <= 64 else Tiles(64, 64, 2, 4)  # two programs share an SM


def _tiles_queries(q: Tensor) -> Tiles:
    return _tiles_keys(q)


def _small(q: Tensor) -> bool:
    """Whether the large tiles do not fit: wide heads, or a GPU with less shared memory than an A100."""
    properties = torch.cuda.get_device_properties(q.device)
    return q.shape[-1] > 128 or properties.shared_memory_per_block_optin < 160 * 1024  # type: ignore[attr-defined]


@triton.jit
def _document(starts_q, starts_k):
    """First row, rows, first slot and slots of the program's document."""
    doc = tl.program_id(1)
    q0, k0 = tl.load(starts_q + doc).to(tl.int32), tl.load(starts_k + doc).to(tl.int32)
    return q0, tl.load(starts_q + doc + 1).to(tl.int32) - q0, k0, tl.load(starts_k + doc + 1).to(tl.int32) - k0


@triton.jit
def _tile(at, first, count, stride, BLOCK: tl.constexpr, d: tl.constexpr, BD: tl.constexpr):
    """Rows [first, first + BLOCK) of a head, zeros from row `first + count` on."""
    i, c = tl.arange(0, BLOCK), tl.arange(0, BD)
    inside = (i < count)[:, None] & (c < d)[None, :]
    return tl.load(at + first.to(tl.int64) * stride + i[:, None] * stride + c[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(at, value, first, count, stride, BLOCK: tl.constexpr, d: tl.constexpr, BD: tl.constexpr):
    i, c = tl.arange(0, BLOCK), tl.arange(0, BD)
    inside = (i < count)[:, None] & (c < d)[None, :]
    at += first.to(tl.int64) * stride + i[:, None] * stride + c[None, :]
    tl.store(at, value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _seen(own, key, window, HAS_WINDOW: tl.constexpr):
    """Whether rows whose own key is `own` see keys `key`."""
    seen = key <= own
    if HAS_WINDOW:
        seen = seen & (key > own - window)
    return seen


@triton.jit
def _key_range(m, q_len, k_len, window, BM: tl.constexpr, BN: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Of a tile of rows from `m` on: its first tile of keys, the first that needs a mask, and their end."""
    behind = k_len - q_len
    end = tl.minimum(k_len, m + BM + behind)
    if HAS_WINDOW:
        begin = tl.maximum(0, m + behind - window + 1) // BN * BN
        return begin, begin, end
    return 0, (m + behind + 1) // BN * BN, end


@triton.jit
def _forward_tile(
    tile, peak, mass, acc, k, v, first, at, n, own, factor, window, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    score = tl.dot(tile, tl.trans(k.load([first + n, at])))
    if MASKED:
        score = tl.where(_seen(own[:, None], (n + tl.arange(0, BN))[None, :], window, HAS_WINDOW), score, LOW)
    higher = tl.maximum(peak, tl.max(score, axis=1) * factor)
    p = tl.exp2(score * factor - higher[:, None])
    kept = tl.exp2(peak - higher)
    values = v.load([first + n, at])
    acc = tl.dot(p.to(values.dtype), values, acc * kept[:, None])
    return higher, mass * kept + tl.sum(p, axis=1), acc


@triton.jit(do_not_specialize=["N", "window"])
def _forward(
    q, k, v, out, lse, starts_q, starts_k, N, scale, q_stride, window, Q: tl.constexpr, G: tl.constexpr,
    d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    head, m = tl.program_id(0), (tl.num_programs(2) - 1 - tl.program_id(2)) * BM  # the rows that see most go first
    if m >= q_len:
        return
    tile = _tile(q + head * d, q0 + m, q_len - m, q_stride, BM, d, BD)
    own = m + tl.arange(0, BM) + k_len - q_len
    begin, all_seen, end = _key_range(m, q_len, k_len, window, BM, BN, HAS_WINDOW)
    at, factor = head // G * d, scale * LOG2E
    peak = tl.full([BM], LOW, dtype=tl.float32)
    mass, acc = tl.zeros([BM], dtype=tl.float32), tl.zeros([BM, BD], dtype=tl.float32)
    for n in range(begin, all_seen, BN):
        peak, mass, acc = _forward_tile(
            tile, peak, mass, acc, k, v, k0, at, n, own, factor, window, False, HAS_WINDOW, BN
        )  # fmt: skip
    for n in range(all_seen, end, BN):
        peak, mass, acc = _forward_tile(
            tile, peak, mass, acc, k, v, k0, at, n, own, factor, window, True, HAS_WINDOW, BN
        )  # fmt: skip
    _store_tile(out + head * d, acc / mass[:, None], q0 + m, q_len - m, Q * d, BM, d, BD)
    i = tl.arange(0, BM)
    tl.store(lse + head.to(tl.int64) * N + q0 + m + i, (peak + tl.log2(mass)) * LN2, mask=i < q_len - m)


@triton.jit
def _keys_tile(
    keys, values, dkey, dvalue, q, dout, lse, row_term, head, m, n, q0, q_len, behind, N, factor, window,
    d: tl.constexpr, HAS_WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = m + tl.arange(0, BM)
    at = head * N.to(tl.int64) + q0
    queries = q.load([q0 + m, head * d])
    # Infinity makes the probability 0 beyond the document.
    log_mass = tl.load(lse + at + row, mask=row < q_len, other=float("inf")) * LOG2E
    p = tl.exp2(tl.dot(keys, tl.trans(queries)) * factor - log_mass[None, :])  # [BN, BM]
    if (m + behind < n + BN - 1) | HAS_WINDOW:  # else every row sees every key
        p = tl.where(_seen((row + behind)[None, :], (n + tl.arange(0, BN))[:, None], window, HAS_WINDOW), p, 0.0)
    rows = dout.load([q0 + m, head * d])
    dvalue = tl.dot(p.to(rows.dtype), rows, dvalue)
    term = tl.load(row_term + at + row, mask=row < q_len, other=0.0)
    dscore = p * (tl.dot(values, tl.trans(rows)) - term[None, :])
    return tl.dot(dscore.to(queries.dtype), queries, dkey), dvalue


@triton.jit(do_not_specialize=["N", "window"])
def _backward_keys(
    q, k, v, dout, lse, row_term, dk, dv, k_stride, v_stride, starts_q, starts_k, N, scale, q_stride, window,
    Q: tl.constexpr, G: tl.constexpr, d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    kv, n = tl.program_id(0), tl.program_id(2) * BN
    if n >= k_len:
        return
    keys = _tile(k + kv * d, k0 + n, k_len - n, k_stride, BN, d, BD)
    values = _tile(v + kv * d, k0 + n, k_len - n, v_stride, BN, d, BD)
    dkey, dvalue = tl.zeros([BN, BD], dtype=tl.float32), tl.zeros([BN, BD], dtype=tl.float32)
    behind, factor = k_len - q_len, scale * LOG2E
    begin = tl.maximum(0, n - behind) // BM * BM  # the first row that sees a key of the tile
    end = q_len
    if HAS_WINDOW:
        end = tl.minimum(q_len, n + BN + window - behind)
    tiles = tl.maximum(0, tl.cdiv(end - begin, BM))
    for i in range(G * tiles):  # one loop over query heads and rows, so that its pipeline never drains between heads
        dkey, dvalue = _keys_tile(
            keys, values, dkey, dvalue, q, dout, lse, row_term, kv * G + i // tiles, begin + i % tiles * BM, n, q0,
            q_len, behind, N, factor, window, d, HAS_WINDOW, BM, BN,
        )  # fmt: skip
    _store_tile(dk + kv * d, dkey * scale, k0 + n, k_len - n, Q // G * d, BN, d, BD)
    _store_tile(dv + kv * d, dvalue, k0 + n, k_len - n, Q // G * d, BN, d, BD)


@triton.jit
def _queries_tile(
    tile, dtile, dquery, log_mass, term, k, v, first, at, n, own, factor, window, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    keys = k.load([first + n, at])
    p = tl.exp2(tl.dot(tile, tl.trans(keys)) * factor - log_mass[:, None])
    if MASKED:
        p = tl.where(_seen(own[:, None], (n + tl.arange(0, BN))[None, :], window, HAS_WINDOW), p, 0.0)
    dscore = p * (tl.dot(dtile, tl.trans(v.load([first + n, at]))) - term[:, None])
    return tl.dot(dscore.to(keys.dtype), keys, dquery)


@triton.jit(do_not_specialize=["N", "window"])
def _backward_queries(
    q, k, v, dout, lse, row_term, dq, starts_q, starts_k, N, scale, q_stride, window, Q: tl.constexpr, G: tl.constexpr,
    d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    q0, q_len, k0, k_len = _document(starts_q, starts_k)
    head, m = tl.program_id(0), (tl.num_programs(2) - 1 - tl.program_id(2)) * BM
    if m >= q_len:
        return
    row = m + tl.arange(0, BM)
    tile = _tile(q + head * d, q0 + m, q_len - m, q_stride, BM, d, BD)
    dtile = _tile(dout + head * d, q0 + m, q_len - m, Q * d, BM, d, BD)
    stats = head.to(tl.int64) * N + q0 + row
    log_mass = tl.load(lse + stats, mask=row < q_len, other=float("inf")) * LOG2E
    term = tl.load(row_term + stats, mask=row < q_len, other=0.0)
    own = row + k_len - q_len
    begin, all_seen, end = _key_range(m, q_len, k_len, window, BM, BN, HAS_WINDOW)
    at, factor = head // G * d, scale * LOG2E
    dquery = tl.zeros([BM, BD], dtype=tl.float32)
    for n in range(begin, all_seen, BN):
        dquery = _queries_tile(
            tile, dtile, dquery, log_mass, term, k, v, k0, at, n, own, factor, window, False, HAS_WINDOW, BN
        )  # fmt: skip
    for n in range(all_seen, end, BN):
        dquery = _queries_tile(
            tile, dtile, dquery, log_mass, term, k, v, k0, at, n, own, factor, window, True, HAS_WINDOW, BN
        )  # fmt: skip
    _store_tile(dq + head * d, dquery * scale, q0 + m, q_len - m, Q * d, BM, d, BD)
