"""What the documents say exists: commands parse, options are options, messages are printed, links lead somewhere."""

import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.cli import main
from eagle3_lightning.options import CacheOptions

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = ("data", "model", "target", "trainer", "export", "acceptance", "throughput", "checkpoint", "preview", "plan")


class Parsed(BaseException):
    """The command line was understood."""


def blocks(file: Path) -> list[str]:
    """Indented code blocks, also inside list items."""
    lines, found = file.read_text().splitlines(), [[]]
    for line in lines:
        if line.startswith("    "):
            found[-1].append(line.strip())
        elif line.strip() and found[-1]:
            found.append([])
    return ["\n".join(block) for block in found if block]


def commands() -> list[str]:
    found = []
    for file in DOCS:
        for block in blocks(file):
            found += [c for c in block.replace("\\\n", " ").splitlines() if c.startswith("eagle3 ")]
    return found


def test_there_are_commands() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    original = StrictParser.parse_args

    def parse(self: StrictParser, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(StrictParser, "parse_args", parse)
    words = shlex.split(command.split("  #")[0])[1:]
    shipped = "configs/llama31_8b.yaml"  # for a user's own, and a run's
    words = [shipped if w.endswith(".yaml") and not Path(w).exists() else w for w in words if w != "[--json]"]
    with pytest.raises(Parsed):
        main(words)


def options(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Every option of fit and plan, groups included."""
    assert main(["plan", "--config", str(ROOT / "configs" / "llama31_8b.yaml"), "--print_config"]) == 0
    names: set[str] = set()

    def walk(prefix: str, values: Any) -> None:
        names.add(prefix)
        for key, value in values.items() if isinstance(values, dict) else ():
            walk(f"{prefix}.{key}" if prefix else key, value)

    walk("", yaml.safe_load(capsys.readouterr().out))
    return names | {f"data.cache.{field.name}" for field in fields(CacheOptions)}  # printed as null: it is off


def test_every_option_that_is_named_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    known = options(capsys)
    pattern = re.compile(rf"(?<![\w/.])(?:--)?((?:{'|'.join(GROUPS)})\.[a-z_]+(?:\.[a-z_]+)*)")
    unknown = set()
    for file in DOCS:
        for span in re.findall(r"`[^`\n]+`", file.read_text()) + blocks(file):
            unknown |= {
                (file.name, n)
                for n in pattern.findall(span)
                if n.removesuffix(".help") not in known and not n.endswith((".py", ".md", ".html"))
            }
    assert unknown == set()


def literals() -> str:
    """Every text in the package, what is filled in written as an ellipsis."""
    texts = []
    for file in (ROOT / "eagle3_lightning").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[sdr]|%\.\d+f", "…", node.value))
    return "\n".join(texts)


def test_messages_in_troubleshooting_are_printed_by_the_code() -> None:
    file = ROOT / "docs" / "troubleshooting.md"
    quoted = [line for block in blocks(file) for line in block.splitlines() if not line.startswith("eagle3 ")]
    table = file.read_text().split("| message | what to do |")[1].split("\n\n")[0]
    quoted += re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    text = re.sub(r"[ \n]+", " ", literals())
    assert len(quoted) > 18
    fragments = [part.strip(" ;(),.") for message in quoted for part in message.split("…")]
    missing = [part for part in fragments if len(part) > 3 and part not in text]
    assert missing == []


def test_every_reason_of_a_drop_is_explained() -> None:
    from typing import get_args

    from eagle3_lightning.stream.messages import DropReason

    table = (ROOT / "docs" / "troubleshooting.md").read_text().split("| reason | meaning")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`(?=,| \|)", table)) >= set(get_args(DropReason))


def test_files_and_links_exist() -> None:
    missing = set()
    for file in DOCS:
        text = file.read_text()
        paths = re.findall(r"`((?:docs|scripts|tests|configs|eagle3_lightning)/[\w/.]+)`", text)
        paths += [
            f"eagle3_lightning/{p}"
            for p in re.findall(r"`((?:extract|stream|draft|export|serve|plan|callbacks|prompts)/[\w/.]*)`", text)
        ]
        paths += re.findall(r"\]\(([\w/.]+)\)", text)
        missing |= {(file.name, path) for path in paths if not (ROOT / path).exists()}
    assert missing == set()
