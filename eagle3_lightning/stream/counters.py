"""What all producers of a run have done, counted in the hub."""

import time

from eagle3_lightning.stream.messages import Stats


class RunCounters:
    """Sums the counters of producers that followed each other, and the time in which they starved."""

    def __init__(self) -> None:
        """Start at zero."""
        self._made = self._made_before = Stats()  # all producers; those before this one
        self._restarts = 0
        self._starved_since: float | None = None
        self._starved_s = 0.0

    def begin_producer(self, restarts: int) -> None:
        """Another one counts from zero.

        Args:
            restarts: how many there were before it.
        """
        self._made_before, self._restarts = self._made, restarts

    def set_starved(self, is_starved: bool) -> None:
        """From now on vLLM could run more requests and those that wait find no room in the arena, or not."""
        if is_starved and self._starved_since is None:
            self._starved_since = time.monotonic()
        elif not is_starved and self._starved_since is not None:
            self._starved_s += time.monotonic() - self._starved_since
            self._starved_since = None

    def add(self, now: Stats, free_blocks: int) -> Stats:
        """A producer's counters with those of the dead ones before it and the hub's own."""
        waiting_s = time.monotonic() - self._starved_since if self._starved_since is not None else 0.0
        self._made = Stats(
            prefill_tokens=self._made_before.prefill_tokens + now.prefill_tokens,
            decode_tokens=self._made_before.decode_tokens + now.decode_tokens,
            busy_s=self._made_before.busy_s + now.busy_s,
            running=now.running,
            starved_s=self._starved_s + waiting_s,
            free_blocks=free_blocks,
            restarts=self._restarts,
        )
        return self._made
