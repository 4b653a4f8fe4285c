"""Draft vocabulary and feature scale, measured on the first samples of a run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lightning.errors import ConfigError, SampleError

_HELD_OUT_EVERY = 10
_MIN_HELD_OUT = 3  # samples: fewer say nothing


@dataclass(frozen=True)
class HeldOut:
    """Every tenth of the first samples, counted once more: on a token's own sample, a vocabulary is always right.

    Attributes:
        response_counts: how often each token stands in a supervised span of theirs.
        prompt_counts: how often it stands elsewhere in them.
        num_samples: how many they are.
    """

    response_counts: Int[Tensor, " V"]
    prompt_counts: Int[Tensor, " V"]
    num_samples: int


@dataclass(frozen=True)
class Coverage:
    """How much of text that had no part in its choice a draft vocabulary holds.

    Attributes:
        share: of the supervised tokens; NaN where too few samples were there to leave any out.
        num_tokens: supervised tokens that were left out.
        num_samples: samples that they are of.
    """

    share: float
    num_tokens: int
    num_samples: int

    def sentence(self, size: int) -> str:
        """For the log.

        Args:
            size: of the vocabulary.
        """
        if math.isnan(self.share):
            return (
                f"how much of other text the draft vocabulary of {size:,} tokens holds is not known: it takes "
                f"{_HELD_OUT_EVERY * _MIN_HELD_OUT} samples to measure it, and there were fewer"
            )
        return (
            f"the draft vocabulary of {size:,} tokens holds about {self.share:.2%} of supervised text: measured on "
            f"{self.num_tokens:,} tokens of every {_HELD_OUT_EVERY}th of the first samples ({self.num_samples} of "
            "them), with these left out of the choice"
        )


@dataclass(frozen=True)
class Calibration:
    """What the first samples say.

    Attributes:
        response_counts: how often each token stands in a supervised span.
        prompt_counts: how often it stands elsewhere.
        feature_rms: root mean square of every channel of the auxiliary states, float32.
        num_tokens: tokens counted.
        special_ids: the tokenizer's special tokens, which a draft vocabulary holds however rare they are.
        held_out: some of the samples by themselves; None where they were not told apart.
    """

    response_counts: Int[Tensor, " V"]
    prompt_counts: Int[Tensor, " V"]
    feature_rms: Float[Tensor, "A H"]
    num_tokens: int
    special_ids: tuple[int, ...] = ()
    held_out: HeldOut | None = None


class Calibrator:
    """Adds samples up to a `Calibration`."""

    def __init__(self, vocab_size: int, num_aux: int, hidden_size: int, special_ids: Iterable[int] = ()) -> None:
        """Start with nothing counted.

        Args:
            vocab_size: V of the target.
            num_aux: auxiliary layers A.
            hidden_size: H of the target.
            special_ids: of the tokenizer.
        """
        self._special_ids = tuple(special_ids)
        self._counts = torch.zeros(2, vocab_size, dtype=torch.long)  # prompt, response
        self._held_out = torch.zeros(2, vocab_size, dtype=torch.long)  # the same of every tenth sample
        self._num_samples = 0
        self._squares = torch.zeros(num_aux, hidden_size, dtype=torch.float64)
        self._num_rows = 0

    def add(self, token_ids: Sequence[int], spans: Iterable[tuple[int, int]], aux: Float[Tensor, "S A H"]) -> None:
        """Count one sample.

        Args:
            token_ids: all of its tokens.
            spans: supervised ranges [start, end) of them.
            aux: auxiliary states of its first S tokens.

        Raises:
            SampleError: a state is not finite.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.long)
        supervised = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans:
            supervised[start:end] = True
        vocab_size = self._counts.shape[1]
        counts = torch.stack([torch.bincount(ids[of], minlength=vocab_size) for of in (~supervised, supervised)])
        self._counts += counts
        self._num_samples += 1
        if self._num_samples % _HELD_OUT_EVERY == 0:
            self._held_out += counts
        # The first position of a document is an attention sink: its states are hundreds of times larger in a few
        # channels.
        rows = aux[1:].float()
        if not torch.isfinite(rows).all():
            raise SampleError(
                "a hidden state of a calibration sample is not finite. Look at the target's dtype: float16 "
                "overflows where bfloat16 does not."
            )
        self._squares += rows.square().sum(dim=0, dtype=torch.float64)
        self._num_rows += rows.shape[0]

    def result(self) -> Calibration:
        """The calibration so far.

        Raises:
            ConfigError: no sample had two tokens.
        """
        if not self._num_rows:
            raise ConfigError(
                "data.batch.calibration_tokens",
                0,
                "no sample was there to measure",
                "Check the prompts and the reasons of dropped samples.",
            )
        rms = (self._squares / self._num_rows).sqrt().float()
        prompt, response = self._counts.clone()
        held_prompt, held_response = self._held_out.clone()
        held_out = HeldOut(held_response, held_prompt, self._num_samples // _HELD_OUT_EVERY)
        return Calibration(response, prompt, rms, int(self._counts.sum()), self._special_ids, held_out)


def choose_draft_vocab(calibration: Calibration, size: int, always: Iterable[int] = ()) -> Int[Tensor, " D"]:
    """The most frequent tokens of responses and prompts together, as offsets.

    Prompts are counted too because a sample of responses alone is too small to show the tail (calibration: 97.3 % of
    later responses covered against 94.8 %). Ties go to the smaller id, and so do places left over.

    Args:
        calibration: what was counted, and the special tokens, which are in whatever their count.
        size: D, at most V.
        always: further tokens that are in: those that end a turn.

    Returns:
        d2t, int64: target token of draft token i is i + d2t[i]; target tokens ascend.

    Raises:
        ConfigError: more tokens asked for than the target has, or fewer than have to be in.
    """
    counts = calibration.response_counts + calibration.prompt_counts
    forced = sorted({t for t in (*always, *calibration.special_ids) if 0 <= t < len(counts)})
    if not len(forced) <= size <= len(counts):
        raise ConfigError(
            "model.draft.draft_vocab_size",
            size,
            f"it must lie between {max(len(forced), 1)} (special tokens and those that end a turn) and {len(counts)} "
            "(the target's vocabulary)",
            "Change it, or give null for the whole vocabulary.",
        )
    rank = counts.clone()
    rank[forced] = counts.sum() + 1
    chosen = torch.sort(rank, descending=True, stable=True).indices[:size].sort().values
    return chosen - torch.arange(size)


def coverage(calibration: Calibration, size: int, always: Iterable[int] = ()) -> Coverage:
    """What share of supervised text a vocabulary of this size holds, chosen without the samples it is measured on.

    The vocabulary that is trained on is chosen with them, so that it holds a little more.

    Args:
        calibration: what was counted.
        size: see `choose_draft_vocab`.
        always: see `choose_draft_vocab`.
    """
    held = calibration.held_out
    num_tokens = 0 if held is None else int(held.response_counts.sum())
    if held is None or held.num_samples < _MIN_HELD_OUT or not num_tokens:
        return Coverage(math.nan, num_tokens, 0 if held is None else held.num_samples)
    others = replace(
        calibration,
        response_counts=calibration.response_counts - held.response_counts,
        prompt_counts=calibration.prompt_counts - held.prompt_counts,
    )
    chosen = choose_draft_vocab(others, size, always) + torch.arange(size)
    return Coverage(int(held.response_counts[chosen].sum()) / num_tokens, num_tokens, held.num_samples)


def share_inside(calibration: Calibration, token_ids: Int[Tensor, " D"]) -> float:
    """What share of the supervised tokens a given draft vocabulary holds; NaN of none."""
    counts = calibration.response_counts
    return int(counts[token_ids].sum()) / int(counts.sum()) if counts.any() else math.nan
