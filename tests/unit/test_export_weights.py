"""A draft whose weights are not whole, or not those of its config.json, is refused by the bench before vLLM starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_support import LAYERS, make_draft, make_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import CONFIG_FILE, WEIGHTS_FILE, read_export
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.export.weights import check_weights
from eagle3_lightning.serve import child
from eagle3_lightning.serve.bench import BenchOptions, measure

Tensors = dict[str, Tensor]


def export(path: Path, **options: object) -> Path:
    target = make_target(path / "target")
    return export_draft(
        make_draft(target, **options), path / "draft", target=target, layers=LAYERS, target_name=str(target.path),
        num_speculative_tokens=3, vllm_version=None,
    ).path  # fmt: skip


def configured(**changes: object) -> Callable[[Path], None]:
    def edit(draft: Path) -> None:
        config = json.loads((draft / CONFIG_FILE).read_text())
        layer = config["transformer_layer_config"]
        for key, value in changes.items():
            (layer if key in layer else config)[key] = value
        (draft / CONFIG_FILE).write_text(json.dumps(config))

    return edit


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(draft: Path) -> None:
        weights = load_file(draft / WEIGHTS_FILE)
        change(weights)
        save_file(weights, draft / WEIGHTS_FILE)

    return edit


def cut(draft: Path) -> None:
    whole = (draft / WEIGHTS_FILE).read_bytes()
    (draft / WEIGHTS_FILE).write_bytes(whole[: len(whole) // 2])


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda draft: (draft / name).write_text(content) and None


def index(content: object) -> Callable[[Path], None]:
    return text(f"{WEIGHTS_FILE}.index.json", json.dumps(content))


FAULTS = {
    "cut short": (cut, "model.safetensors is not a safetensors file or is cut short"),
    "text": (text(WEIGHTS_FILE, "version https://git-lfs.github.com/spec/v1\n"), "is not a safetensors file"),
    "empty": (text(WEIGHTS_FILE, ""), "is not a safetensors file"),
    "index": (index({"weight_map": {"fc.weight": "b.safetensors"}}), "1 of its 1 weight files are missing"),
    "odd index": (index([1]), r"index.json cannot be read"),
    "no mapping": (tensors(lambda t: t.pop("d2t")), "1 tensor is missing that its config.json needs, the first is d2t"),
    "no layer": (configured(num_hidden_layers=2), "9 tensors are missing that its config.json needs, the first is "
                 "layers.1.input_layernorm.weight"),
    "no norms": (configured(fc_norm=True), "3 tensors are .* the first is fc_norm.0.weight"),
    "unknown": (tensors(lambda t: t.update({"norms.weight": torch.zeros(3)})), "1 tensor is there that its "
                "config.json does not know, the first is norms.weight"),
    "shape": (configured(intermediate_size=48), r"mlp.gate_proj.weight has shape \[64, 32\] and its config.json says "
              r"\[48, 32\]"),
    "heads": (configured(num_key_value_heads=4), r"k_proj.weight has shape \[32, 64\] and .* says \[64, 64\]"),
    "layers read": (configured(num_aux_hidden_states=4), r"fc.weight has shape \[32, 96\] and .* says \[32, 128\]"),
    "vocabulary": (configured(draft_vocab_size=41), r"lm_head.weight has shape \[40, 32\] and .* says \[41, 32\]"),
    "kind": (tensors(lambda t: t.update(d2t=t["d2t"].float())), "d2t is stored as F32"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_the_bench_refuses_it_before_vllm(
    edit: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "run_engine", lambda *args, **options: pytest.fail("vLLM was started"))
    draft = export(tmp_path)
    edit(draft)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    with pytest.raises(ConfigError, match=message) as caught:
        measure(BenchOptions(draft, [tmp_path / "prompts.jsonl"]))
    assert (caught.value.option, caught.value.value) == ("--draft", str(draft))
    assert caught.value.remedy == "Export the draft again."


def renamed(weights: Tensors) -> None:
    for name in [name for name in weights if name.startswith("layers.0.")]:
        weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)


def split(draft: Path) -> None:
    weights = load_file(draft / WEIGHTS_FILE)
    (draft / WEIGHTS_FILE).unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, draft / file)
    index({"weight_map": {name: file for file, part in parts.items() for name in part}})(draft)


ACCEPTED = {
    "midlayer": tensors(renamed),
    "several files": split,
    "embeddings": tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(258, 32)})),
    "norm without its flag": tensors(lambda t: t.update({"input_norm.weight": torch.zeros(96)})),  # vLLM drops it
    "bias": tensors(lambda t: t.update({"fc.bias": torch.zeros(32)})),
    "a size left out": configured(num_aux_hidden_states=None),
    "quantized": configured(quantization_config={"quant_method": "fp8"}, intermediate_size=3),
}  # fmt: skip


@pytest.mark.parametrize("edit", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_other_tools_write_is_taken(edit: Callable[[Path], None], tmp_path: Path) -> None:
    draft = export(tmp_path)
    edit(draft)
    check_weights(read_export(draft, "--draft"), "--draft")
