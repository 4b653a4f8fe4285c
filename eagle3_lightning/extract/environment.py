"""The environment of the processes that run vLLM."""

import os
from pathlib import Path

import eagle3_lightning

# Of a distributed launcher: they describe the trainer, and torch or vLLM in a child would take them for its own.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def child_environment() -> dict[str, str]:
    """Ours without the launcher's part; the child imports this very package, and its log is not held back."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    package_root = str(Path(eagle3_lightning.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
