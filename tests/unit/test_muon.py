"""Muon against torch's own, and in float32, where bfloat16 is slow."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from eagle3_lightning.draft import muon
from eagle3_lightning.draft.muon import Muon, orthogonalize

SHAPES = [(24, 72), (64, 24), (24, 24)]


def train(make, monkeypatch, dtype):
    monkeypatch.setattr(muon, "product_dtype", lambda device: dtype)
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(matrices)
    for step in range(3):
        for p in matrices:
            p.grad = torch.randn(p.shape, generator=generator)
        if step == 1:
            matrices[2].grad = None  # a matrix that has none is left alone
        optimizer.step()
    return matrices, optimizer


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_in_bfloat16_it_is_torchs_to_the_last_bit(monkeypatch):
    ours, optimizer = train(lambda p: Muon(p, 0.02, 0.1), monkeypatch, torch.bfloat16)
    theirs, other = train(
        lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), monkeypatch, None
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], other.state[b]["momentum_buffer"])
    monkeypatch.setattr(muon, "product_dtype", lambda device: torch.bfloat16)
    resumed = Muon([nn.Parameter(p.detach().clone()) for p in theirs], 0.5, 0.5)
    resumed.load_state_dict(deepcopy(other.state_dict()))
    for optimizer_, matrices in ((resumed, resumed.param_groups[0]["params"]), (other, theirs)):
        for p in matrices:
            p.grad = torch.ones_like(p).cumsum(0)
        optimizer_.step()
    for a, b in zip(resumed.param_groups[0]["params"], theirs, strict=True):
        assert torch.equal(a, b)


def test_in_float32_it_is_the_same_up_to_bfloat16s_rounding(monkeypatch):
    exact, _ = train(lambda p: Muon(p, 0.02, 0.1), monkeypatch, torch.float32)
    rounded, _ = train(lambda p: Muon(p, 0.02, 0.1), monkeypatch, torch.bfloat16)
    start, _ = train(lambda p: Muon(p, 0.0, 0.1), monkeypatch, torch.float32)
    for a, b, c in zip(exact, rounded, start, strict=True):
        assert 0 < (a - b).norm() < 0.03 * (a - c).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = matrix.clone()
    values = torch.linalg.svdvals(orthogonalize(matrix, torch.float32))
    assert torch.equal(matrix, before)
    assert values.min() > 0.5 and values.max() < 1.3
