"""A small fit with a real vLLM: the same twice, the same when resumed, the same from the disk cache without vLLM."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from eagle3_lightning.datamodule import HiddenStateDataModule
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    DraftOptions,
    EngineOptions,
    LossOptions,
    OptimOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    TargetOptions,
)

SMOLLM2 = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
pytestmark = pytest.mark.vllm


class Losses(pl.Callback):
    """What each step saw, and its loss."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append((trainer.global_step, list(batch.sample_ids), float(outputs["loss"])))


class NoEngine(HiddenStateDataModule):
    def _make_extractor(self, run_dir, world_size):
        raise AssertionError("vLLM was started")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fit")
    topics = ("rivers", "trains", "music", "bread", "winter", "numbers", "birds", "paint", "sleep", "stones")
    rows = [{"prompt": f"Tell me about {t}.", "response": f"Here is what I know about {t}: " * 4} for t in topics]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def fit(place, name, kind=HiddenStateDataModule, cache=None, ckpt_path=None):
    pl.seed_everything(0)
    target = TargetOptions(str(SMOLLM2))
    data = kind(
        target,
        PromptOptions([str(place / "prompts.jsonl")], val_fraction=0.0),
        SamplingOptions(mode="prefill"),
        EngineOptions(max_model_len=256, max_num_seqs=8, enforce_eager=True, start_timeout_s=300.0),
        QueueOptions(capacity_tokens=4096, block_tokens=16),
        BatchOptions(pack_tokens=160, static_shapes=False, calibration_tokens=400),
        cache=cache,
        run_dir=place / name,
    )
    module = Eagle3Module(target, DraftOptions(draft_vocab_size=2048), LossOptions(),
                          OptimOptions(lr=1e-3, warmup_steps=2, schedule="constant"))  # fmt: skip
    losses = Losses()
    saver = pl.callbacks.ModelCheckpoint(place / name, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        callbacks=[losses, saver], num_sanity_val_steps=0, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return losses.rows, module.draft.fc.weight.detach().clone()


@pytest.fixture(scope="module")
def first(place):
    return fit(place, "first", cache=CacheOptions(place / "cache"))


def test_one_seed_gives_the_same_samples_and_losses(place, first):
    rows, weight = fit(place, "second")
    assert len(rows) > 3
    assert rows == first[0]
    assert torch.equal(weight, first[1])


def test_a_resumed_fit_is_the_whole_fit(place, first):
    rows, weight = fit(place, "resumed", ckpt_path=place / "first/step=3.ckpt")
    assert rows == first[0][3:]
    assert torch.equal(weight, first[1])


def test_the_disk_cache_gives_the_same_losses_without_vllm(place, first):
    rows, weight = fit(place, "disk", NoEngine, CacheOptions(place / "cache"))
    assert rows == first[0]
    assert torch.equal(weight, first[1])
