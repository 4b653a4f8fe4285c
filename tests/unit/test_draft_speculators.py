"""The same mathematics as speculators 0.9.0's own Eagle3 model: same weights, same batch, its eager attention."""

import pytest
import torch
from draft_helpers import make_draft, run_step
from draft_reference import make_batch, make_config
from torch import Tensor

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.model import Eagle3Draft

pytest.importorskip("speculators", reason="speculators is a development dependency (make test installs it)")

# Prompts as long as the unroll: speculators shifts masks over document borders, and only masked prompts hide it.
DOCUMENTS = [[False] * 4 + [True] * 9, [False] * 5 + [True] * 3, [False] * 4 + [True] * 4 + [False] * 4 + [True] * 3]
FLAGS = {
    "residual_normed": {"norm_before_residual": True},
    "residual_raw": {"norm_before_residual": False},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle_3_1": {"fc_norm": True, "norm_output": True},
    "qwen3": {"arch": "qwen3"},
    "two_layers": {"num_layers": 2},
}


def make_peer(draft: Eagle3Draft, target_head: Tensor) -> torch.nn.Module:
    """speculators' model with the weights of `draft`; the feature scale is folded into fc as an export does."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    c = draft.config
    layer = (LlamaConfig if c.arch == "llama" else Qwen3Config)(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope["rope_theta"]},
    )
    layer._attn_implementation = "eager"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=c.draft_vocab_size,
            norm_before_residual=c.norm_before_residual,
            norm_before_fc=c.norm_before_fc,
            fc_norm=c.fc_norm,
            norm_output=c.norm_output,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    model.load_vocab_mappings(draft.t2d.clone(), draft.d2t.clone())
    weights = {name: value.detach().clone() for name, value in draft.state_dict().items() if name != "feature_scale"}
    weights["fc.weight"] *= draft.feature_scale.flatten()
    weights["embed_tokens.weight"] = draft.embed_tokens.weight.clone()
    weights["verifier_lm_head.weight"] = target_head[draft.draft_token_ids].clone()
    weights["verifier_norm.weight"] = torch.ones(c.hidden_size)
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("flags", FLAGS)
def test_loss_of_each_step_is_theirs(flags: str) -> None:
    from speculators.losses import resolve_loss_config

    config: DraftConfig = make_config(**FLAGS[flags])
    draft, target_head = make_draft(config, torch.float32)
    peer = make_peer(draft, target_head)
    batch = make_batch(DOCUMENTS, config, dtype=torch.float32)
    with torch.no_grad():  # they norm the teacher's state themselves; ours comes normed
        batch.teacher = peer.verifier_norm(batch.teacher)
    num_steps = 3
    head, plan = run_step(draft, target_head, batch, num_steps)
    _, loss, metrics = peer(
        hidden_states=batch.features.flatten(1)[None],
        input_ids=batch.ids[None],
        document_ids=batch.doc[None],
        loss_mask=batch.mask[None],
        position_ids=batch.pos[None] + 1,
        verifier_last_hidden_states=batch.teacher[None],
        ttt_steps=num_steps,
        ttt_step_loss_decay=1.0,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    ours = [part.mean() for part in head.kl.split(list(plan.pairs_per_step))]
    for k in range(num_steps):
        assert abs(float(ours[k]) - float(metrics[f"loss_{k}_sum"])) < 1e-4
    loss.backward()
    (head.loss / plan.num_supervised).backward()
    theirs = dict(peer.named_parameters())
    for name, p in draft.named_parameters():
        if p.requires_grad:
            wanted = theirs[name].grad
            if name == "fc.weight":
                wanted = wanted * draft.feature_scale.flatten()
            torch.testing.assert_close(p.grad, wanted, rtol=2e-3, atol=2e-5, msg=name)
