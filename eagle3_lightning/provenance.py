"""Where a result comes from: versions, git state. Goes into the run's configuration, its loggers and its exports."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

from eagle3_lightning import __version__
from eagle3_lightning.extract.versions import installed

_PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "safetensors", "wandb")
_GIT_TIMEOUT_S = 10.0


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a result; None is not installed. Nothing is imported for it."""
    found: dict[str, str | None] = {"eagle3_lightning": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    vllm = installed()
    found["vllm"] = None if vllm is None else vllm[1]
    return found


def git_state() -> dict[str, str | bool] | None:
    """Commit of the checkout that this package lies in and whether files differ from it; None outside a checkout."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
