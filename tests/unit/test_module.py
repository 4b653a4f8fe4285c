"""Eagle3Module under a real Trainer, on a toy target and random hidden states."""

import math
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from draft_reference import make_batch
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, IterableDataset
from toy_target import make_target

from eagle3_lightning.batch import Eagle3Batch, check_batch
from eagle3_lightning.draft.vocab import Calibration, Calibrator
from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.trained import load_module

DOCUMENTS = [[False] * 4 + [True] * 6, [False] * 2 + [True] * 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def make_module(target: Path, **options: dict[str, object]) -> Eagle3Module:
    torch.manual_seed(0)
    return Eagle3Module(
        TargetOptions(str(target)),
        DraftOptions(**{"draft_vocab_size": 64, **options.get("draft", {})}),  # type: ignore[arg-type]
        LossOptions(**{"ttt_steps": 2, **options.get("loss", {})}),  # type: ignore[arg-type]
        OptimOptions(**{"lr": 1e-2, "warmup_steps": 0, "schedule": "constant", **options.get("optim", {})}),
    )  # type: ignore[arg-type]


class Stream(IterableDataset[Eagle3Batch]):
    """Batches without a length, as the real data module gives them."""

    def __init__(self, batches: list[Eagle3Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Eagle3Batch]:
        return iter(self.batches)


class Samples(L.LightningDataModule):
    """Random hidden states in the shape of the module's target."""

    def __init__(self, module: Eagle3Module, documents: list[list[list[bool]]], seed: int = 0) -> None:
        super().__init__()
        config = module.draft.config
        self.batches = [make_batch(d, config, seed + i, dtype=torch.float32) for i, d in enumerate(documents)]
        for i, batch in enumerate(self.batches):
            batch.sample_ids = [10 * i + j for j in range(len(batch.sample_ids))]
        self.config = config

    def calibrate(self) -> Calibration:
        calibrator = Calibrator(self.config.vocab_size, self.config.num_aux, self.config.hidden_size)
        for batch in self.batches:
            calibrator.add(batch.ids.tolist(), [(0, len(batch.ids))], batch.features)
        return calibrator.result()

    def train_dataloader(self) -> DataLoader[Eagle3Batch]:
        return DataLoader(Stream(self.batches), batch_size=None)

    def val_dataloader(self) -> DataLoader[Eagle3Batch]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def freeze_calibration(data: Samples, source: Samples | None = None) -> None:
    """Calibrate on what `source` holds now, whatever becomes of the batches."""
    calibration = (source or data).calibrate()
    data.calibrate = lambda: calibration  # type: ignore[method-assign]


def make_trainer(path: Path, **options: object) -> L.Trainer:
    settings = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": path, "log_every_n_steps": 1, "enable_checkpointing": False, "limit_val_batches": 0,
        "max_epochs": 1,
    }  # fmt: skip
    return L.Trainer(**{**settings, **options})  # type: ignore[arg-type]


def test_a_fit_learns_and_logs(target: Path, tmp_path: Path) -> None:
    module = make_module(target, loss={"ttt_steps": 3})
    data = Samples(module, [DOCUMENTS] * 2)
    trainer = make_trainer(tmp_path, max_epochs=20, limit_val_batches=1)
    trainer.fit(module, datamodule=data)
    first = module.draft.lm_head.weight
    assert torch.equal(first, module.target_head[module.draft.draft_token_ids])
    logged = trainer.logged_metrics
    for name in (
        "train/loss",
        "train/full_acc_1",
        "train/cond_acc_3",
        "train/tau",
        "train/lr",
        "train/grad_norm",
        "train/tokens",
        "train/teacher_oov",
        "train/greedy_agreement",
        "val/loss",
        "val/tau",
        "val/full_acc_3",
    ):
        assert name in logged, name
    assert logged["train/tokens"] == 20 * 2 * 17
    assert logged["val/loss"] < 0.5 * make_initial_loss(target, data)


def make_initial_loss(target: Path, data: Samples) -> float:
    module = make_module(target, loss={"ttt_steps": 3})
    trainer = make_trainer(Path("."), limit_val_batches=1)
    module.trainer = trainer
    module.load_target()
    module.calibrate(data.calibrate())
    batch = module.transfer_batch_to_device(data.batches[0], torch.device("cpu"), 0)
    head = module.unroll(batch)
    return float(head.loss.detach()) / batch.plan.num_supervised


def test_calibration_sets_vocabulary_scale_and_head(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    data = Samples(module, [DOCUMENTS])
    module.load_target()
    module.calibrate(data.calibrate())
    seen = set(data.batches[0].ids.tolist())
    assert seen <= set(module.draft.draft_token_ids.tolist())
    assert set(module.target_info.eos_token_ids) <= set(module.draft.draft_token_ids.tolist())
    assert math.isnan(module.vocab_coverage)  # of two samples nothing can be left out
    rms = data.batches[0].features[1:].square().mean(dim=0).sqrt()
    torch.testing.assert_close(module.draft.feature_scale, 1 / rms)


def test_gradient_accumulation_equals_one_large_batch(target: Path, tmp_path: Path) -> None:
    """Uneven masks: means of means would differ."""
    ends = []
    for accumulate in (1, 3):
        module = make_module(target)
        small = [[[False] * 9 + [True]], [[True] * 12], [[False] * 3 + [True] * 4]]
        data = Samples(module, small)
        freeze_calibration(data)
        if accumulate == 1:
            data.batches = [join(data.batches)]
        make_trainer(tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=0.1).fit(module, datamodule=data)
        ends.append(module.draft.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def join(batches: list[Eagle3Batch]) -> Eagle3Batch:
    tensors = {
        name: torch.cat([getattr(b, name) for b in batches]) for name in ("ids", "features", "teacher", "mask", "pos")
    }
    doc = torch.cat([b.doc + i for i, b in enumerate(batches)])
    return Eagle3Batch(**tensors, doc=doc, sample_ids=[s for b in batches for s in b.sample_ids])


def test_clipping_is_by_the_global_norm_of_the_normalized_gradient(target: Path, tmp_path: Path) -> None:
    norms = []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                norms.append(
                    (float(torch.nn.utils.get_total_norm(grads)), float(trainer.callback_metrics["train/grad_norm"]))
                )

    for clip in (None, 1e-3):
        module = make_module(target)
        trainer = make_trainer(tmp_path, gradient_clip_val=clip, callbacks=[Watch()])
        trainer.fit(module, datamodule=Samples(module, [DOCUMENTS] * 2))
    (free, logged), (clipped, logged_too) = norms[0], norms[-1]
    assert free == pytest.approx(logged, rel=1e-5)
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert logged_too > 1e-2


def test_nan_stops_the_run_before_the_weights_change(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    data = Samples(module, [DOCUMENTS] * 3)
    freeze_calibration(data)
    data.batches[1].features[5, 0, 0] = float("nan")
    before: list[torch.Tensor] = []

    class Watch(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, index: int
        ) -> None:
            before.append(pl_module.draft.fc.weight.detach().clone())

    with pytest.raises(SampleError, match=r"step 1 is not finite.*\[10, 11\]"):
        make_trainer(tmp_path, callbacks=[Watch()]).fit(module, datamodule=data)
    assert len(before) == 2
    assert torch.equal(module.draft.fc.weight, before[1])
    assert not torch.equal(before[0], before[1])


def test_a_step_without_supervision_is_refused(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    data = Samples(module, [[[False] * 8]])
    with pytest.raises(SampleError, match=r"no token of step 0 is supervised.*\[0\]"):
        make_trainer(tmp_path).fit(module, datamodule=data)


def test_an_empty_micro_batch_beside_a_full_one_changes_nothing(target: Path, tmp_path: Path) -> None:
    ends = []
    for documents in ([DOCUMENTS], [DOCUMENTS, [[False] * 8]]):
        module = make_module(target)
        data = Samples(module, documents)
        freeze_calibration(data, Samples(module, [DOCUMENTS]))
        make_trainer(tmp_path, accumulate_grad_batches=len(documents)).fit(module, datamodule=data)
        ends.append(module.draft.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, msg=name)


@pytest.mark.parametrize("train_head", [False, True])
def test_checkpoint_round_trip(target: Path, tmp_path: Path, train_head: bool) -> None:
    module = make_module(target, draft={"train_head": train_head})
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=Samples(module, [DOCUMENTS] * 2))
    module.vocab_coverage = 0.375
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert not any("embed_tokens" in name or "target_head" in name for name in saved["state_dict"])
    loaded = load_module(path)
    for name, value in module.draft.state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[name], value), name
    assert torch.equal(loaded.draft.embed_tokens.weight, module.draft.embed_tokens.weight)
    if train_head:
        assert loaded.teacher_head is not None
        assert torch.equal(loaded.teacher_head.weight, module.target_head[module.draft.draft_token_ids])
    assert loaded.vocab_coverage == module.vocab_coverage == 0.375


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_resume_continues_exactly(target: Path, tmp_path: Path, optim: str) -> None:
    options = {"optim": {"name": optim, "schedule": "linear", "warmup_steps": 1}}
    path = tmp_path / "half.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    straight = make_module(target, **options)
    data = Samples(straight, [DOCUMENTS] * 4)
    make_trainer(tmp_path, max_epochs=-1, max_steps=4, callbacks=[Save()]).fit(straight, datamodule=data)
    resumed = make_module(target, **options)
    data.calibrate = lambda: pytest.fail("a resumed run calibrates again")  # type: ignore[method-assign]
    data.batches = data.batches[2:]
    make_trainer(tmp_path, max_epochs=-1, max_steps=4).fit(resumed, datamodule=data, ckpt_path=path)
    assert resumed.global_step == 4
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_checkpoint_of_another_target_or_draft_is_refused(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=Samples(module, [DOCUMENTS]))
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    other = make_target(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="another target"):
        load_module(path, TargetOptions(str(other)))
    narrower = make_module(target, draft={"intermediate_size": 4})
    with pytest.raises(ConfigError, match=r"intermediate_size"):
        make_trainer(tmp_path).fit(narrower, datamodule=Samples(narrower, [DOCUMENTS]), ckpt_path=path)
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ConfigError, match="not written by eagle3"):
        load_module(tmp_path / "foreign.ckpt")


def test_checkpointed_steps_give_the_same_gradients(target: Path, tmp_path: Path) -> None:
    gradients = []
    for recompute in (False, True):
        module = make_module(target, loss={"ttt_steps": 4, "checkpoint_steps": recompute}, draft={"num_layers": 2})
        data = Samples(module, [DOCUMENTS])
        module.load_target()
        module.calibrate(data.calibrate())
        batch = module.transfer_batch_to_device(data.batches[0], torch.device("cpu"), 0)
        module.unroll(batch).loss.backward()
        gradients.append({n: p.grad for n, p in module.draft.named_parameters() if p.grad is not None})
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, msg=name)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"features": torch.zeros(17, 2, 8)}, r"batch.features.*\(17, 2, 8\).*\(17, 3, 8\)"),
        ({"teacher": torch.zeros(16, 8)}, r"batch.teacher"),
        ({"mask": torch.ones(17)}, r"batch.mask.*torch.bool"),
        ({"ids": torch.full((17,), 10**6)}, r"batch.ids.*1000000"),
    ],
)
def test_odd_batches_are_refused(target: Path, change: dict[str, torch.Tensor], match: str) -> None:
    module = make_module(target)
    batch = Samples(module, [DOCUMENTS]).batches[0]
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ConfigError, match=match):
        check_batch(batch, module.draft.config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"draft": {"draft_vocab_size": 10**6}}, r"draft_vocab_size = 1000000.*at most"),
        ({"draft": {"num_heads": 6, "num_kv_heads": 4}}, r"num_kv_heads = 4.*does not divide"),
        ({"draft": {"head_dim": 5}}, r"head_dim = 5.*even"),
        ({"loss": {"ttt_steps": 0}}, r"ttt_steps = 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, options: dict[str, dict[str, object]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_module(target, **options)


def test_half_precision_weights_are_refused(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    with pytest.raises(ConfigError, match=r"trainer.precision.*16-true"):
        make_trainer(tmp_path, precision="bf16-true").fit(module, datamodule=Samples(module, [DOCUMENTS]))


def test_schedules_need_an_end(target: Path, tmp_path: Path) -> None:
    module = make_module(target, optim={"schedule": "cosine"})
    with pytest.raises(ConfigError, match=r"max_steps"):
        make_trainer(tmp_path).fit(module, datamodule=Samples(module, [DOCUMENTS]))


def test_a_schedule_may_end_by_the_clock(target: Path, tmp_path: Path) -> None:
    """Behind 70 % of its time a linear schedule stands at 30 %, however few steps were made."""
    module = make_module(target, optim={"schedule": "linear", "final_lr_ratio": 0.0})

    class Late(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, module: L.LightningModule, batch: object, index: int
        ) -> None:
            timer = next(c for c in trainer.callbacks if isinstance(c, Timer))  # type: ignore[attr-defined]
            timer._offset = 7000.0 * index
            self.lr = trainer.optimizers[0].param_groups[0]["lr"]

    late = Late()
    trainer = make_trainer(tmp_path, max_time={"seconds": 10000}, max_epochs=1, callbacks=[late])
    trainer.fit(module, datamodule=Samples(module, [DOCUMENTS] * 2))
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3e-2, rel=0.01)
    assert late.lr == pytest.approx(1e-2, rel=0.01)


def test_a_checkpoint_with_options_of_another_version_is_refused(target: Path, tmp_path: Path) -> None:
    module = make_module(target)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=Samples(module, [DOCUMENTS]))
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    saved["hyper_parameters"]["loss"]["focal"] = 2.0
    torch.save(saved, path)
    with pytest.raises(ConfigError, match=r"LossOptions has no focal"):
        load_module(path)
