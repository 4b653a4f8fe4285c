"""The target writes its own prompts, so that a draft can be trained with no data set at all.

A chat model that is given its template up to the user's turn goes on with a user's message (Xu et al. 2024, "Magpie").
What comes out is filtered for length, repetition and duplicates, in ways that know no language.
"""

import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions, SynthesisOptions, TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer, UserTurn
from eagle3_lightning.prompts.filters import PromptFilter
from eagle3_lightning.prompts.order import Permutation
from eagle3_lightning.stream.messages import Dropped, Sampling, Submit
from eagle3_lightning.stream.queue import SampleQueue
from eagle3_lightning.stream.sample import FinishedSample
from eagle3_lightning.target import TargetInfo

if TYPE_CHECKING:
    from eagle3_lightning.extract.supervisor import Extractor

REASONS = ("unfinished", "short", "loop", "duplicate", "markup")
_MAX_TRIES = 8  # prompts made for each one that is kept, before giving up
_MIN_JUDGED = 256  # made before a yield below one in _MAX_TRIES ends it all
_SPARE, _SPARE_SHARE = 8, 1.25  # written beyond what the yield so far asks for, so that few stragglers are waited for
_PROGRESS_EVERY_S = 10.0
_POLL_S = 0.5
_MAX_SEED = 2**31
Say = Callable[[str], None]


@dataclass
class SynthesisReport:
    """What was made, and why some of it was thrown away.

    Attributes:
        made: prompts that the target wrote.
        kept: those that were written to the file.
        thrown_away: the others, by reason: `unfinished` at max_tokens, `short`, `loop`, `duplicate`, `markup` (special
            tokens inside), or what the queue dropped a sample for.
    """

    made: int = 0
    kept: int = 0
    thrown_away: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))

    def __str__(self) -> str:
        """One line."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.thrown_away.most_common())
        return f"{self.kept} of {self.made} kept; thrown away: {reasons}"

    def count(self, reason: str | None) -> None:
        """Count a prompt; without a reason to throw it away it is kept."""
        self.made += 1
        if reason is None:
            self.kept += 1
        else:
            self.thrown_away[reason] += 1


class Demand:
    """How many prompts are asked for: those that are missing, at the yield so far. Whoever asks waits for the judge."""

    def __init__(self, opening: list[int], options: SynthesisOptions, sampling: Sampling) -> None:
        """Ask for nothing yet.

        Args:
            opening: token ids up to the user's words.
            options: how many, how long.
            sampling: how they are written, and what ends them.
        """
        self._opening, self._options, self._sampling = opening, options, sampling
        self._changed = threading.Condition()
        self._wanted = self._estimate(SynthesisReport())
        self._ended = False

    def requests(self) -> Iterator[Submit]:
        """One after the other, in the feeder's thread; the reader of the answers has the deadline."""
        options = self._options
        seeds = Permutation(_MAX_SEED, f"{options.seed}/synthesis")
        for index in range(_MAX_TRIES * options.num_prompts):
            with self._changed:
                while index >= self._wanted and not self._ended:
                    self._changed.wait(_POLL_S)
                if self._ended:
                    return
            name, longest = f"self {index}", options.max_tokens
            yield Submit("self", index, name, self._opening, [], longest, seeds[index], self._sampling)

    def update(self, report: SynthesisReport) -> None:
        """Take in what has been judged."""
        with self._changed:
            self._wanted = max(self._wanted, self._estimate(report))
            self._changed.notify_all()

    def end(self) -> None:
        """Ask for no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _estimate(self, report: SynthesisReport) -> int:
        share = (report.kept + 1) / (report.made + 1)
        missing = self._options.num_prompts - report.kept
        return report.made + math.ceil(_SPARE_SHARE * missing / share) + _SPARE


def synthesize_prompts(
    target: TargetOptions, info: TargetInfo, options: SynthesisOptions, engine: EngineOptions, out: Path
) -> SynthesisReport:
    """Start vLLM, let the target write prompts to a JSONL file, and stop vLLM. A run's own vLLM does it without.

    Args:
        target: as the user names it.
        info: of the same target.
        options: how many and how long.
        engine: how vLLM runs the target.
        out: see `write_prompts`.

    Raises:
        ConfigError: `out` exists, the target has no chat template, or a prompt has no room.
        SampleError: the target does not write usable prompts.
        ProducerError: vLLM failed.
    """
    from eagle3_lightning.extract.supervisor import Extractor

    if out.exists():
        raise ConfigError("--out", str(out), "it exists already", "Name a new file.")
    chat = ChatTokenizer(info, {}, target.trust_remote_code)
    engine = replace(engine, max_model_len=check_room(chat.user_turn(), options, engine))
    queue = QueueOptions(capacity_tokens=engine.max_num_seqs * engine.max_model_len + 4096)
    layers = plan_layers(target.layers, info.num_layers, target.layer_convention)
    with tempfile.TemporaryDirectory(prefix="eagle3-") as directory:
        log_dir = out.parent if out.parent.is_dir() else Path(directory)
        extractor = Extractor(
            info, layers, engine, queue, SamplingOptions(), log_dir, trust_remote_code=target.trust_remote_code
        )
        # The directory is not this command's own: a `vllm.log` in it is another's.
        extractor.log_path = log_dir / f"{out.name.removesuffix('.jsonl')}.vllm.log"
        try:
            extractor.start()
            return write_prompts(extractor, info, chat, options, out)
        finally:
            extractor.close()


def write_prompts(
    extractor: "Extractor", info: TargetInfo, chat: ChatTokenizer, options: SynthesisOptions, out: Path
) -> SynthesisReport:
    """Let the target write prompts until enough are kept, and write them to a file; progress goes to standard error.

    Some that were asked for may still come: who goes on with this vLLM has its queue `forget` the stream `self`.

    Args:
        extractor: vLLM, started; its own sampling is not used.
        info: of its target.
        chat: the tokenizer of its target, with the arguments of the template.
        options: how many and how long.
        out: JSONL with `id` and `messages`; written beside and renamed.

    Raises:
        SampleError: the target does not write usable prompts.
        ProducerError: vLLM failed.
    """
    turn, queue = chat.user_turn(), extractor.queue(0)
    # A prompt ends where the template ends the user's turn, too.
    stop_ids = tuple(sorted({*info.eos_token_ids, *turn.stop_ids}))
    demand = Demand(turn.opening, options, Sampling(stop_ids, options.temperature, options.top_p, options.top_k))
    _say(f"the target writes {options.num_prompts} prompts; vLLM starts, its log is {extractor.log_path}")
    queue.feed("self", demand.requests())
    try:
        kept, report = collect(queue, chat, turn, options, demand, _say)
    finally:
        demand.end()
    _write(out, kept)
    _say(f"the target wrote its own prompts: {report}")
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_room(turn: UserTurn, options: SynthesisOptions, engine: EngineOptions) -> int:
    """Tokens of the longest prompt with its opening.

    Raises:
        ConfigError: they are more than the engine takes.
    """
    longest = len(turn.opening) + options.max_tokens + 1
    if longest > engine.max_model_len:
        raise ConfigError(
            "data.prompts.synthesis.max_tokens",
            options.max_tokens,
            f"with the template's opening it needs {longest} tokens, over data.engine.max_model_len = "
            f"{engine.max_model_len}",
            "Lower it, or raise max_model_len.",
        )
    return longest


def collect(
    queue: SampleQueue, chat: ChatTokenizer, turn: UserTurn, options: SynthesisOptions, demand: Demand, say: Say
) -> tuple[list[str], SynthesisReport]:
    """Take what the target wrote, in its order, until enough has been kept.

    Raises:
        SampleError: less than one in eight is usable.
    """
    report, kept, wanted = SynthesisReport(), [], PromptFilter(options.min_tokens)
    progress = _Progress(options, say)
    while report.kept < options.num_prompts:
        sample = queue.get("self")
        too_few = report.made >= _MIN_JUDGED and _MAX_TRIES * report.kept < report.made
        if sample is None or too_few:
            raise SampleError(f"the target writes too few usable prompts: {report}. Raise synthesis.max_tokens if most "
                              "are unfinished, synthesis.temperature if most are duplicates")  # fmt: skip
        if isinstance(sample, FinishedSample):
            sample.release()
            ids = sample.token_ids[sample.prompt_tokens :]
            text, reason = judge(ids, sample.finish_reason, chat, turn, wanted)
            if reason is None:
                kept.append(text)
            report.count(reason)
        else:
            assert isinstance(sample, Dropped), "nothing of this is stored"
            report.count(sample.reason)
        demand.update(report)
        progress.show(report)
    return kept, report


def judge(
    ids: list[int], finish_reason: str, chat: ChatTokenizer, turn: UserTurn, wanted: PromptFilter
) -> tuple[str, str | None]:
    """The text of what the target wrote, and the reason to throw it away, if there is one."""
    finished = finish_reason == "stop"
    if finished:
        ids = ids[:-1]  # the end of the turn
    text = chat.decode(ids)
    if turn.closing and turn.closing in text:
        # The template ends the turn with words that are no token of their own, so that vLLM did not stop there.
        text, finished = text.partition(turn.closing)[0], True
        ids = chat.encode(text)
    text = text.strip()
    if not finished:
        return text, "unfinished"
    return text, "markup" if chat.has_markup(ids) else wanted.refuse(ids, text)


class _Progress:
    """A line every few seconds: what there is, how long the rest will take, and when it is given up."""

    def __init__(self, options: SynthesisOptions, say: Say) -> None:
        self._options, self._say = options, say
        self._start_s: float | None = None
        self._last_s = 0.0

    def show(self, report: SynthesisReport) -> None:
        now_s = time.monotonic()
        if self._start_s is None:  # the first prompt: vLLM has started
            self._start_s = self._last_s = now_s
        if now_s - self._last_s < _PROGRESS_EVERY_S:
            return
        self._last_s = now_s
        wanted = self._options.num_prompts
        left_s = (now_s - self._start_s) / max(report.kept, 1) * (wanted - report.kept)
        self._say(f"{report}; {wanted} wanted, about {left_s:.0f} s left, given up after {_MAX_TRIES * wanted} made")


def _write(out: Path, texts: list[str]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"self-{n}", "messages": [{"role": "user", "content": t}]}) for n, t in enumerate(texts)]
    partial = out.with_name(out.name + ".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(partial, out)
