"""What of vLLM's log stands in an error message; the lines are vLLM 0.32's own."""

from pathlib import Path

from eagle3_lightning.vllm_log import LOG_TAIL_LINES, log_tail

CORE = "(EngineCore pid=17113) ERROR 11-30 09:33:21 [core.py:1510] "
OLDER = "(EngineCore_DP0 pid=9) ERROR 11-30 09:33:21 [core.py:1510] "
LINES = [
    "(EngineCore pid=17113) WARNING 11-30 09:33:20 [x.py:1] ImportError: no numba, an optional package",
    CORE + "EngineCore failed to start.",
    CORE + "Traceback (most recent call last):",
    CORE + "    raise ValueError(",
    CORE + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    *[f'  File "core_client.py", line {n}, in __init__' for n in range(2 * LOG_TAIL_LINES)],
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
]


def test_the_first_error_is_named_where_the_tail_does_not_reach_it(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("\n".join(LINES))
    text = log_tail(log)
    cause = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    assert text.startswith(f" The first error in {log}: ValueError: {cause}. The last lines of {log}:\n")
    assert len(text.splitlines()) == 1 + LOG_TAIL_LINES and text.endswith("{'EngineCore': 1}")
    log.write_text("\n".join(line.replace(CORE, OLDER) for line in LINES))
    assert f"ValueError: {cause}" in log_tail(log)


def test_an_error_in_the_tail_is_not_said_twice_and_one_of_another_start_not_at_all(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("\n".join(LINES[:5]))
    assert log_tail(log).startswith(f" The last lines of {log}:\n") and log_tail(log).count("ValueError: No") == 1
    log.write_text("\n".join(LINES) + "\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("\n".join(["all is well"] * 100))
    assert log_tail(log, start) == f" The last lines of {log}:\n" + "\n".join(["  all is well"] * LOG_TAIL_LINES)
