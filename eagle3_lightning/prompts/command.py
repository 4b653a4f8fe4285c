"""`eagle3 prompts preview` and `eagle3 prompts synthesize`."""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.checks import COUNT, check_number
from eagle3_lightning.errors import ConfigError, did_you_mean
from eagle3_lightning.options import (
    BatchOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    SynthesisOptions,
    TargetOptions,
)

_USAGE = """usage: eagle3 prompts preview --target.path T --prompts.train FILE [options]
       eagle3 prompts preview --config RUN_YAML [options]
       eagle3 prompts synthesize --target.path T --out FILE [options]"""

# data.prompts.synthesis.seed is synthesis.seed here, data.engine.dtype engine.dtype
_RUN_NAMES = re.compile(r"\bdata\.(?:prompts\.(?=synthesis\.))?(prompts|synthesis|sampling|engine|queue|batch)\.")


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 prompts ...`."""
    commands = {"preview": preview, "synthesize": synthesize}
    if len(argv) < 2 or argv[1] not in commands:
        if len(argv) > 1 and argv[1] not in ("--help", "-h"):
            nearest = did_you_mean(argv[1], commands)
            print(f"eagle3 prompts: there is no command {argv[1]!r}. {nearest}".rstrip(), file=sys.stderr)
        print(f"{_USAGE}\n(each with --help for its options)", file=sys.stderr)
        return 0 if argv[1:] in (["--help"], ["-h"]) else 2
    try:
        return commands[argv[1]](argv[2:])
    except ConfigError as error:
        raise _named_as_here(error) from error


def _named_as_here(error: ConfigError) -> ConfigError:
    """The error of a run's option under the name that the option has in these commands."""

    def here(text: str) -> str:
        return _RUN_NAMES.sub(r"\1.", text)

    return ConfigError(here(error.option), error.value, here(error.problem), here(error.remedy))


def preview(argv: Sequence[str]) -> int:
    """Decode the first samples; no vLLM is started."""
    parser = StrictParser(
        prog="eagle3 prompts preview",
        description="Shows the first samples as they are given to vLLM, with the supervised tokens marked.",
    )
    argv, run_dir = _of_a_run(argv)
    _add_options(parser, prompts=PromptOptions, sampling=SamplingOptions, engine=EngineOptions, queue=QueueOptions,
                 batch=BatchOptions)  # fmt: skip
    parser.add_argument("--number", type=int, default=4, help="samples to show")
    parser.add_argument("--html", type=Path | None, default=None, metavar="FILE", help="write a page there as well")
    parser.add_argument("--seed", type=int, default=0, help="of the order, as --seed_everything of the fit")
    options = parser.instantiate(parser.parse_args(argv))
    check_number("--number", options.number, COUNT)
    if options.html is not None:
        _check_place("--html", options.html)
    from rich.console import Console

    from eagle3_lightning.prompts.preview import preview_requests, print_previews, to_html
    from eagle3_lightning.prompts.setup import open_prompts
    from eagle3_lightning.target import inspect_target

    info = inspect_target(options.target)
    prompts = _written_prompts(options.prompts, run_dir)
    streams = open_prompts(options.target, info, prompts, options.sampling, options.engine, options.queue,
                           options.batch, options.seed)  # fmt: skip
    previews = preview_requests(streams["train"], min(options.number, streams["train"].epoch_size))
    print_previews(previews, Console())
    if options.html is not None:
        options.html.write_text(to_html(previews), encoding="utf-8")
        print(f"wrote {options.html}")
    return 0


def synthesize(argv: Sequence[str]) -> int:
    """Let the target write prompts."""
    parser = StrictParser(
        prog="eagle3 prompts synthesize",
        description="The target writes its own prompts: its chat template up to the user's turn is all it is given.",
    )
    _add_options(parser, synthesis=SynthesisOptions, engine=EngineOptions)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL to write; must not exist")
    options = parser.instantiate(parser.parse_args(argv))
    _check_place("--out", options.out)
    from eagle3_lightning.prompts.synthesis import synthesize_prompts
    from eagle3_lightning.target import inspect_target

    report = synthesize_prompts(
        options.target, inspect_target(options.target), options.synthesis, options.engine, options.out
    )
    print(f"wrote {report.kept} prompts to {options.out}\n{report}")
    return 0


def _of_a_run(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """The arguments with the configuration of a run, if one is named, turned into one of a preview.

    Returns:
        The arguments, and the run's directory.
    """
    turned, run_dir = list(argv), None
    for place, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        file = value if equals else (argv[place + 1] if place + 1 < len(argv) else "")
        if name != "--config" or not Path(file).is_file():
            continue
        try:
            config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except yaml.YAMLError:
            continue  # the parser says what is wrong with it
        if not isinstance(config, dict) or not isinstance(data := config.get("data"), dict):
            continue
        groups = ("prompts", "sampling", "engine", "queue", "batch")
        ours = {key: data[key] for key in groups if data.get(key) is not None}
        if "target" in config:
            ours["target"] = config["target"]
        if isinstance(config.get("seed_everything"), int):
            ours["seed"] = int(config["seed_everything"])
        text = json.dumps(ours)
        turned[place : place + (1 if equals else 2)] = [f"--config={text}"] if equals else ["--config", text]
        run_dir = Path(config["run_dir"]) if isinstance(config.get("run_dir"), str) else None
    return turned, run_dir


def _written_prompts(prompts: PromptOptions, run_dir: Path | None) -> PromptOptions:
    """The options with the prompts that a run's target has written in the place of `self`.

    Raises:
        ConfigError: it has not written them yet.
    """
    from eagle3_lightning.prompts.own import OWN_PROMPTS
    from eagle3_lightning.prompts.setup import TRAIN
    from eagle3_lightning.prompts.sources import SELF, as_sources

    sources = as_sources(prompts.train, TRAIN)
    if not any(source.path == SELF for source in sources):
        return prompts
    written = run_dir / OWN_PROMPTS if run_dir is not None else None
    if written is None or not written.is_file():
        raise ConfigError(
            "prompts.train",
            SELF,
            "the target has not written these prompts yet",
            "Let it, with `eagle3 prompts synthesize` or by starting the run, and name the file.",
        )
    named: list[str | SourceOptions] = [replace(s, path=str(written)) if s.path == SELF else s for s in sources]
    return replace(prompts, train=named)


def _check_place(option: str, file: Path) -> None:
    """Refuse a file that could not be written once the work is done.

    Raises:
        ConfigError: it is a directory, or it would lie where nothing can be written.
    """
    directory, problem = file.parent, None
    if file.is_dir():
        problem = "it is a directory"
    elif not directory.is_dir():
        problem = f"there is no directory {directory}"
    elif not os.access(directory, os.W_OK | os.X_OK):
        problem = f"{directory} cannot be written"
    if problem:
        raise ConfigError(option, str(file), problem, "Name a file that can be written.")


def _add_options(parser: StrictParser, **groups: Any) -> None:
    for name, options in {"target": TargetOptions, **groups}.items():
        parser.add_class_arguments(options, name)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
