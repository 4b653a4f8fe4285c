"""Stored states as streams of samples, in place of prompts: the same order, split and epochs."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import CacheOptions, PromptOptions, SamplingOptions, TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.order import SampleOrder
from eagle3_lightning.prompts.setup import TRAIN, VAL, VAL_SEED, source_weights
from eagle3_lightning.prompts.sources import as_sources, check_unused
from eagle3_lightning.prompts.split import Split
from eagle3_lightning.stream.files import FinalNorm, StoredSample
from eagle3_lightning.stream.foreign import PtSample, StateSource, holds_states
from eagle3_lightning.stream.messages import Dropped, Stream
from eagle3_lightning.target import TargetInfo


class StateStream:
    """The stored samples of one stream, by index."""

    def __init__(
        self,
        stream: Stream,
        sources: Sequence[tuple[StateSource, list[int]]],
        weights: Sequence[float] | None,
        chat: ChatTokenizer,
        seed: int,
    ) -> None:
        """Put the sources in order.

        Args:
            stream: train or val.
            sources: each with the rows that belong to this stream.
            weights: relative shares; None is in proportion to the sizes.
            chat: decodes token ids, for previews.
            seed: of the shuffle.
        """
        self._stream: Stream = stream
        self._sources, self.chat = list(sources), chat
        self.order = SampleOrder([len(rows) for _, rows in sources], weights, seed)

    @property
    def epoch_size(self) -> int:
        """Samples of one pass."""
        return self.order.epoch_size

    def fingerprint(self) -> str:
        """Changes when the files or their order do."""
        return "/".join([*(source.fingerprint() for source, _ in self._sources), self.order.fingerprint()])

    def load(self, index: int) -> StoredSample | PtSample | Dropped:
        """Sample `index`, or why it cannot be used."""
        number, position = self.order[index]
        source, rows = self._sources[number]
        return source.load(rows[position], self._stream, index)


def check_nothing_is_made(sampling: SamplingOptions, cache: CacheOptions) -> None:
    """Refuse options of how samples are made and kept, where they are read as they are.

    Raises:
        ConfigError: some of them are not at their defaults; the first is its key, all are named.
    """
    given = [
        (f"{group}.{field.name}", value)
        for group, options in (("data.sampling", sampling), ("data.cache", cache))
        for field in fields(options)
        if (value := getattr(options, field.name)) != field.default
    ]
    if given:
        (key, value), others = given[0], [key for key, _ in given[1:]]
        raise ConfigError(
            key,
            value,
            f"{TRAIN} holds stored states, which are read as they are: no sample is made or kept",
            f"Leave it out, and with it {', '.join(others)}." if others else "Leave it out.",
        )


def open_states(
    target: TargetOptions,
    info: TargetInfo,
    plan: LayerPlan,
    prompts: PromptOptions,
    norm: FinalNorm,
    dtype: torch.dtype,
    seed: int,
) -> dict[Stream, StateStream]:
    """Open directories of states as the streams `train` and, if anything is held out, `val`.

    Raises:
        ConfigError: prompts stand beside states, or states are of another target or of other layers.
    """
    train, val = as_sources(prompts.train, TRAIN), as_sources(prompts.val, VAL)
    for options in (*train, *val):
        if not holds_states(Path(options.path).expanduser()):
            raise ConfigError(TRAIN, options.path, "it stands beside stored states and holds none",
                              "Train on one or the other.")  # fmt: skip
        check_unused(options, TRAIN, ("fields", "subset", "split", "streaming"))
    chat = ChatTokenizer(info, dict(prompts.chat_template_kwargs), target.trust_remote_code)
    opened = [StateSource(options, TRAIN, info, plan, norm, dtype) for options in train]
    if val:
        held_out = [(s, list(range(len(s)))) for s in (StateSource(o, VAL, info, plan, norm, dtype) for o in val)]
        kept = [(source, list(range(len(source)))) for source in opened]
    else:
        split = Split(prompts.val_fraction)
        if not any(split.held_out(_key(row)) for source in opened for row in range(len(source))):
            split.widen()
        kept = [(s, [row for row in range(len(s)) if split.trained(_key(row))]) for s in opened]
        held_out = [(s, [row for row in range(len(s)) if not split.trained(_key(row))]) for s in opened]
    streams = {"train": StateStream("train", kept, source_weights(train, [], TRAIN), chat, seed)}
    held_out = [(source, rows) for source, rows in held_out if rows]
    if prompts.max_val_samples > 0 and held_out:
        streams["val"] = StateStream("val", held_out, None, chat, VAL_SEED)
    return streams  # type: ignore[return-value]


def _key(row: int) -> bytes:
    """What of a stored sample decides on which side it falls: its number, since nothing of it has been read."""
    return str(row).encode()
