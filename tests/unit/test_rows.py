"""The row writer: chunked prefill, mixed and reordered batches, preemption, gaps, and blocks that change hands."""

import numpy as np
import pytest
import torch

from eagle3_lightning.extract.rows import RowWriter
from eagle3_lightning.stream.arena import GAP, Arena

H = 4


@pytest.fixture
def arena():
    made = Arena.create(capacity_tokens=64, block_tokens=4, num_layers=2, hidden_size=H, dtype="float32")
    yield made
    made.close()


def run_step(arena, writer, *parts):
    """A forward pass over (request, first position, tokens); row values are 100 * request + position."""
    names = [name for name, _, _ in parts]
    step = writer.plan(names, np.array([n for _, _, n in parts]), np.array([first for _, first, _ in parts]))
    positions = [100 * int(name) + first + i for name, first, n in parts for i in range(n)]
    if step is not None:
        rows = torch.tensor(positions, dtype=torch.float32)[:, None, None].expand(-1, 2, H).contiguous()
        writer.write([step], rows, np.array(positions), np.ones(len(positions), bool))
    return step


def positions_in(arena, blocks, count):
    return arena.read(blocks, count)[:, 0, 0].tolist()


def test_chunks_of_interleaved_and_reordered_requests_land_in_order(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [2, 0, 5], prompt_tokens=7)
    writer.begin("2", 12, [1, 4], prompt_tokens=3)
    run_step(arena, writer, ("1", 0, 3), ("2", 0, 3))
    run_step(arena, writer, ("2", 3, 1), ("1", 3, 4))
    run_step(arena, writer, ("1", 7, 1), ("2", 4, 1))
    assert positions_in(arena, [2, 0, 5], 8) == [100 + i for i in range(8)]
    assert positions_in(arena, [1, 4], 5) == [200 + i for i in range(5)]
    assert arena.num_written(11, [2]) == 8 and arena.num_written(12, [1]) == 5
    assert arena.ids[arena.row_index([2, 0, 5], 8)].tolist() == [100 + i for i in range(8)]
    assert arena.counters.tolist() == [10, 3, 3]


def test_rows_of_requests_that_nobody_captures_are_left_out(arena):
    writer = RowWriter(arena)
    assert run_step(arena, writer, ("9", 0, 5)) is None
    writer.begin("1", 11, [3], prompt_tokens=2)
    run_step(arena, writer, ("9", 5, 1), ("1", 0, 2), ("8", 0, 4))
    assert positions_in(arena, [3], 2) == [100, 101]
    assert (arena.rows[: 3 * 4] == 0).all() and (arena.rows[4 * 4 :] == 0).all()


def test_a_dropped_chunk_is_a_gap_for_good(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [0, 1, 2], prompt_tokens=12)
    run_step(arena, writer, ("1", 0, 4))
    run_step(arena, writer, ("1", 6, 2))
    assert arena.num_written(11, [0]) == GAP
    run_step(arena, writer, ("1", 8, 1))
    assert arena.num_written(11, [0]) == GAP


def test_a_preempted_request_is_written_again_in_place(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [0, 1], prompt_tokens=3)
    run_step(arena, writer, ("1", 0, 3))
    run_step(arena, writer, ("1", 3, 1))
    run_step(arena, writer, ("1", 0, 2))
    assert arena.num_written(11, [0]) == 4, "rows that were there stay there"
    run_step(arena, writer, ("1", 2, 3))
    assert arena.num_written(11, [0]) == 5
    assert positions_in(arena, [0, 1], 5) == [100 + i for i in range(5)]


def test_one_step_too_many_behind_the_reserved_blocks_is_nobodys(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [0], prompt_tokens=4)
    run_step(arena, writer, ("1", 0, 4))
    run_step(arena, writer, ("1", 4, 1))
    assert arena.num_written(11, [0]) == 4
    assert (arena.rows[4:] == 0).all()


def test_a_late_row_of_an_old_owner_does_not_harm_the_next(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [0], prompt_tokens=2)
    run_step(arena, writer, ("1", 0, 2))
    late = writer.plan(["1"], np.array([1]), np.array([2]))
    writer.forget("1")
    writer.begin("2", 12, [0], prompt_tokens=3)
    writer.write([late], torch.full((1, 2, H), 9.0), np.array([9]), np.array([True]))
    assert arena.num_written(12, [0]) == 0
    run_step(arena, writer, ("2", 0, 3))
    assert arena.num_written(12, [0]) == 3 and arena.num_written(11, [0]) == 0
    assert positions_in(arena, [0], 3) == [200, 201, 202]


def test_the_table_grows_with_requests_and_blocks(arena):
    writer = RowWriter(arena, max_requests=1)
    for i in range(1, 5):
        writer.begin(str(i), i, [i], prompt_tokens=2)
    writer.begin("5", 5, list(range(15, 5, -1)) + [5] * 10, prompt_tokens=2)
    run_step(arena, writer, *[(str(i), 0, 2) for i in (4, 2, 5, 1, 3)])
    for i in range(1, 5):
        assert positions_in(arena, [i], 2) == [100 * i, 100 * i + 1]
    assert positions_in(arena, [15], 2) == [500, 501]


def test_finite_flags_follow_their_rows(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [4], prompt_tokens=2)
    step = writer.plan(["9", "1"], np.array([1, 2]), np.array([0, 0]))
    writer.write([step], torch.zeros(3, 2, H), np.array([7, 8, 9]), np.array([False, True, False]))
    assert arena.finite[16:18].tolist() == [1, 0]
    assert arena.ids[16:18].tolist() == [8, 9]


def test_steps_that_go_on_are_counted_together_but_for_a_lost_one(arena):
    writer = RowWriter(arena)
    writer.begin("1", 11, [2, 0], prompt_tokens=3)
    writer.begin("2", 12, [1, 4], prompt_tokens=2)
    passes = [(0, 0, [2, 2]), (2, 2, [1, 1]), (3, 3, [1, 1]), (4, 5, [1, 1]), (5, 6, [1, 1])]
    steps = [writer.plan(["1", "2"], np.array(counts), np.array(firsts)) for *firsts, counts in passes]
    writer.write(steps[:3], torch.ones(8, 2, H), np.arange(8), np.ones(8, bool))
    assert arena.num_written(11, [2]) == arena.num_written(12, [1]) == 4
    writer.write(steps[2:], torch.ones(6, 2, H), np.arange(6), np.ones(6, bool))
    assert arena.num_written(11, [2]) == 6
    assert arena.num_written(12, [1]) == GAP, "its row at position 4 never came"
    assert arena.counters.tolist() == [5, 9, 6]


def test_steps_that_are_written_together_are_as_those_written_one_by_one():
    """With rows that nobody captures in some of them, and a request that is preempted and begins again."""
    passes = [
        [("1", 0, 3), ("2", 0, 4)],
        [("9", 0, 2), ("2", 4, 1), ("1", 3, 1)],
        [("1", 0, 2), ("2", 5, 1), ("3", 0, 6)],
        [("1", 2, 3), ("3", 6, 1)],
    ]
    found = []
    for together in (1, 2, 4):
        made = Arena.create(capacity_tokens=64, block_tokens=4, num_layers=2, hidden_size=H, dtype="float32")
        writer = RowWriter(made)
        for name, blocks in (("1", [2, 0]), ("2", [1, 4]), ("3", [7, 6])):
            writer.begin(name, 10 + int(name), blocks, prompt_tokens=3)
        for start in range(0, len(passes), together):
            steps, values = [], []
            for parts in passes[start : start + together]:
                counts, firsts = [n for _, _, n in parts], [first for _, first, _ in parts]
                steps.append(writer.plan([name for name, _, _ in parts], np.array(counts), np.array(firsts)))
                values += [100 * int(name) + first + i for name, first, n in parts for i in range(n)]
            rows = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, H).contiguous()
            writer.write(steps, rows, np.array(values), np.array(values) != 302)
        assert made.num_written(11, [2]) == 5 and made.num_written(12, [1]) == 6 and made.num_written(13, [7]) == 7
        assert positions_in(made, [7, 6], 7) == [300 + i for i in range(7)]
        assert made.finite[made.row_index([7, 6], 7)].tolist() == [1, 1, 0, 1, 1, 1, 1]
        found.append([t.clone() for t in (made.rows, made.ids, made.finite, made.headers, made.counters)])
        made.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
