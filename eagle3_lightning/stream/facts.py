"""What the queue tells: how to join it, and what has gone through it."""

from dataclasses import dataclass

import msgspec

from eagle3_lightning.stream.arena import ArenaLayout
from eagle3_lightning.stream.messages import DropReason, Stats


class QueueHandle(msgspec.Struct, frozen=True):
    """All that a rank needs to join; plain values, so that rank 0 can broadcast it.

    Attributes:
        arena_path: where the rows are.
        arena_layout: their sizes.
        socket_path: where the hub listens for ranks other than 0; None with one rank.
        window: requests that rank 0 keeps submitted and unanswered.
        step_timeout_s: longest wait for any progress of the producer while a sample is waited for.
        max_dropped_share: more samples dropped than this share is an error.
    """

    arena_path: str
    arena_layout: ArenaLayout
    socket_path: str | None
    window: int
    step_timeout_s: float
    max_dropped_share: float


def since(before: Stats, now: Stats) -> Stats:
    """What the producer has done between two reports of its counters; restarts are all of the run's."""
    return msgspec.structs.replace(
        now,
        prefill_tokens=now.prefill_tokens - before.prefill_tokens,
        decode_tokens=now.decode_tokens - before.decode_tokens,
        busy_s=now.busy_s - before.busy_s,
        starved_s=now.starved_s - before.starved_s,
    )


@dataclass(frozen=True)
class QueueStats:
    """Counters of one rank's queue, without the stream `self` where that was read to its end by `forget`.

    Attributes:
        depth_samples: finished samples that wait for the trainer.
        depth_tokens: their rows.
        depth_bytes: the arena bytes of those rows.
        wait_s: seconds that the trainer has waited in `get`.
        taken: samples handed out so far, dropped ones not counted.
        cut: samples of those whose answer the length limit ended.
        spilled: samples moved out of the arena early because it was too small for what the trainer held.
        dropped: samples dropped so far, by reason.
        dropped_names: the first few of each reason, with the detail.
        producer: the producer's last counters.
        restarts: how often it was started again.
    """

    depth_samples: int
    depth_tokens: int
    depth_bytes: int
    wait_s: float
    taken: int
    cut: int
    spilled: int
    dropped: dict[DropReason, int]
    dropped_names: dict[DropReason, list[str]]
    producer: Stats
    restarts: int
