"""Whether a draft's tensors are those that its config.json describes, from the headers of its safetensors alone.

vLLM says nothing of a tensor that is missing: the draft is served with zeros or noise in its place. Of the others it
says so after its start, at the end of a log.
"""

from typing import Any

from eagle3_lightning.checkpoint_files import CheckpointFiles
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import WEIGHTS_FILE, ExportedDraft

AGAIN = "Export the draft again."
_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")
# What vLLM takes or passes over, whatever config.json says. speculators writes the embeddings.
_ALLOWED = ("t2d", "mask_hidden", "embed_tokens.weight", "input_norm.weight")
_Shapes = dict[str, tuple[int, ...]]


def check_weights(draft: ExportedDraft, option: str) -> None:
    """Refuse a draft whose weights are not whole or not those of its config.json, before vLLM looks for them.

    Raises:
        ConfigError: no weights, a file cut short, or a tensor that is missing, unknown, or of another shape or kind.
    """
    if not any((draft.path / name).is_file() for name in (WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json")):
        raise ConfigError(option, str(draft.path), f"there is no {WEIGHTS_FILE} in it", AGAIN)
    files = CheckpointFiles(draft.path, str(draft.path), option=option, remedy=AGAIN)
    # Some tools call the only layer so; vLLM takes both names.
    found = {name.replace("midlayer.", "layers.0."): (kind, tuple(shape)) for name, kind, shape in files.headers()}
    layer = draft.config["transformer_layer_config"]
    if draft.config.get("quantization_config") or layer.get("quantization_config"):
        return  # the names and shapes are those of its kind
    try:
        needed, optional = _shapes(draft.config)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return  # of another tool, which leaves sizes to the defaults of vLLM
    if fault := _fault(found, needed, optional):
        raise ConfigError(option, str(draft.path), fault, AGAIN)


def _fault(found: dict[str, tuple[str, tuple[int, ...]]], needed: _Shapes, optional: _Shapes) -> str | None:
    """The first thing that is wrong."""
    if missing := [name for name in needed if name not in found]:
        return f"{_count(missing)} missing that its config.json needs, the first is {missing[0]}"
    known = needed | optional
    modules = {name.rpartition(".")[0] for name in known} - {""}
    odd = [n for n in found if n not in known and n not in _ALLOWED and n.rpartition(".")[0] not in modules]
    if odd:
        return f"{_count(odd)} there that its config.json does not know, the first is {odd[0]}"
    for name, shape in known.items():
        if name not in found:
            continue
        kind, own = found[name]
        if own != shape:
            return f"{name} has shape {list(own)} and its config.json says {list(shape)}"
        if kind not in (_INTEGERS if name == "d2t" else _FLOATS):
            return f"{name} is stored as {kind}"
    return None


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _shapes(config: dict[str, Any]) -> tuple[_Shapes, _Shapes]:
    """What must be there, and what may be, with the defaults that vLLM has for what config.json leaves out."""
    layer = config["transformer_layer_config"]
    hidden, heads, vocab = int(layer["hidden_size"]), int(layer["num_attention_heads"]), int(layer["vocab_size"])
    width = int(config.get("target_hidden_size") or hidden)  # of what it reads of the target
    num_aux = int(
        layer.get("num_aux_hidden_states") or len(config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    )
    draft_vocab = int(config.get("draft_vocab_size") or vocab)
    needed: _Shapes = {"fc.weight": (hidden, num_aux * width), "norm.weight": (hidden,)}
    optional: _Shapes = {"embed_tokens.weight": (vocab, width)}
    head = {"lm_head.weight": (draft_vocab, hidden)}
    if draft_vocab == vocab:
        optional |= {**head, "d2t": (vocab,)}  # else the target's own head; vLLM before 0.30 takes a mapping
    else:
        needed |= {**head, "d2t": (draft_vocab,)}
    if config.get("norm_before_fc"):
        needed["input_norm.weight"] = (num_aux * width,)
    if config.get("fc_norm"):
        needed |= {f"fc_norm.{i}.weight": (width,) for i in range(num_aux)}
    for number in range(int(layer["num_hidden_layers"])):
        needed |= _layer_shapes(f"layers.{number}.", layer, hidden, heads, first=number == 0)
        optional[f"layers.{number}.hidden_norm.weight"] = (hidden,)
    return needed, {name: shape for name, shape in optional.items() if name not in needed}


def _layer_shapes(prefix: str, layer: dict[str, Any], hidden: int, heads: int, first: bool) -> _Shapes:
    head_dim = int(layer.get("head_dim") or hidden // heads)
    keys, inner = int(layer.get("num_key_value_heads") or heads) * head_dim, int(layer["intermediate_size"])
    read = 2 * hidden if first else hidden  # the first layer reads embeddings beside features
    shapes: _Shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head_dim, read),
        "self_attn.k_proj": (keys, read),
        "self_attn.v_proj": (keys, read),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if first:
        shapes["hidden_norm"] = (hidden,)
    if layer.get("model_type") == "qwen3":
        shapes |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
