"""Samples on disk: bit for bit, or near in fp8; capped, refused where they do not belong, and later without vLLM."""

import dataclasses
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from test_datamodule import Recorder, write_prompts
from toy_engine import HIDDEN, ToyDataModule, states
from toy_target import make_target

from eagle3_lightning.datamodule import HiddenStateDataModule
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    TargetOptions,
)
from eagle3_lightning.stream.files import FinalNorm, write_sample
from eagle3_lightning.stream.messages import Dropped
from eagle3_lightning.stream.store import SampleStore, StoreFacts
from eagle3_lightning.target import inspect_target, load_final_norm

NUM_PROMPTS = 30


class NoEngine(ToyDataModule):
    def _make_extractor(self, run_dir, world_size):
        raise AssertionError("vLLM was started")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_data(target, tmp_path):
    train = write_prompts(tmp_path / "train.jsonl", NUM_PROMPTS, "train {}")
    val = write_prompts(tmp_path / "val.jsonl", 4, "val {}")

    def make(kind=ToyDataModule, mode="generate", prompts=None, **cache):
        from_states = kind is NoEngine and prompts is not None and cache == {"dir": None}
        return kind(
            TargetOptions(str(target)),
            prompts or PromptOptions([train], [val]),
            None if from_states else SamplingOptions(mode=mode, max_new_tokens=9),
            EngineOptions(max_model_len=512),
            batch=BatchOptions(pack_tokens=160, static_shapes=False, calibration_tokens=300),
            cache=CacheOptions(**({"dir": tmp_path / "cache"} | cache)),
            run_dir=tmp_path / "run",
        )

    return make


class Counted(ToyDataModule):
    """Remembers the counters at the end, when they are gone with the feed."""

    def teardown(self, stage):
        self.last = self.stats().queue
        super().teardown(stage)


class Full(Recorder):
    """Keeps the validation batches as well, and what threads ran at each step."""

    def __init__(self):
        super().__init__()
        self.val_batches, self.threads = [], []

    def training_step(self, batch, batch_idx):
        self.threads.append({t.name for t in threading.enumerate()})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.val_batches.append(batch)


def fit(data, max_epochs=1, module=None, **kwargs):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=max_epochs,
                         **kwargs)  # fmt: skip
    module = module or Full()
    trainer.fit(module, data)
    return module


def same(first, second):
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(a):
            one, other = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return True


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_training_from_disk_is_the_online_run_to_the_last_bit(make_data, mode):
    online = fit(make_data(mode=mode, dir=None), max_epochs=3)
    writing = fit(make_data(mode=mode), max_epochs=3)
    reading = fit(make_data(NoEngine, mode=mode), max_epochs=3)
    for run in (writing, reading):
        assert same(online.batches, run.batches)
        assert same(online.val_batches, run.val_batches)
        assert torch.equal(online.weight, run.weight)
    # The hub of the queue goes with vLLM, once the first epoch is on disk.
    steps = len(writing.threads) // 3
    assert "eagle3-hub" in writing.threads[0]
    assert "eagle3-hub" not in writing.threads[-steps + 2]
    assert all("eagle3-hub" not in names for names in reading.threads)


def test_an_interrupted_epoch_is_finished_by_the_next_run(make_data):
    fit(make_data(), max_steps=3)
    reading = fit(make_data(), max_epochs=2)
    online = fit(make_data(dir=None), max_epochs=2)
    assert same(online.batches, reading.batches)
    fit(make_data(NoEngine), max_epochs=1)


def test_a_full_cache_keeps_what_it_has_and_vllm_makes_the_rest(make_data, tmp_path):
    online = fit(make_data(dir=None), max_epochs=2)
    small = {"max_gib": 20_000 / 2**30}
    capped = fit(make_data(**small), max_epochs=2)
    assert same(online.batches, capped.batches)
    files = list((tmp_path / "cache/train/hidden_states").glob("hs_*"))
    total = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*/*/hs_*"))
    assert 0 < len(files) < NUM_PROMPTS
    assert 20_000 <= total < 30_000
    assert same(online.batches, fit(make_data(**small), max_epochs=2).batches)


def test_fp8_is_half_the_size_and_near(make_data, tmp_path):
    online = fit(make_data(dir=None))
    fit(make_data(dtype="fp8"))
    reading = fit(make_data(NoEngine, dtype="fp8"))
    for a, b in zip(online.batches, reading.batches, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.mask, b.mask)
        for name in ("features", "teacher"):
            one, other = getattr(a, name), getattr(b, name)
            error = (one - other).norm() / one.norm()
            assert 0 < error < 0.05
    file = load_file(next((tmp_path / "cache/train/hidden_states").glob("hs_*")))
    assert file["hidden_states"].dtype == torch.float8_e4m3fn
    assert file["hidden_states_scales"].shape == (len(file["token_ids"]), 1, 1)


@pytest.mark.parametrize("what", ["sampling", "prompts", "dtype", "target", "no store"])
def test_a_store_of_something_else_is_refused(make_data, tmp_path, what):
    if what == "no store":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache/notes.txt").write_text("mine")
    else:
        fit(make_data(), max_steps=1)
    data = make_data(dtype="fp8" if what == "dtype" else "target")
    if what == "sampling":
        data.sampling = SamplingOptions(max_new_tokens=8)
    if what == "prompts":
        write_prompts(tmp_path / "train.jsonl", NUM_PROMPTS + 1)
    if what == "target":
        data.target = TargetOptions(str(make_target(tmp_path / "other", seed=1)))
    expected = "is not empty and holds no cache.json" if what == "no store" else f"holds the states of another {what}"
    with pytest.raises(ConfigError, match=rf"data.cache.dir = .*{expected}"):
        fit(data)


def test_a_store_trains_as_a_source_of_its_own(make_data, tmp_path):
    online = fit(make_data(), max_epochs=1)
    data = make_data(NoEngine, prompts=PromptOptions([str(tmp_path / "cache")], val_fraction=0.0), dir=None)
    tokens = [sorted(i for b in run.batches for i in b.ids.tolist()) for run in (online, fit(data, max_epochs=1))]
    assert tokens[0] == tokens[1]
    other = make_data(NoEngine, prompts=PromptOptions([str(tmp_path / "cache")], val_fraction=0.0), dir=None)
    other.target = TargetOptions(str(make_target(tmp_path / "other", seed=1)))
    with pytest.raises(ConfigError, match="its states are of another target"):
        fit(other)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (
            "sampling",
            SamplingOptions(mode="prefill"),
            "data.sampling.mode = 'prefill': data.prompts.train holds",
        ),
        ("sampling", SamplingOptions(temperature=0.5), r"data.sampling.temperature = 0.5: data.prompts.train holds"),
        ("cache", CacheOptions(Path("elsewhere")), "data.cache.dir = .*: data.prompts.train holds stored states"),
        ("cache", CacheOptions(dtype="fp8"), "data.cache.dtype = 'fp8': data.prompts.train holds stored states"),
        ("split", "test", r"data.prompts.train.split = 'test': .*cache is read without it"),
        ("streaming", True, r"data.prompts.train.streaming = True: .*cache is read without it"),
    ],
)
def test_stored_states_leave_no_option_unread(make_data, tmp_path, group, options, message):
    fit(make_data(), max_epochs=1)
    source = SourceOptions(str(tmp_path / "cache"))
    if group not in ("sampling", "cache"):
        source = dataclasses.replace(source, **{group: options})
    data = make_data(NoEngine, prompts=PromptOptions([source], val_fraction=0.0), dir=None)
    if group in ("sampling", "cache"):
        setattr(data, group, options)
    with pytest.raises(ConfigError, match=message):
        data.check()


def test_of_few_stored_states_one_is_held_out(make_data, tmp_path):
    fit(make_data(), max_epochs=1)
    sizes = []
    for fraction in (0.0, 1e-9):
        data = make_data(NoEngine, prompts=PromptOptions([str(tmp_path / "cache")], val_fraction=fraction), dir=None)
        fit(data, max_epochs=1)
        sizes.append({name: stream.epoch_size for name, stream in data._streams.items()})
    whole, split = sizes
    assert split == {"train": whole["train"] - 1, "val": 1}


@pytest.mark.parametrize("name", ["layers", "layer_convention", "split"])
def test_prompts_leave_no_option_unread(make_data, tmp_path, name):
    value = {"layers": [1, 2, 3], "layer_convention": "vllm", "split": "test"}[name]
    source = SourceOptions(str(tmp_path / "train.jsonl"), **{name: value})
    with pytest.raises(ConfigError, match=rf"data.prompts.train.{name} = .*train.jsonl is read without it"):
        make_data(prompts=PromptOptions([source])).check()


def test_the_engine_is_checked_before_it_starts_unless_no_sample_is_missing(make_data, tmp_path):
    """By the real check, which needs a vLLM that is installed and starts none."""

    def check():
        data = make_data(HiddenStateDataModule)
        data.queue_options = QueueOptions(capacity_tokens=500)
        data.check()

    def there():
        return {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}

    small = "data.queue.capacity_tokens = 500: one sample of data.engine.max_model_len = 512 tokens does not fit"
    with pytest.raises(ConfigError, match=small):
        check()
    fit(make_data(), max_steps=3)
    with pytest.raises(ConfigError, match=small):
        check()
    fit(make_data(), max_epochs=1)
    with (tmp_path / "cache/train/dropped.jsonl").open("a") as file:
        file.write('{"row": 3, "na')  # of a run that was killed: not mended by a look
    before = there()
    check()
    assert there() == before
    next((tmp_path / "cache/val/hidden_states").glob("hs_*")).unlink()
    with pytest.raises(ConfigError, match=small):
        check()


def test_states_to_validate_on_stand_beside_no_prompts(make_data, tmp_path):
    fit(make_data(), max_epochs=1)
    prompts = PromptOptions([str(tmp_path / "train.jsonl")], [str(tmp_path / "cache")])
    with pytest.raises(ConfigError, match="it holds stored states and not prompts"):
        fit(make_data(prompts=prompts, dir=None), max_epochs=1)
    part = PromptOptions([str(tmp_path / "cache/train")])
    with pytest.raises(ConfigError, match=f"a part of what a run has stored. Name {tmp_path / 'cache'}, which"):
        fit(make_data(NoEngine, prompts=part, dir=None), max_epochs=1)


def test_samples_from_the_disk_are_counted_and_their_length_is_checked(make_data, tmp_path):
    """Where vLLM makes the others, too."""
    fit(make_data(), max_steps=3)
    stored = sorted((tmp_path / "cache/train/hidden_states").glob("hs_*"))
    assert 3 < len(stored) < NUM_PROMPTS
    long = Made()
    long.token_ids, long.num_rows, long.spans = list(range(200)), 200, [(2, 200)]
    write_sample(stored[0], long, FinalNorm(torch.ones(HIDDEN), 1e-5), fp8=False)
    data = make_data(Counted)
    module = fit(data)
    assert data.last.dropped["too_long"] >= 1
    assert "200 tokens are over data.batch.pack_tokens = 160" in data.last.dropped_names["too_long"][0]
    trained = sum(len(batch.sample_ids) for batch in module.batches)
    assert trained == NUM_PROMPTS - 1 - sum(n for why, n in data.last.dropped.items() if why == "empty_mask")
    assert data.last.taken >= trained


# ---- the store -----------------------------------------------------------------------------------------------------


def make_store(directory, limits=(512, 160), num_writers=1, max_gib=1.0):
    facts = StoreFacts("t", (1, 2, 3), 4, HIDDEN, "float32", "tokenizer", "template", "prompts", "sampling")
    norm = FinalNorm(torch.ones(HIDDEN), 1e-5)
    return SampleStore(CacheOptions(directory, max_gib), facts, norm, torch.float32, limits, num_writers)


class Made:
    """A sample as `SampleStore.write` reads it."""

    stream, name, finish_reason, prompt_tokens, num_rows = "train", "made", "stop", 2, 5
    token_ids, spans = [1, 2, 3, 4, 5], [(2, 5)]

    def rows(self):
        return states(self.token_ids)


def test_the_index_holds_what_every_rank_has_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    first, second = make_store(tmp_path / "s"), make_store(tmp_path / "s")
    first.write(0, Made())
    second.write(1, Made())
    first.write_indexes()
    table = datasets.load_from_disk(str(tmp_path / "s/train"))
    assert table["seq_len"] == [5, 5] and [sum(mask) for mask in table["loss_mask"]] == [3, 3]


def test_the_size_is_that_of_all_ranks_and_its_limit_is_told(tmp_path, caplog):
    size_bytes = write_sample(tmp_path / "one", Made(), FinalNorm(torch.ones(HIDDEN), 1e-5), fp8=False)
    max_gib = 3.5 * size_bytes / 2**30
    stores = [make_store(tmp_path / "s", num_writers=2, max_gib=max_gib) for _ in range(2)]
    for row in range(20):
        stores[row % 2].write(row, Made())
    assert len(list(tmp_path.glob("s/train/hidden_states/hs_*"))) == 4
    assert caplog.text.count("has reached data.cache.max_gib") == 2  # each rank says it once


def test_a_row_that_was_too_long_is_tried_again_under_other_limits(tmp_path):
    store = make_store(tmp_path / "s")
    store.drop(3, Dropped("train", 3, "s3", "too_long", "over data.batch.pack_tokens = 160"))
    store.drop(4, Dropped("train", 4, "s4", "bad_record", "no messages"))
    for limits, known in (((512, 160), True), ((512, 320), False)):
        again = make_store(tmp_path / "s", limits)
        assert again.has("train", 3) is known
        assert again.has("train", 4)


# ---- states made elsewhere -----------------------------------------------------------------------------------------


def test_files_of_speculators_say_their_layers_or_are_refused(make_data, target, tmp_path):
    """0.3's data_*.pt: the last layer not normed, the layers only known to the user."""
    place = tmp_path / "old"
    place.mkdir()
    norm = FinalNorm(load_final_norm(inspect_target(TargetOptions(str(target)))), 1e-5)
    for i in range(12):
        ids = torch.arange(5 + i)
        layers = list(states(ids.tolist()).unbind(1))
        mask = (ids >= 3).int()
        torch.save({"input_ids": ids, "hidden_states": layers, "loss_mask": mask}, place / f"data_{i}.pt")
    source = SourceOptions(str(place), layers=[1, 3, 4], layer_convention="output")
    module = fit(make_data(NoEngine, prompts=PromptOptions([source], val_fraction=0.0), dir=None))
    batch = module.batches[0]
    slots = int((batch.doc == 0).sum())
    ids = list(range(slots + 1))
    expected = states(ids)
    assert torch.equal(batch.features[:slots], expected[:-1, :3])
    assert torch.equal(batch.teacher[:slots], norm.apply(expected[1:, 3], torch.float32))
    assert batch.mask[:slots].tolist() == [i >= 3 for i in ids[1:]]
    for changed, message in (
        ({"layers": None}, "its files do not say which layers they hold"),
        ({"layer_convention": None}, "its files do not say which layers they hold"),
        ({"layer_convention": "vllm"}, r"its auxiliary layers are \[0, 2, 3\] \(output of the layer; \[1, 3, 4\] in"),
    ):
        prompts = PromptOptions([dataclasses.replace(source, **changed)], val_fraction=0.0)
        with pytest.raises(ConfigError, match=message):
            fit(make_data(NoEngine, prompts=prompts, dir=None))


@pytest.mark.parametrize(
    "problem", ["it holds 3 layers and not 4", "wide and the target's 8", "token id 5000 is not in"]
)
def test_files_that_do_not_fit_the_target_are_dropped_by_name(make_data, tmp_path, caplog, problem):
    place = tmp_path / "old"
    place.mkdir()
    for i in range(12):
        ids = torch.arange(6)
        layers = list(states(ids.tolist()).unbind(1))
        if i == 3:
            layers = layers[1:] if "layers" in problem else [torch.ones(6, 9)] * 4 if "wide" in problem else layers
            ids = ids + 4995 if "token" in problem else ids
        torch.save({"input_ids": ids, "hidden_states": layers, "loss_mask": torch.ones(6)}, place / f"data_{i}.pt")
    source = SourceOptions(str(place), layers=[1, 3, 4], layer_convention="output")
    module = fit(make_data(NoEngine, prompts=PromptOptions([source], val_fraction=0.0), dir=None))
    assert sum(len(batch.sample_ids) for batch in module.batches) == 11
    assert "data_3.pt: " in caplog.text
    assert problem in caplog.text


@pytest.mark.parametrize("cached", [False, True])
def test_validate_sees_the_batches_of_a_fit(make_data, tmp_path, cached):
    """Lightning validates in inference mode, which threads do not share."""
    directory = tmp_path / "cache" if cached else None
    fitted = fit(make_data(dir=directory))
    validated = Full()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(validated, make_data(NoEngine if cached else ToyDataModule, dir=directory), verbose=False)
    assert same(fitted.val_batches, validated.val_batches)
