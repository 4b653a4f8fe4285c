"""What a draft is worth in vLLM: acceptance length, tokens a second with and without it, losslessness.

One vLLM process for each number of speculative tokens, then one of the target alone, which also judges the outputs of
the others: it holds both texts and can be asked how close the target's decision was where they part.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import EngineOptions
from eagle3_lightning.serve.engine_args import check_reserved, engine_arguments
from eagle3_lightning.serve.messages import EngineJob, EngineResult, Outputs, Progress, Task
from eagle3_lightning.serve.results import BenchReport, draft_figures, never_accepted, recommend, repeat_figures
from eagle3_lightning.summary import read_summary

if TYPE_CHECKING:
    from eagle3_lightning.target import TargetInfo

OnProgress = Callable[[str, Progress], None]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        draft: directory of an exported draft.
        prompts: files of prompts in any format that training reads, each with figures of its own; a conversation's last
            answer is left out.
        target: the target, where it is not the one that the draft's config.json names.
        num_speculative_tokens: tokens proposed in a round, one engine start for each; empty is the export's own number.
        concurrency: requests in flight, one pass over the prompts for each.
        max_new_tokens: longest answer.
        max_prompts: run only the first so many prompts of a file: one number, or one for each concurrency, since few
            requests at once need far longer for as many prompts. Empty runs all.
        log_dir: directory for vLLM's logs, `vllm_draft_K.log` and `vllm_target.log`; None makes `bench` beside the
            draft. What is there is kept: a second bench adds `_2` to its names.
        check_rounding: run the target alone a second time, at the highest concurrency and with the prompts in the
            opposite order, to show what rounding alone changes in 16 bits.
        chat_template_kwargs: passed to the chat template, for example {"enable_thinking": false}.
        trust_remote_code: let Transformers and vLLM run code that the target brings.
        engine: the engine's options; `max_model_len` and `max_num_seqs` follow from the prompts and the concurrency.
    """

    draft: Path
    prompts: list[Path]
    target: str | None = None
    num_speculative_tokens: list[int] = field(default_factory=list)
    concurrency: list[int] = field(default_factory=lambda: [16])
    max_new_tokens: int = 128
    max_prompts: list[int] = field(default_factory=list)
    log_dir: Path | None = None
    check_rounding: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Refuse numbers below one or repeated, an empty list of concurrencies, and what the bench sets itself."""
        for name, values in (
            ("--num-speculative-tokens", self.num_speculative_tokens),
            ("--concurrency", self.concurrency),
            ("--max-new-tokens", [self.max_new_tokens]),
        ):
            if any(value < 1 for value in values) or len(set(values)) < len(values):
                raise ConfigError(
                    name, values, "the numbers must be positive and each given once", "Correct the numbers."
                )
        if any(value < 1 for value in self.max_prompts) or len(self.max_prompts) not in (0, 1, len(self.concurrency)):
            raise ConfigError(
                "--max-prompts",
                self.max_prompts,
                "the numbers must be positive, and one or as many as there are concurrencies",
                f"Give one number, or {len(self.concurrency)}.",
            )
        for name, given in (("--concurrency", self.concurrency), ("--prompts", self.prompts)):
            if not given:
                raise ConfigError(name, [], "nothing would be measured", "Give at least one.")
        check_reserved(self.engine)


def measure(options: BenchOptions, on_progress: OnProgress = lambda label, progress: None) -> BenchReport:
    """Run all engines and put the figures together.

    Args:
        options: what to measure.
        on_progress: called with an engine's label and its progress.

    Raises:
        ConfigError: a draft, prompt file or target that cannot be used, or that do not belong together.
        ProducerError: vLLM died or missed a deadline.
    """
    from eagle3_lightning.export.read import check_target, read_export
    from eagle3_lightning.export.weights import check_weights
    from eagle3_lightning.options import TargetOptions
    from eagle3_lightning.target import inspect_target

    draft = read_export(options.draft, "--draft")
    check_weights(draft, "--draft")
    try:
        target = inspect_target(
            TargetOptions(options.target or draft.target_name, trust_remote_code=options.trust_remote_code)
        )
    except ConfigError as error:
        if options.target:
            raise ConfigError("--target", error.value, error.problem, error.remedy) from error
        problem = f"the target that its config.json names, {error.value!r}: {error.problem}"
        raise ConfigError("--draft", str(options.draft), problem, "Say where the target is with --target.") from error
    check_target(draft, target, "--draft")
    depths = options.num_speculative_tokens or [draft.num_speculative_tokens]
    # A round may write past the answer's end, so the longest round needs room too.
    room_tokens = options.max_new_tokens + max(depths) + 1
    rendered = _render(options, target, room_tokens)
    tasks = _tasks(options, rendered)
    most_at_once = max(options.concurrency)
    files = [str(file) for _ in options.concurrency for file in rendered]
    runner = _Runner(options, str(target.path), depths, tasks, room_tokens, on_progress)
    drafted = {depth: runner.run(depth, tasks) for depth in depths}
    judged = [
        msgspec.structs.replace(
            task,
            judge=[Outputs(str(k), run.passes[i].tokens) for k, run in drafted.items()],
            repeat=options.check_rounding
            and options.engine.dtype != "float32"
            and 1 < task.concurrency == most_at_once,
        )
        for i, task in enumerate(tasks)
    ]
    plain = runner.run(None, judged)
    repeats = [
        repeat_figures(file, alone)
        for file, alone in zip(files, plain.passes, strict=True)
        if alone.repeat_differences is not None
    ]
    figures = [
        draft_figures(depth, file, with_draft, alone, alone.differences[str(depth)], plain.dtype)
        for depth, result in drafted.items()
        for file, with_draft, alone in zip(files, result.passes, plain.passes, strict=True)
    ]
    return BenchReport(
        draft=str(options.draft),
        target=target.name,
        num_prompts=sum(map(len, rendered.values())),
        max_new_tokens=options.max_new_tokens,
        dtype=plain.dtype,
        device=plain.device,
        vllm_version=plain.vllm_version,
        start_s=[result.start_s for result in (*drafted.values(), plain)],
        figures=figures,
        recommended=recommend(figures),
        lossless=all(figure.real_differences == 0 for figure in figures),
        repeats=repeats,
        never_accepted=never_accepted(figures),
    )


def _tasks(options: BenchOptions, rendered: dict[Path, list[list[int]]]) -> list[Task]:
    """Every file at every concurrency, with as many prompts as are asked for there."""
    most = options.max_prompts if len(options.max_prompts) > 1 else [None] * len(options.concurrency)
    return [
        Task(file.name, rendered[file][:limit], number)
        for number, limit in zip(options.concurrency, most, strict=True)
        for file in rendered
    ]


def _render(options: BenchOptions, target: "TargetInfo", room_tokens: int) -> dict[Path, list[list[int]]]:
    """Token ids of the prompts of each file, those that leave room for an answer."""
    from eagle3_lightning.serve.prompts import render_prompts

    longest_tokens = target.max_position_embeddings - room_tokens
    if longest_tokens < 1:
        raise ConfigError(
            "--max-new-tokens",
            options.max_new_tokens,
            f"with {room_tokens - options.max_new_tokens} tokens for a round of the draft it leaves no room for a "
            f"prompt in the {target.max_position_embeddings} that the target takes",
            "Lower it.",
        )
    return {
        file: render_prompts(
            file,
            target,
            template_kwargs=options.chat_template_kwargs,
            trust_remote_code=options.trust_remote_code,
            longest_tokens=longest_tokens,
            max_prompts=max(options.max_prompts, default=None),
        )
        for file in options.prompts
    }


def check_summary(file: Path) -> None:
    """Refuse a summary that could not be updated, before anything is measured for it.

    Raises:
        ConfigError: its directory cannot be written, or what is there is not a JSON object.
    """
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            "--summary", str(file), "its directory is missing or cannot be written", "Name a file that can be written."
        )
    if file.exists():
        read_summary(file)


class _Runner:
    """Runs the same tasks in one engine after the other."""

    def __init__(
        self,
        options: BenchOptions,
        target: str,
        depths: list[int],
        tasks: list[Task],
        room_tokens: int,
        on_progress: OnProgress,
    ) -> None:
        import torch

        from eagle3_lightning.extract.refusals import check_devices

        self._options, self._target, self._on_progress = options, target, on_progress
        engine = replace(
            options.engine,
            max_model_len=max(len(ids) for task in tasks for ids in task.prompts) + room_tokens,
            max_num_seqs=max(options.concurrency),
        )
        check_devices(engine)
        self._arguments, self._env = engine_arguments(engine, on_cpu=not torch.cuda.is_available())
        self._log_dir = options.log_dir or options.draft.resolve().parent / "bench"
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._logs = log_files(self._log_dir, depths)
        except OSError as error:
            raise ConfigError(
                "--log_dir",
                str(self._log_dir),
                f"it cannot be made a directory ({error.strerror})",
                "Name a directory that can be written.",
            ) from error

    def run(self, depth: int | None, tasks: list[Task]) -> EngineResult:
        """One engine: with the draft proposing `depth` tokens, or the target alone."""
        from eagle3_lightning.export.read import speculative_arguments
        from eagle3_lightning.serve.child import run_engine

        options, arguments = (
            self._options,
            {"model": self._target, "trust_remote_code": self._options.trust_remote_code},
        )
        label = "target alone"
        if depth is not None:
            label = f"draft of {depth}"
            arguments |= speculative_arguments(options.draft.resolve(), depth)
        job = EngineJob(
            engine=self._arguments | arguments,
            env=self._env,
            extra=options.engine.extra,
            tasks=tasks,
            max_new_tokens=options.max_new_tokens,
            result="",
            parent_pid=0,
        )
        return run_engine(
            job,
            label=label,
            log_file=self._logs[depth],
            start_timeout_s=options.engine.start_timeout_s,
            step_timeout_s=options.engine.step_timeout_s,
            on_progress=lambda progress: self._on_progress(label, progress),
        )


def log_files(directory: Path, depths: list[int]) -> dict[int | None, Path]:
    """A file for each engine of a bench, none of them there yet and all with one number; None is the target alone.

    That of the target is made here: it takes the number, so that a bench that starts beside this one has another.
    """
    names = {depth: f"vllm_draft_{depth}" for depth in depths} | {None: "vllm_target"}
    for number in count(1):
        suffix = "" if number == 1 else f"_{number}"
        files = {depth: directory / f"{name}{suffix}.log" for depth, name in names.items()}
        if any(os.path.lexists(file) for file in files.values()):
            continue
        try:
            files[None].touch(exist_ok=False)
        except FileExistsError:
            continue
        return files
    raise AssertionError
