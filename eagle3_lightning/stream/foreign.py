"""Directories of states made elsewhere: speculators 0.9 (`hs_*.safetensors`) or 0.3 (`data_*.pt`), or another run's.

The files of speculators do not say which layers they hold, so the user has to; nothing is guessed.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.fingerprint import EARLIER_FORM, is_earlier_form
from eagle3_lightning.layers import LayerPlan, plan_layers, to_vllm
from eagle3_lightning.options import SourceOptions
from eagle3_lightning.stream.files import FinalNorm, SampleFileError, StoredSample, as_rows, runs
from eagle3_lightning.stream.messages import Dropped, Stream
from eagle3_lightning.stream.store import read_facts
from eagle3_lightning.target import TargetInfo

_NUMBER = re.compile(r"(?:hs|data)_(\d+)\.(?:safetensors|pt)")


def holds_states(path: Path) -> bool:
    """Whether a directory holds states rather than prompts."""
    return path.is_dir() and _find(path)[0] is not None


class StateSource:
    """The samples of such a directory, by row."""

    def __init__(
        self,
        options: SourceOptions,
        option: str,
        info: TargetInfo,
        plan: LayerPlan,
        norm: FinalNorm,
        dtype: torch.dtype,
    ) -> None:
        """List the files and check that they hold the layers of this run.

        Args:
            options: the directory, and the layers of its files.
            option: the option that named it, for messages.
            info: the target.
            plan: layers of this run.
            norm: the target's last.
            dtype: of the rows.

        Raises:
            ConfigError: the layers are not said or not those of the run, or the states are of another target.
        """
        self.label = options.path
        self._norm, self._dtype, self._info = norm, dtype, info
        self._num_layers = len(plan.aux) + 1
        kind, files = _find(Path(options.path).expanduser())
        assert kind is not None
        self._kind = kind
        self._files = sorted(files, key=_number)
        if kind == "ours":
            self._check_ours(Path(options.path).expanduser(), option, plan)
        else:
            _check_layers(options, option, info, plan)
        self._masks = _speculators_masks(self._files[0].parent.parent, option) if kind == "hs" else None

    def __len__(self) -> int:
        """Files."""
        return len(self._files)

    def load(self, row: int, stream: Stream, index: int) -> "StoredSample | PtSample | Dropped":
        """One sample, or why it cannot be used."""
        path = self._files[row]
        sample: StoredSample | PtSample
        try:
            if self._kind == "pt":
                sample = PtSample(path, stream, index, self._norm)
            else:
                sample = StoredSample(path, stream, index, self._norm, self._dtype)
                if self._masks is not None and not sample.spans:
                    sample.spans = self._spans(path, sample)
        except SampleFileError as error:
            return Dropped(stream, index, path.name, "bad_record", str(error))
        if problem := self._mismatch(sample):
            return Dropped(stream, index, path.name, "row_mismatch", f"{path}: {problem}")
        return sample

    def _mismatch(self, sample: "StoredSample | PtSample") -> str | None:
        """What does not fit the target or the layers that the user named."""
        if sample.hidden_size != self._info.hidden_size:
            return f"its states are {sample.hidden_size} wide and the target's {self._info.hidden_size}"
        if sample.num_layers != self._num_layers:
            return f"it holds {sample.num_layers} layers and not {self._num_layers} (auxiliary ones and the last)"
        largest = max(sample.token_ids, default=-1)
        if not 0 <= largest < self._info.vocab_size:
            return f"token id {largest} is not in the target's vocabulary of {self._info.vocab_size}"
        return None

    def fingerprint(self) -> str:
        """Of the names and sizes of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._files:
            digest.update(f"{path.name}/{path.stat().st_size}".encode())
        return digest.hexdigest()

    def _spans(self, path: Path, sample: StoredSample) -> list[tuple[int, int]]:
        assert self._masks is not None
        number = _number(path)
        if number >= len(self._masks):
            raise SampleFileError(f"{path}: the data set beside it has only {len(self._masks)} rows")
        row = self._masks[number]
        if list(row["input_ids"]) != sample.token_ids:
            raise SampleFileError(f"{path}: its token ids are not those of row {number} of the data set beside it")
        return runs(row["loss_mask"])

    def _check_ours(self, directory: Path, option: str, plan: LayerPlan) -> None:
        facts = read_facts(directory, option)
        if facts.get("target") != self._info.fingerprint:
            problem = "its states are of another target"
            if is_earlier_form(facts.get("target")):
                problem = f"its fingerprint of the target is {EARLIER_FORM}"
            raise ConfigError(option, self.label, problem, "Name its target, or other states.")
        if facts.get("aux_layers") != list(plan.aux):
            raise ConfigError(option, self.label, f"its auxiliary layers are {facts.get('aux_layers')} and the run's "
                              f"{list(plan.aux)}", f"Set target.layers to {facts.get('aux_layers')}.")  # fmt: skip


class PtSample:
    """A sample of speculators 0.3: input_ids, loss_mask, and hidden_states as a list of [S, H], the last not normed."""

    def __init__(self, path: Path, stream: Stream, index: int, norm: FinalNorm) -> None:
        """Load the file, without pickle's code.

        Raises:
            SampleFileError: it is not such a file.
        """
        self.path, self.stream, self.index, self.name = path, stream, index, path.stem
        self._norm = norm
        data = self._load()
        self.token_ids: list[int] = data["input_ids"].flatten().tolist()
        states = data["hidden_states"]
        self.num_layers = len(states)
        self.num_rows, self.hidden_size = states[0].shape
        self.dtype: torch.dtype = states[0].dtype
        if self.num_rows != len(self.token_ids):
            raise SampleFileError(f"{path}: {len(self.token_ids)} token ids and {self.num_rows} rows")
        self.spans = runs(data["loss_mask"].flatten().bool().numpy())
        self.prompt_tokens = self.spans[0][0] if self.spans else self.num_rows
        self.finish_reason = "stop"
        self._rows: Tensor | None = None

    def rows(self) -> Float[Tensor, "S L H"]:
        """The states: auxiliary layers ascending, then the last layer after the final norm."""
        if self._rows is None:
            self._rows = as_rows(self._load()["hidden_states"], self._norm)
        return self._rows

    def copy_rows(self, start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy the states of tokens start .. start + S - 1, only `layers` of them, into `out`."""
        out.copy_(self.rows()[start : start + out.shape[0], layers])

    def release(self) -> None:
        """Forget the rows."""
        self._rows = None

    def _load(self) -> dict[str, Any]:
        try:
            data: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            missing = {"input_ids", "loss_mask", "hidden_states"} - data.keys()
        except Exception as error:  # torch raises anything for a file that it did not write
            raise SampleFileError(f"{self.path}: {error}") from error
        if missing:
            raise SampleFileError(f"{self.path}: it has no {', '.join(sorted(missing))}")
        return data


def _find(directory: Path) -> tuple[str | None, list[Path]]:
    if (directory / "cache.json").is_file():
        return "ours", list((directory / "train" / "hidden_states").glob("hs_*.safetensors"))
    if files := list((directory / "hidden_states").glob("hs_*.safetensors")):
        return "hs", files
    if files := list(directory.glob("data_*.pt")):
        return "pt", files
    return None, []


def _number(path: Path) -> int:
    found = _NUMBER.fullmatch(path.name)
    return int(found[1]) if found else -1


def _check_layers(options: SourceOptions, option: str, info: TargetInfo, plan: LayerPlan) -> None:
    if options.layers is None or options.layer_convention is None:
        run = Path(options.path).expanduser().parent
        if (run / "cache.json").is_file():
            raise ConfigError(option, options.path, "it is a part of what a run has stored", f"Name {run}, which says "
                              "the layers.")  # fmt: skip
        raise ConfigError(
            option,
            options.path,
            "its files do not say which layers they hold",
            "Give the source `layers` (the auxiliary ones) and `layer_convention`: vllm for files of speculators 0.9, "
            "output for those of 0.3.",
        )
    theirs = plan_layers(options.layers, info.num_layers, options.layer_convention)
    if theirs.aux != plan.aux:
        numbers = f"{list(theirs.aux)} (output of the layer; {list(to_vllm(theirs.aux))} in vLLM's numbers)"
        raise ConfigError(
            option,
            options.path,
            f"its auxiliary layers are {numbers} and the run's are {list(plan.aux)}",
            f"Set target.layers to {list(theirs.aux)}.",
        )


def _speculators_masks(directory: Path, option: str) -> Any:
    try:
        import datasets

        return datasets.load_from_disk(str(directory)).with_format(None).select_columns(["input_ids", "loss_mask"])
    except ImportError as error:
        raise ConfigError(option, str(directory), "reading it needs the package `datasets`",
                          "pip install datasets.") from error  # fmt: skip
    except Exception as error:
        raise ConfigError(
            option,
            str(directory),
            f"the data set beside the files cannot be read ({error})",
            "Keep speculators' *.arrow, state.json and dataset_info.json beside hidden_states/.",
        ) from error
