"""Drafts, batches and one training step without a Trainer, for the tests of `draft/`."""

import torch
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.loss import HeadOutput
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.draft.plan import UnrollPlan, plan_unroll
from eagle3_lightning.draft.ttt import ttt_loss
from eagle3_lightning.options import LossOptions


def make_draft(config: DraftConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Eagle3Draft, Tensor]:
    """A draft with every weight random (norms too), and its target's lm_head [V, H]."""
    torch.manual_seed(seed)
    draft = Eagle3Draft(config, torch.float64).double()
    g = torch.Generator().manual_seed(seed + 1)
    for p in draft.parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
        p.data.copy_(1 + 0.2 * noise if p.ndim == 1 else noise * p.shape[1] ** -0.5)
    draft.embed_tokens.weight.copy_(torch.randn(draft.embed_tokens.weight.shape, generator=g, dtype=torch.float64))
    draft.feature_scale.copy_(0.5 + torch.rand(draft.feature_scale.shape, generator=g, dtype=torch.float64))
    chosen = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
    draft.set_vocab(chosen - torch.arange(len(chosen)))
    target_head = torch.randn(config.vocab_size, config.hidden_size, generator=g, dtype=torch.float64) * 0.3
    if not config.train_head:
        draft.lm_head.weight.data.copy_(target_head[draft.draft_token_ids])
    return draft.to(dtype), target_head.to(dtype)


def run_step(
    draft: Eagle3Draft,
    target_head: Tensor,
    batch: Eagle3Batch,
    num_steps: int,
    decay: float = 1.0,
    dtype: torch.dtype | None = None,
    attention: str = "auto",
) -> tuple[HeadOutput, UnrollPlan]:
    """Forward pass of the unroll and the head."""
    plan = plan_unroll(batch, num_steps)
    options = LossOptions(num_steps, decay, attention)  # type: ignore[arg-type]
    teacher_head = target_head[draft.draft_token_ids]
    return ttt_loss(draft, batch, plan, options, dtype or draft.fc.weight.dtype, teacher_head, want_best=True), plan


def named_weights(draft: Eagle3Draft, target_head: Tensor) -> dict[str, Tensor]:
    """Weights and buffers in float64 leaves for the reference."""
    weights = {n: p.detach().double().clone().requires_grad_(p.requires_grad) for n, p in draft.named_parameters()}
    buffers = {n: b.double() if b.is_floating_point() else b for n, b in draft.named_buffers()}
    return {**weights, **buffers, "target_head": target_head.double()}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
