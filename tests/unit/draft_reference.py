"""EAGLE-3 test-time training written straight from its definition, in float64, one document at a time.

Nothing here is shared with the product: dense masks over a growing key list, concatenated inputs, rotary embedding as
complex numbers, softmax by definition, autograd for every gradient.
"""

import torch
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.config import DraftConfig


def make_config(**changes: object) -> DraftConfig:
    sizes = {
        "arch": "llama", "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "vocab_size": 50, "draft_vocab_size": 20, "num_aux": 3, "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 128,
    }  # fmt: skip
    return DraftConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def make_batch(
    documents: list[list[bool]],
    config: DraftConfig,
    seed: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Eagle3Batch:
    """A batch of random documents, given the mask of each one's slots."""
    g = torch.Generator().manual_seed(seed)
    lengths = [len(d) for d in documents]
    num_slots = sum(lengths) + padding
    doc = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    pos = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.long)])
    ids = torch.randint(0, config.vocab_size, (num_slots,), generator=g)
    ids[doc < 0] = 0
    mask = torch.tensor([m for d in documents for m in d] + [False] * padding)
    features = torch.randn(num_slots, config.num_aux, config.hidden_size, generator=g, dtype=dtype)
    teacher = torch.randn(num_slots, config.hidden_size, generator=g, dtype=dtype)
    return Eagle3Batch(ids, features, teacher, mask, doc, pos, list(range(len(documents))))


def reference_steps(
    params: dict[str, Tensor], config: DraftConfig, batch: Eagle3Batch, num_steps: int
) -> dict[str, Tensor]:
    """KL [K, T], the draft's best token [K, T] and whether a step is scored [K, T], from named weights."""
    num_slots = int((batch.doc >= 0).sum())
    out = {
        "kl": torch.zeros(num_steps, num_slots, dtype=torch.float64),
        "best": torch.zeros(num_steps, num_slots, dtype=torch.long),
        "scored": torch.zeros(num_steps, num_slots, dtype=torch.bool),
    }
    parts = {"kl": [], "best": [], "scored": []}
    for d in range(int(batch.doc.max()) + 1):
        where = (batch.doc == d).nonzero().flatten()
        got = _document(
            params,
            config,
            batch.ids[where],
            batch.features[where].double(),
            batch.teacher[where].double(),
            batch.mask[where],
            num_steps,
        )
        for name in parts:
            parts[name].append(got[name])
    return {name: torch.cat(parts[name], dim=1) if parts[name] else out[name] for name in out}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _document(
    p: dict[str, Tensor], c: DraftConfig, ids: Tensor, features: Tensor, last: Tensor, mask: Tensor, num_steps: int
) -> dict[str, Tensor]:
    n = len(ids)
    rows = p["d2t"] + torch.arange(len(p["d2t"]))
    target = torch.softmax(last @ p["target_head"][rows].t(), dim=-1)
    scaled = features
    if c.norm_before_fc:
        scaled = _norm(features.flatten(1), p["input_norm.weight"], c.rms_norm_eps).view(features.shape)
    if c.fc_norm:
        scaled = torch.stack(
            [_norm(features[:, a], p[f"fc_norm.{a}.weight"], c.rms_norm_eps) for a in range(c.num_aux)], 1
        )
    h = (scaled * p["feature_scale"]).flatten(1) @ p["fc.weight"].t()
    keys: list[list[Tensor]] = [[] for _ in range(c.num_layers)]
    values: list[list[Tensor]] = [[] for _ in range(c.num_layers)]
    kl, best, scored = [], [], []
    for k in range(num_steps):
        ahead = torch.arange(n) + k
        inside = ahead < n
        e = p["embed_tokens.weight"][ids[ahead.clamp(max=n - 1)]]
        for i in range(c.num_layers):
            h = _layer(p, c, i, e, h, torch.arange(n, dtype=torch.float64) + k, keys[i], values[i])
        normed = _norm(h, p["norm.weight"], c.rms_norm_eps)
        logits = normed @ p["lm_head.weight"].t()
        if c.norm_output:
            h = normed
        teacher = target[ahead.clamp(max=n - 1)]
        kl.append((teacher * (teacher.log() - torch.log_softmax(logits, dim=-1))).sum(-1))
        best.append(rows[logits.argmax(-1)])
        scored.append(inside & mask[ahead.clamp(max=n - 1)])
    return {"kl": torch.stack(kl), "best": torch.stack(best), "scored": torch.stack(scored)}


def _layer(
    p: dict[str, Tensor],
    c: DraftConfig,
    i: int,
    e: Tensor,
    h: Tensor,
    positions: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    def w(name: str) -> Tensor:
        return p[f"layers.{i}.{name}.weight"]

    n = h.shape[0]
    if i == 0:
        normed = _norm(h, w("hidden_norm"), c.rms_norm_eps)
        x = torch.cat([_norm(e, w("input_layernorm"), c.rms_norm_eps), normed], dim=-1)
        residual = normed if c.norm_before_residual else h
    else:
        x, residual = _norm(h, w("input_layernorm"), c.rms_norm_eps), h
    q, k, v = ((x @ w(f"self_attn.{name}_proj").t()).view(n, -1, c.head_dim) for name in "qkv")
    if c.arch == "qwen3":
        q, k = _norm(q, w("self_attn.q_norm"), c.rms_norm_eps), _norm(k, w("self_attn.k_norm"), c.rms_norm_eps)
    theta = c.rope["rope_theta"]
    keys.append(_rope(k, positions, theta))
    values.append(v)
    own = torch.arange(n)
    step0 = own[None] <= own[:, None]
    if c.sliding_window is not None:
        step0 &= own[None] > own[:, None] - c.sliding_window
    seen = torch.cat([step0] + [torch.eye(n, dtype=torch.bool)] * (len(keys) - 1), dim=1)
    groups = c.num_heads // c.num_kv_heads
    all_k = torch.cat(keys).repeat_interleave(groups, dim=1)
    all_v = torch.cat(values).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", _rope(q, positions, theta), all_k) / c.head_dim**0.5
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), all_v).flatten(1)
    h = residual + attended @ w("self_attn.o_proj").t()
    y = _norm(h, w("post_attention_layernorm"), c.rms_norm_eps)
    gate = y @ w("mlp.gate_proj").t()
    return h + (gate * torch.sigmoid(gate) * (y @ w("mlp.up_proj").t())) @ w("mlp.down_proj").t()


def reference_walk(right: Tensor, scored: Tensor, doc: Tensor) -> tuple[int, int]:
    """Tokens advanced and rounds, by walking each document as serving would."""
    advanced = rounds = 0
    for d in sorted(set(doc.tolist())):
        slots = [t for t in range(len(doc)) if doc[t] == d]
        t, end = slots[0], slots[-1]
        while t <= end:
            if not scored[0, t]:
                t += 1
                continue
            accepted = 0
            while accepted < len(right) and scored[accepted, t] and right[accepted, t]:
                accepted += 1
            rounds += 1
            advanced += accepted + 1
            t += accepted + 1
    return advanced, rounds
