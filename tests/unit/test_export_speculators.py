"""speculators' own EAGLE-3 class loads an export and computes the same logits, step after step."""

from pathlib import Path

import pytest
import torch
from export_support import LAYERS, make_draft, make_target
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.model import Eagle3Draft, Unroll
from eagle3_lightning.draft.plan import plan_unroll
from eagle3_lightning.export.read import read_export
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.export.start import load_start, open_start
from eagle3_lightning.export.weights import check_weights
from eagle3_lightning.target import TargetInfo, load_embeddings

SLOTS, STEPS = 24, 3
VARIANTS = {
    "llama": {},
    "full vocabulary": {"draft_vocab_size": None},
    "residual before the norm": {"norm_before_residual": False},
    "norm before fc": {"norm_before_fc": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "qwen3": {"arch": "qwen3"},
    "sliding window": {"sliding_window": 4},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_same_logits_in_speculators(tmp_path: Path, options: dict[str, object]) -> None:
    target = make_target(tmp_path / "target")
    draft = make_draft(target, **options)
    out = export_draft(
        draft,
        tmp_path / "out",
        target=target,
        layers=LAYERS,
        target_name=str(target.path),
        num_speculative_tokens=STEPS,
        vllm_version=None,
    ).path
    check_weights(read_export(out, "--draft"), "--draft")
    batch = make_batch(target, draft)
    ours, theirs = our_logits(draft, batch), speculators_logits(out, target, batch)
    for step in range(STEPS):
        rows = SLOTS - step  # later slots have no token at this step
        spread = ours[step][:rows] - ours[step][:rows].mean(-1, keepdim=True)
        error = (theirs[step][:rows] - ours[step][:rows]).norm() / spread.norm()
        assert error < 0.03, f"step {step}: {error}"  # bf16 weights against float32 ones
        assert (theirs[step][:rows].argmax(-1) == ours[step][:rows].argmax(-1)).float().mean() > 0.9
    check_start(target, draft, tmp_path / "theirs")


def check_start(target: TargetInfo, draft: Eagle3Draft, written: Path) -> None:
    """Training can start from what speculators' class has written, with the draft's own logits."""
    started = Eagle3Draft(draft.config, torch.bfloat16)
    started.embed_tokens.weight.copy_(load_embeddings(target))
    started.set_feature_rms(torch.rand(3, target.hidden_size) + 0.5)
    load_start(started, open_start(str(written), draft.config, target, LAYERS), target)
    batch = make_batch(target, draft)
    for own, again in zip(our_logits(draft, batch), our_logits(started, batch), strict=True):
        assert (own - again).norm() / (own - own.mean(-1, keepdim=True)).norm() < 0.03


def make_batch(target: TargetInfo, draft: Eagle3Draft) -> Eagle3Batch:
    generator = torch.Generator().manual_seed(3)
    return Eagle3Batch(
        ids=torch.randint(target.vocab_size, (SLOTS,), generator=generator),
        features=torch.randn(SLOTS, 3, target.hidden_size, generator=generator) / draft.feature_scale,
        teacher=torch.zeros(SLOTS, target.hidden_size),
        mask=torch.ones(SLOTS, dtype=torch.bool),
        doc=torch.zeros(SLOTS, dtype=torch.int64),
        pos=torch.arange(SLOTS),
        sample_ids=[0],
    )


@torch.no_grad()
def our_logits(draft: Eagle3Draft, batch: Eagle3Batch) -> list[Tensor]:
    unroll = Unroll(draft, batch, plan_unroll(batch, STEPS), torch.float32, attention="sdpa")
    features, keys, values, logits = unroll.fuse(), [], [], []
    for step in range(STEPS):
        states, features, key, value = unroll.step(step, features, keys, values)
        keys.append(key)
        values.append(value)
        logits.append(states @ draft.lm_head.weight.float().t())
    return logits


@torch.no_grad()
def speculators_logits(out: Path, target: TargetInfo, batch: Eagle3Batch) -> list[Tensor]:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(str(out))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(out), config=config).float()
    # speculators 0.9.0 with Transformers 5.19 leaves absent embeddings at zero instead of reading the verifier's.
    model.embed_tokens.weight.copy_(load_embeddings(target))
    # What its trainer writes, embeddings among it, the bench must take.
    model.to(torch.bfloat16).save_pretrained(str(out.parent / "theirs"))
    written = read_export(out.parent / "theirs", "--draft")
    assert "embed_tokens.weight" in load_file(written.path / "model.safetensors")
    check_weights(written, "--draft")
    model.float()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    model(
        hidden_states=batch.features.flatten(1)[None],
        input_ids=batch.ids[None],
        document_ids=batch.doc[None],
        ttt_steps=STEPS,
    )
    return logits
