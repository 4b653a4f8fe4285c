"""Prompts that the run's own target writes: once for a run, and only when nothing else is wrong with it.

The engine that writes them is the run's, and makes the samples then.

RUN_DIR/self_prompts.jsonl   what the target wrote
RUN_DIR/self_prompts.json    what it depends on: target, chat template, options and seed of the writing
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.fingerprint import EARLIER_FORM, is_earlier_form
from eagle3_lightning.options import EngineOptions, PromptOptions, SourceOptions, TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.setup import TRAIN
from eagle3_lightning.prompts.sources import SELF, as_sources
from eagle3_lightning.prompts.synthesis import check_room, write_prompts
from eagle3_lightning.ranks import rank_zero_first
from eagle3_lightning.run_directory import CHECKPOINTS
from eagle3_lightning.target import TargetInfo

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from eagle3_lightning.extract.supervisor import Extractor

OWN_PROMPTS = "self_prompts.jsonl"
OWN_FACTS = "self_prompts.json"
_OPTION_OF = {"target": "target", "tokenizer": "target", "template": "data.prompts.chat_template_kwargs"}
_WRITING_TIMEOUT_S = 24 * 3600.0  # of prompts, on rank 0; what it waits for itself has deadlines of its own
_log = logging.getLogger(__name__)


class OwnPrompts:
    """The prompts that the options call `self`."""

    def __init__(
        self,
        target: TargetOptions,
        info: TargetInfo,
        prompts: PromptOptions,
        engine: EngineOptions,
        run_dir: Path | None,
    ) -> None:
        """Look whether there are any, and what lies in the run's directory already.

        Args:
            target: as the run names it.
            info: of the same target.
            prompts: all sources of the run.
            engine: how vLLM runs the target.
            run_dir: where they are written.

        Raises:
            ConfigError: the run has no directory to put them, they cannot be written, or the run is resumed and has
                prompts that were written under other options.
        """
        self._info, self._prompts = info, prompts
        self._sources = as_sources(prompts.train, TRAIN)
        self._run_dir = run_dir
        self.wanted = any(source.path == SELF for source in self._sources)
        if not self.wanted:
            return
        if run_dir is None:
            raise ConfigError(TRAIN, SELF, "the prompts need a place", "Give the run a directory.")
        self._chat = ChatTokenizer(info, dict(prompts.chat_template_kwargs), target.trust_remote_code)
        check_room(self._chat.user_turn(), prompts.synthesis, engine)
        self._facts: dict[str, Any] = {
            "target": info.fingerprint,
            **self._chat.fingerprint(),
            **{f"synthesis.{name}": value for name, value in asdict(prompts.synthesis).items()},
        }
        self.written = (run_dir / OWN_PROMPTS).is_file() and self._is_same(run_dir)

    def write(self, trainer: "pl.Trainer", start: "Callable[[], Extractor]") -> PromptOptions:
        """Let the target write them, unless they are there.

        Args:
            trainer: its ranks wait for rank 0.
            start: the run's vLLM, on rank 0; it goes on to make the samples.

        Returns:
            The options with a file in the place of `self`.
        """
        if not self.wanted:
            return self._prompts
        assert self._run_dir is not None
        own = self._run_dir / OWN_PROMPTS
        with rank_zero_first(trainer, "the writing of prompts", _WRITING_TIMEOUT_S) as here:
            if here and not self.written:
                self._run_dir.mkdir(parents=True, exist_ok=True)
                own.unlink(missing_ok=True)
                # Before the prompts, which are written whole: where they are, this is about them.
                (self._run_dir / OWN_FACTS).write_text(json.dumps(self._facts, indent=1) + "\n", encoding="utf-8")
                extractor = start()
                write_prompts(extractor, self._info, self._chat, self._prompts.synthesis, own)
                extractor.queue(0).forget("self")
        return self._with(own)

    @contextmanager
    def stand_in(self) -> Iterator[PromptOptions]:
        """The options with the shortest of prompts in the place of those that are not written yet.

        What is refused of these would be refused of any; the message names `self`.
        """
        if not self.wanted:
            yield self._prompts
            return
        assert self._run_dir is not None
        if self.written:
            yield self._with(self._run_dir / OWN_PROMPTS)
            return
        with tempfile.TemporaryDirectory(prefix="eagle3-") as directory:
            file = Path(directory) / OWN_PROMPTS
            row = {"id": "self", "messages": [{"role": "user", "content": "a"}]}
            file.write_text(json.dumps(row) + "\n", encoding="utf-8")
            try:
                yield replace(self._with(file), val_fraction=0.0)  # the one row is none to split
            except ConfigError as error:
                value, problem = str(error.value).replace(str(file), SELF), error.problem.replace(str(file), SELF)
                raise ConfigError(error.option, value, problem, error.remedy) from error

    def _with(self, file: Path) -> PromptOptions:
        named: list[str | SourceOptions] = [replace(s, path=str(file)) if s.path == SELF else s for s in self._sources]
        return replace(self._prompts, train=named)

    def _is_same(self, run_dir: Path) -> bool:
        """Whether the prompts that are there are those of this run; a run that has trained on others is refused."""
        try:
            theirs = json.loads((run_dir / OWN_FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            theirs = None
        has_trained = (run_dir / CHECKPOINTS).is_dir() and any((run_dir / CHECKPOINTS).iterdir())
        if not isinstance(theirs, dict):
            if has_trained:
                _log.warning("%s does not say how %s was written: taken as it is", run_dir / OWN_FACTS, OWN_PROMPTS)
            return has_trained
        other = [key for key, value in self._facts.items() if theirs.get(key) != value]
        if not other:
            return True
        names = ", ".join(_OPTION_OF.get(key, f"data.prompts.{key}") for key in other)
        values = "; ".join(f"{key} {theirs.get(key)} there, {self._facts[key]} here" for key in other)
        if is_earlier_form(theirs.get("target")):
            values += f"; the target's fingerprint there is {EARLIER_FORM}"
        if has_trained:
            raise ConfigError(
                TRAIN,
                SELF,
                f"the prompts of {run_dir} were written under another {names} ({values})",
                "Resume with the options that the run has, or start a new run.",
            )
        _log.warning("%s was written under another %s (%s): it is written anew", run_dir / OWN_PROMPTS, names, values)
        return False
