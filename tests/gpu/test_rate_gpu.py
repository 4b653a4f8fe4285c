"""The matrix rate that `perf/mfu` is a share of, as the fit measures it at its start."""

import pytest
import torch

from eagle3_lightning.callbacks.throughput import matrix_rate

pytestmark = pytest.mark.gpu


def test_the_rate_is_a_cards_and_its_memory_is_given_back() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    assert 1e13 < matrix_rate(device, torch.bfloat16) < 1e16
    assert torch.cuda.memory_reserved(device) <= before + (64 << 20)  # the library's own workspace may stay
