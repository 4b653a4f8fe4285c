"""An exported draft as it lies on disk: what its config.json says, and whether it belongs to a target."""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.fingerprint import EARLIER_FORM, is_earlier_form

if TYPE_CHECKING:
    from eagle3_lightning.target import TargetInfo

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PROVENANCE_FILE = "eagle3_lightning.json"
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class ExportedDraft:
    """A directory in the speculators format, ours or another tool's.

    Attributes:
        path: the directory.
        config: its config.json.
        target_name: the target that it names, a hub id or a path.
        num_speculative_tokens: tokens that it asks to propose in a round.
        fingerprint: of the target that it was trained for; None in drafts of other tools.
    """

    path: Path
    config: dict[str, Any]
    target_name: str
    num_speculative_tokens: int
    fingerprint: str | None


def read_export(path: Path, option: str) -> ExportedDraft:
    """Read an exported draft's facts.

    Args:
        path: the directory.
        option: the option that named it, for messages.

    Raises:
        ConfigError: not a directory, no config.json, or not an EAGLE-3 draft in the speculators format.
    """
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            option, str(path), f"there is no {CONFIG_FILE} in it", "Name a directory that `eagle3 export` wrote."
        ) from error
    except OSError as error:
        raise ConfigError(
            option, str(path), f"its {CONFIG_FILE} cannot be read ({error.strerror})", "Check the path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            option, str(path), f"its {CONFIG_FILE} is not JSON ({error})", "Export the draft again."
        ) from error
    try:
        if config["speculators_model_type"] != "eagle3":
            raise KeyError("speculators_model_type")
        speculators = config["speculators_config"]
        target_name = str(speculators["verifier"]["name_or_path"])
        num_tokens = int(speculators["proposal_methods"][0]["speculative_tokens"])
        if num_tokens < 1:
            raise ValueError(f"speculative_tokens = {num_tokens}")
        for key in ("hidden_size", "vocab_size"):
            _ = config["transformer_layer_config"][key]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            option,
            str(path),
            f"its {CONFIG_FILE} is not an EAGLE-3 draft in the speculators format (looked for {error})",
            "Name a directory that `eagle3 export` wrote.",
        ) from error
    return ExportedDraft(path, config, target_name, num_tokens, _fingerprint(path, option))


def _fingerprint(path: Path, option: str) -> str | None:
    """Of the target, from the file that `eagle3 export` adds; None where there is no such file."""
    file = path / PROVENANCE_FILE
    if not file.exists():
        return None
    try:
        fingerprint = json.loads(file.read_text(encoding="utf-8"))["target_fingerprint"]
        if not isinstance(fingerprint, str):
            raise TypeError("target_fingerprint is not text")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            option,
            str(path),
            f"its {PROVENANCE_FILE} does not name the target ({type(error).__name__}: {error})",
            "Export the draft again.",
        ) from error
    return fingerprint


def check_target(
    draft: ExportedDraft,
    target: "TargetInfo",
    option: str,
    remedy: str = "Give the draft's own target with --target.",
) -> None:
    """Refuse a draft that was trained for another target: it would load, and nearly nothing would be accepted.

    Args:
        draft: as it was read.
        target: the one that it shall work with.
        option: the option that named the draft, for messages.
        remedy: against another target.

    Raises:
        ConfigError: sizes differ, or the target's fingerprint does.
    """
    layer = draft.config["transformer_layer_config"]
    for key, own, theirs in (
        ("hidden_size", target.hidden_size, draft.config.get("target_hidden_size") or layer["hidden_size"]),
        ("vocab_size", target.vocab_size, layer["vocab_size"]),
    ):
        if own != theirs:
            raise ConfigError(
                option,
                str(draft.path),
                f"it was made for a target with {key} {theirs}, and {target.name} has {own}",
                remedy,
            )
    if is_earlier_form(draft.fingerprint):
        raise ConfigError(
            option,
            str(draft.path),
            f"its fingerprint of the target is {EARLIER_FORM}",
            f"Train it with this version, or remove its {PROVENANCE_FILE} so that only sizes are compared.",
        )
    if draft.fingerprint is not None and draft.fingerprint != target.fingerprint:
        raise ConfigError(
            option,
            str(draft.path),
            f"it was trained for another checkpoint than {target.name} "
            f"(fingerprint {draft.fingerprint[:12]}, this one is {target.fingerprint[:12]})",
            remedy,
        )


def speculative_arguments(draft: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's engine arguments for a draft.

    vLLM keeps compiled code for later starts. Up to 0.25.1 at least, before its pull request 47911, the key left the
    draft out: of two drafts for one target the later one ran the code of the earlier, and few of its tokens were
    accepted. `additional_config` is in the key of every version, so it names what the code depends on: the draft's
    config.json.

    Args:
        draft: an exported draft's directory.
        num_speculative_tokens: tokens to propose in a round.
    """
    digest = hashlib.sha256((draft / CONFIG_FILE).read_bytes()).hexdigest()
    return {
        "speculative_config": {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": num_speculative_tokens,
        },
        "additional_config": {"draft": digest[:_DIGEST_CHARACTERS]},
    }


def serve_command(draft: Path, target_name: str, num_speculative_tokens: int) -> str:
    """The shell command that serves the target with the draft, quoted where a name needs it."""
    words = ["vllm", "serve", target_name]
    for name, value in speculative_arguments(draft, num_speculative_tokens).items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value)]
    return shlex.join(words)
