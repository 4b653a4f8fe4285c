"""Files and data sets of speculators 0.9.0, by its own code: it reads ours, and we read its."""

import dataclasses
import json
import sys
from pathlib import Path

import datasets
import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_datamodule import Recorder
from toy_engine import ToyDataModule, states
from toy_target import make_target

from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    SourceOptions,
    TargetOptions,
)
from eagle3_lightning.stream.files import FinalNorm, StoredSample
from eagle3_lightning.target import inspect_target, load_final_norm

pytestmark = pytest.mark.data
hs_connectors = pytest.importorskip("hs_connectors")
speculators_data = pytest.importorskip("speculators.train.data")


class NoEngine(ToyDataModule):
    def _make_extractor(self, run_dir, world_size):
        raise AssertionError("vLLM was started")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TargetOptions(str(make_target(tmp_path_factory.mktemp("target"))))


def fit(target, kind, prompts, cache=None):
    sampling = SamplingOptions(max_new_tokens=9) if kind is ToyDataModule else None  # states are read as they are
    data = kind(
        target, prompts, sampling, EngineOptions(max_model_len=512),
        batch=BatchOptions(pack_tokens=160, static_shapes=False), cache=cache, run_dir=Path(target.path) / "run",
    )  # fmt: skip
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=1)  # fmt: skip
    module = Recorder()
    trainer.fit(module, data)
    return module, data


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_speculators_reads_what_a_run_kept(target, tmp_path, dtype):
    lines = [json.dumps({"prompt": f"count to {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cache = CacheOptions(tmp_path / "cache", dtype=dtype)
    fit(target, ToyDataModule, PromptOptions([str(tmp_path / "a.jsonl")], val_fraction=0.0), cache=cache)
    place = tmp_path / "cache/train"
    transfer = (hs_connectors.FileTransfer if dtype == "target" else hs_connectors.transfer.FP8Transfer)(
        place / "hidden_states", **({} if dtype == "target" else {"dequantize_dtype": torch.float32})
    )
    theirs = speculators_data.ArrowDataset(512, place, transfer=transfer, on_missing="skip")
    norm = FinalNorm(load_final_norm(inspect_target(target)), 1e-5)
    checked = 0
    for row in range(len(theirs)):
        if not (file := place / f"hidden_states/hs_{row}.safetensors").exists():
            continue  # an answer of one token, which is not kept
        item = theirs[row]
        ours = StoredSample(file, "train", row, norm, torch.float32)
        expected = states(ours.token_ids)
        tolerance = 1e-6 if dtype == "target" else 0.06
        assert item["input_ids"].tolist() == ours.token_ids
        marked = [any(a <= i < b for a, b in ours.spans) for i in range(ours.num_rows)]
        assert item["loss_mask"].bool().tolist() == marked
        features = item["hidden_states"].view(ours.num_rows, 3, 8)
        assert (features - expected[:, :3]).norm() <= tolerance * expected[:, :3].norm()
        # What its verifier_norm makes of the last state is the teacher that we train with.
        teacher = norm.apply(item["verifier_last_hidden_states"], torch.float32)
        assert (teacher - expected[:, 3]).norm() <= max(tolerance, 1e-4) * expected[:, 3].norm()
        checked += 1
    assert checked > 12


@pytest.mark.parametrize("fp8", [False, True])
def test_a_data_set_of_speculators_trains_here(target, tmp_path, fp8):
    from speculators.data_generation.preprocessing import build_speculator_training_dataset

    rows = [{"input_ids": list(range(i, i + 12)), "loss_mask": [0] * 5 + [1] * 7} for i in range(15)]
    table = build_speculator_training_dataset(datasets.Dataset.from_list(rows), processor=None, num_proc=1)
    place = tmp_path / "theirs"
    table.save_to_disk(place)
    (place / "hidden_states").mkdir()
    for row, item in enumerate(rows):
        ids = torch.tensor(item["input_ids"])
        hidden = states(item["input_ids"])
        hidden[:, -1] *= 3.0  # before the norm, a last state has any length
        tensors = {"hidden_states": hidden, "token_ids": ids}
        if fp8:
            quantized, scales = hs_connectors.fp8_utils.quantize_tensor_to_fp8(hidden)
            tensors |= {"hidden_states": quantized, hs_connectors.fp8_utils.SCALES_KEY: scales}
        save_file(tensors, place / f"hidden_states/hs_{row}.safetensors")
    source = SourceOptions(str(place), layers=[2, 4, 5], layer_convention="vllm")
    module, data = fit(target, NoEngine, PromptOptions([source], val_fraction=0.0))
    assert sorted(i for batch in module.batches for i in batch.sample_ids) == list(range(15))
    batch = module.batches[0]
    first = data._streams["train"].load(batch.sample_ids[0])
    expected = states(first.token_ids)
    tolerance = 0.06 if fp8 else 1e-4
    assert batch.ids[:11].tolist() == first.token_ids[1:]
    assert batch.mask[:11].tolist() == [False] * 4 + [True] * 7
    assert (batch.features[:11] - expected[:-1, :3]).norm() <= tolerance * expected[:-1, :3].norm()
    assert (batch.teacher[:11] - expected[1:, 3]).norm() <= tolerance * expected[1:, 3].norm()
    assert dataclasses.asdict(source)["layer_convention"] == "vllm"


def test_a_mask_that_belongs_to_other_tokens_is_refused(target, tmp_path, caplog):
    rows = [{"input_ids": [i, 1, 2, 3], "loss_mask": [0, 0, 1, 1], "seq_len": 4} for i in range(6)]
    place = tmp_path / "theirs"
    datasets.Dataset.from_list(rows).save_to_disk(place)
    (place / "hidden_states").mkdir()
    for row, item in enumerate(rows):
        ids = item["input_ids"] if row != 3 else [9, 9, 9, 9]
        tensors = {"hidden_states": states(ids), "token_ids": torch.tensor(ids)}
        save_file(tensors, place / f"hidden_states/hs_{row}.safetensors")
    source = SourceOptions(str(place), layers=[2, 4, 5], layer_convention="vllm")
    module, _ = fit(target, NoEngine, PromptOptions([source], val_fraction=0.0))
    assert "hs_3.safetensors: its token ids are not those of row 3" in caplog.text
    assert len({i for batch in module.batches for i in batch.sample_ids}) == 5
