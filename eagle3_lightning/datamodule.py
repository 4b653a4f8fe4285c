"""vLLM as a data source for Lightning: prompts in, packed batches of hidden states out, resumable to the sample."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.data_feed import AnySample, QueueFeed
from eagle3_lightning.data_loaders import TrainLoader, ValLoader, drain
from eagle3_lightning.data_open import AnyFeed, AnyStream, DataOpener, DataOptions, sampling_fingerprint
from eagle3_lightning.data_stream import Prefetcher, Round, RoundMaker, StepLedger, make_filler
from eagle3_lightning.data_warnings import warn_of_few_held_out, warn_of_little_data
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    TargetOptions,
)
from eagle3_lightning.prompts.preview import Preview, preview_batch
from eagle3_lightning.prompts.setup import VAL
from eagle3_lightning.prompts.sources import as_sources
from eagle3_lightning.stream.messages import Ready, Stream
from eagle3_lightning.stream.packer import Packer
from eagle3_lightning.stream.queue import QueueStats
from eagle3_lightning.target import inspect_target

if TYPE_CHECKING:
    from eagle3_lightning.draft.vocab import Calibration
    from eagle3_lightning.extract.supervisor import Extractor

_PREFETCH_ROUNDS = 2
_JOIN_TIMEOUT_S = 10.0
_READY_GRACE_S = 30.0  # over the supervisor's own deadline, which knows more
_FINGERPRINT_OPTIONS = {
    "tokenizer": "target.path",
    "template": "data.prompts.chat_template_kwargs",
    "prompts": "data.prompts.train, seed_everything",
    "sampling": "data.sampling",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataStats:
    """Counters of this rank's data, for the log.

    Attributes:
        queue: of the sample queue and the producer behind it.
        rounds_ready: assembled batches that wait for the trainer.
        wait_s: seconds that the trainer has waited for a batch.
        next_sample: index of the first sample not yet handed to the trainer.
        epoch_size: samples of one pass over the prompts.
    """

    queue: QueueStats
    rounds_ready: int
    wait_s: float
    next_sample: int
    epoch_size: int


class HiddenStateDataModule(pl.LightningDataModule):
    """Streams hidden states made by vLLM into the trainer.

    One Lightning epoch is one pass over the prompts. The position in the stream is one integer, the index of the first
    sample that no optimizer step has seen; a checkpoint holds it and a resumed run goes on there.
    """

    def __init__(
        self,
        target: TargetOptions,
        prompts: PromptOptions,
        sampling: SamplingOptions | None = None,
        engine: EngineOptions | None = None,
        queue: QueueOptions | None = None,
        batch: BatchOptions | None = None,
        cache: CacheOptions | None = None,
        run_dir: Path | None = None,
        seed: int = 0,
    ) -> None:
        """Keep the options; files are read and vLLM is started by `setup`.

        Args:
            target: the model whose states are made.
            prompts: what it is asked.
            sampling: how it answers.
            engine: how vLLM runs it.
            queue: the memory between the two.
            batch: how samples become batches.
            cache: where made samples are kept on disk.
            run_dir: where vLLM's log goes; None makes a directory under the system's temporary one.
            seed: of the order of the prompts and of the sampling.
        """
        super().__init__()
        self.target, self.prompts = target, prompts
        self.sampling, self.engine = sampling or SamplingOptions(), engine or EngineOptions()
        self.queue_options, self.batch_options = queue or QueueOptions(), batch or BatchOptions()
        self.cache = cache or CacheOptions()
        self.run_dir, self.seed = run_dir, seed
        self.ready: Ready | None = None  # what the engine said of itself, once it is up
        self._opener: DataOpener | None = None
        self._extractor: Extractor | None = None
        self._feed: AnyFeed | None = None
        self._streams: dict[Stream, AnyStream] = {}
        self._val: list[Eagle3Batch] | None = None
        self._begun: set[Stream] = set()
        self._maker: RoundMaker | None = None
        self._source: Iterator[Round] = iter(())
        self._held: deque[Round] = deque()  # made by `calibrate`, not yet handed out
        self._recent: deque[Round] = deque(maxlen=2)  # handed out last, in case Lightning drops one
        self._prefetcher: Prefetcher | None = None
        self._ledger = StepLedger(step=0, next_sample=0, batches=0)
        self._resumed = False

    # -- Lightning's hooks -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what files and options alone show to be wrong; `setup` goes on with what was opened for it.

        Raises:
            ConfigError: as `setup` raises it. Nothing has been written or started, loggers included.
        """
        if self._opener is None:
            self.info = inspect_target(self.target)
            self.layers = plan_layers(self.target.layers, self.info.num_layers, self.target.layer_convention)
            self._opener = DataOpener(self._options(), self.info, self.layers, self._make_extractor, self._check_engine)
            self._opener.check()

    def setup(self, stage: str) -> None:
        """Check target, prompts and lengths, then start vLLM (on rank 0; the other ranks join its queue).

        Raises:
            ConfigError: anything that can be known to be wrong before vLLM starts.
            ProducerError: vLLM did not start.
        """
        if self._feed is not None:
            return
        self.check()
        assert self._opener is not None
        opener, self._opener = self._opener, None
        try:
            self._streams, self._feed = opener.open(self.trainer)
        finally:
            self._extractor = opener.extractor
            if self._feed is None:
                self._close()
        if stage == "fit" and self.trainer is not None:
            if self.trainer.is_global_zero and self.trainer.limit_val_batches != 0:
                warn_of_few_held_out(self.prompts, self._num_val if "val" in self._streams else 0)
            if "val" not in self._streams:
                self.trainer.limit_val_batches = 0

    def teardown(self, stage: str) -> None:
        """Stop the batch thread and vLLM; nothing is left running."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """The same as `teardown`, which Lightning does not call when a run fails."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The position behind the trainer's last optimizer step."""
        assert self.trainer is not None
        step = self.trainer.global_step
        next_sample, batches = self._ledger.at(step)
        position = {"step": step, "next_sample": next_sample, "batches_in_epoch": batches}
        return {**position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the optimizer step that the checkpoint was written at.

        Raises:
            ConfigError: it was written with another tokenizer, chat template, prompts or sampling: its draft vocabulary
                would be stale, and its position mean other samples.
        """
        assert self.trainer is not None
        then, now = state_dict["fingerprint"], self.fingerprint
        for part, option in _FINGERPRINT_OPTIONS.items():
            if self.trainer.state.fn == "fit" and then.get(part) != now.get(part):
                raise ConfigError("ckpt_path", part, f"the checkpoint was written with another {part} ({option})",
                                  "Resume with what it was trained on, or start a new run.")  # fmt: skip
        self._ledger = StepLedger(state_dict["step"], state_dict["next_sample"], state_dict["batches_in_epoch"])
        self._resumed = True

    def train_dataloader(self) -> Iterable[Eagle3Batch]:
        """Batches of one epoch, or of what is left of it after a resume."""
        return TrainLoader(self._epoch)

    def val_dataloader(self) -> Iterable[Eagle3Batch]:
        """The held-out batches of this rank: made once, before any training sample, and kept in CPU memory."""
        self._start_streams()
        return ValLoader(self._val) if self._val else []

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the samples come from: tokenizer, template, prompts with their order, and sampling."""
        train = self._streams["train"]
        return {
            **train.chat.fingerprint(),
            "prompts": train.fingerprint(),
            "sampling": sampling_fingerprint(self.sampling),
        }

    @property
    def held_out_files(self) -> list[str]:
        """The files that are validated on, sorted; none where what is held out is a part of the training's."""
        return sorted(str(Path(source.path).resolve()) for source in as_sources(self.prompts.val, VAL))

    # -- for the module and the callbacks --------------------------------------------------------------------------

    def calibrate(self) -> "Calibration":
        """Measure the first samples: token counts for the draft vocabulary, the scale of each feature channel.

        They stay in line and are trained on. Every rank reads the same samples and finds the same.
        """
        from eagle3_lightning.draft.vocab import Calibrator

        self._start_streams()
        assert self._maker is not None
        special_ids = self._streams["train"].chat.special_ids
        calibrator = Calibrator(self.info.vocab_size, len(self.layers.aux), self.info.hidden_size, special_ids)
        num_samples = num_rows = 0

        def add(sample: AnySample) -> None:
            nonlocal num_samples, num_rows
            num_samples, num_rows = num_samples + 1, num_rows + sample.num_rows
            calibrator.add(sample.token_ids[: sample.num_rows], sample.spans, sample.rows()[:, : len(self.layers.aux)])

        self._maker.on_sample = add
        for round_ in self._source:
            self._held.append(round_)
            if num_rows >= self.batch_options.calibration_tokens or round_.last:
                break
        self._maker.on_sample = None
        if self.trainer is not None and self.trainer.is_global_zero:
            warn_of_little_data(self.batch_options, num_samples, num_rows)
        return calibrator.result()

    def preview(self, num_samples: int) -> list[Preview]:
        """The first samples that were made, decoded, with the supervised tokens marked; none before the first batch."""
        rounds = [*self._recent, *self._held]
        previews = (p for round_ in rounds for p in preview_batch(round_.batch, self._streams["train"].chat))
        return list(islice(previews, num_samples))

    @property
    def is_open(self) -> bool:
        """Whether there are counters to ask for."""
        return self._feed is not None

    @property
    def makes_samples(self) -> bool:
        """Whether vLLM is beside this run, and not only stored samples."""
        return isinstance(self._feed, QueueFeed)

    def stats(self) -> DataStats:
        """Counters as of now."""
        assert self._feed is not None, "stats() needs open data"
        waiting = self._prefetcher
        return DataStats(
            queue=self._feed.stats(),
            rounds_ready=len(self._held) + (waiting.depth if waiting else 0),
            wait_s=waiting.wait_s if waiting else 0.0,
            next_sample=self._recent[-1].next_sample if self._recent else 0,
            epoch_size=self._streams["train"].epoch_size if "train" in self._streams else 0,
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _options(self) -> DataOptions:
        return DataOptions(
            self.target,
            self.prompts,
            self.sampling,
            self.engine,
            self.queue_options,
            self.batch_options,
            self.cache,
            self.run_dir,
            self.seed,
        )

    def _check_engine(self) -> None:
        self._make_extractor(self.run_dir or Path(), 1)  # which checks all that it can, and starts nothing

    def _make_extractor(self, run_dir: Path, world_size: int) -> "Extractor":
        from eagle3_lightning.extract.supervisor import Extractor

        return Extractor(
            self.info,
            self.layers,
            self.engine,
            self.queue_options,
            self.sampling,
            run_dir,
            world_size,
            max_restarts=self.batch_options.max_restarts,
            trust_remote_code=self.target.trust_remote_code,
        )

    def _start_streams(self) -> None:
        """Begin both streams, and make the validation set before the first training sample is taken.

        The order matters: validation samples that queue up behind training samples would wait for arena blocks which
        the trainer, waiting for validation, does not give back.
        """
        assert self.trainer is not None
        assert self._feed is not None
        if "val" in self._streams and "val" not in self._begun and self.trainer.limit_val_batches != 0:
            self._begun.add("val")
            self._feed.begin("val", 0, self._num_val)
        if self.trainer.state.fn == "fit" and "train" not in self._begun:
            self._begun.add("train")
            self._feed.begin("train", self._ledger.start, None)
            self._maker = self._make_rounds("train", self._ledger.start, self._streams["train"].epoch_size)
            self._source = iter(self._maker)
        if self.ready is None:
            self.ready = self._feed.wait_ready(self.engine.start_timeout_s + _READY_GRACE_S)
            for note in (
                (f"vLLM {self.ready.vllm_version}, tap {self.ready.tap}", *self.ready.notes) if self.ready else ()
            ):
                _log.info("%s", note)
        if "val" in self._begun and self._val is None:
            self._val = [round_.batch for round_ in self._make_rounds("val", 0, self._num_val)]
            _log.info("keeping %d validation batches of %d prompts in memory", len(self._val), self._num_val)

    @property
    def _num_val(self) -> int:
        return min(self._streams["val"].epoch_size, self.prompts.max_val_samples)

    def _make_rounds(self, stream: Stream, start: int, epoch_size: int) -> RoundMaker:
        assert self.trainer is not None
        assert self._feed is not None
        num_aux = len(self.layers.aux)
        packer = Packer(self.batch_options.pack_tokens, self.batch_options.static_shapes, num_aux)
        dtype = getattr(torch, self.info.dtype if self.engine.dtype == "auto" else self.engine.dtype)
        filler = make_filler(num_aux, self.info.hidden_size, dtype)
        return RoundMaker(self._feed, stream, packer, start, epoch_size, self.trainer.global_rank,
                          self.trainer.world_size, filler)  # fmt: skip

    def _epoch(self) -> Iterator[Eagle3Batch]:
        """Hand out what is left of the running epoch, noting for each batch where it leads."""
        assert self.trainer is not None
        self._start_streams()
        trained = self._ledger.rewind(self.trainer.global_step)
        # Lightning asks for one batch more than it trains on when it ends an epoch early or resumes at an epoch's end.
        again = [round_ for round_ in self._recent if round_.first_sample >= trained]
        # An int is a number of batches; the default, the float 1.0, is all of them.
        limit = self.trainer.limit_train_batches if isinstance(self.trainer.limit_train_batches, int) else None
        recount = self._resumed and self._ledger.batches == 0 and limit is None
        self._resumed = False
        if self._prefetcher is None:
            pin = self.trainer.strategy.root_device.type == "cuda"
            self._prefetcher = Prefetcher(chain(drain(self._held), self._source), _PREFETCH_ROUNDS, pin)
        for round_ in chain(again, iter(self._prefetcher.get, None)):
            assert round_.first_sample >= trained, f"sample {round_.first_sample} would be trained on twice"
            if not any(round_ is known for known in self._recent):
                self._recent.append(round_)
            last = round_.last or self._ledger.batches + 1 == limit
            self._ledger.handed_out(round_, last, self.trainer.accumulate_grad_batches)
            yield round_.batch
            if recount:
                self._restart_batch_count()
                recount = False
            if last:
                return

    def _restart_batch_count(self) -> None:
        """Let Lightning count the batches of a new epoch from 0.

        Lightning 2.6 does so itself, except when it resumes at the end of an epoch whose loader has no length: the old
        count would shift every accumulation of the new epoch. It asks for the second batch just before it counts the
        first, so this comes in time.
        """
        assert self.trainer is not None
        self.trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()

    def _close(self) -> None:
        # The thread reads the arena: it must be gone before the arena is. Closing the feed ends its wait. Whatever one
        # of them raises, the others are closed.
        prefetcher, feed, extractor = self._prefetcher, self._feed, self._extractor
        self._prefetcher = self._feed = self._extractor = self._maker = None
        self._held.clear()
        self._begun.clear()
        with ExitStack() as last_first:
            if extractor is not None:
                last_first.callback(extractor.close)
            if feed is not None:
                last_first.callback(feed.join)
            if prefetcher is not None:
                last_first.callback(prefetcher.join, _JOIN_TIMEOUT_S)
            if feed is not None:
                last_first.callback(feed.close)
            if prefetcher is not None:
                last_first.callback(prefetcher.stop)
