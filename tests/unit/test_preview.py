"""The preview marks exactly the supervised tokens, and the first of them."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from toy_target import make_target

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.prompts.command import main
from eagle3_lightning.prompts.preview import Piece, Preview, print_previews, to_html, to_table

PIECES = [Piece("<user> Hi ", False), Piece("H", True, True), Piece("ello", True), Piece(" <end>", False)]
SHOWN = Preview("p1", 9, 4, PIECES)


def test_terminal_html_and_table():
    out = io.StringIO()
    print_previews([SHOWN, Preview("p2", 0, 0, [], "too_long: no")], Console(file=out, force_terminal=True, width=100))
    text = out.getvalue()
    assert "p1: 9 tokens, 4 supervised" in text
    assert "\x1b[1;32mello\x1b[0m" in text
    assert "\x1b[1;7;32mH\x1b[0m" in text
    assert "too_long: no" in text
    page = to_html([SHOWN])
    assert "&lt;user&gt; Hi <mark class='first'>H</mark><mark>ello</mark> &lt;end&gt;" in page
    assert to_table([SHOWN]) == [["p1", 9, 4, "<user> Hi «Hello» <end>"]]


def test_the_command_needs_no_vllm(tmp_path, capsys):
    target = make_target(tmp_path / "t")
    rows = [{"id": f"q{i}", "prompt": f"say {i}", "response": f"word {i}"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    code = main(["prompts", "preview", "--target.path", str(target), "--prompts.train", str(tmp_path / "a.jsonl"),
                 "--prompts.val_fraction=0", "--sampling.mode=prefill", "--number=8", "--html", str(page)])  # fmt: skip
    assert code == 0
    shown = capsys.readouterr().out
    assert all(f"q{i}:" in shown for i in range(8))
    assert page.read_text().count("<mark class='first'>w</mark><mark>ord ") == 8


def run_yaml(tmp_path, train):
    """As `eagle3 fit` writes it into the directory of a run, shortened."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"seed_everything: 3\nrun_dir: {tmp_path / 'run'}\ntarget:\n  path: {make_target(tmp_path / 't')}\n"
        "trainer:\n  max_steps: 7\nmodel:\n  loss:\n    ttt_steps: 2\n"
        f"data:\n  prompts:\n    train: {train}\n    val_fraction: 0\n  sampling:\n    mode: prefill\n"
        "  engine:\n    max_model_len: 256\n  queue:\n    block_tokens: 32\n  cache:\n    dir: null\n"
    )
    return str(file)


def test_the_configuration_of_a_run_shows_its_prompts(tmp_path, capsys):
    rows = [{"id": f"q{i}", "prompt": f"say {i}", "response": f"word {i}"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_yaml(tmp_path, f"[{tmp_path / 'a.jsonl'}]")
    assert main(["prompts", "preview", "--config", config, "--number=8"]) == 0
    in_order = capsys.readouterr().out
    assert all(f"q{i}:" in in_order for i in range(8))
    assert main(["prompts", "preview", f"--config={config}", "--number=8", "--seed=4"]) == 0
    assert capsys.readouterr().out != in_order  # a flag behind the file goes over it


def test_the_share_of_broken_rows_is_that_of_the_run(tmp_path, capsys):
    rows = [{"id": f"q{i}", "prompt": f"say {i}", "response": f"word {i}"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{}\n" * 2)
    config = run_yaml(tmp_path, f"[{tmp_path / 'a.jsonl'}]")
    with pytest.raises(ConfigError, match="2 of 10 rows cannot be used"):
        main(["prompts", "preview", "--config", config])
    text = Path(config).read_text().replace("block_tokens: 32", "max_dropped_share: 0.3")
    Path(config).write_text(text.replace("  engine:\n    max_model_len: 256\n", "  engine: null\n"))
    assert main(["prompts", "preview", "--config", config]) == 0
    with pytest.raises(ConfigError, match="--number = 0: it must be at least 1"):
        main(["prompts", "preview", "--config", config, "--number=0"])


def test_prompts_of_the_targets_own_are_shown_once_they_are_written(tmp_path, capsys):
    config = run_yaml(tmp_path, "self")
    with pytest.raises(ConfigError, match="the target has not written these prompts yet"):
        main(["prompts", "preview", "--config", config])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "self_prompts.jsonl").write_text('{"id": "self-0", "prompt": "Hi", "response": "Yes"}\n')
    assert main(["prompts", "preview", "--config", config]) == 0
    assert "self-0" in capsys.readouterr().out


def test_an_option_has_the_name_that_it_has_here(tmp_path):
    given = ["prompts", "synthesize", "--target.path", "t", "--out", str(tmp_path / "o"), "--synthesis.num_prompts=0"]
    with pytest.raises(ConfigError, match=r"^synthesis\.num_prompts = 0"):
        main(given)
    with pytest.raises(ConfigError, match=r"^engine\.kv_cache_gib = 0"):
        main([*given[:-1], "--engine.kv_cache_gib=0"])
    with pytest.raises(ConfigError, match=r"^prompts\.max_val_samples = 0"):
        main(["prompts", "preview", "--target.path", "t", "--prompts.train", "p", "--prompts.max_val_samples=0"])


def test_a_command_that_is_none_is_refused(capsys):
    assert main(["prompts", "previe"]) == 2
    assert "eagle3 prompts preview --target.path" in capsys.readouterr().err
