"""What Lightning iterates over: epochs of training batches, and the validation batches in memory."""

from collections import deque
from collections.abc import Callable, Iterator

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.data_stream import Round


class TrainLoader:
    """What Lightning iterates over, once an epoch. It has no length: nobody knows how long the answers will be."""

    def __init__(self, epoch: Callable[[], Iterator[Eagle3Batch]]) -> None:
        """Take what begins an epoch, or goes on with it."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Eagle3Batch]:
        """The batches that are left of the epoch."""
        return self._epoch()


class ValLoader:
    """The validation batches; a list would pass for one loader per batch."""

    def __init__(self, batches: list[Eagle3Batch]) -> None:
        """Keep them."""
        self._batches = batches

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Eagle3Batch]:
        """All of them."""
        return iter(self._batches)


def drain(rounds: deque[Round]) -> Iterator[Round]:
    """Take the rounds out, first in first out."""
    while rounds:
        yield rounds.popleft()
