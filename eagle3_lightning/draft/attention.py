"""Attention of test-time training without a growing key cache.

At step k a query sees the step-0 keys of its document up to itself (causal), and of steps 1 .. k the keys of its own
slot only. The first part is ordinary causal attention; its output and log-sum-exp are merged with the few same-slot
keys as element-wise terms. In the backward pass, ordinary attention is given the *merged* output and log-sum-exp: its
probabilities exp(score - lse) and its row term dO . O are then those of the joint softmax, so its gradients are exact,
and the same-slot terms are again element-wise.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.draft.linear import fused, wide_dtype
from eagle3_lightning.draft.plan import Spans
from eagle3_lightning.errors import ConfigError

Kind = Literal["auto", "sdpa", "flash"]
_CHUNK_ROWS = 1024  # query rows of the dense path at once: bounds its score matrix


class Backend(Protocol):
    """Causal attention of each document's rows over all of its slots."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [N, q heads, d] and log-sum-exp [q heads, N], float32 or wider."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v through the probabilities exp(score - lse); `row_term` is dout * out summed by head."""


def make_backend(
    kind: Kind, spans: Spans, scale: float, window: int | None, head_dim: int, q_sample: Tensor
) -> Backend:
    """Choose the implementation.

    Args:
        kind: as the user said.
        spans: which rows attend to which slots.
        scale: factor on the scores.
        window: step-0 keys that a query sees, itself included; None is all.
        head_dim: size of a head.
        q_sample: a tensor of the device and dtype that attention will run in.

    Raises:
        ConfigError: `flash` on a device, in a dtype or for a head size that has none.
    """
    fits = check_kind(kind, q_sample.device.type, q_sample.dtype, head_dim)
    if kind == "flash" or (kind == "auto" and fits):
        return FlashBackend(spans, scale, window)
    return DenseBackend(spans, scale, window)


def check_kind(kind: Kind, device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels can be used.

    Args:
        kind: as the user said.
        device_type: where attention will run.
        dtype: in which.
        head_dim: size of a head.

    Raises:
        ConfigError: they are asked for and cannot be used.
    """
    # Tensor descriptors want rows of whole 16 bytes.
    fits = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0
    if kind == "flash" and not fits:
        raise ConfigError(
            "model.loss.attention",
            kind,
            f"it needs CUDA, bf16 and heads of a multiple of 8, not {device_type}, {dtype} and {head_dim}",
            "Use trainer.precision=bf16-mixed on a GPU, or model.loss.attention=sdpa.",
        )
    return fits


def ttt_attention(
    backend: Backend, scale: float, q: Float[Tensor, "N Q d"], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Float[Tensor, "N Q d"]:
    """One step's attention.

    Args:
        backend: of the step-0 keys.
        scale: factor on the scores.
        q: queries of the rows.
        keys: step 0's [T, K, d], then steps 1 .. k of the same rows [N, K, d].
        values: likewise.
    """
    return _TTTAttention.apply(backend, scale, q, *keys, *values)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, scale, q, *keys_values):  # type: ignore[no-untyped-def]
        half = len(keys_values) // 2
        keys, values = keys_values[:half], keys_values[half:]
        out, lse = backend.forward(q, keys[0], values[0])
        if half > 1:
            merge = _same_slot().merge_forward if fused(q) else _merge
            out, lse = merge(scale, q, out, lse, keys[1:], values[1:])
        ctx.backend, ctx.scale = backend, scale
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, out, lse, *keys_values = ctx.saved_tensors
        dout = dout.contiguous()
        half = len(keys_values) // 2
        keys, values = keys_values[:half], keys_values[half:]
        row_term = _same_slot().row_terms(dout, out) if fused(q) else _row_terms(dout, out)
        dq, dk, dv = ctx.backend.backward(dout, q, keys[0], values[0], lse, row_term)
        dkeys, dvalues = [dk], [dv]
        if half > 1:
            merge = _same_slot().merge_backward if fused(q) else _merge_backward
            dq, more_k, more_v = merge(ctx.scale, q, lse, row_term, dout, dq, keys[1:], values[1:])
            dkeys, dvalues = [dk, *more_k], [dv, *more_v]
        return None, None, dq, *dkeys, *dvalues


def _flash() -> ModuleType:
    from eagle3_lightning.draft import flash

    return flash


def _same_slot() -> ModuleType:
    from eagle3_lightning.draft import same_slot

    return same_slot


def _row_terms(dout: Tensor, out: Tensor) -> Tensor:
    """Sum of dout * out over each head, [Q, N], in float32 or wider."""
    return (dout.to(wide_dtype(out.dtype)) * out).sum(dim=-1).t()


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Query heads by the key head that they share: [N, K, G, d], in float32 or wider."""
    return x.to(wide_dtype(x.dtype)).unflatten(1, (kv_heads, -1))


def _merge(
    scale: float, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add the same-slot keys to an attention output and its log-sum-exp."""
    kv_heads = keys[0].shape[1]
    grouped = _grouped(q, kv_heads)
    scores = [lse.t().unflatten(1, (kv_heads, -1))]  # [N, K, G]
    scores += [torch.einsum("nkgd,nkd->nkg", grouped, k.to(grouped.dtype)) * scale for k in keys]
    total = torch.logsumexp(torch.stack(scores), dim=0)
    merged = _grouped(out, kv_heads) * (scores[0] - total).exp()[..., None]
    for score, v in zip(scores[1:], values, strict=True):
        merged.addcmul_((score - total).exp()[..., None], v.to(merged.dtype)[:, :, None])
    return merged.flatten(1, 2).to(out.dtype), total.flatten(1).t().contiguous()


def _merge_backward(
    scale: float,
    q: Tensor,
    lse: Tensor,
    row_term: Tensor,
    dout: Tensor,
    dq: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the same-slot terms; their part of the queries' is added to `dq`."""
    kv_heads = keys[0].shape[1]
    grouped, dgrouped = _grouped(q, kv_heads), _grouped(dout, kv_heads)
    total, row = (x.t().unflatten(1, (kv_heads, -1)) for x in (lse, row_term))
    dqueries, dkeys, dvalues = _grouped(dq, kv_heads), [], []
    for k, v in zip(keys, values, strict=True):
        wide_k, wide_v = k.to(grouped.dtype), v.to(grouped.dtype)
        p = (torch.einsum("nkgd,nkd->nkg", grouped, wide_k) * scale - total).exp()
        dscore = p * (torch.einsum("nkgd,nkd->nkg", dgrouped, wide_v) - row) * scale
        dqueries = dqueries + dscore[..., None] * wide_k[:, :, None]
        dkeys.append(torch.einsum("nkg,nkgd->nkd", dscore, grouped).to(k.dtype))
        dvalues.append(torch.einsum("nkg,nkgd->nkd", p, dgrouped).to(v.dtype))
    return dqueries.flatten(1, 2).to(q.dtype), dkeys, dvalues


class DenseBackend:
    """Plain matrix products, one document after the other, on any device and in any dtype.

    Scores are kept for one chunk of rows at a time and made again in the backward pass.
    """

    def __init__(self, spans: Spans, scale: float, window: int | None) -> None:
        """Note the documents' bounds; see `make_backend`."""
        self.scale, self.window = scale, window
        self.chunks = [
            (slice(doc.slot_start, doc.slot_end), slice(row, min(row + _CHUNK_ROWS, doc.row_end)), doc.row_end - row)
            for doc in spans.documents
            for row in range(doc.row_start, doc.row_end, _CHUNK_ROWS)
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        dtype, kv_heads = wide_dtype(q.dtype), k.shape[1]
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
        for slots, rows, behind in self.chunks:
            scores, _, _ = self._scores(q[rows], k[slots], behind)  # [K, G * n, L]
            part = torch.logsumexp(scores, dim=-1, keepdim=True)
            probabilities = scores.sub_(part).exp_().to(v.dtype)
            out[rows] = _by_row(probabilities @ v[slots].transpose(0, 1), q.shape[1]).to(q.dtype)
            lse[:, rows] = part.view(kv_heads * scores.shape[1] // (rows.stop - rows.start), -1)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend`."""
        dtype, kv_heads = wide_dtype(q.dtype), k.shape[1]
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)
        for slots, rows, behind in self.chunks:
            scores, q_heads, keys = self._scores(q[rows], k[slots], behind)
            p = scores.sub_(lse[:, rows].reshape(kv_heads, -1, 1)).exp_()
            d = _by_head(dout[rows], kv_heads)
            row = row_term[:, rows].reshape(kv_heads, -1, 1)
            dv[slots] += (p.to(v.dtype).transpose(1, 2) @ d).transpose(0, 1)
            dscores = (d @ v[slots].permute(1, 2, 0)).to(dtype).sub_(row).mul_(p).mul_(self.scale).to(q.dtype)
            dq[rows] = _by_row(dscores @ keys, q.shape[1]).to(q.dtype)
            dk[slots] += (dscores.transpose(1, 2) @ q_heads).transpose(0, 1)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, behind: int) -> tuple[Tensor, Tensor, Tensor]:
        """Masked scores [K, G * n, L] in float32 or wider, and queries and keys by head.

        Args:
            q: a chunk of a document's rows.
            k: all of the document's slots.
            behind: rows from the chunk's first to the document's end; the rows are a suffix of the slots.
        """
        num_keys, kv_heads = k.shape[0], k.shape[1]
        q_heads, k_heads = _by_head(q, kv_heads), k.transpose(0, 1)
        wide = wide_dtype(q.dtype)
        scores = (q_heads.to(wide) * self.scale) @ k_heads.to(wide).transpose(1, 2)
        own = torch.arange(q.shape[0], device=q.device)[:, None] + (num_keys - behind)  # key index of each row itself
        index = torch.arange(num_keys, device=q.device)
        hidden = index > own
        if self.window is not None:
            hidden |= index <= own - self.window
        scores.unflatten(1, (-1, q.shape[0])).masked_fill_(hidden, float("-inf"))
        return scores, q_heads, k_heads


class FlashBackend:
    """The kernels of `flash.py`: documents of any lengths, no padding, no block mask, nothing compiled again."""

    def __init__(self, spans: Spans, scale: float, window: int | None) -> None:
        """Note the documents' bounds; see `make_backend`."""
        self.spans, self.scale, self.window = spans, scale, window or 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        return _flash().flash_forward(q, k, v, self.spans, self.scale, self.window)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend`."""
        return _flash().flash_backward(dout, q, k, v, lse, row_term, self.spans, self.scale, self.window)


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """Rows [n, Q, d] as [K, G * n, d]: for each key head, its query heads' rows one head after the other."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(kv_heads, -1, x.shape[-1])


def _by_row(x: Tensor, q_heads: int) -> Tensor:
    """The inverse of `_by_head`."""
    return x.reshape(q_heads, -1, x.shape[-1]).transpose(0, 1)
