"""A mistake is told under the option that the user has given, not under the one of the part that finds it."""

from pathlib import Path

import lightning  # noqa: F401 - its log handler keeps the stderr of the moment: not one that a test captures and closes
import pytest
import torch
from export_support import LAYERS, make_draft, make_target

from eagle3_lightning.cli import main
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle3")]
    return line


@pytest.fixture
def bench(tmp_path: Path) -> list[str]:
    """A bench of a draft that names a target which is gone."""
    target = make_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    export_draft(
        make_draft(target), tmp_path / "draft", target=target, layers=LAYERS, target_name="/gone",
        num_speculative_tokens=3, vllm_version=None,
    )  # fmt: skip
    return ["bench", "--draft", str(tmp_path / "draft"), "--prompts", str(tmp_path / "p.jsonl")]


def test_the_target_of_a_bench(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, [*bench, "--target", "/nope"])
    assert line.startswith("eagle3 bench: --target = '/nope': there is no such directory. Name a checkpoint")
    line = refusal(capsys, bench)
    assert line.startswith(
        f"eagle3 bench: --draft = {bench[2]!r}: the target that its config.json names, '/gone': there"
    )
    assert line.endswith("Say where the target is with --target.")


def test_an_answer_that_no_prompt_fits_beside(
    bench: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, [*bench, "--target", str(tmp_path / "target"), "--max-new-tokens", "100000"])
    assert line == (
        "eagle3 bench: --max-new-tokens = 100000: with 4 tokens for a round of the draft it leaves no room for a "
        "prompt in the 256 that the target takes. Lower it."
    )


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    target = str(make_target(tmp_path / "target").path)
    module = Eagle3Module(TargetOptions(target), DraftOptions(draft_vocab_size=64), LossOptions(), OptimOptions())
    saved = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(saved)
    torch.save(saved, tmp_path / "some.ckpt")
    return tmp_path / "some.ckpt"


def test_the_target_of_an_export(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ckpt.parent
    export = ["export", "--ckpt", str(ckpt), "--out", str(place / "out")]
    make_target(place / "other", seed=1)
    line = refusal(capsys, [*export, "--target", str(place / "other")])
    assert line.startswith(f"eagle3 export: --target = {str(place / 'other')!r}: the checkpoint belongs to another")
    assert line.endswith("Give the target it was trained on.")
    line = refusal(capsys, [*export, "--target", "/nope"])
    assert line.startswith("eagle3 export: --target = '/nope': there is no such directory.")
    (place / "target").rename(place / "moved")
    line = refusal(capsys, export)
    assert line.startswith(f"eagle3 export: --ckpt = {str(ckpt)!r}: its target {str(place / 'target')!r}: there is no")
    assert line.endswith("Say where the target is with --target.")
    (place / "other").rename(place / "target")
    assert refusal(capsys, export).startswith(
        f"eagle3 export: --ckpt = {str(ckpt)!r}: the checkpoint belongs to another"
    )


def test_the_target_of_a_run_that_is_resumed(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ckpt.parent
    make_target(place / "other", seed=1)
    (place / "p.jsonl").write_text('{"prompt": "hello"}\n')
    line = refusal(
        capsys,
        [
            *("fit", "--run_dir", str(place / "run"), "--target.path", str(place / "other"), "--trainer.max_steps=9"),
            *("--model.draft.draft_vocab_size=64", "--model.optim.warmup_steps=1", "--ckpt_path", str(ckpt)),
            *("--data.prompts.train", str(place / "p.jsonl")),
        ],
    )
    assert line.startswith(f"eagle3 fit: --ckpt_path = {str(ckpt)!r}: the checkpoint belongs to another target than")
    assert line.endswith("Give the target it was trained on, or start a new run.")
