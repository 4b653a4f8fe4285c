"""What is read of a target, and what is refused, on checkpoints made on the spot."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_target import make_target

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import TargetOptions
from eagle3_lightning.target import inspect_target, load_embeddings, load_lm_head


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def read(path):
    return inspect_target(TargetOptions(str(path)))


def test_sizes_and_names(tmp_path):
    path = make_target(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 257]}))
    info = inspect_target(TargetOptions(str(path), name="org/model"))
    assert (info.hidden_size, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (8, 8, 2, 1, 4)
    assert info.vocab_size == 258
    assert info.dtype == "float32"
    assert info.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert info.eos_token_ids == (5, 257)
    assert info.name == "org/model"
    assert read(path).name == str(path)
    assert (info.logit_scale, info.logit_softcap) == (1.0, None)


def test_embeddings_and_head_rows(tmp_path):
    path = make_target(tmp_path)
    info, tensors = read(path), load_file(path / "model.safetensors")
    assert torch.equal(load_embeddings(info), tensors["model.embed_tokens.weight"])
    assert torch.equal(load_lm_head(info), tensors["lm_head.weight"])
    rows = torch.tensor([7, 3, 200])
    assert torch.equal(load_lm_head(info, rows), tensors["lm_head.weight"][rows])


def test_tied_head_is_the_embedding(tmp_path):
    info = read(make_target(tmp_path, tie_word_embeddings=True))
    assert info.tie_word_embeddings
    assert torch.equal(load_lm_head(info, torch.tensor([1, 2])), load_embeddings(info)[1:3])


def test_without_a_word_and_without_a_head_it_is_tied(tmp_path):
    path = make_target(tmp_path, tie_word_embeddings=True)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]  # as in Gemma's
    (path / "config.json").write_text(json.dumps(config))
    info = read(path)
    assert torch.equal(load_lm_head(info), load_embeddings(info))


def test_text_config_of_a_multimodal_target_in_several_files(tmp_path):
    path = make_target(tmp_path)
    config = json.loads((path / "config.json").read_text())
    outer = {"architectures": ["KimiK25Model"], "model_type": "kimi_k25", "text_config": config}
    (path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    extra = {"language_model.model.layers.61.embed_tokens.weight": torch.zeros(258, 8)}  # of a multi-token head
    embedding = {"language_model.model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    parts = {"a.safetensors": {**embedding, **extra},
             "b.safetensors": {"language_model.lm_head.weight": tensors["lm_head.weight"]}}  # fmt: skip
    for name, part in parts.items():
        save_file(part, path / name)
    index = {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    info = read(path)
    assert (info.model_type, info.architectures) == ("llama", ("KimiK25Model",))
    assert torch.equal(load_embeddings(info), tensors["model.embed_tokens.weight"])
    (path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of its 2 weight files are missing, the first is b.safetensors"):
        read(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
         {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}},
         {"rope_type": "default", "rope_theta": 1e6}),
        ({"partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_rotary_parameters_old_and_new(tmp_path, given, expected):
    assert read(edit_config(make_target(tmp_path), **given)).rope == expected


def test_logit_scale_and_softcap(tmp_path):
    assert read(edit_config(make_target(tmp_path), logits_scaling=8.0)).logit_scale == 0.125
    assert read(edit_config(make_target(tmp_path), logit_scale=0.25)).logit_scale == 0.25
    assert read(edit_config(make_target(tmp_path), final_logit_softcapping=30.0)).logit_softcap == 30.0


def test_fingerprint_follows_the_weights_and_not_the_place(tmp_path):
    one, copy, other = (make_target(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    edit_config(copy, transformers_version="9.9", _name_or_path="elsewhere")
    assert read(one).fingerprint == read(copy).fingerprint
    assert read(one).fingerprint != read(other).fingerprint
    before = read(one).fingerprint
    tensors = load_file(one / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, one / "model.safetensors")
    assert read(one).fingerprint != before
    edit_config(one, rms_norm_eps=1e-6)
    assert read(one).fingerprint not in (before, read(copy).fingerprint)


def bad(tmp_path, kind):
    path = make_target(tmp_path)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    if kind == "no config":
        (path / "config.json").unlink()
    elif kind == "broken config":
        (path / "config.json").write_text('{"hidden_size": ')
    elif kind == "no safetensors":
        weights.rename(path / "pytorch_model.bin")
    elif kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "not safetensors":
        weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "encoder":
        edit_config(path, num_hidden_layers=None)
    elif kind == "no embedding":
        save_file({"lm_head.weight": tensors["lm_head.weight"]}, weights)
    elif kind == "other shape":
        edit_config(path, vocab_size=300)
    elif kind == "quantized":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
        save_file(tensors, weights)
    elif kind == "biased":
        save_file({**tensors, "lm_head.bias": torch.zeros(258)}, weights)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", "holds no config.json, so it is not a checkpoint"),
        ("broken config", "config.json is not JSON"),
        ("no safetensors", "holds no safetensors"),
        ("cut short", "model.safetensors is not a safetensors file or is cut short"),
        ("not safetensors", "model.safetensors is not a safetensors file or is cut short"),
        ("encoder", "num_hidden_layers = None"),
        ("no embedding", "none of its tensors is an embedding"),
        ("other shape", r"shape \[258, 8\] and config.json says \[300, 8\]"),
        ("quantized", "lm_head.weight is stored as I8, so it is quantized"),
        ("biased", "lm_head.bias"),
    ],
)
def test_checkpoints_that_cannot_be_used(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(bad(tmp_path, kind))
    assert str(caught.value).startswith(f"target.path = {str(tmp_path)!r}")


@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/place", "there is no such directory"), ("./nowhere", "there is no such directory"),
     ("justaname", "there is no such directory"), (__file__, "it is a file")],
)  # fmt: skip
def test_paths_that_are_no_checkpoint(path, message):
    with pytest.raises(ConfigError, match=message):
        inspect_target(TargetOptions(path))


def test_a_hub_id_without_a_network_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"target.path = 'no-such-org/no-such-model': no such directory, and the hub"):
        inspect_target(TargetOptions("no-such-org/no-such-model"))
