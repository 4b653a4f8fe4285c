"""The process that owns vLLM for `eagle3 bench`: `python -m eagle3_lightning.serve.engine_process JOB EVENTS_FD`.

vLLM patches torch and starts threads and processes of its own, so it never runs inside the caller's process, and it
ends with the caller, however the caller ends. What vLLM prints goes to a log file; events have a pipe of their own.
"""

import os
import sys
import time
from collections import deque
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract.watchdog import unlink_shared_memory, watch
from eagle3_lightning.serve.messages import (
    DONE,
    START_STAGES,
    Difference,
    EngineJob,
    EngineResult,
    Outputs,
    Pass,
    Progress,
    Task,
)
from eagle3_lightning.stream.messages import Mistake

if TYPE_CHECKING:
    from vllm import LLM

SPEC_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
WARM_UP_TOKENS = 8
NUM_RANKED = 20  # of the target's tokens at a first difference; vLLM's own limit by default


class Events:
    """Progress lines to the caller, at most ten a second and always the first and last of a stage."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "wb", buffering=0)
        self._last_s = 0.0

    def send(self, stage: str, done: int, total: int, mistake: Mistake | None = None) -> None:
        """Tell the caller that `done` of `total` are finished, or which mistake ends it."""
        now_s = time.monotonic()
        if 0 < done < total and now_s - self._last_s < 0.1:
            return
        self._last_s = now_s
        self._pipe.write(msgspec.json.encode(Progress(stage, done, total, mistake)) + b"\n")


def main(job_file: str, events_fd: int) -> None:
    """Run one job."""
    started_s = time.monotonic()
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=EngineJob)
    watch(job.parent_pid, os.getpid(), Path(job_file).parent)
    os.environ.update(job.env)
    events = Events(events_fd)
    events.send(START_STAGES[0], 0, 1)
    import torch
    import vllm

    events.send(START_STAGES[1], 0, 1)
    try:
        llm = _start(job)
    except ConfigError as error:
        events.send(START_STAGES[1], 0, 1, Mistake.of(error))
        return
    unlink_shared_memory(os.getpgid(0), Path(job_file).parent)
    run_pass(llm, Task("warm-up", job.tasks[0].prompts[:1], 1), WARM_UP_TOKENS, lambda done: None)
    start_s = time.monotonic() - started_s
    passes: list[Pass] = []
    for task in job.tasks:
        stage, total = f"{task.name}, {task.concurrency} concurrent", len(task.prompts)
        result = run_pass(
            llm, task, job.max_new_tokens, lambda done, stage=stage, total=total: events.send(stage, done, total)
        )
        differences: dict[str, list[Difference]] = {}
        for other in task.judge:
            events.send("comparing outputs", 0, 1)
            differences[other.name] = judge(llm, task.prompts, other, result.tokens)
        repeated = None
        if task.repeat:
            backwards = msgspec.structs.replace(task, prompts=task.prompts[::-1])
            again = run_pass(
                llm, backwards, job.max_new_tokens, lambda done, total=total: events.send("once more", done, total)
            )
            repeated = judge(llm, task.prompts, Outputs("repeat", again.tokens[::-1]), result.tokens)
        passes.append(msgspec.structs.replace(result, differences=differences, repeat_differences=repeated))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    report = EngineResult(vllm.__version__, device, dtype, start_s, passes)
    result_file = Path(job.result)
    partial = result_file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(report))
    partial.rename(result_file)
    events.send(DONE, 1, 1)


def _start(job: EngineJob) -> "LLM":
    """The engine.

    Raises:
        ConfigError: vLLM does not take the user's arguments.
    """
    from vllm import LLM, EngineArgs

    from eagle3_lightning.extract.refusals import check_known, started

    check_known(job.extra, EngineArgs.__dataclass_fields__)
    return started(lambda: LLM(**job.engine), job.extra)


def run_pass(llm: "LLM", task: Task, max_new_tokens: int, on_finished: Any) -> Pass:
    """Run all prompts of a task greedily with at most its concurrency in flight.

    The requests are fed one by one instead of all at once, so that one engine start serves every concurrency.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=max_new_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine, prompts = llm.llm_engine, task.prompts
    waiting = deque(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    rounds = [-1] * len(prompts)  # the prefill's token is not a round
    num_running = num_finished = 0
    before, start_s = spec_counters(llm), time.perf_counter()
    while waiting or num_running:
        while waiting and num_running < task.concurrency:
            index, ids = waiting.popleft()
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
            num_running += 1
        for output in engine.step():
            index, new = int(output.request_id), output.outputs[0].token_ids
            tokens[index].extend(new)
            rounds[index] += bool(new)
            if output.finished:
                num_running -= 1
                num_finished += 1
                on_finished(num_finished)
    seconds = time.perf_counter() - start_s
    after = spec_counters(llm)
    grown = {name: [a - b for a, b in zip_longest(after[name], before[name], fillvalue=0)] for name in SPEC_COUNTERS}
    return Pass(
        task.concurrency,
        seconds,
        tokens,
        rounds,
        drafts=sum(grown["drafts"]),
        draft_tokens=sum(grown["draft_tokens"]),
        accepted_tokens=sum(grown["accepted_tokens"]),
        accepted_per_position=grown["accepted_tokens_per_pos"],
    )


def spec_counters(llm: "LLM") -> dict[str, list[int]]:
    """vLLM's counters of speculative decoding since the engine's start; empty lists for an engine without a draft."""
    totals: dict[str, list[int]] = {name: [] for name in SPEC_COUNTERS}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in totals:
            values = metric.values if hasattr(metric, "values") else [metric.value]
            totals[name] = [
                int(a + b) for a, b in zip_longest(totals[name], values, fillvalue=0)
            ]  # one metric an engine
    return totals


def judge(llm: "LLM", prompts: list[list[int]], other: Outputs, own: list[list[int]]) -> list[Difference]:
    """Find where the outputs part, and ask this engine how close the decision was."""
    from vllm import SamplingParams

    parted = []
    for prompt, (theirs, ours) in enumerate(zip(other.tokens, own, strict=True)):
        if theirs != ours:
            same = next(
                (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
            )
            parted.append(
                (prompt, same, theirs[same] if same < len(theirs) else -1, ours[same] if same < len(ours) else -1)
            )
    if not parted:
        return []
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_RANKED, detokenize=False)
    prefixes = [{"prompt_token_ids": prompts[prompt] + own[prompt][:same]} for prompt, same, _, _ in parted]
    found = []
    for (prompt, same, theirs_token, own_token), answer in zip(
        parted, llm.generate(prefixes, params, use_tqdm=False), strict=True
    ):
        ranked = sorted(answer.outputs[0].logprobs[0].items(), key=lambda item: -item[1].logprob)[:NUM_RANKED]
        logprob = {token: value.logprob for token, value in ranked}
        lowest = ranked[-1][1].logprob  # what is not ranked lies at least as far down
        gap = ranked[0][1].logprob - min(logprob.get(theirs_token, lowest), logprob.get(own_token, lowest))
        found.append(Difference(prompt, same, theirs_token, own_token, gap, [token for token, _ in ranked]))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
