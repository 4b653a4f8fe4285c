"""One sample in one file: no bit is lost, and files of another precision are read as what they mean."""

import pytest
import torch
from safetensors.torch import save_file
from toy_target import make_target

from eagle3_lightning.options import TargetOptions
from eagle3_lightning.stream.files import FinalNorm, StoredSample, _decode, _encode
from eagle3_lightning.stream.packer import assemble
from eagle3_lightning.target import inspect_target, load_final_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_encoding_loses_no_bit(dtype):
    torch.manual_seed(0)
    for weight in (torch.rand(577) * 3 + 0.1, torch.cat([torch.randn(575) * 3, torch.tensor([0.0, 1e-5])])):
        norm = FinalNorm(weight, 1e-5)
        rows = (torch.randn(200, 4, 577) * 50).to(dtype)
        rows[:, -1] = norm.apply(rows[:, -1], dtype)
        tensors = _encode(rows, norm, fp8=False)
        back = torch.empty_like(rows)
        _decode(tensors, norm, 0, slice(None), back)
        assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))
        for start, layers in ((1, slice(3)), (7, slice(3, None)), (199, slice(1, 4))):
            part = torch.empty(200 - start, *rows[:, layers].shape[1:], dtype=dtype)
            _decode(tensors, norm, start, layers, part)
            assert torch.equal(part.view(torch.uint8), rows[start:, layers].contiguous().view(torch.uint8))
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
