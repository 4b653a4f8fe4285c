"""A real bench on the CPU: a draft whose acceptance is known, losslessness, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fault_support import read_command
from serve_support import TARGET, export_echo

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.export.read import speculative_arguments
from eagle3_lightning.extract.watchdog import group_members
from eagle3_lightning.options import EngineOptions
from eagle3_lightning.serve import child
from eagle3_lightning.serve.bench import BenchOptions, measure
from eagle3_lightning.serve.child import run_engine
from eagle3_lightning.serve.engine_args import engine_arguments
from eagle3_lightning.serve.messages import EngineJob, Outputs, Progress, Task
from eagle3_lightning.serve.results import BenchReport, is_near_tie

pytestmark = pytest.mark.vllm
REPEATING = [{"text": "0" * 40}, {"text": "!" * 30}]  # the target goes on with zeros, after two tokens
ORDINARY = [{"prompt": "Write one sentence about the sea."}, {"prompt": "What is the capital of France?"}]
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_echo(tmp_path_factory.mktemp("bench") / "draft").path


@pytest.fixture(scope="module")
def report(draft: Path) -> BenchReport:
    files = []
    for name, rows in {"all": REPEATING + ORDINARY, "repeating": REPEATING}.items():
        files.append(draft.parent / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return measure(
        BenchOptions(
            draft,
            files,
            max_new_tokens=NEW_TOKENS,
            concurrency=[4, 1],
            max_prompts=[4, 1],
            engine=EngineOptions(dtype="float32"),
        )
    )


def test_float32_is_lossless_token_by_token(report: BenchReport) -> None:
    figures, repeating, *alone = report.figures
    assert report.dtype == "float32"
    assert report.lossless
    assert (figures.identical, repeating.identical, report.num_prompts) == (4, 2, 6)
    assert figures.differences == repeating.differences == []
    assert [(f.concurrency, f.num_prompts, f.identical) for f in alone] == [(1, 1, 1)] * 2


def test_the_counters_are_those_of_this_draft(report: BenchReport) -> None:
    figures, repeating = report.figures[:2]
    assert repeating.acceptance_length > 2.5 > figures.acceptance_length  # each file has its own
    assert figures.num_speculative_tokens == 3  # the export's own number
    # Nearly all rounds of the two ordinary prompts give one token, nearly all of the two repeating ones four.
    assert 2 * (NEW_TOKENS - 1) / 4 < figures.num_drafts < 2 * (NEW_TOKENS - 1) * 1.4
    first, second, third = figures.acceptance_per_position
    assert 0.1 < third <= second <= first < 0.6
    assert figures.acceptance_length == pytest.approx(1 + first + second + third)
    low, high = figures.acceptance_length_ci95
    assert low < figures.acceptance_length < high


def test_vllm_is_told_which_draft_it_compiles_for(report: BenchReport, draft: Path) -> None:
    log = (draft.parent / "bench" / "vllm_draft_3.log").read_text()
    assert str(speculative_arguments(draft, 3)["additional_config"]) in log  # among vLLM's `non-default args`


def engine_job(**changes: object) -> EngineJob:
    arguments, environment = engine_arguments(
        EngineOptions(max_model_len=128, max_num_seqs=4, dtype="float32"), on_cpu=True
    )
    job = EngineJob(arguments | {"model": str(TARGET)}, environment, [Task("one", [[1, 4093, 198]], 1)], 8, "", 0)
    return msgspec.structs.replace(job, **changes)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, of ours and of what we start; pytest's own is too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        yield Path(path)


def test_another_text_is_a_real_difference(tmp_path: Path, temporary: Path) -> None:
    """What the target would not have written is found at its place, and the gap says that rounding did not do it."""
    job = engine_job(tasks=[Task("one", [[1, 4093, 198]], 1, [Outputs("forged", [[7] * 8])])])
    result = run_engine(job, label="x", log_file=tmp_path / "log", start_timeout_s=300, step_timeout_s=300)
    (difference,) = result.passes[0].differences["forged"]
    own = result.passes[0].tokens[0]
    assert (difference.prompt, difference.position, difference.draft_token, difference.plain_token) == (0, 0, 7, own[0])
    assert own[0] == difference.top_tokens[0]
    assert not is_near_tie(difference, "bfloat16")
    assert list(temporary.iterdir()) == []  # vLLM's own files and sockets among it


def test_the_same_prompts_backwards_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """In float32 nothing differs; a repetition that were compared in the wrong order would."""
    prompts = [[1, 4093, 198], [1, 520, 9531, 198], [2683, 198, 57, 1042]]
    job = engine_job(tasks=[Task("three", prompts, 2, repeat=True)])
    result = run_engine(job, label="x", log_file=tmp_path / "log", start_timeout_s=300, step_timeout_s=300)
    assert result.passes[0].repeat_differences == []
    assert len({tuple(tokens) for tokens in result.passes[0].tokens}) == 3


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = engine_job(engine={"model": str(tmp_path / "nothing")})
    with pytest.raises(
        ProducerError, match=r"(?s)engine \(broken\) died with exit code 1.*last lines of .*log:.*nothing"
    ):
        run_engine(job, label="broken", log_file=tmp_path / "log", start_timeout_s=300, step_timeout_s=300)


def test_what_an_engine_core_of_its_own_process_died_of_is_named(tmp_path: Path) -> None:
    job = engine_job()
    job = msgspec.structs.replace(
        job,
        engine=job.engine | {"num_gpu_blocks_override": 1},
        env=job.env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    with pytest.raises(ProducerError, match=r"The first error in .*log: ValueError: No available memory for the cache"):
        run_engine(job, label="broken", log_file=tmp_path / "log", start_timeout_s=300, step_timeout_s=300)


def test_a_deadline_names_the_engine_and_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is stopped in its import: how fast this machine is makes no difference."""
    monkeypatch.setattr(child, "TERM_TIMEOUT_S", 1.0)  # which a stopped process does not hear

    def stop_engine(progress: Progress) -> None:
        for pid in children(os.getpid()):
            if b"engine_process" in read_command(pid):
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(ProducerError, match=r"engine \(slow\) said nothing for 5 s at stage `importing vLLM`"):
        run_engine(
            engine_job(), label="slow", log_file=tmp_path / "log", start_timeout_s=5, step_timeout_s=300,
            on_progress=stop_engine,
        )  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_engine_outlives_the_bench(draft: Path, tmp_path: Path, end: signal.Signals) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hi"}) + "\n")
    bench = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "eagle3_lightning",
            "bench",
            "--draft",
            str(draft),
            "--prompts",
            str(prompts),
            "--log-dir",
            str(tmp_path),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    assert "importing vLLM" in bench.stderr.readline()
    engines = children(bench.pid)
    assert len(engines) == 1
    bench.send_signal(end)
    assert bench.wait(30) == (130 if end == signal.SIGINT else -end)
    deadline = time.monotonic() + 30
    while group_members(engines[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(engines[0]) == []


def children(pid: int) -> list[int]:
    return (
        [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if os.path.exists(f"/proc/{pid}")
        else []
    )
