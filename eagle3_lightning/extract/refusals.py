"""What vLLM would refuse: of the machine before its start, of the user's own engine arguments in its process."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from eagle3_lightning.errors import ConfigError, did_you_mean
from eagle3_lightning.options import EngineOptions
from eagle3_lightning.stream.arena import available_memory_bytes

_Engine = TypeVar("_Engine")


def check_devices(engine: EngineOptions) -> None:
    """Refuse what this machine has not got, which vLLM would say at the end of its start.

    Raises:
        ConfigError: more GPUs than there are, or on a CPU more memory than is free.
    """
    if torch.cuda.is_available():
        if engine.tensor_parallel_size > (there := torch.cuda.device_count()):
            raise ConfigError(
                "data.engine.tensor_parallel_size",
                engine.tensor_parallel_size,
                f"torch finds {there} {'GPU' if there == 1 else 'GPUs'} here",
                f"Give at most {there}.",
            )
    elif engine.kv_cache_gib * 2**30 > (free_bytes := available_memory_bytes()):
        raise ConfigError(
            "data.engine.kv_cache_gib",
            engine.kv_cache_gib,
            f"only {free_bytes / 2**30:.1f} GiB of memory are available",
            "Lower it, or free memory.",
        )


def check_known(extra: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse names that vLLM does not know; in the process that has imported it.

    Args:
        extra: further engine arguments.
        known: names of the engine's arguments.

    Raises:
        ConfigError: there is no such argument.
    """
    for name in extra.keys() - set(known):
        raise ConfigError(
            f"data.engine.extra.{name}",
            extra[name],
            "this vLLM has no such engine argument",
            did_you_mean(name, known) or "Spell it as vLLM's EngineArgs does, with underscores.",
        )


def started(start: Callable[[], _Engine], extra: Mapping[str, Any]) -> _Engine:
    """What `start` gives.

    Args:
        start: starts vLLM.
        extra: further engine arguments.

    Raises:
        ConfigError: vLLM refuses the value of one of them.
    """
    try:
        return start()
    except ValueError as error:
        if (refused := _refusal(error, extra)) is not None:
            raise refused from error
        raise


def _refusal(error: Exception, extra: Mapping[str, Any]) -> ConfigError | None:
    """vLLM's refusal of the value of an extra engine argument; None for an error of another kind."""
    for fault in error.errors() if hasattr(error, "errors") else ():  # of pydantic
        for name, value in extra.items():
            # vLLM's configurations call some of the engine's arguments otherwise: kv_cache_dtype is cache_dtype.
            if any(name == place or name.endswith(f"_{place}") for place in map(str, fault["loc"])):
                problem = f"vLLM refuses it ({fault['msg']})"
                return ConfigError(f"data.engine.extra.{name}", value, problem, "Correct it, or leave it out.")
    return None
