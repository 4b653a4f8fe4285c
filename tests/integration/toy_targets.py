"""Toy checkpoints with random weights whose layers all matter: each adds about as much as the stream already holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Multi-head latent attention, as small as vLLM's CPU kernels take it (they are compiled for ranks of 512 + 64).
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    # As the published ones have it; and with plain rotary embeddings vLLM's CPU kernel turns only the first head of a
    # query of three dimensions, so that its DeepSeek is another model (measured on 0.32.0).
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
}


def _config(kind: str, **own: Any) -> Callable[..., Any]:
    def make(**sizes: Any) -> Any:
        import transformers

        return getattr(transformers, kind)(**{**COMMON, **own, **sizes})

    return make


# Transformers' configuration does not know the last of these; vLLM would take softmax without it.
V3 = {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALL: dict[str, Callable[..., Any]] = {
    "llama": _config("LlamaConfig", head_dim=32),
    # Heads of 32: the smallest that vLLM's CPU attention is compiled for, on every version.
    "qwen2": _config("Qwen2Config", num_attention_heads=2, num_key_value_heads=1),
    "qwen3": _config("Qwen3Config", head_dim=32),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=32, norm_topk_prob=True, mlp_only_layers=[], **MOE),
    "gpt_oss": _config(
        "GptOssConfig", head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=64, intermediate_size=64
    ),
    "gemma2": _config(
        # `hidden_act` as published: vLLM reads it, and this Transformers class does not write it.
        "Gemma2Config", head_dim=32, sliding_window=64, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    "gemma3": _config("Gemma3TextConfig", head_dim=32, sliding_window=64),
    "deepseek_v2": _config(
        "DeepseekV2Config", topk_method="greedy", norm_topk_prob=False, scoring_func="softmax", **MLA
    ),
    "deepseek_v3": _config("DeepseekV3Config", **V3, **MLA),
    "kimi_61": _config("DeepseekV3Config", **V3, **MLA, num_hidden_layers=61),
}  # fmt: skip


def _kimi_k25(**sizes: Any) -> Any:
    from transformers import Kimi_K25Config

    vision = {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    ids = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    text = ALL["kimi_61"](**sizes)
    text.architectures = ["DeepseekV3ForCausalLM"]
    return Kimi_K25Config(
        text_config=text.to_dict(), vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False, **ids
    )


ALL["kimi_k25"] = _kimi_k25


def make_toy(name: str, path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> Path:
    """Write a toy checkpoint, as `save_pretrained` does."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = ALL[name](**sizes)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.add_(0.1 * noise)  # around 1, or around 0 where the norm multiplies by 1 + weight
            elif parameter.dim() >= 2:
                scale = 1.0 if "embed_tokens" in key else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
            else:
                parameter.copy_(0.02 * noise)  # biases, sinks
    model.save_pretrained(path)
    if name == "kimi_k25":
        _rename_as_published(path)
    return path


def _rename_as_published(path: Path) -> None:
    """Transformers 5.19 writes Kimi-K2.5's text layers as `blocks` and has a class name of its own."""
    file = path / "model.safetensors"
    tensors = {
        key.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model."): value
        for key, value in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = path / "config.json"
    config.write_text(config.read_text().replace("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"))


def make_int4_toy(packed: Path, dequantized: Path, group: int = 32) -> tuple[Path, Path]:
    """A Llama with int4 weights in compressed-tensors' `pack-quantized` format, and the same with plain weights."""
    make_toy("llama", dequantized, torch.bfloat16, hidden_size=256, intermediate_size=512, head_dim=64)
    tensors = load_file(dequantized / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for key, weight in tensors.items():
        if not key.endswith("proj.weight"):
            stored[key] = weight
            continue
        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // group, group)
        scale = (groups.abs().amax(dim=2, keepdim=True) / 7).to(weight.dtype)
        whole = (groups / scale.float()).round().clamp(-8, 7)
        tensors[key] = (whole * scale.float()).view(rows, columns).to(weight.dtype)
        nibbles = (whole.view(rows, columns // 8, 8) + 8).long() << (4 * torch.arange(8))
        words = nibbles.sum(dim=2)
        stem = key.removesuffix("weight")
        stored[stem + "weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
        stored[stem + "weight_scale"] = scale.squeeze(2)
        stored[stem + "weight_shape"] = torch.tensor([rows, columns])
    save_file(tensors, dequantized / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = json.loads((dequantized / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (packed / "config.json").write_text(json.dumps(config))
    return packed, dequantized
