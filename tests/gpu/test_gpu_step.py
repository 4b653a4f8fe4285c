"""The CUDA step: Triton kernels and flash attention against the plain path and the definition."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import lightning as L
import pytest
import torch
from draft_helpers import make_draft, named_weights, relative_error
from draft_reference import make_batch, make_config, reference_steps
from torch.utils.data import DataLoader, IterableDataset

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.plan import UnrollPlan, plan_unroll
from eagle3_lightning.draft.ttt import ttt_loss
from eagle3_lightning.draft.vocab import Calibration, Calibrator
from eagle3_lightning.errors import SampleError
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions

DOCUMENTS = [
    [False] * 40 + [True] * 90,
    [True] * 30,
    [False] * 60,
    [False] * 3 + [True] * 17 + [False] * 20 + [True] * 31,
]
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "qwen3_two_layers": {"arch": "qwen3", "num_layers": 2},
    "trained_head": {"train_head": True},
    "norms": {"fc_norm": True, "norm_output": True},
}


def sizes(**changes: object) -> DraftConfig:
    base = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 3000,
        "draft_vocab_size": 1000,
    }
    return make_config(**{**base, **changes})


def run_cuda(
    config: DraftConfig, batch: Eagle3Batch, dtype: torch.dtype, attention: str, num_steps: int = 4
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, KL of the pairs and gradients of a step on the GPU."""
    draft, target_head = make_draft(config, torch.float32)
    draft, target_head = draft.cuda(), target_head.cuda()
    plan = plan_unroll(batch, num_steps).to(torch.device("cuda"))
    options = LossOptions(num_steps, 0.9, attention)  # type: ignore[arg-type]
    head = ttt_loss(draft, batch.to("cuda"), plan, options, dtype, target_head[draft.draft_token_ids])
    head.loss.backward()
    gradients = {n: p.grad.cpu() for n, p in draft.named_parameters() if p.grad is not None}
    return float(head.loss.detach()), head.kl.cpu(), gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_follows_the_definition(variant: str) -> None:
    config = sizes(**VARIANTS[variant])
    batch = make_batch(DOCUMENTS, config, padding=5, dtype=torch.float32)
    loss, _, gradients = run_cuda(config, batch, torch.float32, "sdpa")
    draft, target_head = make_draft(config, torch.float32)
    weights = named_weights(draft, target_head)
    wanted = reference_steps(weights, config, batch, 4)
    total = ((wanted["kl"] * wanted["scored"]).sum(dim=1) * 0.9 ** torch.arange(4, dtype=torch.float64)).sum()
    total.backward()
    assert abs(loss / float(total.detach()) - 1) < 1e-5
    for name, gradient in gradients.items():
        assert relative_error(gradient, weights[name].grad) < 2e-5, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_flash_equals_sdpa(variant: str) -> None:
    """Both in bf16, so both are off the exact result by rounding; neither may be further off than the other allows."""
    config = sizes(**VARIANTS[variant])
    batch = make_batch(DOCUMENTS, config, padding=5, dtype=torch.bfloat16)
    exact = run_cuda(config, batch, torch.float32, "sdpa")
    dense = run_cuda(config, batch, torch.bfloat16, "sdpa")
    flash = run_cuda(config, batch, torch.bfloat16, "flash")
    assert abs(flash[0] / dense[0] - 1) < 2e-3
    assert relative_error(flash[1], dense[1]) < 1e-2
    for name, gradient in flash[2].items():
        off = relative_error(dense[2][name], exact[2][name])
        assert relative_error(gradient, exact[2][name]) < max(1.5 * off, 5e-3), name


def test_flash_of_one_long_document() -> None:
    config = sizes()
    batch = make_batch([[False] * 100 + [True] * 2900], config, dtype=torch.bfloat16)
    exact = run_cuda(config, batch, torch.float32, "sdpa", num_steps=7)
    flash = run_cuda(config, batch, torch.bfloat16, "flash", num_steps=7)
    assert relative_error(flash[1], exact[1]) < 2e-2
    for name, gradient in flash[2].items():
        assert relative_error(gradient, exact[2][name]) < 3e-2, name


class Packings(IterableDataset[Eagle3Batch]):
    """Batches of 2,048 slots in documents of random lengths and masks, every one another packing."""

    def __init__(self, config: DraftConfig, count: int) -> None:
        self.config, self.count = config, count

    def __iter__(self) -> Iterator[Eagle3Batch]:
        generator = torch.Generator().manual_seed(0)
        whole = make_batch([[True] * 2048], self.config, dtype=torch.bfloat16)
        for index in range(self.count):
            documents: list[list[bool]] = []
            while (left := 2048 - sum(map(len, documents))) > 0:
                length = min(left, int(torch.randint(3, 700, (1,), generator=generator)))
                prompt = int(torch.randint(0, length, (1,), generator=generator))
                documents.append([False] * prompt + [True] * (length - prompt))
            laid = make_batch(documents, replace(self.config, hidden_size=1), dtype=torch.bfloat16)
            yield replace(laid, features=whole.features, teacher=whole.teacher, sample_ids=[index]).pin_memory()


class Data(L.LightningDataModule):
    def __init__(self, config: DraftConfig, count: int) -> None:
        super().__init__()
        self.stream, self.config = Packings(config, count), config

    def calibrate(self) -> Calibration:
        calibrator = Calibrator(self.config.vocab_size, self.config.num_aux, self.config.hidden_size)
        batch = next(iter(self.stream))
        calibrator.add(batch.ids.tolist(), [(0, 2048)], batch.features)
        return calibrator.result()

    def train_dataloader(self) -> DataLoader[Eagle3Batch]:
        return DataLoader(self.stream, batch_size=None)


def make_module(path: Path, optim: Literal["adamw", "muon"] = "adamw") -> Eagle3Module:
    from toy_target import make_target

    target = make_target(
        path / "target",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Eagle3Module(
        TargetOptions(str(target)),
        DraftOptions(draft_vocab_size=128),
        LossOptions(ttt_steps=3),
        OptimOptions(name=optim, lr=1e-4, warmup_steps=0, schedule="constant"),
    )


def trainer(path: Path, **options: object) -> L.Trainer:
    settings = {
        "accelerator": "gpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "logger": False,
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": path,
        "log_every_n_steps": 10**6,
        "gradient_clip_val": 1.0,
    }
    return L.Trainer(**{**settings, **options})  # type: ignore[arg-type]


def count_compiled() -> int:
    from eagle3_lightning.draft import adamw, flash, kernels, kl, same_slot

    modules = (adamw, flash, kernels, kl, same_slot)
    functions = [f for m in modules for f in vars(m).values() if hasattr(f, "device_caches")]
    return sum(len(cache[0]) for f in functions for cache in f.device_caches.values())


def test_200_packings_compile_nothing_new_and_never_wait_for_the_gpu(tmp_path: Path) -> None:
    compiled: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, module: L.LightningModule, batch: object, index: int
        ) -> None:
            if index == 5:
                compiled.append(count_compiled())
                torch.cuda.set_sync_debug_mode("error")

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            torch.cuda.set_sync_debug_mode("default")
            compiled.append(count_compiled())

    module = make_module(tmp_path)
    try:
        fit = trainer(tmp_path, callbacks=[Watch()])
        fit.fit(module, datamodule=Data(module.draft.config, 205))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fit.global_step == 205
    assert compiled[0] > 5
    assert compiled[1] == compiled[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0  # torch.compile has no part in the step


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_nan_is_skipped_on_the_device_and_stops_the_run(tmp_path: Path, optim: Literal["adamw", "muon"]) -> None:
    module = make_module(tmp_path, optim)
    data = Data(module.draft.config, 6)
    weights: list[torch.Tensor] = []

    class Poison(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, module: L.LightningModule, batch: Eagle3Batch, index: int
        ) -> None:
            weights.append(module.draft.fc.weight.detach().clone())
            if index == 2:
                batch.features[7, 1, 3] = float("nan")

    with pytest.raises(SampleError, match=r"step 2 is not finite.*\[2\]"):
        trainer(tmp_path, callbacks=[Poison()]).fit(module, datamodule=data)
    assert not torch.equal(weights[1], weights[2])
    for name, value in module.draft.named_parameters():
        assert torch.isfinite(value).all(), name


def test_the_plan_travels_without_waiting() -> None:
    batch = make_batch(DOCUMENTS, sizes(), dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = plan_unroll(batch, 3).to(torch.device("cuda"), non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(plan, UnrollPlan)
    assert plan.rows.is_cuda
