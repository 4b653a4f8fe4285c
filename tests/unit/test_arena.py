"""The arena and its credits."""

import subprocess
import sys
import textwrap

import pytest
import torch

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.stream import arena as arena_module
from eagle3_lightning.stream.arena import Arena, BlockPool


@pytest.fixture
def arena():
    made = Arena.create(capacity_tokens=40, block_tokens=4, num_layers=2, hidden_size=8, dtype="bfloat16")
    yield made
    made.close()


def test_rows_are_read_in_the_order_of_the_blocks_whatever_their_numbers(arena):
    rows = torch.randn(10, 2, 8, dtype=torch.bfloat16)
    blocks = [7, 0, 3]
    arena.rows[arena.row_index(blocks, 10)] = rows
    assert torch.equal(arena.read(blocks, 10), rows)
    part = torch.empty(5, 1, 8, dtype=torch.bfloat16)
    arena.copy_rows(blocks, 3, slice(1, None), part)
    assert torch.equal(part, rows[3:8, 1:])


def test_another_process_writes_what_this_one_reads(arena):
    program = textwrap.dedent(f"""
        import msgspec, torch
        from eagle3_lightning.stream.arena import Arena, ArenaLayout
        layout = msgspec.json.decode('''{__import__("msgspec").json.encode(arena.layout).decode()}''', type=ArenaLayout)
        other = Arena.open({arena.path!r}, layout)
        other.rows[4:8] = 3.0
        other.ids[4] = 17
        other.headers[1] = torch.tensor([5, 4])
        other.close()
    """)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert (arena.rows[4:8] == 3).all() and (arena.rows[8:] == 0).all()
    assert arena.ids[4] == 17
    assert arena.num_written(serial=5, blocks=[1]) == 4
    assert arena.num_written(serial=6, blocks=[1]) == 0, "rows of an older reservation are not this one's"


def test_regions_do_not_overlap(arena):
    arena.counters.fill_(1)
    arena.headers.fill_(2)
    arena.ids.fill_(3)
    arena.finite.fill_(1)
    arena.rows.fill_(5)
    assert (
        (arena.counters == 1).all()
        and (arena.headers == 2).all()
        and (arena.ids == 3).all()
        and (arena.finite == 1).all()
    )


def test_an_arena_over_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(arena_module, "available_memory_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"data.queue.capacity_tokens = 1000000.*GiB"):
        Arena.create(capacity_tokens=1_000_000, block_tokens=64, num_layers=4, hidden_size=4096, dtype="bfloat16")


def test_available_memory_is_a_sane_number():
    assert 1 << 20 < arena_module.available_memory_bytes() < 1 << 50


def test_a_pool_gives_all_or_nothing_and_notices_a_double_release():
    pool = BlockPool(4)
    first = pool.take(3)
    assert first is not None and len(set(first)) == 3
    assert pool.take(2) is None and pool.num_free == 1
    pool.give(first[:1])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(first)


def test_a_row_that_is_still_looked_at_outlives_the_arena(arena):
    arena.rows.fill_(3)
    late = arena.rows[5:7]
    arena.close()
    assert (late == 3).all()
