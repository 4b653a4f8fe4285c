"""The report page of a run, from files as a run leaves them."""

import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from eagle3_lightning.charts import LARGEST, Chart, Line, line_chart, ticks
from eagle3_lightning.cli import main
from eagle3_lightning.export.read import serve_command
from eagle3_lightning.report import make_page, read_curves, read_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for version, rows in enumerate(("10,2.0,\n20,1.5,1.25\n", "20,1.4,\n30,1.2,1.5\n")):
        folder = tmp_path / "logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"step,train/loss,val/tau\n{rows}")
    (tmp_path / "summary.json").write_text(json.dumps({
        "simulated_tau": 1.5, "served_acceptance_length": 1.47, "acceptance_per_position": [0.3, 0.1], "lossless": True,
        "steps": 30, "tokens_trained": 123456, "export_dir": "/gone",
        "samples_dropped": {"too_long": 4}, "first_dropped": {"too_long": ["a.jsonl line 7"]},
    }))  # fmt: skip
    (tmp_path / "config.yaml").write_text("run_dir: <here>\n")
    return tmp_path


def test_a_resumed_run_is_one_curve(run_dir: Path) -> None:
    assert read_curves(run_dir) == {
        "train/loss": [(10.0, 2.0), (20.0, 1.4), (30.0, 1.2)],
        "val/tau": [(20.0, 1.25), (30.0, 1.5)],
    }


def test_the_page_stands_alone_and_says_what_counts(run_dir: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert all(text in page for text in ("1.470", "0.300 / 0.100", "123,456", "served by vLLM", "&lt;here&gt;"))
    assert page.count("<svg") == 2  # acceptance and loss; what was never logged is left out
    assert 'class="dot' in page  # the bench's figure, beside the simulated curve


def test_a_bench_of_other_prompts_is_a_point_of_its_own(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    for held_out, told in (("/held_out", False), ("/elsewhere", True)):
        more = {"simulated_on": [held_out], "served_acceptance_by_prompts": {"/held_out": 1.47}}
        (run_dir / "summary.json").write_text(json.dumps({**summary, **more}))
        page = make_page(run_dir)
        assert ("served by vLLM, other prompts" in page) is told
        assert ("Simulated against served" in page) is not told  # the table that sets the two side by side


def test_a_figure_of_an_earlier_step_says_so(run_dir: Path) -> None:
    """A resumed run went on behind its last validation and its last bench."""
    summary = json.loads((run_dir / "summary.json").read_text())
    for step, told in ((20, True), (30, False)):
        (run_dir / "summary.json").write_text(json.dumps({**summary, "served_step": step, "simulated_step": step}))
        page = make_page(run_dir)
        for name in ("served acceptance length", "simulated acceptance length", "lossless"):
            assert (f"<span>{name}, at step 20</span>" in page) is told
            assert (f"<span>{name}</span>" in page) is not told
        assert read_run(run_dir)[0]["serve/acceptance_length"] == [(float(step), 1.47)]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither logs" in capsys.readouterr().err


def test_a_chart_is_well_formed_and_inside_its_frame() -> None:
    text = line_chart(Chart("a < b", [Line("x", [(0, 1.0), (10, 3.0)])], "step"))
    figure = ElementTree.fromstring(text)
    points = figure.find(".//polyline").get("points").split()
    places = [tuple(map(float, point.split(","))) for point in points]
    assert all(0 <= x <= 560 and 0 <= y <= 260 for x, y in places)
    assert places[0][1] > places[1][1]  # larger values lie higher


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (1.07, 1.93), (0, 227227), (3e-5, 1e-3), (5.0, 5.0), (-2.0, 7.0), (0.0, 0.0),
                     (-1e308, 1e308), (0.0, 1e308), (0.0, 5e-324), (1e-13, 9e-13), (1.0, 1.0 + 1e-15), (-3e200, 3e200)]
)  # fmt: skip
def test_ticks_enclose_and_are_few(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= max(low, -LARGEST)
    assert found[-1] >= min(high, LARGEST)
    assert 3 <= len(found) <= 7
    assert found == sorted(set(found))


def test_a_page_needs_no_summary(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    assert "Curves" in make_page(run_dir)


def test_simulated_stands_against_served_and_drops_have_their_reasons(run_dir: Path) -> None:
    page = make_page(run_dir)
    assert "<td>30</td><td>1.470</td><td>1.500 (step 30)</td><td>+2.0%</td>" in page
    assert "<td>too_long</td><td>4</td><td>a.jsonl line 7</td>" in page


def test_every_chart_is_a_png_too(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--png", str(run_dir / "png")]) == 0
    assert "wrote 2 charts" in capsys.readouterr().out
    files = sorted((run_dir / "png").iterdir())
    assert [file.name for file in files] == ["01_acceptance_length_simulated_and_served.png", "02_loss.png"]
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (1120, 576)
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50  # curves and text, not an empty canvas
    (run_dir / "file").touch()
    assert main(["report", str(run_dir), "--png", str(run_dir / "file")]) == 2
    assert "--png = " in capsys.readouterr().err


def test_the_serve_command_survives_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "it's my run" / "export"
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    words = shlex.split(serve_command(out, "/models/my target", 3))
    assert words[:4] == ["vllm", "serve", "/models/my target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert words[5] == "--additional-config"
    assert len(words) == 7
    draft = json.loads(words[6])
    (out / "config.json").write_text('{"norm_output": true}')
    assert json.loads(shlex.split(serve_command(out, "/models/my target", 3))[6]) != draft


@pytest.mark.parametrize("values", [(1e308, -1e308), (5e-324, 0.0), (1.0, 1.0 + 1e-15), (-1e308, -1e308)], ids=str)
def test_any_finite_values_are_drawn_inside_the_frame(run_dir: Path, values: tuple[float, float]) -> None:
    text = line_chart(Chart("x", [Line("x", [(0, values[0]), (10, values[1])])]))
    figure = ElementTree.fromstring(text)
    places = [tuple(map(float, p.split(","))) for p in figure.find(".//polyline").get("points").split()]
    assert all(0 <= x <= 560 and 0 <= y <= 260 for x, y in places)
    assert all(len(mark.text) < 12 for mark in figure.iter("text") if mark.text != "optimizer step")
    rows = "".join(f"{step},{value!r},\n" for step, value in enumerate(values))
    (run_dir / "logs" / "version_1" / "metrics.csv").write_text(f"step,train/loss,val/tau\n{rows}")
    assert main(["report", str(run_dir), "--png", str(run_dir / "png")]) == 0


@pytest.mark.parametrize("served", [0.0, -1.0, 5e-324])
def test_a_served_length_of_nothing_has_no_ratio(run_dir: Path, served: float) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"steps": 30, "served_acceptance_length": served}))
    page = make_page(run_dir)
    assert "<td>-</td>" in page


@pytest.mark.parametrize(
    "summary",
    [
        {"samples_dropped": {"too_long": "x"}},
        {"samples_dropped": {"too_long": None}},
        {"steps": float("nan")},
        {"steps": 1, "served_acceptance_length": float("inf")},
    ],
    ids=str,
)
def test_a_summary_that_cannot_be_shown_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], summary: dict[str, object]
) -> None:
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert main(["report", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert f"RUN = '{run_dir / 'summary.json'}': it is not a summary of a run" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["config.yaml", "preview.html"])
def test_a_file_that_is_no_text_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run_dir / name).write_bytes(b"\xff\xfe\x00")
    assert main(["report", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert f"RUN = '{run_dir / name}': it is not UTF-8 text" in error
    assert error.count("\n") == 1


def test_a_step_that_is_no_number_names_its_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "logs" / "version_0" / "metrics.csv").write_text("step,train/loss\nnan,1.0\n")
    assert main(["report", str(run_dir)]) == 2
    assert "metrics.csv': it is not a table of metrics by step (ValueError: step nan)" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["RUN", "--png", "--out"])
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_place_is_not_the_current_directory(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str, empty: str
) -> None:
    monkeypatch.chdir(run_dir)
    before = sorted(run_dir.iterdir())
    assert main(["report", empty] if place == "RUN" else ["report", str(run_dir), place, empty]) == 2
    assert f"{place} = {empty!r}: it is empty" in capsys.readouterr().err
    assert sorted(run_dir.iterdir()) == before
