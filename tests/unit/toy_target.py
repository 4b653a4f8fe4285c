"""Small targets made on the spot: a byte-level tokenizer with any special tokens and template, and random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    plain_added: Sequence[str] = (),
    template: str | None = CHATML,
    **special_names: str,
) -> PreTrainedTokenizerFast:
    """One id for each byte, then the special tokens, then added tokens that are not special (such as <think>)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain_added])
    names = special_names or {"eos_token": specials[-1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


def make_target(path: Path, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0, **config: Any) -> Path:
    """A Llama checkpoint of 8 layers and hidden size 8, of which only embedding, norm and lm_head exist."""
    tokenizer = tokenizer or make_tokenizer()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(path))
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer),
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "dtype": "float32",
        "tie_word_embeddings": False, "eos_token_id": len(tokenizer) - 1, **config,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    rows, hidden = settings["vocab_size"], settings["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(rows, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(rows, hidden, generator=generator),
    }
    if settings["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    return path
