"""The target writes its own prompts, so that a draft can be trained with no data set at all.

A chat model that is given its template up to the user's turn goes on with a user's message (Xu et al. 2024, "Magpie").
What comes out is filtered for length, repetition and duplicates, in ways that know no language.
"""

import json
import logging
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions, SynthesisOptions, TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.order import Permutation
from eagle3_lightning.stream.messages import Dropped, Submit
from eagle3_lightning.target import TargetInfo

_MAX_TRIES = 8  # prompts made for each one that is kept, before giving up
_SHINGLE_TOKENS = 3
_SAME_SHARE = 0.7  # of the shorter prompt's shingles
_LOOP_TOKENS, _MIN_DISTINCT = 4, 0.5
_MIN_COMPRESSED = 0.25
_MAX_SEED = 2**31
_log = logging.getLogger(__name__)


@dataclass
class SynthesisReport:
    """What was made, and why some of it was thrown away.

    Attributes:
        made: prompts that the target wrote.
        kept: those that were written to the file.
        thrown_away: the others, by reason: `unfinished`, `short`, `loop`, `duplicate`, `markup`.
    """

    made: int = 0
    kept: int = 0
    thrown_away: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """One line."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.thrown_away.most_common()) or "nothing"
        return f"{self.kept} of {self.made} kept; thrown away: {reasons}"


class PromptFilter:
    """Decides on one prompt after the other, remembering those that it kept."""

    def __init__(self, min_tokens: int) -> None:
        """Keep prompts of at least `min_tokens`."""
        self._min_tokens = min_tokens
        self._texts: set[str] = set()
        self._shingles: dict[tuple[int, ...], list[int]] = {}
        self._num_shingles: list[int] = []

    def refuse(self, ids: Sequence[int], text: str) -> str | None:
        """The reason to throw a finished prompt away; None keeps it."""
        if len(ids) < self._min_tokens or not text:
            return "short"
        if is_loop(ids, text):
            return "loop"
        normal = " ".join(text.casefold().split())
        shingles = set(_windows(ids, _SHINGLE_TOKENS)) or {tuple(ids)}
        if normal in self._texts or self._resembles(shingles):
            return "duplicate"
        self._texts.add(normal)
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


def synthesize_prompts(
    target: TargetOptions,
    info: TargetInfo,
    options: SynthesisOptions,
    engine: EngineOptions,
    out: Path,
    template_kwargs: Mapping[str, object] | None = None,
) -> SynthesisReport:
    """Start vLLM, let the target write prompts until enough are kept, and write them to a JSONL file.

    Args:
        target: as the run names it.
        info: of the same target.
        options: how many and how long.
        engine: how vLLM runs the target.
        out: JSONL with `id` and `messages`; written beside and renamed.
        template_kwargs: for the chat template.

    Raises:
        ConfigError: `out` exists, or the target has no chat template.
        SampleError: the target does not write usable prompts.
        ProducerError: vLLM failed.
    """
    from eagle3_lightning.extract.supervisor import Extractor

    if out.exists():
        raise ConfigError("--out", str(out), "it exists already", "Name a new file.")
    chat = ChatTokenizer(info, dict(template_kwargs or {}), target.trust_remote_code)
    opening = chat.user_opening()
    longest = len(opening) + options.max_tokens + 1
    if longest > engine.max_model_len:
        raise ConfigError(
            "synthesis.max_tokens",
            options.max_tokens,
            f"with the template's opening it needs {longest} tokens and engine.max_model_len is {engine.max_model_len}",
            "Lower it, or raise max_model_len.",
        )
    engine = replace(engine, max_model_len=longest)
    queue = QueueOptions(capacity_tokens=engine.max_num_seqs * longest + 4096, max_dropped_share=1.0)
    sampling = SamplingOptions(temperature=options.temperature, top_p=options.top_p, max_new_tokens=options.max_tokens)
    with tempfile.TemporaryDirectory(prefix="eagle3-") as directory:
        log_dir = out.parent if out.parent.is_dir() else Path(directory)
        layers = plan_layers(target.layers, info.num_layers, target.layer_convention)
        extractor = Extractor(
            info, layers, engine, queue, sampling, log_dir, trust_remote_code=target.trust_remote_code
        )
        extractor.start()
        try:
            extractor.queue(0).feed("train", _requests(opening, options))
            kept, report = _collect(extractor.queue(0), chat, options)
        finally:
            extractor.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"self-{n}", "messages": [{"role": "user", "content": t}]}) for n, t in enumerate(kept)]
    partial = out.with_name(out.name + ".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(partial, out)
    _log.info("the target wrote its own prompts: %s", report)
    return report


def _requests(opening: list[int], options: SynthesisOptions) -> Iterator[Submit]:
    seeds = Permutation(_MAX_SEED, f"{options.seed}/synthesis")
    for index in range(_MAX_TRIES * options.num_prompts):
        yield Submit("train", index, f"self {index}", opening, [], options.max_tokens, seeds[index % _MAX_SEED])


def _collect(queue: object, chat: ChatTokenizer, options: SynthesisOptions) -> tuple[list[str], SynthesisReport]:
    report, kept, wanted = SynthesisReport(), [], PromptFilter(options.min_tokens)
    while report.kept < options.num_prompts:
        sample = queue.get("train")  # type: ignore[attr-defined]
        if sample is None:
            raise SampleError(f"the target writes too few usable prompts: {report}")
        report.made += 1
        if isinstance(sample, Dropped):
            report.thrown_away[sample.reason] += 1
            continue
        sample.release()
        ids = sample.token_ids[sample.prompt_tokens :]
        reason = "unfinished" if sample.finish_reason != "stop" else None
        ids = ids[:-1]  # the end of the turn
        text = chat.decode(ids).strip()
        reason = reason or ("markup" if chat.has_special(ids) else None) or wanted.refuse(ids, text)
        if reason is None:
            kept.append(text)
            report.kept += 1
        else:
            report.thrown_away[reason] += 1
    return kept, report


def _windows(ids: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + length]) for start in range(len(ids) - length + 1))
