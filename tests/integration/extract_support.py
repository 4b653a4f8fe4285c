"""A producer on toy and small targets, as the tests of the extraction drive it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions, TargetOptions
from eagle3_lightning.stream.messages import Dropped, Stream, Submit
from eagle3_lightning.stream.queue import FinishedSample, SampleQueue
from eagle3_lightning.target import TargetInfo, inspect_target

SMOLLM2 = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
ENGINE = EngineOptions(max_model_len=1024, max_num_seqs=64, cpu_threads=2, start_timeout_s=180.0, step_timeout_s=120.0)
QUEUE = QueueOptions(capacity_tokens=16384, block_tokens=16)


def add_to_python_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """For the processes that are started."""
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{old}" if old else str(directory))


def choose_runner(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """`v1` or `v2`: the model runner of producers started from now on; V2's kernels run in Triton's interpreter."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
    if runner == "v2":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # what it compiles asks Triton's driver for more than a name
        add_to_python_path(monkeypatch, Path(__file__).parents[1] / "interpreted")


def read_target(path: Path) -> TargetInfo:
    """The facts of a checkpoint."""
    return inspect_target(TargetOptions(str(path)))


@contextmanager
def extractor(
    info: TargetInfo,
    plan: LayerPlan,
    run_dir: Path,
    sampling: SamplingOptions | None = None,
    kind: type[Extractor] = Extractor,
    **engine: object,
) -> Iterator[tuple[Extractor, SampleQueue]]:
    """A started producer and the queue of its only rank."""
    options = replace(ENGINE, **engine)  # type: ignore[arg-type]
    made = kind(info, plan, options, QUEUE, sampling or SamplingOptions(), run_dir)
    made.start()
    try:
        made.wait_ready()
        yield made, made.queue()
    finally:
        made.close()


def all_layers(info: TargetInfo) -> LayerPlan:
    """Every decoder layer's output as an auxiliary one."""
    return LayerPlan(tuple(range(info.num_layers - 1)), info.num_layers - 1)


def collect_all(
    queue: SampleQueue, prompts: Sequence[Sequence[int]], max_new_tokens: int, stream: Stream = "train"
) -> list[FinishedSample | Dropped]:
    """Feed prompts to a stream and take what becomes of each."""
    queue.feed(stream, (Submit(stream, i, f"prompt {i}", list(p), [], max_new_tokens) for i, p in enumerate(prompts)))
    return list(iter(lambda: queue.get(stream), None))


def collect(
    queue: SampleQueue, prompts: Sequence[Sequence[int]], max_new_tokens: int, stream: Stream = "train"
) -> list[FinishedSample]:
    """Feed prompts to a stream and take all samples; none may be dropped."""
    items = collect_all(queue, prompts, max_new_tokens, stream)
    dropped = [item for item in items if isinstance(item, Dropped)]
    assert not dropped, dropped
    return items  # type: ignore[return-value]


def random_prompts(info: TargetInfo, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, info.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@cache
def _reference_model(path: Path) -> tuple[nn.Module, list[Tensor]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    base, outputs = kind.from_pretrained(path, dtype=torch.float32).eval().get_decoder(), []
    for layer in base.layers:
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    return base, outputs


def reference_states(path: Path, token_ids: Sequence[int]) -> Tensor:
    """[S, N + 1, H] of Transformers in float32: outputs of layers 0 .. N - 1, then the last one's after the norm."""
    base, outputs = _reference_model(path)
    outputs.clear()
    with torch.no_grad():
        last = base(torch.tensor([list(token_ids)])).last_hidden_state
    return torch.stack([o.reshape(len(token_ids), -1) for o in outputs] + [last[0]], dim=1)


def relative_error(ours: Tensor, reference: Tensor) -> Tensor:
    """Per layer: the norm of the difference over the norm of the reference. Inputs are [S, L, H]."""
    return (ours.float() - reference).norm(dim=(0, 2)) / reference.norm(dim=(0, 2))


def check_states(
    info: TargetInfo,
    plan: LayerPlan,
    run_dir: Path,
    *,
    lengths: Sequence[int] = (3, 9, 33, 120, 7, 64),
    tolerance: float = 2e-4,
    reference: Path | None = None,
    **engine: object,
) -> str:
    """Random prompts answered with 16 tokens, and the same texts prefilled, against Transformers in float32.

    Args:
        info: the target.
        plan: what is captured.
        run_dir: of the producer.
        lengths: tokens of each prompt.
        tolerance: relative error of a layer; one layer off gives more than 0.1.
        reference: the checkpoint that Transformers reads, if not the target's.
        engine: engine options.

    Returns:
        The tap in use, as `aux/v1`.
    """
    with extractor(info, plan, run_dir, **{"max_num_seqs": 8, **engine}) as (made, queue):
        samples = collect(queue, random_prompts(info, lengths), 16)
        samples += collect(queue, [s.token_ids for s in samples], 0, "val")
        worst = 0.0
        for sample in samples:
            expected = reference_states(reference or info.path, sample.token_ids[: sample.num_rows])
            error = relative_error(sample.rows(), expected[:, [*plan.aux, -1]])
            assert error.max() < tolerance, (sample.index, error)
            worst = max(worst, float(error.max()))
            sample.release()
        tap = made.wait_ready().tap
    print(f"TAP {tap} | {worst:.1e} |")
    return tap
