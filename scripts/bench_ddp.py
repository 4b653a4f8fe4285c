"""Measure training under Lightning's Trainer on one GPU and on several (DDP), one after the other, in one run.

    python scripts/bench_ddp.py [--devices N] [--shape 8b|tiny] [--steps N] [--json FILE]

This is the module as `eagle3 fit` trains it: batches start in page-locked memory of the host, one micro-batch a step
and GPU, documents of 2,048 at 8,192 tokens, TTT 3, frozen head, AdamW, clipping. It also says at which share of the
plain step of `bench_train.py` the Trainer runs, on the same machine: what copies, planning and hooks cost. `--shape
tiny` runs anywhere, CPUs included, and measures nothing of interest.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset
from train_cases import CASES, Case, make_batches

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.callbacks.termination import TerminationCallback
from eagle3_lightning.draft.vocab import Calibration
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.ranks import ddp

WARM_STEPS = 10
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 40000}


def make_case(shape: str) -> Case:
    """The headline case, or a tiny one."""
    return CASES[0] if shape == "8b" else replace(CASES[0], shape=TINY, tokens=256, documents=64)


def write_target(case: Case, path: Path) -> None:
    """A checkpoint with random embeddings and lm_head, which is all that training reads of it."""
    shape = case.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": 128 if shape is not TINY else 16,
        "num_hidden_layers": 32,
        "vocab_size": shape["vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    rows, width = shape["vocab_size"], shape["hidden_size"]
    tensors = {n: torch.randn(rows, width).to(torch.bfloat16) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({**tensors, "model.norm.weight": torch.ones(width, dtype=torch.bfloat16)}, path / "model.safetensors")


class Batches(IterableDataset[Eagle3Batch]):
    """Three batches of random states on the host, round and round."""

    def __init__(self, case: Case, num: int, pin: bool) -> None:
        """Make them, each with tensors of its own."""
        made = [replace(b, features=b.features.clone(), teacher=b.teacher.clone()) for b in make_batches(case, "cpu")]
        self.batches, self.num = [b.pin_memory() if pin else b for b in made], num

    def __iter__(self) -> Iterator[Eagle3Batch]:
        """Round and round."""
        for i in range(self.num):
            yield self.batches[i % len(self.batches)]


class Data(L.LightningDataModule):
    """The same batches on every rank, and a calibration that nothing was measured for."""

    def __init__(self, case: Case, num: int, pin: bool) -> None:
        """See `Batches`."""
        super().__init__()
        self.case, self.batches = case, Batches(case, num, pin)

    def calibrate(self) -> Calibration:
        """Every token as frequent as any other, every channel of size 1."""
        config = self.case.config()
        counts = torch.ones(config.vocab_size, dtype=torch.long)
        return Calibration(counts, counts, torch.ones(config.num_aux, config.hidden_size), 1)

    def train_dataloader(self) -> DataLoader[Eagle3Batch]:
        """The batches."""
        return DataLoader(self.batches, batch_size=None)


class Clock(L.Callback):
    """Seconds of each step on this rank's GPU, without waiting inside one."""

    def __init__(self) -> None:
        """Nothing timed yet."""
        self.marks: list[Any] = []

    def on_train_batch_end(self, *_: object) -> None:
        """Note when the GPU gets here."""
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of the steps after the warm ones."""
        marks = self.marks[WARM_STEPS:]
        if not torch.cuda.is_available():
            return [b - a for a, b in itertools.pairwise(marks)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def fit(case: Case, target: Path, devices: int, steps: int) -> dict[str, Any] | None:
    """Train; rank 0's figures."""
    cuda = torch.cuda.is_available()
    module = Eagle3Module(
        TargetOptions(str(target)),
        DraftOptions(draft_vocab_size=32000),
        LossOptions(ttt_steps=case.ttt_steps),
        OptimOptions(lr=1e-5, warmup_steps=0, schedule="constant"),
    )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices,
        strategy=ddp() if devices > 1 else "auto",
        precision="bf16-mixed",
        max_steps=WARM_STEPS + steps + 1,
        gradient_clip_val=1.0,
        log_every_n_steps=10**6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[TerminationCallback(), clock],  # as in every fit of the command line
    )
    trainer.fit(module, datamodule=Data(case, WARM_STEPS + steps + 1, cuda))
    seconds = statistics.median(clock.seconds())
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    result = {"devices": devices, "step_ms": 1e3 * seconds, "tokens_per_s": devices * case.tokens / seconds}
    return {**result, "peak_gib": peak} if trainer.is_global_zero else None


def measure(arguments: argparse.Namespace, target: Path, devices: int) -> dict[str, Any]:
    """A fit in processes of its own."""
    command = [sys.executable, __file__, "--child", str(target), "--devices", str(devices)]
    command += ["--shape", arguments.shape, "--steps", str(arguments.steps)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NCCL_NVLS_ENABLE": "0"})
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or len(lines) != 1:
        sys.exit(f"the fit on {devices} devices ended with {run.returncode} and {len(lines)} results")
    return json.loads(lines[0])  # type: ignore[no-any-return]


def plain_step(case: Case) -> float:
    """Tokens/s of the step alone, its batch on the GPU already."""
    from bench_train import Turn, our_step, timed

    step, _ = our_step(case)
    seconds = statistics.median(timed(Turn(step, make_batches(case, "cuda")), case.num_steps, warm=6))
    return case.tokens / seconds


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--shape", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    case = make_case(arguments.shape)
    if arguments.child:
        if result := fit(case, Path(arguments.child), arguments.devices, arguments.steps):
            print(json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_target(case, Path(folder))
        results = [measure(arguments, Path(folder), n) for n in (1, arguments.devices)]
    plain = plain_step(case) if torch.cuda.is_available() else None
    print("| GPUs | tokens/s | step ms | peak GiB | times one GPU |\n| --- | --- | --- | --- | --- |")
    for r in results:
        times = r["tokens_per_s"] / results[0]["tokens_per_s"]
        line = [str(r["devices"]), f"{r['tokens_per_s']:,.0f}", f"{r['step_ms']:.1f}", f"{r['peak_gib']:.1f}"]
        print("| " + " | ".join([*line, f"{times:.2f}"]) + " |")
    if plain:
        share = results[0]["tokens_per_s"] / plain
        print(
            f"The step alone, its batch on the GPU: {plain:,.0f} tokens/s; the Trainer on one GPU: {share:.1%} of it."
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"results": results, "plain_tokens_per_s": plain}, indent=1))


if __name__ == "__main__":
    main()
