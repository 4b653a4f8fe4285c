"""Opens the data of a run: prompts with vLLM behind them, prompts with a store, or stored states alone."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import msgspec
import torch

from eagle3_lightning.data_feed import DiskFeed, Loader, QueueFeed, is_complete
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    TargetOptions,
)
from eagle3_lightning.prompts.own import OwnPrompts
from eagle3_lightning.prompts.requests import RequestStream
from eagle3_lightning.prompts.setup import TRAIN, check_lengths, open_prompts
from eagle3_lightning.prompts.sources import as_sources
from eagle3_lightning.prompts.states import StateStream, check_nothing_is_made, open_states
from eagle3_lightning.stream.files import FinalNorm
from eagle3_lightning.stream.foreign import holds_states
from eagle3_lightning.stream.messages import Stream
from eagle3_lightning.stream.queue import QueueHandle, SampleQueue
from eagle3_lightning.stream.store import SampleStore, StoreFacts, check_place, listed_rows
from eagle3_lightning.target import TargetInfo, load_final_norm

if TYPE_CHECKING:
    from eagle3_lightning.extract.supervisor import Extractor

AnyFeed = DiskFeed | QueueFeed
AnyStream = RequestStream | StateStream
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataOptions:
    """The options of a data module, all in one.

    Attributes:
        target: the model whose states are made.
        prompts: what it is asked.
        sampling: how it answers.
        engine: how vLLM runs it.
        queue: the memory between the two.
        batch: how samples become batches.
        cache: where made samples are kept on disk.
        run_dir: where vLLM's log and prompts of its own go.
        seed: of the order of the prompts and of the sampling.
    """

    target: TargetOptions
    prompts: PromptOptions
    sampling: SamplingOptions
    engine: EngineOptions
    queue: QueueOptions
    batch: BatchOptions
    cache: CacheOptions
    run_dir: Path | None
    seed: int


def sampling_fingerprint(sampling: SamplingOptions) -> str:
    """Changes when mode or sampling do."""
    return hashlib.sha256(repr(sampling).encode()).hexdigest()


class DataOpener:
    """Decides what a run needs, and opens it.

    Attributes:
        extractor: vLLM's, on rank 0, if it was started; the caller closes it.
    """

    def __init__(
        self,
        options: DataOptions,
        info: TargetInfo,
        layers: LayerPlan,
        make_extractor: "Callable[[Path, int], Extractor]",
        check_engine: Callable[[], None],
    ) -> None:
        """Open nothing yet.

        Args:
            options: of the run.
            info: the target.
            layers: that are captured.
            make_extractor: run directory and number of ranks to an Extractor.
            check_engine: refuses options that vLLM cannot be started with.
        """
        self._options, self._info, self._layers = options, info, layers
        self._make_extractor, self._check_engine = make_extractor, check_engine
        self._trainer: pl.Trainer | None = None
        self._states: tuple[dict[Stream, AnyStream], AnyFeed] | None = None
        self._own: OwnPrompts | None = None
        self._requests: dict[Stream, RequestStream] = {}
        self._dtype: torch.dtype = getattr(
            torch, info.dtype if options.engine.dtype == "auto" else options.engine.dtype
        )
        self.extractor: Extractor | None = None

    def check(self) -> None:
        """Open what can be read, and refuse what it shows; nothing is written or started. `open` goes on from there.

        Raises:
            ConfigError: anything that files and options show to be wrong.
        """
        if self._own is not None or self._states is not None:
            return
        self._states = self._open_states()
        if self._states is not None:
            return
        o = self._options
        check_lengths(self._info, o.engine, o.sampling)
        own = OwnPrompts(o.target, self._info, o.prompts, o.engine, o.run_dir)
        with own.stand_in() as prompts:
            streams = self._open_requests(prompts)
        is_whole = not own.wanted or own.written
        if o.cache.dir is not None:
            check_place(o.cache.dir, self._store_facts(streams), () if is_whole else ("prompts",))
        if not (is_whole and self._is_stored(streams)):
            self._check_engine()
        if is_whole:
            self._requests = streams
        self._own = own

    def open(self, trainer: "pl.Trainer | None") -> tuple[dict[Stream, AnyStream], AnyFeed]:
        """Streams of samples, and the feed that they come from.

        Args:
            trainer: its ranks share what is opened.

        Raises:
            ConfigError: anything that can be known to be wrong before vLLM starts.
            ProducerError: vLLM did not start.
        """
        self._trainer = trainer
        self.check()
        return self._states or self._open_prompts()

    def _open_states(self) -> tuple[dict[Stream, AnyStream], AnyFeed] | None:
        """A feed of states that were stored before, if that is what the sources are; vLLM is not needed then."""
        sources = as_sources(self._options.prompts.train, TRAIN)
        if not any(holds_states(Path(source.path).expanduser()) for source in sources):
            return None
        check_nothing_is_made(self._options.sampling, self._options.cache)
        norm = FinalNorm(load_final_norm(self._info), self._info.rms_norm_eps)
        streams = open_states(
            self._options.target, self._info, self._layers, self._options.prompts, norm, self._dtype, self._options.seed
        )
        feed = DiskFeed(
            lambda stream, index: streams[stream].load(index),
            self._options.batch.pack_tokens,
            self._options.queue.max_dropped_share,
        )
        return dict(streams), feed

    def _open_prompts(self) -> tuple[dict[Stream, AnyStream], AnyFeed]:
        """A feed of samples that vLLM makes of prompts; of the store alone, if all of them are there already."""
        assert self._own is not None
        streams = self._requests
        if not streams:
            assert self._trainer is not None
            if self._trainer.state.fn == "validate" and self._options.prompts.val:
                with self._own.stand_in() as prompts:  # nobody reads the training prompts
                    streams = self._open_requests(prompts)
            else:
                streams = self._open_requests(self._own.write(self._trainer, self._start_engine))
        store, disk = self._open_store(streams)
        max_val_samples = self._options.prompts.max_val_samples
        if store is not None and disk is not None and is_complete(store.has_all, streams, max_val_samples):
            if self.extractor is None:
                _log.info("every sample is in %s: vLLM is not started", store.directory)
            else:
                _log.info("every sample is in %s: vLLM has written the prompts and ends", store.directory)
                self.extractor.close()
            return dict(streams), disk
        assert self._trainer is not None
        queue = self._open_queue()
        alone = self._trainer.world_size == 1
        return dict(streams), QueueFeed(queue, self.extractor, streams, store, disk, alone)

    def _open_requests(self, prompts: PromptOptions) -> dict[Stream, RequestStream]:
        o = self._options
        return open_prompts(o.target, self._info, prompts, o.sampling, o.engine, o.queue, o.batch, o.seed)

    def _is_stored(self, streams: dict[Stream, RequestStream]) -> bool:
        """Whether no sample has to be made, by the names of the files that are there; none is read."""
        o = self._options
        if o.cache.dir is None:
            return False
        rows = {stream: listed_rows(o.cache.dir, stream, self._limits) for stream in streams}
        return is_complete(lambda stream, asked: rows[stream].issuperset(asked), streams, o.prompts.max_val_samples)

    @property
    def _limits(self) -> tuple[int, ...]:
        o = self._options
        return o.engine.max_model_len, o.batch.pack_tokens, o.queue.capacity_tokens

    def _store_facts(self, streams: dict[Stream, RequestStream]) -> StoreFacts:
        chat = streams["train"].chat.fingerprint()
        rows = "/".join(streams[stream].rows_fingerprint() for stream in sorted(streams))
        dtype = str(self._dtype).removeprefix("torch.") if self._options.cache.dtype == "target" else "fp8"
        return StoreFacts(
            target=self._info.fingerprint,
            aux_layers=self._layers.aux,
            last_layer=self._layers.last,
            hidden_size=self._info.hidden_size,
            dtype=dtype,
            tokenizer=chat["tokenizer"],
            template=chat["template"],
            prompts=rows,
            sampling=sampling_fingerprint(self._options.sampling),
        )

    def _open_store(self, streams: dict[Stream, RequestStream]) -> tuple[SampleStore | None, DiskFeed | None]:
        if self._options.cache.dir is None:
            return None, None
        norm = FinalNorm(load_final_norm(self._info), self._info.rms_norm_eps)
        o = self._options
        num_writers = 1 if self._trainer is None else self._trainer.world_size
        store = SampleStore(o.cache, self._store_facts(streams), norm, self._dtype, self._limits, num_writers)
        load: Loader = lambda stream, index: store.load(stream, streams[stream].row_id(index), index)  # noqa: E731
        return store, DiskFeed(load, self._options.batch.pack_tokens, self._options.queue.max_dropped_share)

    def _start_engine(self) -> "Extractor":
        """The run's vLLM, on rank 0: started by what needs it first, the prompts or the samples."""
        assert self._trainer is not None
        if self.extractor is None:
            run_dir = self._options.run_dir or Path(tempfile.mkdtemp(prefix="eagle3-"))
            self.extractor = self._make_extractor(run_dir, self._trainer.world_size)
            self.extractor.start()
        return self.extractor

    def _open_queue(self) -> SampleQueue:
        """Start vLLM on rank 0, unless it runs, and join its queue on every rank."""
        assert self._trainer is not None
        rank, world_size = self._trainer.global_rank, self._trainer.world_size
        packed = b""
        if rank == 0:
            packed = msgspec.json.encode(self._start_engine().handle)
        if world_size > 1:
            packed = self._trainer.strategy.broadcast(packed, src=0)
        if self.extractor is not None:
            return self.extractor.queue(0)
        return SampleQueue.connect(msgspec.json.decode(packed, type=QueueHandle), rank, os.getpid())
