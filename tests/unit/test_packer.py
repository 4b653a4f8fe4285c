"""Packing: the shift, the mask, the padding, and that the plan depends on lengths alone."""

import os
import random

import pytest
import torch

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.messages import Sample
from eagle3_lightning.stream.packer import Packer, assemble, num_slots
from eagle3_lightning.stream.queue import FinishedSample

A, H = 3, 4


@pytest.fixture
def arena():
    made = Arena.create(capacity_tokens=4096, block_tokens=4, num_layers=A + 1, hidden_size=H, dtype="float32")
    made.rows.copy_(torch.randn(made.rows.shape))
    yield made
    made.close()


def make_sample(arena, index, prompt_tokens, answer_tokens, first_block=0, mode="prefill", released=None):
    num_tokens = prompt_tokens + answer_tokens
    blocks = list(range(first_block, first_block + arena.layout.blocks_for(num_tokens)))
    random.Random(index).shuffle(blocks)
    num_rows = num_tokens - (mode == "generate")
    token_ids = [1000 * index + i for i in range(num_tokens)]
    message = Sample(
        index + 1,
        "train",
        index,
        f"s{index}",
        token_ids,
        prompt_tokens,
        [(prompt_tokens, num_tokens)],
        num_rows,
        blocks,
        "stop",
    )
    return FinishedSample(message, arena, (released if released is not None else []).append)


def test_prompt_of_5_and_answer_of_3_supervises_slots_4_5_6(arena):
    sample = make_sample(arena, 0, 5, 3)
    rows = sample.rows()
    batch = assemble([sample], A, None)
    assert batch.num_slots == 7
    assert batch.mask.nonzero().flatten().tolist() == [4, 5, 6]
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert torch.equal(batch.features, rows[:-1, :A])
    assert torch.equal(batch.teacher, rows[1:, A])
    assert batch.pos.tolist() == list(range(7)) and batch.doc.tolist() == [0] * 7


def test_in_generate_mode_the_last_answered_token_has_no_row_and_no_slot(arena):
    batch = assemble([make_sample(arena, 0, 5, 3, mode="generate")], A, None)
    assert batch.num_slots == 6
    assert batch.mask.nonzero().flatten().tolist() == [4, 5]


def test_documents_lie_end_to_end_and_padding_is_marked(arena):
    first, second = make_sample(arena, 3, 4, 2), make_sample(arena, 4, 2, 3, first_block=8)
    alone = [assemble([s], A, None) for s in (first, second)]
    batch = assemble([first, second], A, 12)
    assert batch.sample_ids == [3, 4]
    assert batch.doc.tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    for field in ("ids", "features", "teacher", "mask", "pos"):
        packed = getattr(batch, field)
        assert torch.equal(packed[:9], torch.cat([getattr(b, field) for b in alone])), field
        assert not packed[9:].any(), field


def test_a_pack_closes_when_the_next_does_not_fit_and_order_is_kept(arena):
    packer = Packer(pack_tokens=10, static_shapes=True, num_aux=A)
    lengths = [5, 7, 3, 11, 2, 2]  # slots 4, 6 | 2 | 10 | 1, 1
    packs = [packer.add(make_sample(arena, i, 1, n - 1)) for i, n in enumerate(lengths)] + [packer.flush()]
    assert [[s.index for s in pack] for pack in packs if pack] == [[0, 1], [2], [3], [4, 5]]
    assert packer.flush() is None


def test_the_plan_is_a_pure_function_of_lengths(arena):
    lengths = [random.Random(0).randint(2, 40) for _ in range(200)]

    def plan(start):
        packer = Packer(64, False, A)
        packs = [packer.add(make_sample(arena, i, 1, n - 1)) for i, n in enumerate(lengths) if i >= start]
        return [[s.index for s in pack] for pack in [*packs, packer.flush()] if pack]

    whole = plan(0)
    assert [index for pack in whole for index in pack] == list(range(200))
    assert all(sum(num_slots(lengths[i]) for i in pack) <= 64 for pack in whole)
    assert plan(whole[5][0]) == whole[5:], "every boundary is a clean cut: a run that starts there goes on alike"


def test_assembling_releases_every_sample_once(arena):
    released: list[int] = []
    packer = Packer(32, True, A)
    samples = [make_sample(arena, i, 2, 4, first_block=2 * i, released=released) for i in range(3)]
    for sample in samples:
        packer.add(sample)
    batch = packer.assemble(packer.flush())
    assert isinstance(batch, Eagle3Batch) and batch.num_slots == 32
    assert released == [1, 2, 3]
    samples[0].release()
    assert released == [1, 2, 3]


def test_a_spilled_sample_reads_as_before(arena):
    released: list[int] = []
    sample, twin = (make_sample(arena, 0, 5, 6, released=released) for _ in range(2))
    before = twin.rows()
    sample.spill()
    assert released == [1]
    arena.rows.fill_(0)
    assert torch.equal(sample.rows(), before)
    batch = assemble([sample], A, None)
    assert torch.equal(batch.features, before[:-1, :A]) and torch.equal(batch.teacher, before[1:, A])
    sample.release()
    assert released == [1]


def test_a_reader_copies_alone():
    """torch would start as many threads as there are cores for each reader, beside vLLM and the trainer."""
    made = Arena.create(capacity_tokens=1024, block_tokens=64, num_layers=A + 1, hidden_size=1024, dtype="bfloat16")
    samples = [make_sample(made, i, 100, 28, first_block=2 * i) for i in range(8)]
    packer, threads = Packer(1024, False, A), torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        packer.assemble(samples[:1])  # the first reader's thread
        torch.zeros(1 << 20).add_(1)  # and those that torch starts for this one
        before = len(os.listdir("/proc/self/task"))
        packer.assemble(samples[1:])
        assert len(os.listdir("/proc/self/task")) - before < 4
    finally:
        torch.set_num_threads(threads)
        made.close()
