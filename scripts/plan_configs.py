"""Writes what `eagle3 plan` says of each shipped configuration into its head, where the tests compare it.

    python scripts/plan_configs.py

The lines that begin with `#` and three blanks are replaced; they stand above `seed_everything`. Of the targets, the
config.json files in tests/configs are read.
"""

import contextlib
import io
from pathlib import Path

import yaml

from eagle3_lightning.cli import main

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama31_8b",
    "Qwen/Qwen3-8B": "qwen3_8b",
    "moonshotai/Kimi-K2.5": "kimi_k25",
    ".cache/target/smollm2-135m": "smollm2_135m",
}
BODY = "seed_everything:"
MARK = "#   "


def estimate(file: Path) -> list[str]:
    """The summary lines of a configuration's plan."""
    target = ROOT / "tests" / "configs" / TARGETS[yaml.safe_load(file.read_text())["target"]["path"]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["plan", "--config", str(file), "--target.path", str(target)])
    return [line.strip() for line in printed.getvalue().split("summary\n")[1].split("\n\n")[0].splitlines()]


def run() -> None:
    """Rewrite every configuration."""
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        head, body = file.read_text().split(BODY, 1)
        kept = [line for line in head.splitlines() if not line.startswith(MARK)]
        file.write_text("\n".join([*kept, *(MARK + line for line in estimate(file)), BODY + body]))
        print(file.name)


if __name__ == "__main__":
    run()
