"""A cache that was damaged or is no cache: named once, made again or left out, and never the end of a run."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from test_bad_files import DEEP
from test_cache import NUM_PROMPTS, Counted, Full, Made, NoEngine, fit, make_data, make_store, same, target  # noqa: F401
from test_datamodule import write_prompts

from eagle3_lightning.data_feed import QueueFeed
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import BatchOptions, PromptOptions
from eagle3_lightning.stream.messages import Dropped
from eagle3_lightning.stream.store import FORMAT, StoreFacts, check_place

CUT = "cannot be read as a sample and is removed"


def cut(file: Path, size_bytes: int = 100) -> Path:
    file.write_bytes(file.read_bytes()[:size_bytes])
    return file


@pytest.mark.parametrize("size_bytes", [0, 100, -50])
def test_a_broken_file_is_named_once_and_made_again(make_data, tmp_path, caplog, size_bytes):  # noqa: F811
    online = fit(make_data(), max_epochs=2)
    broken = cut(tmp_path / "cache/train/hidden_states/hs_0.safetensors", size_bytes)
    assert same(online.batches, fit(make_data(), max_epochs=2).batches)
    assert caplog.text.count(CUT) == caplog.text.count(str(broken)) == 1
    assert same(online.batches, fit(make_data(NoEngine), max_epochs=2).batches)
    assert not list(tmp_path.glob("cache/*/*/.hs_*"))  # nothing half-written stays


class CountedDisk(Counted, NoEngine):
    pass


class Breaks(Full):
    """Breaks a file when the run has begun, and vLLM is not there any more."""

    def on_train_start(self):
        data = self.trainer.datamodule
        row = data._streams["train"].row_id(NUM_PROMPTS - 1)
        self.broken = cut(data.cache.dir / f"train/hidden_states/hs_{row}.safetensors")


def test_a_file_that_breaks_behind_vllm_is_dropped_counted_and_made_by_the_next_run(make_data, caplog):  # noqa: F811
    online = fit(make_data())
    data, module = make_data(CountedDisk), Breaks()
    fit(data, module=module)
    named = data.last.dropped_names["bad_record"]
    assert data.last.dropped["bad_record"] == len(named) and all(module.broken.name in name for name in named)
    # The next epoch is read ahead, and not trained on: it may have come to the file as well.
    assert [int(name.split()[1]) for name in named][:1] == [NUM_PROMPTS - 1]
    assert all(int(name.split()[1]) >= NUM_PROMPTS for name in named[1:])
    assert sum(len(b.sample_ids) for b in module.batches) == sum(len(b.sample_ids) for b in online.batches) - 1
    assert not module.broken.exists()
    assert same(online.batches, fit(make_data()).batches)
    assert module.broken.exists()


def test_the_index_leaves_a_broken_file_out(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    store = make_store(tmp_path / "s")
    for row in range(3):
        store.write(row, Made())
    broken = cut(tmp_path / "s/train/hidden_states/hs_1.safetensors")
    store.write_indexes()
    assert datasets.load_from_disk(str(tmp_path / "s/train"))["seq_len"] == [5, 1, 5]
    assert not broken.exists() and caplog.text.count(CUT) == 1
    again = make_store(tmp_path / "s")
    assert [again.has("train", row) for row in range(3)] == [True, False, True]


def test_what_cannot_be_removed_is_dropped(tmp_path, caplog):
    (tmp_path / "s/train/hidden_states/hs_1.safetensors").mkdir(parents=True)
    (tmp_path / "s/cache.json").write_text(facts_of(tmp_path))
    store = make_store(tmp_path / "s")
    assert store.has("train", 1) and store.has("train", 1)
    assert caplog.text.count("cannot be removed") == 1
    dropped = store.load("train", 1, 7)
    assert isinstance(dropped, Dropped) and (dropped.index, dropped.reason) == (7, "bad_record")


def test_a_file_of_other_layers_is_broken(tmp_path, caplog):
    store = make_store(tmp_path / "s")
    wide = Made()
    wide.rows = lambda: Made().rows()[:, 1:]
    store.write(0, wide)
    assert not make_store(tmp_path / "s").has("train", 0)
    assert "3 layers of 8, not 4 of 8" in caplog.text


def test_everything_is_closed_behind_an_error(make_data, monkeypatch):  # noqa: F811
    close = QueueFeed.close

    def fail(self):
        close(self)
        raise OSError("the disk is gone")

    monkeypatch.setattr(QueueFeed, "close", fail)
    data = make_data()
    with pytest.raises(OSError, match="the disk is gone"):
        fit(data, max_steps=1)
    assert data._extractor is None and data._feed is None and not data._begun
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"eagle3-hub", "eagle3-batches", "eagle3-queue"}


def test_a_longer_pack_makes_what_was_too_long(make_data, tmp_path):  # noqa: F811
    rows = (write_prompts(tmp_path / "own.jsonl", 5, "own {}")).read_text()
    turns = [{"role": "user", "content": "a" * 200}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "own.jsonl").write_text(rows + json.dumps({"messages": turns}) + "\n")

    def data(kind, pack_tokens):
        made = make_data(kind, "prefill", PromptOptions([str(tmp_path / "own.jsonl")], val_fraction=0.0))
        made.batch_options = dataclasses.replace(made.batch_options, pack_tokens=pack_tokens)
        assert isinstance(made.batch_options, BatchOptions)
        return made

    def count(kind, pack_tokens):
        return sum(len(batch.sample_ids) for batch in fit(data(kind, pack_tokens)).batches)

    assert count(Counted, 160) == 5
    assert count(Counted, 320) == 6
    assert [count(NoEngine, size) for size in (320, 160)] == [6, 5]


# ---- the files beside the samples ----------------------------------------------------------------------------------


def facts_of(tmp_path: Path) -> str:
    make_store(tmp_path / "facts")
    return (tmp_path / "facts/cache.json").read_text()


def test_half_a_line_of_a_killed_run_is_taken_off(tmp_path, caplog):
    make_store(tmp_path / "s").drop(3, Dropped("train", 3, "s3", "bad_record", "no messages"))
    file = tmp_path / "s/train/dropped.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:17])
    store = make_store(tmp_path / "s")
    assert store.has("train", 3) and caplog.text.count("ends with half a line") == 1
    assert file.read_text() == whole
    store.drop(4, Dropped("train", 4, "s4", "bad_record", "no messages"))
    assert make_store(tmp_path / "s").has("train", 4) and caplog.text.count("ends with half a line") == 1


@pytest.mark.parametrize(
    "line", [b'{"row": 3', b"[]", b"{}", b"", b"\xff\xfe", b"\0" * 500, DEEP.encode(),
             b'{"row": "3", "name": "a", "reason": "bad_record", "detail": ""}',
             b'{"row": 3, "name": "a", "reason": "tired", "detail": ""}'],
    ids=lambda line: str(line[:30]),
)  # fmt: skip
def test_another_damaged_line_is_one_message(tmp_path, line):
    make_store(tmp_path / "s").drop(3, Dropped("train", 3, "s3", "bad_record", "no messages"))
    file = tmp_path / "s/train/dropped.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes())
    with pytest.raises(ConfigError, match=r"data.cache.dir = .*dropped.jsonl': its line 1 is damaged") as caught:
        make_store(tmp_path / "s")
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"{", b"", b"\xff\xfe", DEEP.encode()],
                         ids=lambda content: str(content[:20]))  # fmt: skip
def test_a_damaged_cache_json_is_one_message(tmp_path, content):
    make_store(tmp_path / "s")
    (tmp_path / "s/cache.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data.cache.dir = .*: its cache.json is not") as caught:
        make_store(tmp_path / "s")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "cache.json is a directory"])
def test_a_place_that_is_no_directory_is_refused(tmp_path, kind):
    place = tmp_path / "s"
    if kind == "dangling link":
        place.symlink_to(tmp_path / "gone")
    elif kind == "cache.json is a directory":
        (place / "cache.json").mkdir(parents=True)
    else:
        place.touch()
    with pytest.raises(ConfigError) as caught:
        make_store(place / "cache" if kind == "below a file" else place)
    assert caught.value.option == "data.cache.dir" and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("moment", ["while it writes the facts", "between two looks"])
def test_a_rank_looks_at_the_store_that_another_is_making(tmp_path, monkeypatch, moment):
    place, facts = tmp_path / "cache", StoreFacts("t", (1,), 4, 8, "float32", "t", "t", "p", "s")
    place.mkdir()
    if moment == "between two looks":
        listed = Path.iterdir

        def list_late(path):
            """The other rank goes on just before the directory is listed."""
            (place / "cache.json").write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(facts)}))
            (place / "train").mkdir()
            return listed(path)

        monkeypatch.setattr(Path, "iterdir", list_late)
    else:
        (place / ".cache.json.1234").write_text("{")
    check_place(place, facts)
    monkeypatch.undo()
    (place / "cache.json").unlink(missing_ok=True)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty and holds no cache\.json"):
        check_place(place, facts)
