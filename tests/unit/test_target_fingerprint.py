"""The target's fingerprint: which changes of the weights it sees, and what is said of an earlier version's."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_target
from export_support import LAYERS, make_draft, make_target
from safetensors.torch import load_file, save_file

from eagle3_lightning.checkpoint_files import CheckpointFiles
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import PROVENANCE_FILE, check_target, read_export
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.fingerprint import chosen_tensors
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.stream.store import StoreFacts, check_place
from eagle3_lightning.target import inspect_target

EARLIER = "4aac4179e452fe" + "0" * 50
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")  # fmt: skip


def fingerprint(path: Path) -> str:
    return inspect_target(TargetOptions(str(path))).fingerprint


def all_layers(path: Path) -> Path:
    """A toy target of ten of SmolLM2's layers, each tensor longer than what is read of it."""
    toy_target.make_target(path, hidden_size=48)
    tensors = load_file(path / "model.safetensors")
    for layer in range(10):
        for name in MATRICES:
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(48, 48)
    save_file(tensors, path / "model.safetensors")
    return path


def test_any_tensor_that_is_scaled_changes_it(tmp_path: Path) -> None:
    path = all_layers(tmp_path)
    before, seen = fingerprint(path), set()
    entries = CheckpointFiles(path, str(path))._entries
    assert len(entries) == 93
    with (path / "model.safetensors").open("r+b") as file:
        for entry in entries.values():
            size = entry.end - entry.start
            own = os.pread(file.fileno(), size, entry.start)
            os.pwrite(file.fileno(), (np.frombuffer(own, np.float32) * np.float32(1.5)).tobytes(), entry.start)
            seen.add(fingerprint(path))
            os.pwrite(file.fileno(), own, entry.start)
    assert fingerprint(path) == before
    assert len(seen - {before}) == 93


def test_one_file_or_two_are_one_checkpoint(tmp_path: Path) -> None:
    one, two = all_layers(tmp_path / "one"), tmp_path / "two"
    tensors = load_file(one / "model.safetensors")
    toy_target.make_target(two, hidden_size=48)
    (two / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, two / f"model-{number}.safetensors")
    assert fingerprint(one) == fingerprint(two)


def test_of_many_experts_each_layer_and_kind_is_read() -> None:
    """As in Kimi-K2.5: too many tensors for reading all of them, one layer without experts, few kinds in a layer."""
    kinds = ["self_attn.q_a_proj", "self_attn.o_proj", "input_layernorm", "mlp.gate", "mlp.shared_experts.up_proj"]
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(61) for kind in kinds]
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.{part}"
               for layer in range(1, 61) for expert in range(384) for name in ("gate", "up", "down")
               for part in ("weight_packed", "weight_scale")]  # fmt: skip
    chosen = set(chosen_tensors([*names, *experts], 4096))
    assert chosen >= set(names)
    assert len(chosen) == 4096
    spread = {tuple(name.split(".mlp.experts.")[0:1]) + tuple(name.split(".")[-2:]) for name in chosen - set(names)}
    assert len(spread) == 60 * 6
    assert len(chosen_tensors(experts, 100)) == 100


def earlier_export(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    out = export_draft(
        make_draft(target), tmp_path / "out", target=target, layers=LAYERS, target_name="org/tiny",
        num_speculative_tokens=3, vllm_version=None,
    ).path  # fmt: skip
    file = out / PROVENANCE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_fingerprint": EARLIER}))
    check_target(read_export(out, "--draft"), target, "--draft")


def earlier_checkpoint(tmp_path: Path) -> None:
    target = toy_target.make_target(tmp_path / "target")
    module = Eagle3Module(TargetOptions(str(target)), DraftOptions(draft_vocab_size=64), LossOptions(), OptimOptions())
    saved: dict[str, Any] = {}
    module.on_save_checkpoint(saved)
    saved["eagle3"]["target_fingerprint"] = EARLIER
    module.on_load_checkpoint(saved)


def earlier_store(tmp_path: Path) -> None:
    facts = StoreFacts("2-" + "0" * 64, (1, 3), 7, 8, "bfloat16", "t", "t", "p", "s")
    recorded = {"format": 1, **facts.__dict__, "target": EARLIER}
    (tmp_path / "cache.json").write_text(json.dumps(recorded))
    check_place(tmp_path, facts)


@pytest.mark.parametrize("read", [earlier_export, earlier_checkpoint, earlier_store], ids=lambda read: read.__name__)
def test_what_an_earlier_version_wrote_is_not_called_another_target(read: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="form that an earlier version wrote, which cannot be compared") as caught:
        read(tmp_path)
    assert "another" not in caught.value.problem
