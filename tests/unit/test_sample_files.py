"""One sample in one file: no bit is lost, and files of another precision are read as what they mean."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_packer import make_sample
from toy_target import make_target

from eagle3_lightning.options import TargetOptions
from eagle3_lightning.stream import packer as packer_module
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.files import FinalNorm, SampleFileError, StoredSample, _decode, _encode, write_sample
from eagle3_lightning.stream.foreign import PtSample
from eagle3_lightning.stream.packer import Packer, assemble
from eagle3_lightning.target import inspect_target, load_final_norm


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_encoding_loses_no_bit(dtype):
    torch.manual_seed(0)
    for weight in (torch.rand(577) * 3 + 0.1, torch.cat([torch.randn(575) * 3, torch.tensor([0.0, 1e-5])])):
        norm = FinalNorm(weight, 1e-5)
        rows = (torch.randn(200, 4, 577) * 50).to(dtype)
        rows[:, -1] = norm.apply(rows[:, -1], dtype)
        tensors = _encode(rows, norm, fp8=False)
        read = {name: tensor.clone() for name, tensor in tensors.items()}
        assert same_bits(_decode(read, norm, dtype), rows)
        # and the final norm of what speculators reads gives the teacher again
        error = (norm.apply(tensors["hidden_states"][:, -1], dtype).float() - rows[:, -1].float()).norm()
        assert error < 0.01 * rows[:, -1].float().norm()


def test_two_bits_are_enough_for_ordinary_norms():
    rows = torch.randn(50, 4, 64).bfloat16()
    norm = FinalNorm(torch.rand(64) + 0.5, 1e-5)
    rows[:, -1] = norm.apply(rows[:, -1], torch.bfloat16)
    assert _encode(rows, norm, fp8=False)["last_correction"].shape == (50, 16)


def test_norms_from_one_are_read_as_they_multiply(tmp_path):
    plain, gemma = (make_target(tmp_path / kind, model_type=kind) for kind in ("llama", "gemma2"))
    assert torch.equal(load_final_norm(inspect_target(TargetOptions(str(plain)))), torch.ones(8))
    assert torch.equal(load_final_norm(inspect_target(TargetOptions(str(gemma)))), torch.full((8,), 2.0))


@pytest.mark.parametrize("ours", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("theirs", [torch.bfloat16, torch.float16, torch.float32])
def test_states_of_another_precision_keep_their_values(tmp_path, ours, theirs):
    """Speculators may have run the target in float16, and the run is in bfloat16."""
    torch.manual_seed(0)
    states, norm = torch.randn(6, 4, 8).to(theirs), FinalNorm(torch.rand(8) + 0.5, 1e-5)
    file = tmp_path / "hs_0.safetensors"
    save_file({"hidden_states": states, "token_ids": torch.arange(6), "loss_mask": torch.ones(6)}, file)
    expected = torch.cat([states[:, :3], norm.apply(states[:, 3:], theirs)], dim=1).to(ours)
    sample = StoredSample(file, "train", 0, norm, ours)
    assert torch.equal(sample.rows(), expected)
    batch = assemble([sample], 3, None)
    assert torch.equal(batch.features, expected[:-1, :3]) and torch.equal(batch.teacher, expected[1:, 3])


def test_a_sample_file_names_what_it_lacks(tmp_path):
    save_file({"hidden_states": torch.zeros(3, 4, 8), "token_ids": torch.arange(2)}, tmp_path / "hs_0.safetensors")
    with pytest.raises(ValueError, match="2 token ids and 3 rows"):
        StoredSample(tmp_path / "hs_0.safetensors", "train", 0, FinalNorm(torch.ones(8), 1e-5), torch.float32)


# ---- packs of them --------------------------------------------------------------------------------------------------

WIDTH = 577


@dataclasses.dataclass
class Made:
    """A finished sample of given states, as write_sample takes it."""

    states: torch.Tensor
    token_ids: list[int]
    spans: list[tuple[int, int]]
    name: str = "made"
    prompt_tokens: int = 1
    finish_reason: str = "stop"

    @property
    def num_rows(self):
        return len(self.states)

    def rows(self):
        return self.states


def make_states(num_rows, norm, dtype):
    states = torch.randn(num_rows, 4, WIDTH).to(dtype)
    states[:, -1] = norm.apply(states[:, -1], dtype)
    return states


def store(path, index, states, norm, fp8=False, spans=((1, 3), (5, 99))):
    made = Made(states, [100 * index + i for i in range(len(states) + 1)], list(spans))
    write_sample(path, made, norm, fp8)
    return StoredSample(path, "train", index, norm, states.dtype)


def check_pack(batch, samples, pad_to=None):
    """Beside what its samples' own rows, ids and spans say, one after the other."""
    start = 0
    for doc, sample in enumerate(samples):
        rows, here = sample.rows(), slice(start, start + sample.num_rows - 1)
        assert same_bits(batch.features[here], rows[:-1, :3]), doc
        assert same_bits(batch.teacher[here], rows[1:, 3]), doc
        assert batch.ids[here].tolist() == sample.token_ids[1 : sample.num_rows]
        inside = [any(a <= i < b for a, b in sample.spans) for i in range(1, sample.num_rows)]
        assert batch.mask[here].tolist() == inside
        assert batch.doc[here].tolist() == [doc] * (sample.num_rows - 1)
        assert batch.pos[here].tolist() == list(range(sample.num_rows - 1))
        start = here.stop
    assert batch.num_slots == (start if pad_to is None else pad_to)
    assert batch.sample_ids == [sample.index for sample in samples]
    for field in ("ids", "features", "teacher", "mask", "pos"):
        assert not getattr(batch, field)[start:].any(), field
    assert (batch.doc[start:] == -1).all()


@pytest.mark.parametrize("piece_bytes", [1, 50_000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_pack_of_stored_samples_is_what_was_written(tmp_path, monkeypatch, dtype, piece_bytes):
    torch.manual_seed(0)
    monkeypatch.setattr(packer_module, "_PIECE_BYTES", piece_bytes)
    norm = FinalNorm(torch.rand(WIDTH) + 0.5, 1e-5)
    states = [make_states(num_rows, norm, dtype) for num_rows in (7, 2, 130, 9)]
    samples = [store(tmp_path / f"hs_{i}.safetensors", i, rows, norm) for i, rows in enumerate(states)]
    assert all(same_bits(sample.rows(), rows) for sample, rows in zip(samples, states, strict=True))
    assert [sample.spans[0] for sample in samples] == [(1, 3), (1, 2), (1, 3), (1, 3)]
    check_pack(assemble(samples, 3, 200), samples, 200)
    check_pack(assemble(samples[1:2], 3, None), samples[1:2])


@pytest.mark.parametrize("pool_bytes", [0, 1 << 30])
def test_a_pack_of_every_kind_of_file_and_of_the_arena(tmp_path, monkeypatch, pool_bytes):
    """Corrections, a whole copy, fp8, speculators' of two precisions and its .pt, and rows that vLLM just made."""
    torch.manual_seed(0)
    monkeypatch.setattr(packer_module, "_POOL_BYTES", pool_bytes)
    norm, file = FinalNorm(torch.rand(WIDTH) + 0.5, 1e-5), lambda i: tmp_path / f"hs_{i}.safetensors"
    fits, wild = make_states(9, norm, torch.bfloat16), torch.randn(6, 4, WIDTH).bfloat16()
    wild[:, -1] *= torch.logspace(-38, 30, WIDTH)  # undone by a weight of 0 below
    odd = FinalNorm(torch.cat([torch.zeros(1), norm.weight[1:] * 1e-9]), 1e-5)
    samples = [store(file(0), 0, fits, norm), store(file(1), 1, fits, norm), store(file(2), 2, wild, odd)]
    assert [set(s.tensors) - {"hidden_states"} for s in samples] == [{"last_correction"}] * 2 + [{"last_normed"}]
    samples += [store(file(3), 3, fits, norm, fp8=True), store(file(4), 4, fits[:3], norm, fp8=True)]
    for index, dtype in ((5, torch.float16), (6, torch.float32), (7, torch.bfloat16)):
        states = torch.randn(5, 4, WIDTH).to(dtype)
        save_file({"hidden_states": states, "token_ids": torch.arange(5)}, file(index))
        samples.append(StoredSample(file(index), "train", index, norm, torch.bfloat16))
        expected = torch.cat([states[:, :3], norm.apply(states[:, 3:], dtype)], dim=1).bfloat16()
        assert same_bits(samples[-1].rows(), expected)
    layers = list(torch.randn(4, 6, WIDTH).bfloat16())
    torch.save({"input_ids": torch.arange(6), "loss_mask": torch.ones(6), "hidden_states": layers}, tmp_path / "d.pt")
    samples.append(PtSample(tmp_path / "d.pt", "train", 8, norm))
    arena = Arena.create(capacity_tokens=64, block_tokens=4, num_layers=4, hidden_size=WIDTH, dtype="bfloat16")
    arena.rows.copy_(torch.randn(arena.rows.shape))
    samples += [make_sample(arena, 9, 5, 3), make_sample(arena, 10, 2, 4, first_block=4, mode="generate")]
    samples.append(store(file(11), 11, fits, norm))
    check_pack(assemble(samples, 3, 100), samples, 100)
    packer = Packer(100, True, 3)
    expected = [sample.rows() for sample in samples]
    batch = packer.assemble(samples)
    assert same_bits(batch.teacher[:8], expected[0][1:, 3])
    arena.close()


def test_fp8_rows_are_the_scaled_values_and_the_last_is_normed(tmp_path):
    torch.manual_seed(0)
    norm = FinalNorm(torch.rand(WIDTH) + 0.5, 1e-5)
    sample = store(tmp_path / "hs_0.safetensors", 0, make_states(70, norm, torch.bfloat16), norm, fp8=True)
    read = load_file(sample.path)
    states = (read["hidden_states"].float() * read["hidden_states_scales"]).bfloat16()
    expected = torch.cat([states[:, :3], norm.apply(states[:, 3:], torch.bfloat16)], dim=1)
    assert same_bits(sample.rows(), expected)


# ---- damaged files --------------------------------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path):
    norm = FinalNorm(torch.rand(WIDTH) + 0.5, 1e-5)
    return store(tmp_path / "hs_0.safetensors", 0, make_states(40, norm, torch.bfloat16), norm)


def read_again(sample):
    return StoredSample(sample.path, "train", 0, sample.norm, sample.dtype)


def edit_header(path: Path, change) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def test_a_header_that_is_longer_than_what_is_read_at_once(sample):
    rows = sample.rows()
    edit_header(sample.path, lambda header: header["__metadata__"].update(more="x" * 100_000))
    again = read_again(sample)
    assert same_bits(again.rows(), rows) and again.token_ids == sample.token_ids and again.spans == sample.spans


@pytest.mark.parametrize("size_bytes", [0, 5, 8, 100, 1000, -1, -50, -100_000])
def test_every_cut_is_seen_when_the_facts_are_read(sample, size_bytes):
    sample.path.write_bytes(sample.path.read_bytes()[:size_bytes])
    with pytest.raises(SampleFileError, match=str(sample.path)):
        read_again(sample)


def test_bytes_behind_the_end_are_seen(sample):
    with sample.path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(SampleFileError, match="bytes and its header says"):
        read_again(sample)


def set_entry(name, **facts):
    return lambda header: header[name].update(facts)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [1],
        lambda header: "text",
        lambda header: header.pop("token_ids") and None,
        lambda header: header.pop("loss_mask") and None,
        lambda header: header.update(__metadata__=3),
        lambda header: header.update(__metadata__={"prompt_tokens": 3}),
        lambda header: header["__metadata__"].update(prompt_tokens="three"),
        lambda header: header.update(token_ids=7),
        set_entry("token_ids", dtype="I65"),
        set_entry("token_ids", dtype="I32"),
        set_entry("token_ids", dtype=["I64"]),
        set_entry("token_ids", shape=[39]),
        set_entry("token_ids", shape=[20, 2]),
        set_entry("token_ids", shape=["40"]),
        set_entry("token_ids", shape=[-40]),
        set_entry("token_ids", data_offsets=[8, 328]),
        set_entry("token_ids", data_offsets=[0]),
        set_entry("token_ids", data_offsets=[0, 1 << 70]),
        set_entry("hidden_states", shape=[40, 4 * WIDTH]),
        set_entry("hidden_states", shape=[20, 8, WIDTH]),
        set_entry("loss_mask", shape=[2, 20]),
        set_entry("last_correction", shape=[20, 290]),
    ],
)
def test_a_damaged_header_is_one_error_with_the_file(sample, change):
    edit_header(sample.path, change)
    with pytest.raises(SampleFileError, match=str(sample.path)) as caught:
        read_again(sample)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_header_that_is_no_json(sample, text):
    sample.path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SampleFileError, match=str(sample.path)):
        read_again(sample)


def test_a_file_that_goes_or_changes_under_its_reader(sample):
    held = read_again(sample)
    data = sample.path.read_bytes()
    with sample.path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SampleFileError, match="was changed"):
        held.rows()
    sample.path.write_bytes(data)
    os.replace(sample.path, sample.path.with_suffix(".gone"))
    with pytest.raises(SampleFileError, match="No such file"):
        assemble([held], 3, None)
