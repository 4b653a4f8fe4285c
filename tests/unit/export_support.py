"""A toy target on disk and a random draft for it."""

from dataclasses import replace
from pathlib import Path

import torch
import toy_target

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.options import DraftOptions, TargetOptions
from eagle3_lightning.target import TargetInfo, inspect_target, load_embeddings, load_lm_head

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 258, 40
LAYERS = plan_layers(None, 8)


def make_target(path: Path, seed: int = 0) -> TargetInfo:
    """A toy target, taken for one in bf16 so that the export rounds as a real one does."""
    toy_target.make_target(
        path,
        seed=seed,
        hidden_size=HIDDEN,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        rope_theta=5000.0,
    )
    return replace(inspect_target(TargetOptions(str(path))), dtype="bfloat16")


def make_draft(target: TargetInfo, **options: object) -> Eagle3Draft:
    """A draft with random weights, norms, vocabulary and feature scale, and the target's embeddings."""
    torch.manual_seed(1)
    given = {"draft_vocab_size": DRAFT_VOCAB} | options
    draft = Eagle3Draft(DraftConfig.resolve(DraftOptions(**given), target), torch.bfloat16)  # type: ignore[arg-type]
    draft.embed_tokens.weight.copy_(load_embeddings(target))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.requires_grad:
                parameter.normal_(std=0.1)
    size = draft.config.draft_vocab_size
    ids = torch.randperm(target.vocab_size)[:size].sort().values
    draft.set_vocab(ids - torch.arange(size))
    draft.lm_head.weight.data.copy_(load_lm_head(target, ids))
    draft.set_feature_rms(torch.rand(3, target.hidden_size) * 300 + 0.1)
    return draft
