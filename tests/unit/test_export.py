"""What an export holds, what it refuses, and that a failure leaves the earlier one whole."""

import json
import resource
from pathlib import Path

import pytest
import torch
from export_support import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, make_draft, make_target
from safetensors.torch import load_file, save_file

from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import check_target, read_export
from eagle3_lightning.export.speculators import Export, export_draft
from eagle3_lightning.export.verify import check_logits
from eagle3_lightning.target import TargetInfo


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


def export(draft: Eagle3Draft, target: TargetInfo, out: Path, vllm_version: str | None = "0.32.0") -> Export:
    return export_draft(
        draft,
        out,
        target=target,
        layers=LAYERS,
        target_name="org/tiny",
        num_speculative_tokens=3,
        vllm_version=vllm_version,
    )


def test_config_says_everything_that_vllm_does_not_default(target: TargetInfo, tmp_path: Path) -> None:
    export(make_draft(target), target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model_type" not in config  # vLLM takes the directory for a speculators one only without it
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # our 1, 3, 4
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    flags = {key: config[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    assert flags == {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    layer = config["transformer_layer_config"]
    assert (layer["vocab_size"], layer["hidden_size"], layer["head_dim"]) == (VOCAB, HIDDEN, 16)
    assert (layer["max_position_embeddings"], layer["rms_norm_eps"], layer["hidden_act"]) == (256, 1e-5, "silu")
    # Both spellings: vLLM before 0.17 knows only the old one.
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert (layer["rope_theta"], layer["rope_scaling"]) == (5000.0, None)


def test_tensors_are_those_of_the_schema(target: TargetInfo, tmp_path: Path) -> None:
    draft = make_draft(target)
    export(draft, target, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items() if not name.startswith("layers.0.mlp")} == {
        "fc.weight": ((HIDDEN, 3 * HIDDEN), torch.bfloat16),
        "layers.0.input_layernorm.weight": ((HIDDEN,), torch.bfloat16),
        "layers.0.hidden_norm.weight": ((HIDDEN,), torch.bfloat16),
        "layers.0.post_attention_layernorm.weight": ((HIDDEN,), torch.bfloat16),
        "layers.0.self_attn.q_proj.weight": ((64, 2 * HIDDEN), torch.bfloat16),
        "layers.0.self_attn.k_proj.weight": ((32, 2 * HIDDEN), torch.bfloat16),
        "layers.0.self_attn.v_proj.weight": ((32, 2 * HIDDEN), torch.bfloat16),
        "layers.0.self_attn.o_proj.weight": ((HIDDEN, 64), torch.bfloat16),
        "norm.weight": ((HIDDEN,), torch.bfloat16),
        "lm_head.weight": ((DRAFT_VOCAB, HIDDEN), torch.bfloat16),
        "d2t": ((DRAFT_VOCAB,), torch.int64),
        "t2d": ((VOCAB,), torch.bool),
    }
    ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    folded = draft.fc.weight.detach() * draft.feature_scale.flatten()
    torch.testing.assert_close(tensors["fc.weight"].float(), folded, rtol=2**-8, atol=0)


def test_a_full_vocabulary_needs_no_mapping(target: TargetInfo, tmp_path: Path) -> None:
    draft = make_draft(target, draft_vocab_size=None)
    made = export(draft, target, tmp_path / "out")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    assert made.check.relative_error < 0.02


def test_others_may_read_the_weights(target: TargetInfo, tmp_path: Path) -> None:
    export(make_draft(target), target, tmp_path / "out")
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("damage", ["scale", "swap", "vocabulary", "missing"])
def test_loading_back_finds_what_was_written_wrong(target: TargetInfo, tmp_path: Path, damage: str) -> None:
    draft = make_draft(target)
    out = export(draft, target, tmp_path / "out").path
    tensors = load_file(out / "model.safetensors")
    if damage == "scale":
        tensors["fc.weight"] = draft.fc.weight.detach().bfloat16()
    elif damage == "swap":
        tensors["layers.0.self_attn.k_proj.weight"], tensors["layers.0.self_attn.v_proj.weight"] = (
            tensors["layers.0.self_attn.v_proj.weight"],
            tensors["layers.0.self_attn.k_proj.weight"],
        )
    elif damage == "vocabulary":
        tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)  # ids instead of offsets
    else:
        del tensors["norm.weight"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(AssertionError, match="export"):
        check_logits(draft, out)


@pytest.mark.parametrize(
    ("options", "too_old", "good"),
    [
        ({}, "0.15.1", "0.16.0"),
        ({"norm_before_fc": True}, "0.18.2", "0.19.0"),
        ({"fc_norm": True}, "0.24.0", "0.25.1"),
        ({"norm_output": True}, "0.24.0", "0.25.0+cpu"),
        ({"arch": "qwen3"}, "0.24.0", "0.25.1"),
    ],
)
def test_refuses_what_the_serving_vllm_cannot_serve(
    target: TargetInfo, tmp_path: Path, options: dict[str, object], too_old: str, good: str
) -> None:
    draft = make_draft(target, **options)
    with pytest.raises(ConfigError, match=r"0\.16|cannot serve it"):
        export(draft, target, tmp_path / "out", too_old)
    assert not (tmp_path / "out").exists()
    export(draft, target, tmp_path / "out", good)


def test_replaces_an_earlier_export_and_nothing_else(target: TargetInfo, tmp_path: Path) -> None:
    draft, out = make_draft(target), tmp_path / "out"
    export(draft, target, out)
    with torch.no_grad():
        draft.norm.weight.fill_(0.25)
    export(draft, target, out)
    assert load_file(out / "model.safetensors")["norm.weight"].unique().item() == 0.25
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="not empty"):
        export(draft, target, mine)
    with pytest.raises(ConfigError, match="it is a file"):
        export(draft, target, mine / "thesis.txt")
    assert (mine / "thesis.txt").read_text() == "all of it"


def test_a_write_that_fails_leaves_the_earlier_export_whole(target: TargetInfo, tmp_path: Path) -> None:
    draft, out = make_draft(target), tmp_path / "out"
    export(draft, target, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # the config fits, the weights do not
    try:
        with pytest.raises(ConfigError, match="earlier export there is untouched"):
            export(draft, target, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_draft_of_another_target_is_refused(target: TargetInfo, tmp_path: Path) -> None:
    draft = read_export(export(make_draft(target), target, tmp_path / "out").path, "--draft")
    check_target(draft, target, "--draft")
    with pytest.raises(ConfigError, match="another checkpoint"):
        check_target(draft, make_target(tmp_path / "other", seed=5), "--draft")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ("{}", "not an EAGLE-3 draft"),
        ('{"speculators_model_type": "mtp"}', "not an EAGLE-3"),
    ],
)
def test_what_is_no_export_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_export(tmp_path, "--draft")
