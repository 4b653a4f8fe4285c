"""Which of the prompts that a target writes are worth keeping, by measures that know no language."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

_SHINGLE_TOKENS = 3
_SAME_SHARE = 0.7  # of the shorter prompt's shingles
_BEGINNING_CHARS = 40
_LOOP_TOKENS, _MIN_DISTINCT = 4, 0.5
_MIN_COMPRESSED = 0.25


class PromptFilter:
    """Decides on one prompt after the other, remembering those that it kept."""

    def __init__(self, min_tokens: int) -> None:
        """Keep prompts of at least `min_tokens`."""
        self._min_tokens = min_tokens
        self._texts: set[str] = set()
        self._beginnings: set[str] = set()
        self._shingles: dict[tuple[int, ...], list[int]] = {}
        self._num_shingles: list[int] = []

    def refuse(self, ids: Sequence[int], text: str) -> str | None:
        """The reason to throw a finished prompt away; None keeps it."""
        if len(ids) < self._min_tokens or not text:
            return "short"
        if is_loop(ids, text):
            return "loop"
        normal = _normal(text)
        beginning = normal[:_BEGINNING_CHARS]
        shingles = set(_windows(ids, _SHINGLE_TOKENS)) or {tuple(ids)}
        if normal in self._texts or beginning in self._beginnings or self._resembles(shingles):
            return "duplicate"
        self._texts.add(normal)
        if len(beginning) == _BEGINNING_CHARS:
            self._beginnings.add(beginning)
        for shingle in shingles:
            self._shingles.setdefault(shingle, []).append(len(self._num_shingles))
        self._num_shingles.append(len(shingles))
        return None

    def _resembles(self, shingles: set[tuple[int, ...]]) -> bool:
        """Whether a prompt that was kept shares most of its runs of three tokens."""
        shared = Counter(number for shingle in shingles for number in self._shingles.get(shingle, ()))
        return any(
            count >= _SAME_SHARE * min(len(shingles), self._num_shingles[number]) for number, count in shared.items()
        )


def is_loop(ids: Sequence[int], text: str) -> bool:
    """Whether a text repeats itself: few distinct runs of four tokens, or bytes that compress too well."""
    windows = list(_windows(ids, _LOOP_TOKENS))
    if len(windows) >= 4 and len(set(windows)) < _MIN_DISTINCT * len(windows):
        return True
    data = text.encode()
    return len(data) >= 100 and len(zlib.compress(data, 9)) < _MIN_COMPRESSED * len(data)


def _normal(text: str) -> str:
    """Without case, punctuation and double spaces; a text of nothing else stays as it is."""
    letters = "".join(c if c.isalnum() else " " for c in text.casefold())
    return " ".join(letters.split()) or text


def _windows(ids: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + length]) for start in range(len(ids) - length + 1))
