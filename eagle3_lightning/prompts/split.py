"""Which rows are held out: by a hash of each row, so that the same row always falls on the same side."""

import hashlib

_MIN_ROWS = 10  # of fewer, none is given away


class Split:
    """The rows whose hash lies below a share of all hashes; of few rows, where none does, those of the least hash.

    Without its last clause a row's side does not depend on the rows beside it.
    """

    def __init__(self, val_fraction: float) -> None:
        """Nothing has been read yet.

        Args:
            val_fraction: share to hold out.
        """
        self._asked = self._threshold = int(val_fraction * 2**64)
        self._least, self._num_least, self._num_rows = 2**64, 0, 0

    def held_out(self, row: bytes) -> bool:
        """Whether a row is held out; it is counted for `widen`."""
        hashed = _hash(row)
        self._num_rows += 1
        if hashed < self._least:
            self._least, self._num_least = hashed, 0
        self._num_least += hashed == self._least
        return hashed < self._threshold

    def trained(self, row: bytes) -> bool:
        """Whether a row is trained on."""
        return _hash(row) >= self._threshold

    def widen(self) -> bool:
        """Hold out the row of the least hash where no row was; False where that is not wanted or leaves nothing."""
        if not self._threshold or self._num_rows < max(_MIN_ROWS, self._num_least + 1) or self._least < self._threshold:
            return False
        self._threshold = self._least + 1
        return True

    def narrow(self) -> None:
        """Take `widen` back."""
        self._threshold = self._asked

    @property
    def is_widened(self) -> bool:
        """Whether more is held out than was asked for."""
        return self._threshold > self._asked


def _hash(row: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(row.strip(), digest_size=8).digest(), "big")
