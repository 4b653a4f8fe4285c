"""One fit on two ranks of one host, toy engine, real queue; each rank writes which samples each step saw.

    python ranks_run.py TARGET PROMPTS OUT MAX_STEPS ACCUMULATE [CHECKPOINT]

Lightning starts the second rank by running this file again. With CACHE_DIR in the environment samples are kept there.
The PROMPTS `self` are written by the toy.
"""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_engine import ToyDataModule

from eagle3_lightning.callbacks.threads import ThreadsCallback
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    SynthesisOptions,
    TargetOptions,
)


class Recorder(pl.LightningModule):
    """Notes the samples of each step, and the calibration."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.steps: dict[int, list[list[int]]] = {}
        self.calibration: list[float] = []
        self.engine_runs: list[bool] = []

    def on_fit_start(self) -> None:
        if self.trainer.ckpt_path is None:
            measured = self.trainer.datamodule.calibrate()  # type: ignore[attr-defined]
            self.calibration = [float(measured.response_counts.sum()), *measured.feature_rms.flatten().tolist()]

    def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        self.steps.setdefault(self.trainer.global_step, []).append(batch.sample_ids)
        extractor = self.trainer.datamodule._extractor  # type: ignore[attr-defined]
        self.engine_runs.append(extractor is not None and extractor._thread.is_alive())
        return (batch.features.mean((0, 1)) * self.weight).sum() + 0 * self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Run the fit that the arguments say."""
    target, prompts, out, max_steps, accumulate, *checkpoint = sys.argv[1:]
    own = prompts == "self"
    data = ToyDataModule(
        TargetOptions(target),
        PromptOptions([prompts], val_fraction=0.0, synthesis=SynthesisOptions(num_prompts=31, max_tokens=60)),
        SamplingOptions(max_new_tokens=9) if own else SamplingOptions(mode="prefill"),
        EngineOptions(max_model_len=512),
        batch=BatchOptions(pack_tokens=160, static_shapes=False, calibration_tokens=400),
        cache=CacheOptions(Path(os.environ["CACHE_DIR"])) if "CACHE_DIR" in os.environ else None,
        run_dir=Path(out),
    )
    saver = pl.callbacks.ModelCheckpoint(Path(out) / "ckpt", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=int(max_steps), accumulate_grad_batches=int(accumulate),
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saver, ThreadsCallback()],
        num_sanity_val_steps=0,
    )  # fmt: skip
    module = Recorder()
    trainer.fit(module, data, ckpt_path=checkpoint[0] if checkpoint else None)
    record = {"steps": module.steps, "weight": module.weight.tolist(), "calibration": module.calibration}
    record["threads"] = torch.get_num_threads()
    record["engine_runs"], record["num_engines"] = module.engine_runs, data.num_engines
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
