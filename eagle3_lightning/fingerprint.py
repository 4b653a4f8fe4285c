"""A target's fingerprint: what says that a draft, a checkpoint or a stored state was made for these very weights.

It is a hash of the sizes in config.json, of every tensor's name, dtype and shape, and of values of the tensors: of all
of them where there are at most 4,096, else of as many, at least one of each kind in each decoder layer (all tensors but
experts, which are many of a kind). Hashing every byte of a large target would take minutes.

What it sees: another fine-tune, merge or quantization; any layer, or any tensor that is read, that was scaled or
replaced as a whole. What it does not see: single values that were changed between the places that are read, and single
experts of a checkpoint with more than 4,096 tensors.

What it costs: at most about 33,000 reads of 128 bytes, 16 of them at once, and each file is opened once.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from eagle3_lightning.checkpoint_files import CheckpointFiles

# In front of the hash, so that one of the first form, which was the hash alone, is not taken for another target's.
_FORM = "2-"
EARLIER_FORM = "of a form that an earlier version wrote, which cannot be compared with today's"
_MAX_TENSORS = 4096
_PLACES, _MORE_PLACES = 8, 64  # in each tensor, and in those that every draft is made with
_Item = TypeVar("_Item")
_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def fingerprint(config: dict[str, Any], files: "CheckpointFiles", always: Iterable[str]) -> str:
    """Of a checkpoint; equal for its copies, in one file or in many.

    Args:
        config: the text model's part of config.json.
        files: the weights.
        always: tensors that are read at more places, and whatever else is.
    """
    digest = hashlib.sha256()
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    headers = files.headers()
    digest.update(json.dumps(stable, sort_keys=True).encode())
    digest.update(json.dumps(headers, sort_keys=True).encode())
    places = dict.fromkeys(chosen_tensors([name for name, _, _ in headers], _MAX_TENSORS), _PLACES)
    places |= dict.fromkeys(always, _MORE_PLACES)
    for _, values in sorted(files.sample(places).items()):
        digest.update(values)
    return _FORM + digest.hexdigest()


def is_earlier_form(recorded: object) -> bool:
    """Whether a recorded fingerprint was made in another way than today's are, so that a difference says nothing."""
    return isinstance(recorded, str) and re.fullmatch("[0-9a-f]{64}", recorded) is not None


def chosen_tensors(names: list[str], most: int) -> list[str]:
    """All names, or `most` of them: as many of each kind in each layer where there are as many, evenly spaced.

    Args:
        names: of all tensors.
        most: how many to choose; more kinds than that leave one of every few kinds.
    """
    if len(names) <= most:
        return names
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault(_kind(name), []).append(name)
    groups = _evenly(list(kinds.values()), most)
    chosen: list[str] = []
    for done, group in enumerate(sorted(groups, key=len)):  # what small groups leave over goes to the large ones
        chosen += _evenly(group, (most - len(chosen)) // (len(groups) - done))
    return chosen


def _kind(name: str) -> str:
    """The name without its numbers behind the layer's, so that all experts of a layer are one kind."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for place in numbers[1:]:
        parts[place] = "#"
    return ".".join(parts)


def _evenly(items: list[_Item], most: int) -> list[_Item]:
    count = min(len(items), most)
    return [items[i * len(items) // count] for i in range(count)]
