"""Shared memory for hidden states: rows of tokens in fixed blocks, in one memfd that has no name and leaves no trace.

The trainer creates it; the vLLM worker opens it through /proc/PID/fd/FD. Beside each row lie the token id that the
forward pass was really fed and whether the row is finite. Before them lie counters of the worker's own (rows of
prompts, rows of answers, forward passes), so that progress is seen without a message. Each block has a header of two
int64: the serial of the reservation that owns it and how many of its rows are there without a gap (GAP if one was left
out).
Only the first block of a reservation has its header written, and only by the worker, in the order of its forward
passes. That order makes the reuse of blocks safe: a late row of an old owner (vLLM runs one step more than it needs
behind a stop token) always lands before the first row, and before the header, of the next one.

Legend: B blocks, R = B * block_tokens rows, L captured layers (auxiliary ones, then the last), H hidden.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.errors import ConfigError

GAP = -1
NOBODY = 0  # serial of a block that nobody has written to yet
_HEADER_INTS = 2
NUM_COUNTERS = 3  # prompt rows, answer rows, forward passes since the worker's start
_COUNTERS_BYTES = 64
_PAGE_BYTES = 4096
_RESERVE_BYTES = 256 << 20  # left to everybody else when the arena is sized against the free memory


class ArenaLayout(msgspec.Struct, frozen=True):
    """Sizes of an arena; with its path all that another process needs to open it.

    Attributes:
        num_blocks: blocks B.
        block_tokens: rows of one block.
        num_layers: captured layers L: the auxiliary ones and the last.
        hidden_size: H.
        dtype: of the rows, a torch name such as `bfloat16`.
    """

    num_blocks: int
    block_tokens: int
    num_layers: int
    hidden_size: int
    dtype: str

    @property
    def num_rows(self) -> int:
        """Rows of the whole arena."""
        return self.num_blocks * self.block_tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.num_layers * self.hidden_size * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def rows_offset_bytes(self) -> int:
        """Where the rows begin, behind counters, headers, token ids and finite flags."""
        before = _COUNTERS_BYTES + self.num_blocks * _HEADER_INTS * 8 + self.num_rows * (4 + 1)
        return -(-before // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.rows_offset_bytes + self.num_rows * self.row_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` rows take."""
        return -(-num_tokens // self.block_tokens)


class Arena:
    """One mapping of the shared memory.

    Attributes:
        layout: its sizes.
        path: /proc/PID/fd/FD, good for other processes of the user as long as the creator lives.
        counters: [NUM_COUNTERS] int64.
        headers: [B, 2] int64, serial and rows written.
        ids: [R] int32, the token id fed to the forward pass.
        finite: [R] uint8, 1 where every value of the row is finite.
        rows: [R, L, H] in the target's dtype.
    """

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        """Map an open descriptor, which the arena owns from here on."""
        self.layout = layout
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._fd = fd
        self._map = mmap.mmap(fd, layout.total_bytes, mmap.MAP_SHARED)
        num_rows, num_header_ints = layout.num_rows, layout.num_blocks * _HEADER_INTS
        ids_offset_bytes = _COUNTERS_BYTES + num_header_ints * 8
        self.counters = self._view(torch.int64, 0, NUM_COUNTERS)
        self.headers = self._view(torch.int64, _COUNTERS_BYTES, num_header_ints).view(-1, _HEADER_INTS)
        self.ids = self._view(torch.int32, ids_offset_bytes, num_rows)
        self.finite = self._view(torch.uint8, ids_offset_bytes + num_rows * 4, num_rows)
        row_values = layout.num_layers * layout.hidden_size
        self.rows = self._view(layout.torch_dtype, layout.rows_offset_bytes, num_rows * row_values).view(
            num_rows, layout.num_layers, layout.hidden_size
        )

    def _view(self, dtype: torch.dtype, offset_bytes: int, count: int) -> Tensor:
        # Through NumPy, whose arrays keep the mapping from being closed. torch.frombuffer does not, and a late read of
        # a row would end the process.
        everything = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        return everything[offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype)

    @staticmethod
    def plan(capacity_tokens: int, block_tokens: int, num_layers: int, hidden_size: int, dtype: str) -> ArenaLayout:
        """The layout of a region of at least `capacity_tokens` rows, which is not made yet.

        Raises:
            ConfigError: the memory that is free cannot hold it.
        """
        layout = ArenaLayout(-(-capacity_tokens // block_tokens), block_tokens, num_layers, hidden_size, dtype)
        free_bytes = available_memory_bytes()
        if layout.total_bytes + _RESERVE_BYTES > free_bytes:
            raise ConfigError(
                "data.queue.capacity_tokens",
                capacity_tokens,
                f"the arena takes {layout.total_bytes / 2**30:.2f} GiB ({layout.row_bytes} bytes a token) and only "
                f"{free_bytes / 2**30:.2f} GiB of memory are available",
                "Lower it, or free memory.",
            )
        return layout

    @classmethod
    def create(cls, capacity_tokens: int, block_tokens: int, num_layers: int, hidden_size: int, dtype: str) -> "Arena":
        """Make a new region of at least `capacity_tokens` rows.

        Raises:
            ConfigError: the memory that is free cannot hold it.
        """
        layout = cls.plan(capacity_tokens, block_tokens, num_layers, hidden_size, dtype)
        fd = os.memfd_create("eagle3-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.total_bytes)
        return cls(fd, layout)

    @classmethod
    def open(cls, path: str, layout: ArenaLayout) -> "Arena":
        """Map the region that another process of this user has created.

        Raises:
            OSError: that process is gone, or belongs to somebody else.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), layout)

    def num_written(self, serial: int, blocks: Sequence[int]) -> int:
        """Rows of a reservation that are there without a gap; GAP if one was left out, 0 before the first."""
        owner, written = self.headers[blocks[0]].tolist()
        return int(written) if owner == serial else 0

    def row_index(self, blocks: Sequence[int], num_rows: int) -> Tensor:
        """[num_rows] int64: where in `rows`, `ids` and `finite` the rows of these blocks lie."""
        size = self.layout.block_tokens
        index = torch.tensor(blocks, dtype=torch.int64)[:, None] * size + torch.arange(size)
        return index.view(-1)[:num_rows]

    def copy_rows(self, blocks: Sequence[int], start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy rows start .. start + S - 1 of these blocks, only `layers` of them, into `out`.

        Block by block, since the rows of one block lie together: a plain memcpy where `layers` are all.
        """
        size = self.layout.block_tokens
        done, num_rows = 0, out.shape[0]
        while done < num_rows:
            block, offset = divmod(start + done, size)
            count = min(size - offset, num_rows - done)
            first = blocks[block] * size + offset
            copy_bits(self.rows[first : first + count, layers], out[done : done + count])
            done += count

    def read(self, blocks: Sequence[int], num_rows: int) -> Float[Tensor, "S L H"]:
        """A copy of the first `num_rows` rows of these blocks."""
        out = torch.empty(num_rows, *self.rows.shape[1:], dtype=self.rows.dtype)
        self.copy_rows(blocks, 0, slice(None), out)
        return out

    def close(self) -> None:
        """Unmap; the memory is free when the last process has done so. Rows that were read are copies and stay."""
        if self._fd < 0:
            return
        empty = torch.empty(0)
        self.counters = self.headers = self.ids = self.finite = self.rows = empty
        with suppress(BufferError):  # a thread still looks at a row; the mapping goes with its last view
            self._map.close()
        os.close(self._fd)
        self._fd = -1


class BlockPool:
    """Which blocks of an arena are free. The credits of the queue: no block, no request."""

    def __init__(self, num_blocks: int) -> None:
        """All of `num_blocks` are free."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the blocks used last are the ones in the caches
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None if so many are not free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        """Take blocks back."""
        assert self._taken.issuperset(blocks), f"blocks {sorted(set(blocks) - self._taken)} were given back twice"
        self._taken.difference_update(blocks)
        self._free.extend(blocks)


def copy_bits(source: Tensor, dest: Tensor) -> None:
    """Copy between tensors of one dtype on the CPU, in this thread alone: torch would wake all of its own for it."""
    assert source.dtype == dest.dtype, f"the bits of {source.dtype} mean something else in {dest.dtype}"
    np.copyto(as_bits(dest), as_bits(source))


def as_bits(values: Tensor) -> np.ndarray:
    """A tensor's memory as integers of its values' size."""
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize]).numpy()


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping: the kernel's MemAvailable, or what the control group leaves."""
    available = _counters(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        stat = _counters(group / "memory.stat")
        used = int((group / "memory.current").read_text()) - stat["active_file"] - stat["inactive_file"]
        available = min(available, int(limit) - used)
    return available


def _counters(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
