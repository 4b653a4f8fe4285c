"""What crosses between processes: ids, shapes, block lists and counters. Never tensors, never pickle.

The hub (hub.py, a thread of the trainer's rank 0) stands in the middle: rank 0 submits, the hub reserves arena blocks
and passes the request to the producer, and what the producer answers goes to every rank. Frames on the private Unix
sockets are a 4-byte big-endian length and a msgpack body (channel.py). Indices count samples of one stream from 0; a
stream is `train`, `val` or `self`, the prompts that the target writes: rank 0 alone reads those, and the other ranks,
which may not have joined yet, hear nothing of them. A serial is the hub's own number for one reservation of blocks,
never used twice.
"""

from typing import Literal

import msgspec

from eagle3_lightning.errors import ConfigError

Stream = Literal["train", "val", "self"]
DropReason = Literal["bad_record", "too_long", "empty_mask", "non_finite", "row_mismatch", "token_mismatch", "aborted"]


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """A rank to the hub, its first words on a new connection.

    Attributes:
        rank: of the trainer.
        pid: of its process, for error messages.
    """

    rank: int
    pid: int


class Begin(Message, frozen=True):
    """Rank 0 to the hub, which repeats it to every rank: the samples of this stream count from `start_index`."""

    stream: Stream
    start_index: int


class Sampling(msgspec.Struct, frozen=True):
    """How an answer is sampled, and what ends it.

    Attributes:
        stop_token_ids: end an answer.
        temperature: see SamplingOptions.
        top_p: see SamplingOptions.
        top_k: see SamplingOptions.
    """

    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Submit(Message, frozen=True):
    """Rank 0 to the hub to the producer: make this sample. Answered by one `Sample` or `Dropped`, in any order.

    Attributes:
        name: what the data set calls the sample, for error messages.
        prompt_ids: token ids that are prefilled.
        spans: supervised token ranges [start, end) of `prompt_ids`; in generate mode the answer is the only one, and
            this is empty.
        max_new_tokens: 0 is prefill only; otherwise the longest answer.
        seed: of the request's sampling, or None.
        sampling: where it is not the engine's.
        serial: of the reservation; filled in by the hub.
        blocks: arena blocks for the prompt and the longest answer; filled in by the hub.
    """

    stream: Stream
    index: int
    name: str
    prompt_ids: list[int]
    spans: list[tuple[int, int]]
    max_new_tokens: int
    seed: int | None = None
    sampling: Sampling | None = None
    serial: int = 0
    blocks: list[int] = []


class End(Message, frozen=True):
    """Rank 0 to the hub, which repeats it to every rank: `count` is the first index that the stream lacks."""

    stream: Stream
    count: int


class Release(Message, frozen=True):
    """A rank to the hub: it needs the rows of this reservation no more. Blocks are free when all who got it say so."""

    serial: int


class Starved(Message, frozen=True):
    """Hub to every rank: the next request in line finds no free arena blocks, or has found them now.

    A rank that waits for this very sample must give way: the blocks which it holds itself may be the missing ones.
    """

    stream: Stream
    index: int
    waiting: bool


class Shutdown(Message, frozen=True):
    """Hub to producer: stop the engine and exit."""


class Ready(Message, frozen=True):
    """Producer to the hub to every rank: the engine is up and its self-check passed.

    Attributes:
        vllm_version: version of the vLLM in use.
        tap: which tap captures the states, for example `aux/v1`.
        notes: what the user should know about this engine, one sentence each.
        num_layers_captured: auxiliary layers plus the last.
        hidden_size: H of the target.
        dtype: of the rows in the arena, for example `bfloat16`.
        pid: of the producer.
    """

    vllm_version: str
    tap: str
    num_layers_captured: int
    hidden_size: int
    dtype: str
    pid: int
    notes: list[str] = []


class Sample(Message, frozen=True):
    """Producer to the hub to every rank: a finished sample, its rows in the arena.

    Attributes:
        serial: of the reservation, to be given back with `Release`.
        token_ids: prompt and answer, all of them; the last answered token has no row.
        prompt_tokens: how many of them are the prompt.
        spans: supervised token ranges [start, end) of `token_ids`.
        num_rows: tokens whose states are in `blocks`, token i in row i % block_tokens of block i // block_tokens.
        blocks: the arena blocks that hold rows; the hub has taken back the rest of the reservation.
        finish_reason: vLLM's: `stop`, `length`.
    """

    serial: int
    stream: Stream
    index: int
    name: str
    token_ids: list[int]
    prompt_tokens: int
    spans: list[tuple[int, int]]
    num_rows: int
    blocks: list[int]
    finish_reason: str


class Dropped(Message, frozen=True):
    """To every rank: this sample cannot be made, says rank 0 (a prompt that it refuses), the hub or the producer.

    Attributes:
        serial: of the reservation that ends with it; 0 if there was none.
    """

    stream: Stream
    index: int
    name: str
    reason: DropReason
    detail: str
    serial: int = 0


class Stored(Message, frozen=True):
    """Rank 0 to the hub to every rank: this sample is on disk (stream/store.py) and need not be made."""

    stream: Stream
    index: int
    name: str


class Stats(Message, frozen=True):
    """Producer to the hub to every rank, about once a second: counters since the producer's start.

    The hub adds those of the producers before it, so that the ranks see the counters of the whole run.

    Attributes:
        prefill_tokens: prompt tokens run.
        decode_tokens: answer tokens made.
        busy_s: seconds with at least one request running.
        running: requests inside vLLM now.
        starved_s: seconds in which vLLM could have run more requests, and those that waited found no room in the arena
            (the trainer is the slower side); the hub's, since its start.
        free_blocks: arena blocks free now; the hub's.
        restarts: how often the producer was started again; the hub's.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    running: int = 0
    starved_s: float = 0.0
    free_blocks: int = 0
    restarts: int = 0


class Mistake(msgspec.Struct, frozen=True):
    """A ConfigError on its way to the process that talks to the user; see there for its fields."""

    option: str
    value: str | bool | int | float | None
    problem: str
    remedy: str

    @staticmethod
    def of(error: ConfigError) -> "Mistake":
        """Pack an error."""
        value = error.value if isinstance(error.value, str | bool | int | float | None) else str(error.value)
        return Mistake(error.option, value, error.problem, error.remedy)

    def as_error(self) -> ConfigError:
        """Unpack it."""
        return ConfigError(self.option, self.value, self.problem, self.remedy)


class Failed(Message, frozen=True):
    """Last words of the producer to the hub, or of the hub to every rank: why it stops.

    Attributes:
        error: for the user, with the end of vLLM's log where it helps.
        mistake: what the user can mend, which is then all that there is to say.
    """

    error: str
    mistake: Mistake | None = None


AnyMessage = (
    Hello | Begin | Submit | End | Release | Starved | Shutdown | Ready | Sample | Dropped | Stored | Stats | Failed
)
