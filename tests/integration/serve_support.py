"""A draft whose acceptance is known: it proposes the token before again, by the target's own third auxiliary state.

Its attention and MLP add nothing, `fc` picks the auxiliary state of layer 26 of 30, and norm and head are the target's:
a logit lens on the token that was just read. Where the target repeats itself it is right in every position; elsewhere
almost never. The feature scale is not one, so an export that does not fold it shows.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.export.speculators import Export, export_draft
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.options import DraftOptions, TargetOptions
from eagle3_lightning.target import TargetInfo, inspect_target, load_embeddings, load_lm_head

TARGET = Path(__file__).parents[2] / ".cache" / "target" / "smollm2-135m"


def target_info() -> TargetInfo:
    """SmolLM2-135M-Instruct, as `make target` prepares it."""
    return inspect_target(TargetOptions(str(TARGET)))


@torch.no_grad()
def echo_draft(target: TargetInfo, draft_vocab_size: int | None, **options: Any) -> Eagle3Draft:
    """See the module's docstring."""
    wanted = DraftOptions(draft_vocab_size=draft_vocab_size, norm_before_residual=False, **options)
    draft = Eagle3Draft(DraftConfig.resolve(wanted, target), torch.bfloat16)
    draft.embed_tokens.weight.copy_(load_embeddings(target))
    size = draft.config.draft_vocab_size
    ids = torch.arange(size) + min(16, draft.config.vocab_size - size)  # a reduced vocabulary is shifted by 16
    draft.set_vocab(ids - torch.arange(size))
    draft.lm_head.weight.copy_(load_lm_head(target, ids))
    with safe_open(target.path / "model.safetensors", "pt") as file:
        draft.norm.weight.copy_(file.get_tensor("model.norm.weight"))
    draft.fc.weight.zero_()
    for layer in draft.decoder_layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    rms = torch.linspace(1.0, 50.0, 3 * target.hidden_size).view(3, -1)
    draft.set_feature_rms(rms)
    draft.fc.weight[:, 2 * target.hidden_size :] = torch.diag(rms[2])
    return draft


def export_echo(out: Path, draft_vocab_size: int | None = 40000, **options: Any) -> Export:
    """The echo draft as a served directory; `options` are more of DraftOptions."""
    target = target_info()
    return export_draft(
        echo_draft(target, draft_vocab_size, **options),
        out,
        target=target,
        layers=plan_layers(None, target.num_layers),
        target_name=str(target.path),
        num_speculative_tokens=3,
        vllm_version=None,
    )
