"""Which row of which source is sample number i: a pure function, so that a run can resume from one integer.

An epoch is a seeded permutation of its rows. It is computed, not stored: a balanced Feistel network over the smallest
even number of bits that holds the size, walked until it lands inside (Black and Rogaway 2002, "Ciphers with Arbitrary
Finite Domains"). Eighteen million rows shuffle in no memory at all.
"""

import hashlib
from collections.abc import Sequence

_ROUNDS = 6
STREAM_EPOCH_SIZE = 100_000


class Permutation:
    """A bijection of 0 .. size - 1, fixed by `key`."""

    def __init__(self, size: int, key: str) -> None:
        """Derive the round keys.

        Args:
            size: how many numbers are permuted, at least 1.
            key: any text; another key is another permutation.
        """
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """Where `index` goes."""
        value = index
        while True:  # at most four steps on average: the network's domain is below 4 * size
            value = self._encrypt(value)
            if value < self._size:
                return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(value: int) -> int:
    """A 64-bit finalizer (splitmix64): every input bit reaches every output bit."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


class SampleOrder:
    """Sample index -> (source, row), epoch after epoch.

    An epoch has as many samples as all sources with a known size have rows (STREAM_EPOCH_SIZE if there is none).
    Without weights each row comes once. With weights, source s gives the share `weights[s] / sum(weights)` of every
    epoch; its rows still come evenly, each once before any comes again, across epoch borders.
    """

    def __init__(self, sizes: Sequence[int | None], weights: Sequence[float] | None, seed: int) -> None:
        """Fix the shares.

        Args:
            sizes: rows of each source; None is a stream, whose rows come in its own order.
            weights: relative shares, all positive; None is in proportion to the sizes.
            seed: of the shuffles.
        """
        self._sizes, self._seed = list(sizes), seed
        known = sum(size for size in sizes if size is not None) or STREAM_EPOCH_SIZE
        if weights is None:
            self._shares = [known if size is None else size for size in sizes]
        else:
            self._shares = [max(1, round(known * weight / sum(weights))) for weight in weights]
        self.epoch_size = sum(self._shares)
        self._weighted = weights is not None
        self._cache: dict[str, Permutation] = {}

    def fingerprint(self) -> str:
        """Changes when another row comes at some index, the sources being the same."""
        shares = f"/{self._shares}" if self._weighted else ""
        return f"{self.epoch_size}/{self._seed}{shares}"

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Source and row of sample `index`, which may lie in any epoch. The row of a stream is -1: its next one."""
        epoch, position = divmod(index, self.epoch_size)
        slot = self._permutation(f"{self._seed}/epoch/{epoch}", self.epoch_size)[position]
        source = 0
        while slot >= self._shares[source]:
            slot -= self._shares[source]
            source += 1
        size = self._sizes[source]
        if size is None:
            return source, -1
        if self._shares[source] == size:
            return source, slot
        # `turn` counts this source's draws over all epochs: every pass over it is a permutation of its own.
        turn, row = divmod(epoch * self._shares[source] + slot, size)
        return source, self._permutation(f"{self._seed}/source/{source}/{turn}", size)[row]

    def _permutation(self, key: str, size: int) -> Permutation:
        if key not in self._cache:
            if len(self._cache) > 64:
                self._cache.clear()
            self._cache[key] = Permutation(size, key)
        return self._cache[key]
