"""The EAGLE-3 draft: parameters named as they are exported, and one step of its unroll."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.attention import Kind, make_backend, ttt_attention
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.linear import CastWeight, cast_columns, cast_weight, linear
from eagle3_lightning.draft.ops import (
    Added,
    add_rms_norm,
    add_rows,
    rms_norm,
    rope_heads,
    swiglu_linear,
    take_rows,
    unweighted_norm,
)
from eagle3_lightning.draft.plan import UnrollPlan
from eagle3_lightning.draft.rope import Rope

_INIT_STD = 0.02


class Norm(nn.Module):
    """Weight of an RMSNorm."""

    def __init__(self, size: int) -> None:
        """Start at ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Table(nn.Module):
    """A frozen matrix that no checkpoint holds, because it can be read from the target again."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Start uninitialized."""
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, columns, dtype=dtype), persistent=False)
        self.weight: Tensor


class SelfAttention(nn.Module):
    """Projections of an attention block; `input_size` is 2H in the first layer."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        """Build the projections, and per-head norms for a Qwen3-style draft."""
        super().__init__()
        q, k, v = config.qkv_sizes
        self.q_proj = nn.Linear(input_size, q, bias=False)
        self.k_proj = nn.Linear(input_size, k, bias=False)
        self.v_proj = nn.Linear(input_size, v, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)
        if config.arch == "qwen3":
            self.q_norm = Norm(config.head_dim)
            self.k_norm = Norm(config.head_dim)

    @property
    def qkv(self) -> list[Tensor]:
        """The projections that read the same input."""
        return [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]


class MLP(nn.Module):
    """Projections of a SwiGLU block."""

    def __init__(self, config: DraftConfig) -> None:
        """Build the projections."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DecoderLayer(nn.Module):
    """A decoder layer; the first reads embeddings (normed by `input_layernorm`) beside features (`hidden_norm`)."""

    def __init__(self, config: DraftConfig, first: bool) -> None:
        """Build the layer's parts."""
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size)
        if first:
            self.hidden_norm = Norm(config.hidden_size)
        self.self_attn = SelfAttention(config, 2 * config.hidden_size if first else config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = MLP(config)


class Eagle3Draft(nn.Module):
    """A draft that reads three layers of its target.

    Parameters and persistent buffers carry the names of the exported tensors. `feature_scale` is the factor on each
    channel of the auxiliary states (one over its RMS); an export multiplies it into the columns of `fc.weight`.

    Attributes:
        d2t: offset from a draft token to its target token: target = draft + d2t[draft].
        t2d: whether a target token is in the draft vocabulary.
        feature_scale: factor on each auxiliary channel, after the norms before `fc` if there are any.
        embed_tokens: the target's embeddings, frozen, in no checkpoint.
    """

    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor

    def __init__(self, config: DraftConfig, frozen_dtype: torch.dtype = torch.float32) -> None:
        """Build a draft with random weights and an identity-like draft vocabulary (the first D tokens).

        Args:
            config: sizes and flags.
            frozen_dtype: of what is not trained: embeddings and a frozen lm_head; the target's own loses nothing.
        """
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(config.num_aux * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(config.num_aux * size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(size) for _ in range(config.num_aux))
        self.layers = nn.ModuleList(DecoderLayer(config, first=i == 0) for i in range(config.num_layers))
        self.norm = Norm(size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = Table(config.vocab_size, size, frozen_dtype)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.register_buffer("feature_scale", torch.ones(config.num_aux, size))
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
        if not config.train_head:
            self.lm_head.to(frozen_dtype).requires_grad_(False)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, as what they are."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @property
    def draft_token_ids(self) -> Int[Tensor, " D"]:
        """The target token of each draft token."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def set_vocab(self, d2t: Int[Tensor, " D"]) -> None:
        """Take another draft vocabulary, in place.

        Args:
            d2t: offsets, as `vocab.choose_draft_vocab` gives them.
        """
        self.d2t.copy_(d2t)
        self.t2d.zero_()
        self.t2d[self.draft_token_ids] = True

    def set_feature_rms(self, rms: Float[Tensor, "A H"]) -> None:
        """Divide every auxiliary channel by its RMS from now on, in place.

        Behind a norm before `fc`, which divides by the RMS of what it norms already, only the channels' relation to it
        is left to even out.
        """
        rms = rms.to(self.feature_scale)
        if self.config.norm_before_fc:
            rms = rms / rms.square().mean().sqrt()
        elif self.config.fc_norm:
            rms = rms / rms.square().mean(dim=1, keepdim=True).sqrt()
        self.feature_scale.copy_(1.0 / rms.clamp(min=1e-6))


class Unroll:
    """The draft at work on one batch: weights cast once, and everything that all steps share computed once."""

    def __init__(
        self, draft: Eagle3Draft, batch: Eagle3Batch, plan: UnrollPlan, dtype: torch.dtype, attention: Kind = "auto"
    ) -> None:
        """Cast the weights and project the tokens.

        Args:
            draft: the weights.
            batch: the packed documents, on the draft's device.
            plan: the batch's plan, likewise.
            dtype: the compute dtype.
            attention: which implementation.
        """
        self.draft, self.config, self.plan, self.dtype = draft, draft.config, plan, dtype
        self.eps = draft.config.rms_norm_eps
        self.scale = draft.config.head_dim**-0.5
        self._features = batch.features[: plan.num_slots]
        self._cast()
        tokens = draft.embed_tokens.weight[batch.ids[: plan.num_slots]].to(dtype)
        self._projected_tokens = linear(unweighted_norm(tokens, self.eps), self._qkv_tokens)
        window, head_dim = draft.config.sliding_window, draft.config.head_dim
        self._rows_attend = make_backend(attention, plan.row_spans(), self.scale, window, head_dim, tokens)
        self._slots_attend = make_backend(attention, plan.slot_spans(), self.scale, window, head_dim, tokens)
        cos, sin = draft.rope.tables(plan.longest + plan.num_steps, tokens)
        self._row_tables = [(cos[plan.positions + k], sin[plan.positions + k]) for k in range(plan.num_steps)]
        slot_positions = batch.pos[: plan.num_slots]
        self._slot_tables = self._row_tables[0] if plan.all_rows else (cos[slot_positions], sin[slot_positions])

    def _cast(self) -> None:
        draft, size = self.draft, self.config.hidden_size
        self._fc = cast_columns(
            [draft.fc.weight],
            self.dtype,
            (self.config.num_aux * size,),
            norm=self._fc_norm_weight(),
            scale=draft.feature_scale.flatten() if self.config.feature_scale else None,
        )[0]
        layers = draft.decoder_layers
        first = layers[0]
        self._qkv_tokens, qkv_features = cast_columns(
            first.self_attn.qkv, self.dtype, (size, size), norm=first.input_layernorm.weight
        )
        self._qkv: list[CastWeight] = [qkv_features]
        self._qkv += [cast_weight(layer.self_attn.qkv, self.dtype) for layer in layers[1:]]
        self._o = [cast_weight([layer.self_attn.o_proj.weight], self.dtype) for layer in layers]
        self._gate_up = [
            cast_weight([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight], self.dtype) for layer in layers
        ]
        self._down = [cast_weight([layer.mlp.down_proj.weight], self.dtype) for layer in layers]
        self.head = cast_weight([draft.lm_head.weight], self.dtype)

    def _fc_norm_weight(self) -> Tensor | None:
        if self.config.norm_before_fc:
            return self.draft.input_norm.weight
        if not self.config.fc_norm:
            return None
        return torch.cat([norm.weight for norm in self.draft.fc_norm if isinstance(norm, Norm)])

    def fuse(self) -> Float[Tensor, "T H"]:
        """The fused features of every slot, what step 0 starts from."""
        features = self._features.to(self.dtype)
        if self.config.norm_before_fc:
            features = unweighted_norm(features.flatten(1), self.eps)
        elif self.config.fc_norm:
            features = unweighted_norm(features, self.eps)
        return linear(features.flatten(1), self._fc)

    def step(
        self, step: int, features: Tensor, keys: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """One step: features in, the same draft's next features out.

        Args:
            step: k; decides token, position and which keys are seen.
            features: of every slot at step 0, of every row after it.
            keys: for each earlier step, one tensor per layer.
            values: likewise.

        Returns:
            The rows' states for the head (normed), their features for the next step, and this step's keys and values,
            one per layer.
        """
        hidden, own_keys, own_values = features, [], []
        for i in range(self.config.num_layers):
            residual, change, key, value = self._layer(i, step, hidden, [k[i] for k in keys], [v[i] for v in values])
            if i < self.config.num_layers - 1:
                hidden = residual + change
            own_keys.append(key)
            own_values.append(value)
        hidden, normed = add_rms_norm(residual, change, self.draft.norm.weight, self.eps)
        return normed, normed if self.config.norm_output else hidden, own_keys, own_values

    def _layer(
        self, i: int, step: int, hidden: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A decoder layer up to its last addition, which the caller joins with the norm that follows."""
        layer = self.draft.decoder_layers[i]
        # At step 0 every slot gives keys and values; what comes after them is for the rows alone, in the last layer.
        last = i == self.config.num_layers - 1
        first_norm = layer.hidden_norm if i == 0 else layer.input_layernorm
        normed = rms_norm(hidden, first_norm.weight, self.eps)
        residual = normed if i == 0 and self.config.norm_before_residual else hidden
        qkv = linear(normed, self._qkv[i])
        q, key, value = self._heads(layer, qkv, step, self._tokens_at(step) if i == 0 else None)
        if step == 0 and last and not self.plan.all_rows:
            q, residual = take_rows(q, self.plan.rows), take_rows(residual, self.plan.rows)
        backend = self._rows_attend if step or last else self._slots_attend
        attended = ttt_attention(backend, self.scale, q, [*keys, key], [*values, value])
        residual, normed = add_rms_norm(
            residual, linear(attended.flatten(1), self._o[i]), layer.post_attention_layernorm.weight, self.eps
        )
        return residual, swiglu_linear(linear(normed, self._gate_up[i]), self._down[i]), key, value

    def _tokens_at(self, step: int) -> Added:
        """What the projected tokens of this step add to the projected features."""
        if step == 0:
            return Added(self._projected_tokens, None, None)
        return Added(self._projected_tokens, self.plan.shifted[step], self.plan.unshifted[step])

    def _heads(self, layer: DecoderLayer, qkv: Tensor, step: int, tokens: Added | None) -> tuple[Tensor, ...]:
        """Queries, keys and values of a step, turned to their positions."""
        rotary_dim, q_heads, kv_heads = self.draft.rope.rotary_dim, self.config.num_heads, self.config.num_kv_heads
        tables, heads = self._row_tables[step] if step else self._slot_tables, (q_heads, kv_heads, kv_heads)
        if self.config.arch == "qwen3":
            qkv, tokens = self._norm_heads(layer, qkv if tokens is None else add_rows(qkv, tokens)), None
        return rope_heads(qkv, *tables, rotary_dim, heads, tokens)

    def _norm_heads(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split(list(self.config.qkv_sizes), dim=1)
        size = self.config.head_dim
        q = rms_norm(q.reshape(-1, size), layer.self_attn.q_norm.weight, self.eps).view(q.shape)
        k = rms_norm(k.reshape(-1, size), layer.self_attn.k_norm.weight, self.eps).view(k.shape)
        return torch.cat([q, k, v], dim=1)
