"""Prompts as requests to vLLM: sample number i of a stream, made when it is needed and the same in every run."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SamplingOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.files import MAX_CHECKED_RECORDS
from eagle3_lightning.prompts.order import Permutation, SampleOrder
from eagle3_lightning.prompts.records import Record, RecordError, name_faults
from eagle3_lightning.prompts.sources import AnySource
from eagle3_lightning.prompts.spans import Spans
from eagle3_lightning.prompts.tables import StreamSource
from eagle3_lightning.stream.messages import Dropped, DropReason, Stream, Submit

_NUM_CHECKED = 256
_NUM_NAMED = 5
_MAX_SEED = 2**31
_REMEDIES: dict[DropReason, str] = {
    "too_long": "Raise the length that they break, or give shorter ones.",
    "empty_mask": "Give conversations with an answer, or set data.sampling.mode to generate.",
}
_log = logging.getLogger(__name__)


class RequestStream:
    """The requests of one stream, by index. An epoch is `epoch_size` samples; indices run on over epochs."""

    def __init__(
        self,
        stream: Stream,
        sources: Sequence[AnySource],
        weights: Sequence[float] | None,
        chat: ChatTokenizer,
        sampling: SamplingOptions,
        max_model_len: int,
        pack_tokens: int,
        seed: int,
    ) -> None:
        """Put the sources in order; nothing is read yet.

        Args:
            stream: train or val.
            sources: with random access, or streams.
            weights: relative shares of the sources; None is in proportion to their sizes.
            chat: makes token ids.
            sampling: mode and length of the answers.
            max_model_len: tokens of the longest sequence that vLLM takes.
            pack_tokens: slots of a micro-batch, which the longest possible sample must not exceed.
            seed: of the shuffle and of the sampling.
        """
        self._stream: Stream = stream
        self._sources = list(sources)
        sizes = [None if isinstance(source, StreamSource) else len(source) for source in sources]
        self.order = SampleOrder(sizes, weights, seed)
        self.chat = chat
        self._sampling = sampling
        self._max_model_len, self._pack_tokens = max_model_len, pack_tokens
        self._seeds = Permutation(_MAX_SEED, f"{seed}/sampling/{stream}")

    @property
    def epoch_size(self) -> int:
        """Samples of one pass."""
        return self.order.epoch_size

    @property
    def labels(self) -> str:
        """The sources as the user named them."""
        return ", ".join(source.label for source in self._sources)

    def fingerprint(self) -> str:
        """Changes when the rows, their order or the shares do."""
        return _digest([self.rows_fingerprint(), self.order.fingerprint()])

    def rows_fingerprint(self) -> str:
        """Changes when the row behind a `row_id` does; beside a stream these are indices, which depend on the order."""
        order = [self.order.fingerprint()] if self.num_rows is None else []
        return _digest([*(source.fingerprint() for source in self._sources), *order])

    @property
    def num_rows(self) -> int | None:
        """Rows of all sources; None if one is a stream."""
        sizes = [None if isinstance(source, StreamSource) else len(source) for source in self._sources]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def row_id(self, index: int) -> int:
        """A number for the row of sample `index`, the same whenever it comes again; for streams, the index."""
        number, row = self.order[index]
        if row < 0 or self.num_rows is None:
            return index
        return row + sum(len(source) for source in self._sources[:number] if not isinstance(source, StreamSource))

    def __getitem__(self, index: int) -> Submit | Dropped:
        """The request of sample `index`, or why there is none."""
        return next(self.requests(index, index + 1))

    def requests(self, start: int, stop: int | None = None) -> Iterator[Submit | Dropped]:
        """Requests from index `start` up to `stop`, or without end."""
        for index, record in self.records(start, stop):
            yield self.request(index, record)

    def records(self, start: int, stop: int | None = None) -> Iterator[tuple[int, Record | RecordError]]:
        """What the sources hold for each index from `start` up to `stop`, or without end."""
        streams = self._open_streams(start)
        for index in count(start) if stop is None else range(start, stop):
            number, row = self.order[index]
            source = self._sources[number]
            try:
                yield index, next(streams[number]) if isinstance(source, StreamSource) else source.read(row)
            except RecordError as error:
                yield index, error
            except StopIteration:
                yield index, RecordError(source.label, "the stream has no rows of this split")

    def _open_streams(self, start: int) -> dict[int, Iterator[Record | RecordError]]:
        """Streams, each behind the rows that the samples before `start` took from it."""
        numbers = [n for n, source in enumerate(self._sources) if isinstance(source, StreamSource)]
        if not numbers:
            return {}
        taken = Counter({numbers[0]: start}) if len(self._sources) == 1 else Counter(
            number for number, row in map(self.order.__getitem__, range(start)) if row < 0
        )  # fmt: skip
        opened: dict[int, Iterator[Record | RecordError]] = {}
        for number in numbers:
            source = self._sources[number]
            assert isinstance(source, StreamSource)
            opened[number] = source.rows(taken[number])
        return opened

    def request(self, index: int, record: Record | RecordError) -> Submit | Dropped:
        """What is sent for a record."""
        name = record.where if isinstance(record, RecordError) else record.name
        try:
            if isinstance(record, RecordError):
                raise record
            if self._sampling.mode == "prefill":
                ids, spans = self.chat.conversation(record)
                self._check_prefill(len(ids), spans, record.where)
                return Submit(self._stream, index, name, ids, spans, 0)
            ids = self.chat.prompt(record)
            self._check_generate(len(ids), record.where)
        except RecordError as error:
            return Dropped(self._stream, index, name, error.reason, str(error))
        seed = self._seeds[index % _MAX_SEED] if self._sampling.temperature > 0 else None
        return Submit(self._stream, index, name, ids, [], self._sampling.max_new_tokens, seed)

    def check(self, option: str) -> None:
        """Make the first few requests, and refuse the prompts if none of them can be used.

        Raises:
            ConfigError: none can be used; the message counts the reasons.
        """
        num_checked = min(_NUM_CHECKED, self.epoch_size)
        records = list(self.records(0, num_checked))
        made = [(record, self.request(index, record)) for index, record in records]
        dropped = [request for _, request in made if isinstance(request, Dropped)]
        if len(dropped) < num_checked and self._are_read:  # rows that cannot be read were warned of then
            dropped = [r for record, r in made if isinstance(r, Dropped) and not isinstance(record, RecordError)]
        reasons: Counter[DropReason] = Counter(d.reason for d in dropped)
        summary = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        named = name_faults(d.detail for d in dropped[:_NUM_NAMED])
        if len(dropped) == num_checked:
            raise ConfigError(
                option,
                self.labels,
                f"none of the first {num_checked} samples can be used ({summary}): {named}",
                _REMEDIES.get(reasons.most_common(1)[0][0], "Repair the prompts."),
            )
        if dropped:
            _log.warning(
                "%d of the first %d samples of %s will be dropped (%s): %s",
                len(dropped),
                num_checked,
                self.labels,
                summary,
                named,
            )

    @property
    def _are_read(self) -> bool:
        """Whether all rows were parsed when the sources were opened, so that `check_faults` knows of every fault."""
        sized = [source for source in self._sources if not isinstance(source, StreamSource)]
        return len(sized) == len(self._sources) and all(len(source) <= MAX_CHECKED_RECORDS for source in sized)

    def _check_prefill(self, num_ids: int, spans: Spans, where: str) -> None:
        if num_ids + 1 > self._max_model_len:  # vLLM always makes one token
            raise RecordError(
                where,
                f"the conversation of {num_ids} tokens, and the one more that vLLM makes, are over "
                f"data.engine.max_model_len = {self._max_model_len}",
                "too_long",
            )
        if num_ids - 1 > self._pack_tokens:
            raise RecordError(
                where,
                f"the conversation of {num_ids} tokens is over data.batch.pack_tokens = {self._pack_tokens}",
                "too_long",
            )
        if not spans or spans[-1][1] < 2:
            raise RecordError(where, "nothing in it is supervised behind the first token", "empty_mask")

    def _check_generate(self, num_ids: int, where: str) -> None:
        longest = num_ids + self._sampling.max_new_tokens
        parts = f"prompt of {num_ids} tokens and answer of at most {self._sampling.max_new_tokens}"
        if longest > self._max_model_len:
            raise RecordError(where, f"{parts} are over data.engine.max_model_len = {self._max_model_len}", "too_long")
        if longest - 2 > self._pack_tokens:  # the last token has no state, and the first is not drafted
            raise RecordError(where, f"{parts} are over data.batch.pack_tokens = {self._pack_tokens}", "too_long")


def _digest(parts: Sequence[str]) -> str:
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()
