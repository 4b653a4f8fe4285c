"""The data module under a real Trainer: order, epochs, resume, accumulation, failure. Real queue, toy engine."""

import json
import threading

import lightning.pytorch as pl
import pytest
import torch
from toy_engine import ToyDataModule, answer, states
from toy_target import make_target, make_tokenizer

from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.options import (
    BatchOptions,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    TargetOptions,
)


class Recorder(pl.LightningModule):
    """Notes which samples each optimizer step saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.steps: dict[int, list[int]] = {}
        self.val: list[list[int]] = []
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.steps.setdefault(self.trainer.global_step, []).extend(batch.sample_ids)
        self.batches.append(batch)
        return (batch.features.mean((0, 1)) * self.weight).sum()

    def validation_step(self, batch, batch_idx):
        self.val.append(batch.sample_ids)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def write_prompts(path, number, text="count to {}", answered=True):
    rows = []
    for i in range(number):
        messages = [{"role": "user", "content": text.format(i)}]
        if answered:
            messages.append({"role": "assistant", "content": "one two three"[: 3 + i % 10]})
        rows.append(json.dumps({"id": f"p{i}", "messages": messages}))
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def make_data(target, tmp_path):
    def make(number=30, mode="prefill", pack_tokens=160, max_new_tokens=8, val=0, **kwargs):
        train = write_prompts(tmp_path / "train.jsonl", number)
        held_out = [write_prompts(tmp_path / "val.jsonl", val, "spell {}")] if val else []
        return ToyDataModule(
            TargetOptions(str(target)),
            PromptOptions([train], held_out, val_fraction=0.0),
            SamplingOptions(mode=mode, max_new_tokens=max_new_tokens),
            EngineOptions(max_model_len=512),
            batch=BatchOptions(pack_tokens=pack_tokens, static_shapes=False, calibration_tokens=300),
            run_dir=tmp_path / "run",
            **kwargs,
        )

    return make


def fit(data, tmp_path=None, ckpt_path=None, module=None, **kwargs):
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0} | kwargs
    callbacks = []
    if tmp_path is not None:
        callbacks = [pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=bool(callbacks), callbacks=callbacks, **settings)  # fmt: skip
    module = module or Recorder()
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def test_an_epoch_trains_on_every_prompt_once_in_order(make_data):
    module = fit(make_data(30), max_epochs=2)
    seen = [i for step in sorted(module.steps) for i in module.steps[step]]
    assert seen == list(range(60))
    for batch in module.batches:  # no pack crosses the epoch
        assert len({i // 30 for i in batch.sample_ids}) == 1


def test_batches_hold_the_states_of_their_tokens(make_data):
    data = make_data(30)
    module = fit(data)
    batch = module.batches[2]
    start = 0
    for doc, index in enumerate(batch.sample_ids):
        submit = data._streams["train"][index]
        slots = len(submit.prompt_ids) - 1
        here, expected = slice(start, start + slots), states(submit.prompt_ids)
        assert (batch.doc[here] == doc).all()
        assert batch.ids[here].tolist() == submit.prompt_ids[1:]
        assert torch.equal(batch.features[here], expected[:-1, :3])
        assert torch.equal(batch.teacher[here], expected[1:, 3])
        (begin, end), *more = submit.spans
        assert not more
        assert batch.mask[here].nonzero().flatten().tolist() == list(range(begin - 1, end - 1))
        start += slots
    assert start == batch.num_slots


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 8, 9])
def test_a_resumed_run_sees_what_the_whole_run_saw(make_data, tmp_path, accumulate, at):
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 9, "max_steps": 12}
    whole = fit(make_data(30), tmp_path, **options)
    assert sorted(whole.steps) == list(range(12))
    part = fit(make_data(30), ckpt_path=tmp_path / f"ckpt/step={at}.ckpt", **options)
    assert part.steps == {step: ids for step, ids in whole.steps.items() if step >= at}
    assert torch.equal(part.weight, whole.weight)


def test_epochs_cut_short_lose_no_sample(make_data, tmp_path):
    options = {"limit_train_batches": 2, "max_epochs": 4}
    module = fit(make_data(30), tmp_path, **options)
    assert [i for step in sorted(module.steps) for i in module.steps[step]] == list(
        range(sum(map(len, module.steps.values())))
    )
    assert sorted(module.steps) == list(range(8))
    part = fit(make_data(30), ckpt_path=tmp_path / "ckpt/step=4.ckpt", **options)
    assert part.steps == {step: ids for step, ids in module.steps.items() if step >= 4}


def test_another_seed_is_another_order_and_the_same_seed_is_not(make_data):
    def names(seed):
        data = make_data(30, seed=seed)
        fit(data)
        return [data._streams["train"][i].name for i in range(30)]

    first, again, other = names(1), names(1), names(2)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_validation_batches_are_made_once_and_first(make_data):
    module = fit(make_data(30, val=6), max_steps=6, val_check_interval=2, check_val_every_n_epoch=None, max_epochs=9)
    assert module.val == 3 * [[0, 1, 2, 3], [4, 5]]


def test_generate_mode_supervises_the_answer(make_data):
    data = make_data(40, mode="generate", max_new_tokens=9)
    module = fit(data)
    dropped = 0
    seen = {i for step in module.steps.values() for i in step}
    for index in range(40):
        submit = data._streams["train"][index]
        if len(answer(submit.prompt_ids, 9)) == 1:  # a lone token has no state behind it: nothing to supervise
            dropped += 1
            assert index not in seen
        else:
            assert index in seen
    assert 0 < dropped < 20
    batch = module.batches[0]
    first = data._streams["train"][batch.sample_ids[0]]
    made = answer(first.prompt_ids, 9)
    begin = len(first.prompt_ids) - 1
    assert batch.mask[: begin + len(made) - 1].nonzero().flatten().tolist() == list(range(begin, begin + len(made) - 1))


def test_calibration_samples_are_trained_on(make_data):
    calibrated = []

    class Calibrating(Recorder):
        def on_fit_start(self):
            calibrated.append(self.trainer.datamodule.calibrate())

    data = make_data(30)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, max_epochs=1)  # fmt: skip
    module = Calibrating()
    trainer.fit(module, data)
    assert [i for step in sorted(module.steps) for i in module.steps[step]] == list(range(30))
    (calibration,) = calibrated
    assert 300 <= calibration.num_tokens < 300 + 2 * 160
    first = data._streams["train"][0].prompt_ids
    assert all(calibration.response_counts[i] + calibration.prompt_counts[i] > 0 for i in first[1:])


def test_a_failing_source_ends_the_fit(make_data):
    data = make_data(200)
    read = data.setup

    def setup(stage):
        read(stage)
        requests = data._streams["train"]
        make = requests.request

        def fail_at_40(index, record):
            if index == 40:
                raise OSError("the disk is gone")
            return make(index, record)

        requests.request = fail_at_40

    data.setup = setup
    with pytest.raises(OSError, match="the disk is gone"):
        fit(data)
    assert not [t for t in threading.enumerate() if t.name in ("eagle3-batches", "eagle3-queue", "eagle3-hub")]


def test_an_interrupted_fit_leaves_no_thread(make_data):
    class Stumbling(Recorder):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of memory")

    data = make_data(200)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, max_epochs=1)  # fmt: skip
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Stumbling(), data)
    assert not [t for t in threading.enumerate() if t.name in ("eagle3-batches", "eagle3-queue", "eagle3-hub")]


def test_an_epoch_without_a_usable_sample_ends_the_fit(make_data):
    with pytest.raises(SampleError, match=r"empty_mask|were dropped"):
        fit(make_data(10, mode="generate", max_new_tokens=1))


def test_lengths_that_cannot_fit_are_refused_before_anything_starts(make_data):
    data = make_data(10)
    data.engine = EngineOptions(max_model_len=100_000)
    with pytest.raises(ConfigError, match=r"data.engine.max_model_len = 100000: the target takes at most 4096"):
        data.setup("fit")
    data = make_data(10, mode="generate", max_new_tokens=512)
    with pytest.raises(ConfigError, match=r"data.sampling.max_new_tokens = 512: no prompt fits"):
        data.setup("fit")
    data = make_data(10, pack_tokens=4)
    with pytest.raises(ConfigError, match=r"none of the first 10 samples can be used \(10 too_long\)"):
        data.setup("fit")


def test_a_target_without_a_chat_template_is_refused(make_data, tmp_path):
    bare = make_target(tmp_path / "bare", make_tokenizer(template=None))
    data = make_data(10)
    data.target = TargetOptions(str(bare))
    with pytest.raises(ConfigError, match="no chat template"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("change", "part"),
    [("prompts", "prompts"), ("seed", "prompts"), ("sampling", "sampling"), ("template", "template")],
)
def test_a_checkpoint_of_other_data_is_refused(make_data, tmp_path, change, part):
    fit(make_data(30), tmp_path, max_steps=2)
    data = make_data(29 if change == "prompts" else 30, seed=1 if change == "seed" else 0)
    if change == "sampling":
        data.sampling = SamplingOptions(mode="prefill", top_k=5)
    if change == "template":
        kwargs = {"enable_thinking": False}
        data.prompts = PromptOptions(data.prompts.train, val_fraction=0.0, chat_template_kwargs=kwargs)
    with pytest.raises(ConfigError, match=f"the checkpoint was written with another {part}"):
        fit(data, ckpt_path=tmp_path / "ckpt/step=2.ckpt", max_steps=4)


def test_the_preview_shows_what_is_trained_on(make_data, tmp_path):
    from eagle3_lightning.callbacks.preview import PreviewCallback

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                         enable_checkpointing=False, max_steps=1,
                         callbacks=[PreviewCallback(tmp_path / "shown", 3)])  # fmt: skip
    data = make_data(30)
    trainer.fit(Recorder(), data)
    page = (tmp_path / "shown/preview.html").read_text()
    assert page.count("<h2>") == 3
    first = data._streams["train"][0]
    start, end = first.spans[0]
    text = data._streams["train"].chat.decode(first.prompt_ids[start + 1 : end])
    assert f"<mark>{text.replace('<', '&lt;').replace('>', '&gt;')}</mark>" in page


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "eagle3_lightning.data_warnings"]


def test_a_run_without_a_validation_says_so(make_data, caplog):
    data = make_data(9)
    data.prompts = PromptOptions(data.prompts.train, val_fraction=0.001)
    fit(data, max_steps=1)
    (told,) = warnings_of(caplog)
    assert told.startswith(
        "no sample is held out (data.prompts.val_fraction = 0.001), so there is no validation and no "
    )
    assert "name held-out prompts with data.prompts.val, raise val_fraction" in told
    caplog.clear()
    data = make_data(40)
    data.prompts = PromptOptions(data.prompts.train, val_fraction=0.001)
    module = fit(data, max_steps=1, val_check_interval=1)
    assert len(module.val[0]) == 1
    (told,) = warnings_of(caplog)
    assert told.startswith("only 1 of the samples is held out (data.prompts.val_fraction = 0.001), so the validation's")
    caplog.clear()
    for data, options in ((make_data(9), {}), (make_data(40, val=2), {}), (make_data(40), {"limit_val_batches": 0})):
        fit(data, max_steps=1, **options)  # none is wanted, or prompts are named for it
    assert warnings_of(caplog) == []


def test_a_data_set_that_is_less_than_the_calibration_asks_for_is_told(make_data, caplog):
    for number, expected in ((3, 1), (40, 0)):  # 300 tokens are asked for

        class Calibrates(Recorder):
            def on_fit_start(self):
                self.trainer.datamodule.calibrate()

        caplog.clear()
        fit(make_data(number), module=Calibrates())
        told = [line for line in warnings_of(caplog) if "the whole data set is" in line]
        assert len(told) == expected
        assert all(line.startswith("the whole data set is 3 samples of ") for line in told)
        assert all("less than data.batch.calibration_tokens = 300" in line for line in told)
