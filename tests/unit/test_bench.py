"""The arithmetic and the advice of a bench, its prompts and its arguments. The engine is in tests/integration."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning  # noqa: F401 - its log handler keeps the stderr of the moment: not one that a test captures and closes
import msgspec
import pytest
import toy_target

from eagle3_lightning.cli import main
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract.engine import OWN_ARGUMENTS, check_extra
from eagle3_lightning.options import EngineOptions, TargetOptions
from eagle3_lightning.serve.bench import BenchOptions, log_files
from eagle3_lightning.serve.command import against_simulation
from eagle3_lightning.serve.engine_args import RESERVED, engine_arguments
from eagle3_lightning.serve.messages import Difference, Pass
from eagle3_lightning.serve.prompts import render_prompts
from eagle3_lightning.serve.results import (
    BenchReport,
    DraftFigures,
    Repeat,
    acceptance_interval,
    draft_figures,
    is_near_tie,
    never_accepted,
    pooled_acceptance,
    recommend,
    repeat_figures,
    speedup,
)
from eagle3_lightning.serve.table import as_text
from eagle3_lightning.summary import update_summary
from eagle3_lightning.target import inspect_target

BENCH = ["bench", "--draft", "/nowhere", "--prompts", "/nowhere.jsonl"]


def make_pass(
    seconds: float, tokens: list[list[int]], rounds: list[int], accepted: list[int], drafts: int, concurrency: int = 4
) -> Pass:
    return Pass(concurrency, seconds, tokens, rounds, drafts, 3 * drafts, sum(accepted), accepted)


def test_acceptance_length_counts_the_bonus_token() -> None:
    tokens = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    drafted = make_pass(2.0, tokens, [3, 2], [3, 1, 0], drafts=5)
    plain = make_pass(4.0, tokens, [6, 2], [], drafts=0)
    figures = draft_figures(3, "p", drafted, plain, [], "bfloat16")
    assert figures.acceptance_length == 1 + 4 / 5
    assert figures.acceptance_per_position == [3 / 5, 1 / 5, 0.0]
    assert (figures.tokens_per_s, figures.plain_tokens_per_s, figures.speedup) == (5.0, 2.5, 2.0)
    assert figures.identical == 2


def test_a_draft_that_never_proposed_accepts_nothing() -> None:
    one = make_pass(1.0, [[1]], [0], [], drafts=0)
    figures = draft_figures(3, "p", one, one, [], "float32")
    assert (figures.acceptance_length, figures.acceptance_length_ci95) == (1.0, (1.0, 1.0))


def test_the_interval_is_of_prompts_not_of_rounds() -> None:
    assert acceptance_interval([20] * 8, [10] * 8) == (2.0, 2.0)  # all prompts alike: nothing to doubt
    low, high = acceptance_interval([10, 30] * 4, [10] * 8)
    assert 1.0 < low < 2.0 < high < 3.0


@pytest.mark.parametrize(
    ("gap", "top", "dtype", "near"),
    [
        (0.125, [5, 7], "bfloat16", True),
        (0.125, [7, 5], "bfloat16", True),
        (2.0, [5, 7], "bfloat16", False),
        (0.125, [5, 9], "bfloat16", False),  # neither run may write a third token
        (0.125, [5, 7], "float32", False),
        (0.0, [5, 7], "float32", False),
    ],
)
def test_what_rounding_explains(gap: float, top: list[int], dtype: str, near: bool) -> None:
    assert is_near_tie(Difference(0, 3, 5, 7, gap, top), dtype) is near


def test_the_target_against_itself_is_counted_and_printed() -> None:
    plain = make_pass(1.0, [[1, 2]] * 4, [1] * 4, [0, 0, 0], 0, concurrency=16)
    differences = [Difference(0, 1, 5, 7, 0.1, [5, 7]), Difference(2, 1, 5, 7, 0.6, [7, 5])]
    repeat = repeat_figures("a/p.jsonl", msgspec.structs.replace(plain, repeat_differences=differences))
    assert repeat == Repeat("a/p.jsonl", 16, 4, 2, 0.6)
    assert repeat_figures("p", plain).identical == 4
    report = BenchReport("d", "t", 4, 2, "bfloat16", "cpu", "0.32.0", [1.0], [], [], True, [repeat])
    assert "p.jsonl backwards, 16 requests: 2 of 4 outputs identical, widest gap 0.6000 nats" in as_text(report)


def test_the_widest_gap_comes_first_and_makes_the_verdict() -> None:
    one = make_pass(1.0, [[1, 2]] * 3, [1] * 3, [0, 0, 0], drafts=3)
    differences = [Difference(0, 1, 5, 7, 0.1, [5, 7]), Difference(2, 1, 5, 7, 3.0, [7, 5])]
    figures = draft_figures(3, "p", one, one, differences, "bfloat16")
    assert [d.gap for d in figures.differences] == [3.0, 0.1]
    assert (figures.identical, figures.real_differences) == (1, 1)
    report = BenchReport(
        "d", "t", 3, 2, "bfloat16", "cpu", "0.32.0", [1.0, 1.0], [figures], recommend([figures]), lossless=False
    )
    text = as_text(report)
    assert "lossless: NO" in text
    assert "3.0000 nats down: REAL" in text
    assert "0.1000 nats down: near-tie" in text


def test_nothing_accepted_is_said_of_enough_rounds_alone() -> None:
    plain = make_pass(1.0, [[1, 2]], [1], [], 0)

    def figures(depth: int, *passes: tuple[int, int]) -> list[DraftFigures]:
        return [
            draft_figures(depth, f"p{i}", make_pass(1.0, [[1, 2]], [1], [accepted, 0], rounds), plain, [], "bfloat16")
            for i, (accepted, rounds) in enumerate(passes)
        ]

    assert never_accepted(figures(3, (0, 60), (0, 40))) == [3]
    assert never_accepted(figures(3, (0, 60), (0, 39))) == []
    assert never_accepted(figures(3, (0, 6000), (1, 4000))) == []
    assert never_accepted([*figures(5, (0, 100)), *figures(2, (1, 100)), *figures(4, (0, 100))]) == [4, 5]


@pytest.mark.parametrize(
    ("dtype", "device", "lossless", "said"),
    [
        ("float32", "NVIDIA H200", False, "lossless: NO (float32 is exact on the CPU alone: on CUDA"),
        ("float32", "cpu", False, "lossless: NO\n"),
        ("bfloat16", "NVIDIA H200", False, "lossless: NO\n"),
        ("bfloat16", "NVIDIA H200", True, "lossless: yes (every difference is a near-tie"),
    ],
)
def test_the_verdict_says_what_float32_is_on_cuda(dtype: str, device: str, lossless: bool, said: str) -> None:
    one = make_pass(1.0, [[1, 2]], [1], [0], drafts=3)
    figures = draft_figures(3, "p", one, one, [Difference(0, 1, 5, 7, 0.01, [5, 7])], dtype)
    report = BenchReport("d", "t", 1, 2, dtype, device, "0.32.0", [1.0], [figures], recommend([figures]), lossless)
    assert said in as_text(report)


def test_advice_by_concurrency() -> None:
    tokens = [[1, 2, 3]]
    plain = [make_pass(1.0, tokens, [2], [], 0, concurrency) for concurrency in (1, 32)]
    figures = [
        draft_figures(depth, "p", make_pass(seconds, tokens, [1], [1], 1, base.concurrency), base, [], "bfloat16")
        for depth, times in {2: (0.8, 1.4), 5: (0.5, 2.0)}.items()
        for base, seconds in zip(plain, times, strict=True)
    ]
    advice = recommend(figures)
    assert [(a.concurrency, a.num_speculative_tokens) for a in advice] == [(1, 5), (32, None)]
    assert advice[0].speedup == 2.0


def test_prompts_end_where_the_answer_begins(tmp_path: Path) -> None:
    target = inspect_target(TargetOptions(str(toy_target.make_target(tmp_path / "target"))))
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n{"prompt": "hi"}\n'
    )
    prompts = render_prompts(
        file, target, template_kwargs={}, trust_remote_code=False, longest_tokens=100, max_prompts=None
    )
    assert len(prompts) == 2
    assert prompts[0] == prompts[1]
    with pytest.raises(ConfigError, match=r"line 1: \d+ tokens, and at most 5"):
        render_prompts(file, target, template_kwargs={}, trust_remote_code=False, longest_tokens=5, max_prompts=None)
    file.write_text('{"prompt": "hi"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match="line 2"):
        render_prompts(file, target, template_kwargs={}, trust_remote_code=False, longest_tokens=100, max_prompts=None)


def test_engine_arguments_keep_the_figures_honest() -> None:
    arguments, environment = engine_arguments(EngineOptions(extra={"block_size": 32}), on_cpu=True)
    assert arguments["enable_prefix_caching"] is False
    assert arguments["disable_log_stats"] is False
    assert arguments["enforce_eager"] is True
    assert arguments["block_size"] == 32
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    arguments, environment = engine_arguments(EngineOptions(gpu_memory_utilization=0.8), on_cpu=False)
    assert arguments["gpu_memory_utilization"] == 0.8
    assert not any("CPU" in name for name in environment)


@pytest.mark.parametrize(
    "name",
    ["speculative_config", "additional_config", "max_num_seqs", "dtype", "enforce_eager", "disable_log_stats"],
)
def test_what_the_bench_sets_itself_is_refused_at_once(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([*BENCH, "--engine.extra", f"{{{name}: 1}}"]) == 2
    assert f"eagle3 bench: --engine.extra.{name} = 1: the bench sets it itself" in capsys.readouterr().err


def test_what_the_producers_engine_takes_the_bench_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a fit would come to its bench and not measure."""
    assert set(RESERVED) <= set(OWN_ARGUMENTS)
    check_extra({"seed": 3})
    assert main([*BENCH, "--engine.extra", "{seed: 3}"]) == 2
    assert "/nowhere" in capsys.readouterr().err  # only the draft is wrong
    assert engine_arguments(EngineOptions(extra={"seed": 3}), on_cpu=True)[0]["seed"] == 3


def test_errors_name_options_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--engine.kv_cache_gib", "0"]) == 2
    assert capsys.readouterr().err.startswith("eagle3 bench: --engine.kv_cache_gib = 0: it must be at least 1")


def test_a_summary_keeps_what_others_wrote(tmp_path: Path) -> None:
    file = tmp_path / "run" / "summary.json"
    update_summary(file, {"simulated_tau": 1.5, "lossless": False})
    assert update_summary(file, {"lossless": True}) == {"simulated_tau": 1.5, "lossless": True}
    assert [path.name for path in file.parent.iterdir()] == ["summary.json"]
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        update_summary(file, {})


def test_a_later_bench_keeps_the_logs_of_an_earlier_one(tmp_path: Path) -> None:
    benches = []
    for depths, stopped in (([3, 5], False), ([3], True), ([5], False), ([7], False)):
        files = log_files(tmp_path, depths)
        benches.append(sorted(file.name for file in files.values()))
        for depth, file in files.items():
            if depth is not None and not stopped:  # Ctrl-C, before the first engine
                file.touch(exist_ok=False)
    assert benches == [
        ["vllm_draft_3.log", "vllm_draft_5.log", "vllm_target.log"],
        ["vllm_draft_3_2.log", "vllm_target_2.log"],
        ["vllm_draft_5_3.log", "vllm_target_3.log"],
        ["vllm_draft_7_4.log", "vllm_target_4.log"],
    ]


def test_benches_that_start_at_once_have_logs_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        benches = list(pool.map(lambda _: log_files(tmp_path, [3]), range(40)))
    assert len({file for files in benches for file in files.values()}) == 80


def test_no_prompts_are_refused_and_not_taken_for_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-prompts = "):
        BenchOptions(tmp_path, [tmp_path / "p"], max_prompts=[0])


def test_limits_of_prompts_belong_to_one_concurrency_each() -> None:
    with pytest.raises(ConfigError, match="Give one number, or 3"):
        BenchOptions(Path("draft"), [Path("p")], concurrency=[1, 8, 32], max_prompts=[10, 80])


def test_the_table_ends_with_the_simulated_length_beside_the_served() -> None:
    for tau, where in ((1.53, "2.0% over"), (1.4949, "0.3% under"), (1.5, "equal to"), (1.4999, "equal to")):
        line = against_simulation({"simulated_tau": tau, "served_acceptance_length": 1.5})
        assert line == f"simulated tau: {tau:.3f} on the held-out set, {where} the served 1.500"
    assert "without a validation" in against_simulation({"simulated_tau": None, "served_acceptance_length": 1.5})


def test_a_bench_of_other_prompts_is_not_held_against_the_simulation(tmp_path: Path) -> None:
    summary = {"simulated_tau": 1.5, "served_acceptance_length": 1.4, "simulated_on": [str(tmp_path / "a")]}
    for served, told in ((["a"], False), (["b"], True), (["a", "b"], True)):
        by_prompts = {str(tmp_path / name): 1.4 for name in served}
        line = against_simulation({**summary, "served_acceptance_by_prompts": by_prompts})
        assert ("other prompts, which `eagle3 validate` simulates" in line) is told
        assert ("over the served" in line) is not told
    split_off = {**summary, "simulated_on": [], "served_acceptance_by_prompts": {str(tmp_path / "a"): 1.4}}
    assert "other prompts" in against_simulation(split_off)


def test_several_files_pool_into_one_figure() -> None:
    """Rounds count, not files: 1 of 2 rounds and 30 of 10 rounds are 31 of 12."""
    plain = make_pass(4.0, [[1] * 4], [3], [], 0)
    figures = [
        draft_figures(3, name, make_pass(seconds, [[1] * 4], [2], accepted, rounds), plain, [], "bfloat16")
        for name, seconds, accepted, rounds in (("a", 1.0, [1, 0, 0], 2), ("b", 3.0, [10, 10, 10], 10))
    ]
    length, by_position = pooled_acceptance(figures)
    assert length == pytest.approx(1 + 31 / 12)
    assert by_position == pytest.approx([11 / 12, 10 / 12, 10 / 12])
    assert speedup(figures) == pytest.approx(2.0)
    assert [advice.speedup for advice in recommend(figures)] == [speedup(figures)]
