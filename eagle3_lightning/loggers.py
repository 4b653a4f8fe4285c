"""Loggers from the configuration, completed: they write into the run's directory, and W&B needs no account."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.run_directory import VALIDATION

WANDB = "lightning.pytorch.loggers.WandbLogger"
CSV = "lightning.pytorch.loggers.CSVLogger"
WANDB_ID_FILE = "wandb_id"
_WANDB_URL = "https://api.wandb.ai"
_REACH_TIMEOUT_S = 10.0
_FINISH_TIMEOUT_S = 600  # W&B's own is none: a server that is gone would keep a run that is over
_log = logging.getLogger(__name__)


def complete_logger(logger: Any, run_dir: Path, validation: bool = False) -> Any:
    """Fill in what the configuration leaves open: a CSV logger beside the others, the run's directory as `save_dir`.

    The CSV files are what `eagle3 report` draws.

    Args:
        logger: `trainer.logger` as parsed: None, true, false, one logger or a list.
        run_dir: the run's directory.
        validation: of a checkpoint: the logs go to a directory of their own in it, which the run's curves leave alone.

    Returns:
        The same, completed; loggers are still configuration and not yet objects.
    """
    if logger is False:
        return False
    given = [] if logger in (None, True) else logger if isinstance(logger, list) else [logger]
    log_dir = run_dir / VALIDATION if validation else run_dir
    for entry in given:
        arguments = entry.init_args
        if "save_dir" in arguments and arguments.save_dir in (None, ".", str(run_dir)):
            arguments.save_dir = str(log_dir)  # a run's own config.yaml has its directory in it
        if entry.class_path == WANDB:
            if validation and arguments.id == _stable_id(run_dir):
                arguments.id = None
            if arguments.name is None:
                arguments.name = run_dir.resolve().name + ("-validation" if validation else "")
            _complete_wandb(arguments, log_dir)
    return given if any(entry.class_path == CSV for entry in given) else [*given, _csv(log_dir)]


def _csv(run_dir: Path) -> Namespace:
    arguments = {
        "save_dir": str(run_dir),
        "name": "logs",
        "version": None,
        "prefix": "",
        "flush_logs_every_n_steps": 10,
    }
    return Namespace(class_path=CSV, init_args=Namespace(**arguments))


def _complete_wandb(arguments: Namespace, run_dir: Path) -> None:
    """One W&B run for a training, also when it is resumed; offline where nobody is logged in."""
    if arguments.project is None:
        arguments.project = "eagle3_lightning"
    if arguments.id is None and arguments.version is None:
        arguments.id = _stable_id(run_dir)
    is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    if arguments.offline or not is_first:  # the other ranks log nothing, so that nothing is asked or said
        return
    fault = None if has_account() else "W&B has no account here"
    if fault is None and os.environ.get("WANDB_MODE", "online") == "online":
        fault = wandb_fault()
    if fault is not None:
        _log.warning("%s: this run is logged offline, into %s; `wandb sync` sends it later", fault, run_dir / "wandb")
        arguments.offline = True
        return
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(_FINISH_TIMEOUT_S))


def begin_wandb(logger: WandbLogger) -> None:
    """Have W&B begin its run now, before vLLM starts; on the other ranks nothing happens.

    Raises:
        ConfigError: it does not, for example for a key that its server does not know.
    """
    try:
        _ = logger.experiment
    except Exception as error:  # W&B's own kinds, and those of the libraries under it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            "trainer.logger",
            "WandbLogger",
            f"W&B does not begin its run ({reason})",
            "Check WANDB_API_KEY and WANDB_BASE_URL, or set WANDB_MODE=offline.",
        ) from error


def wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    """Those of a trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def end_wandb(logger: WandbLogger) -> None:
    """Wait until W&B has sent its run. Left to the end of the process, it would not say what it could not send."""
    with wandb_may_fail("the end of its run"):
        logger.experiment.finish()


@contextmanager
def wandb_may_fail(what: str) -> Iterator[None]:
    """Let the run go on when W&B's server does not take something that it is waited for.

    Metrics are not waited for: W&B writes them to the disk, tries again in the background and says at the end what was
    not sent.

    Args:
        what: is sent, for the message.
    """
    try:
        yield
    except Exception as error:  # as above
        reason = " ".join(str(error).split()) or type(error).__name__
        _log.warning("W&B did not take %s (%s): the run goes on without it", what, reason)


def wandb_fault() -> str | None:
    """Why W&B's server cannot be used now; None if it answers. W&B itself would try for minutes, and then fail."""
    url = os.environ.get("WANDB_BASE_URL") or _WANDB_URL
    try:
        urllib.request.urlopen(url, timeout=_REACH_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:  # it answered, and its front page is not what is needed
        return f"W&B's server {url} answers with {error.code}" if error.code >= 500 else None
    except (OSError, ValueError) as error:  # no route, no name, a bad certificate, no URL at all
        return f"W&B's server {url} cannot be reached ({getattr(error, 'reason', None) or error})"
    return None


def _stable_id(run_dir: Path) -> str:
    """The id under which the directory's run was first logged."""
    import secrets

    file = run_dir / WANDB_ID_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    return secrets.token_hex(4)


def has_account() -> bool:
    """Whether W&B has an API key or was told how to run (WANDB_MODE), without importing it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    try:
        import netrc

        return (
            netrc.netrc().authenticators(os.environ.get("WANDB_BASE_URL", "api.wandb.ai").removeprefix("https://"))
            is not None
        )
    except (OSError, netrc.NetrcParseError):
        return False
