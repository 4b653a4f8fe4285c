"""The config.json of an exported draft, in the speculators format that `vllm serve` reads.

vLLM builds the draft's configuration from `transformer_layer_config` without filling in any default, and different
versions read different spellings of the rotary parameters, so every field is written out, in both spellings.
Source: vllm/transformers_utils/configs/speculators/{base,algos}.py, versions 0.16.0 to 0.33.0.
"""

from typing import Any

from packaging.version import InvalidVersion, Version

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.target import TargetInfo

OLDEST_VLLM = "0.16"
SCHEMA_VERSION = "0.9.0"  # of speculators, whose model class loads what is written here


def speculators_config(
    draft: DraftConfig,
    target: TargetInfo,
    layers: LayerPlan,
    *,
    target_name: str,
    num_speculative_tokens: int,
    dtype: str,
) -> dict[str, Any]:
    """The whole config.json.

    Args:
        draft: sizes and flags of the draft.
        target: the target that it was trained for.
        layers: auxiliary layers, written in vLLM's numbers.
        target_name: the target as `vllm serve DIR` shall load it, a hub id or a path.
        num_speculative_tokens: tokens that `vllm serve DIR` proposes in a round.
        dtype: of the tensors, for example `bfloat16`.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SCHEMA_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(target.architectures)},
        },
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": None,  # same as the draft's own
        "eagle_aux_hidden_state_layer_ids": list(layers.aux_vllm),
        # Absent, vLLM takes norm_before_residual for true and speculators for false.
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformer_layer_config": _layer_config(draft, dtype),
    }


def needed_vllm(draft: DraftConfig) -> dict[str, str]:
    """What this draft asks of vLLM beyond the oldest supported one: option -> first version that serves it."""
    needs = {}
    if draft.norm_before_fc:
        needs["model.draft.norm_before_fc"] = "0.19"
    if draft.fc_norm:
        needs["model.draft.fc_norm"] = "0.25"
    if draft.norm_output:
        needs["model.draft.norm_output"] = "0.25"
    if draft.arch != "llama":
        needs["model.draft.arch"] = "0.25"
    return needs


def check_servable(draft: DraftConfig, vllm_version: str) -> None:
    """Refuse a draft that the stated vLLM would refuse, or load and serve wrongly.

    Raises:
        ConfigError: no version number, one older than this project supports, or a flag that it does not know.
    """
    try:
        version = Version(vllm_version)
    except InvalidVersion as error:
        raise ConfigError(
            "--vllm-version",
            vllm_version,
            "it is not a version number",
            "Write it as `vllm --version` prints it, for example 0.25.1.",
        ) from error
    if version < Version(OLDEST_VLLM):
        raise ConfigError(
            "--vllm-version",
            vllm_version,
            f"drafts are exported for vLLM {OLDEST_VLLM} and newer",
            f"Serve with vLLM {OLDEST_VLLM} or newer.",
        )
    for option, first in needed_vllm(draft).items():
        if version < Version(first):
            value = getattr(draft, option.rsplit(".", 1)[1])
            raise ConfigError(
                option,
                value,
                f"vLLM {vllm_version} cannot serve it, the first that can is {first}",
                "Serve with a newer vLLM, or train without the option.",
            )


def _layer_config(draft: DraftConfig, dtype: str) -> dict[str, Any]:
    rope = dict(draft.rope)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    windowed = draft.sliding_window is not None
    config = {
        "model_type": draft.arch,
        "vocab_size": draft.vocab_size,  # the target's: ids go in as the target's, only logits are in the draft's
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": draft.num_layers,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",  # the only one that vLLM's Llama and Qwen3 layers take
        "rms_norm_eps": draft.rms_norm_eps,
        # Shorter than the target's, and vLLM stops drafting for a whole batch once one sequence passes it.
        "max_position_embeddings": draft.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * draft.num_layers,
        "sliding_window": draft.sliding_window,
        "use_sliding_window": windowed,
        "num_aux_hidden_states": draft.num_aux,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config


def draft_config(config: dict[str, Any]) -> DraftConfig:
    """The draft that an exported config.json describes; its feature scale is folded into the weights."""
    layer = config["transformer_layer_config"]
    return DraftConfig(
        arch=layer["model_type"],
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_layers=layer["num_hidden_layers"],
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        num_aux=len(config["eagle_aux_hidden_state_layer_ids"]),
        rms_norm_eps=layer["rms_norm_eps"],
        rope=layer["rope_parameters"],
        max_position_embeddings=layer["max_position_embeddings"],
        norm_before_residual=config["norm_before_residual"],
        norm_before_fc=config["norm_before_fc"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        feature_scale=False,
        sliding_window=layer["sliding_window"],
    )
