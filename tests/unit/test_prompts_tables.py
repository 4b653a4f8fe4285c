"""Parquet, saved data sets, directories, streams, and several sources mixed by weight."""

import gzip
import json
import math

import datasets
import pytest

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SourceOptions
from eagle3_lightning.prompts.order import SampleOrder
from eagle3_lightning.prompts.sources import as_sources, check_faults, open_source
from eagle3_lightning.prompts.split import Split
from eagle3_lightning.prompts.tables import StreamSource

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
ROWS = [
    {"id": f"r{i}", "messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "yes"}]}
    for i in range(50)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read_all(source):
    return [source.read(i) for i in range(len(source))]


@pytest.fixture
def places(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    made = {}
    table.to_parquet(tmp_path / "rows.parquet")
    made["parquet file"] = SourceOptions(str(tmp_path / "rows.parquet"))
    (tmp_path / "parts").mkdir()
    for part in range(2):
        table.shard(2, part, contiguous=True).to_parquet(tmp_path / f"parts/train-{part:05d}-of-00002.parquet")
    made["parquet directory"] = SourceOptions(str(tmp_path / "parts"))
    table.save_to_disk(tmp_path / "saved")
    made["saved data set"] = SourceOptions(str(tmp_path / "saved"))
    datasets.DatasetDict({"train_sft": table, "test": table.select(range(3))}).save_to_disk(tmp_path / "splits")
    made["saved splits"] = SourceOptions(str(tmp_path / "splits"), split="train_sft")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made["jsonl directory"] = SourceOptions(str(tmp_path / "lines"))
    return made


@pytest.mark.parametrize(
    "kind", ["parquet file", "parquet directory", "saved data set", "saved splits", "jsonl directory"]
)
def test_tables_hold_what_was_written(places, kind):
    records = read_all(open_source(places[kind], "opt"))
    assert [r.name for r in records] == [row["id"] for row in ROWS]
    assert [r.messages for r in records] == [row["messages"] for row in ROWS]


def test_keys_that_other_rows_have_do_not_appear_as_nulls(tmp_path):
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": None}
    rows = [ROWS[0], {"id": "call", "messages": [{"role": "user", "content": "1 + 1"}, turn]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    plain, call = read_all(open_source(SourceOptions(str(tmp_path / "a.parquet")), "opt"))
    assert plain.messages == ROWS[0]["messages"]
    assert call.messages[1]["tool_calls"] == [CALL | {"type": "function"}]


def test_rows_of_a_table_are_split_by_hash(places):
    train, val = (
        open_source(places["parquet file"], "opt", keep) for keep in (Split(0.3).trained, Split(0.3).held_out)
    )
    names = [{r.name for r in read_all(source)} for source in (train, val)]
    assert names[0] | names[1] == {row["id"] for row in ROWS}
    assert not names[0] & names[1]
    assert 5 < len(names[1]) < 25


def test_a_stream_is_shuffled_the_same_way_and_skips_what_was_taken(places):
    options = SourceOptions(places["jsonl directory"].path, streaming=True)

    def take(number, skip=0, seed=0):
        source = open_source(options, "opt", seed=seed)
        assert isinstance(source, StreamSource)
        rows = source.rows(skip)
        return [next(rows).name for _ in range(number)]

    whole = take(120)
    assert sorted(whole[:50]) == sorted(whole[50:100]) == sorted(row["id"] for row in ROWS)
    assert whole[:50] != whole[50:100]
    assert whole[:50] != [row["id"] for row in ROWS]
    assert take(40, skip=80) == whole[80:]
    assert take(120, seed=1) != whole


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "stream"])
def test_a_fingerprint_follows_what_is_read_of_the_rows(tmp_path, kind):
    """The same bytes under other `fields` are other prompts: a cache or a checkpoint must not be taken for theirs."""
    rows = [{"a": row["messages"], "b": row["messages"][:1]} for row in ROWS[:5]]
    file = tmp_path / f"rows.{'parquet' if kind in ('parquet', 'stream') else kind}"
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))

    def fingerprint(**options):
        made = SourceOptions(str(file), streaming=kind == "stream", **options)
        return open_source(made, "opt").fingerprint()

    assert fingerprint(fields={"messages": "a"}) == fingerprint(fields={"messages": "a"})
    assert fingerprint(fields={"messages": "a"}) != fingerprint(fields={"messages": "b"})


def test_the_fingerprint_of_an_order_follows_the_shares():
    """The epoch is as long with 3 : 1 as with 1 : 3, and the rows are others."""
    orders = [SampleOrder([100, 100], weights, 0) for weights in (None, [3.0, 1.0], [1.0, 3.0])]
    assert [order.epoch_size for order in orders] == [200] * 3
    assert len({order.fingerprint() for order in orders}) == 3
    assert SampleOrder([100, 100], None, 1).fingerprint() != orders[0].fingerprint()


def test_a_streams_fingerprint_follows_its_split(places):
    one, other = (
        open_source(SourceOptions(places["saved splits"].path, split=split, streaming=True), "opt").fingerprint()
        for split in ("train_sft", "test")
    )
    assert one != other


def test_tables_that_cannot_be_opened(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data.prompts.train = .*empty.*the directory is empty"):
        open_source(SourceOptions(str(tmp_path / "empty")), "data.prompts.train")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="`datasets` cannot open it"):
        open_source(SourceOptions(str(tmp_path / "broken.parquet")), "opt")
    with pytest.raises(ConfigError, match="there is no such file"):
        open_source(SourceOptions(str(tmp_path / "none.parquet")), "opt")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "mixed" / "b.txt").write_text("b\n")
    (tmp_path / "mixed" / "c.json").write_text('{"text": "c"}\n')
    with pytest.raises(ConfigError, match=r"Couldn't cast .*; it holds a.jsonl, b.txt, c.json\. Let its files be"):
        open_source(SourceOptions(str(tmp_path / "mixed")), "opt")


@pytest.mark.parametrize("of_a_run", [True, False])
def test_the_advice_names_options_that_the_command_has(tmp_path, of_a_run):
    (tmp_path / "bad.jsonl").write_text('{}\n{"prompt": "a"}\n')
    source = open_source(SourceOptions(str(tmp_path / "bad.jsonl")), "--prompts")
    with pytest.raises(ConfigError, match="1 of 2 rows cannot be used") as refused:
        check_faults([source], "--prompts", 0.0, of_a_run)
    assert ("max_dropped_share" in str(refused.value)) is of_a_run


def test_sources_as_the_user_writes_them():
    assert as_sources("self", "opt") == [SourceOptions("self")]
    assert as_sources(["a.jsonl", SourceOptions("b", weight=2.0)], "opt") == [
        SourceOptions("a.jsonl"),
        SourceOptions("b", weight=2.0),
    ]
    assert as_sources(SourceOptions("b", weight=2.0), "opt") == [SourceOptions("b", weight=2.0)]
    for text, problem in (
        ('{"pathh": "x"}', "no such key: pathh"),
        ("{path: x, wieght: 3}", "no such key: wieght"),
        ("[{path: x}, {weight: 3}]", "`path` is missing"),
        ("[{path: x, weight: abc}]", "one of these is of the wrong type: weight: 'abc'"),
    ):
        with pytest.raises(ConfigError) as refused:
            as_sources([text], "data.prompts.train")
        assert refused.value.problem == f"it is neither a path nor a source ({problem})"
        assert refused.value.remedy.startswith("The keys are path, weight")
    with pytest.raises(ConfigError, match="a share must be positive"):
        SourceOptions("a", weight=0.0)


def test_a_hub_name_may_have_a_dot_and_a_missing_file_is_no_hub_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="`datasets` cannot open it"):
        open_source(SourceOptions("nobody-here/OpenNothing-2.5"), "data.prompts.train")
    with pytest.raises(ConfigError, match="there is no such file"):
        open_source(SourceOptions("data/prompts.jsonl"), "data.prompts.train")


def test_a_compressed_file_is_called_so(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write(b'{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError, match="the file is compressed"):
        open_source(SourceOptions(str(tmp_path / "rows.jsonl.gz")), "data.prompts.train")


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_share_is_positive_and_finite(weight):
    with pytest.raises(ConfigError, match="positive and finite"):
        SourceOptions("a.jsonl", weight=weight)
