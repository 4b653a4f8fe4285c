"""Exports the draft when the fit ends, and in between if asked."""

import json
import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from packaging.version import Version

from eagle3_lightning.callbacks.wandb_draft import record_draft
from eagle3_lightning.checks import COUNT, NOT_NEGATIVE, check_number
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import PROVENANCE_FILE
from eagle3_lightning.export.schema import check_servable, needed_vllm
from eagle3_lightning.export.speculators import Export, export_draft, portable_name
from eagle3_lightning.extract.versions import installed
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.summary import SUMMARY_FILE, read_summary, update_summary

EXPORT_DIR, BEST_DIR = "export", "best"


class ExportCallback(Callback):
    """Leaves `run_dir/export`, a directory that `vllm serve` loads, and the fit's part of `run_dir/summary.json`."""

    def __init__(
        self,
        run_dir: Path | None = None,
        every_n_steps: int | None = None,
        num_speculative_tokens: int | None = None,
        vllm_version: str | None = None,
        artifact_max_mib: float = 1024.0,
    ) -> None:
        """Say when and for whom.

        Args:
            run_dir: the run's directory; None is the trainer's `default_root_dir`.
            every_n_steps: also export whenever so many optimizer steps are done; the newest replaces the one before.
                None or 0 exports at the end alone.
            num_speculative_tokens: tokens that the export proposes in a round; None is `model.loss.ttt_steps`.
            vllm_version: the vLLM that will serve the draft; None is the one installed here. Where none is, it must be
                named for a draft that not every supported vLLM serves.
            artifact_max_mib: W&B gets the draft as an artifact up to this size, and of a larger one the path.

        Raises:
            ConfigError: a number that makes no sense.
        """
        check_number("export.every_n_steps", every_n_steps, NOT_NEGATIVE)
        check_number("export.num_speculative_tokens", num_speculative_tokens, COUNT)
        check_number("export.artifact_max_mib", artifact_max_mib, NOT_NEGATIVE)
        self.run_dir, self.every_n_steps = run_dir, every_n_steps
        self.artifact_max_mib = artifact_max_mib
        self.num_speculative_tokens = num_speculative_tokens
        self.vllm_version = vllm_version
        self._start_s, self._earlier_s = time.monotonic(), 0.0
        self._tau: tuple[float, int] | None = None  # of the last validation, and its step
        self._exported_step = -1

    def state_dict(self) -> dict[str, Any]:
        """What the summary of a resumed run must not forget: seconds of all starts so far, and the last validation."""
        return {"seconds": self._seconds(), "tau": None if self._tau is None else list(self._tau)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._earlier_s = state_dict["seconds"]
        self._tau = None if state_dict["tau"] is None else tuple(state_dict["tau"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what was simulated, and at which step."""
        tau = trainer.callback_metrics.get("val/tau")
        if trainer.state.fn == "fit" and not trainer.sanity_checking and tau is not None and math.isfinite(tau):
            self._tau = float(tau), trainer.global_step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a draft that the serving vLLM cannot serve now, not after the training."""
        assert isinstance(pl_module, Eagle3Module)
        if (version := self._serving_version(pl_module)) is not None:
            check_servable(pl_module.draft.config, version)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Export if it is time."""
        step = trainer.global_step
        if self.every_n_steps and step and step % self.every_n_steps == 0 and step != self._exported_step:
            self.export(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export what the training ended with."""
        export = self.export(trainer, pl_module)
        if export is not None:
            rank_zero_info(
                f"exported to {export.path} (logits within {export.check.relative_error:.2%}). Serve it with\n"
                f"  {export.serve_command}"
            )
            file, figures = self.directory(trainer) / SUMMARY_FILE, self._figures(trainer, pl_module, export)
            if file.is_file() and self._knows_more(read_summary(file), trainer.global_step):
                del figures["simulated_tau"], figures["simulated_step"], figures["simulated_on"]
            summary = update_summary(file, figures)
            self._record(trainer, pl_module, export, summary)

    def _record(self, trainer: Trainer, pl_module: LightningModule, export: Export, summary: dict[str, Any]) -> None:
        """In W&B: what the training ended with, and the best that was measured in vLLM."""
        assert isinstance(pl_module, Eagle3Module)
        facts = {
            "step": trainer.global_step,
            "target": pl_module.target_info.name,
            "target_fingerprint": pl_module.target_info.fingerprint,
            "simulated_tau": summary.get("simulated_tau"),
        }
        best = self.directory(trainer) / BEST_DIR
        if best.is_dir():
            origin = json.loads((best / PROVENANCE_FILE).read_text(encoding="utf-8"))
            record_draft(trainer, best, "best", self.artifact_max_mib, {**facts, "step": origin.get("step")})
        record_draft(trainer, export.path, "last", self.artifact_max_mib, facts)  # W&B calls the newest one `latest`

    @rank_zero_only
    def export(self, trainer: Trainer, pl_module: LightningModule) -> Export:
        """Export the draft as it is now (on rank 0; nothing happens on the others)."""
        assert isinstance(pl_module, Eagle3Module)
        self._exported_step = trainer.global_step
        tokens = self.num_speculative_tokens
        return export_draft(
            pl_module.draft,
            self.directory(trainer) / EXPORT_DIR,
            target=pl_module.target_info,
            layers=pl_module.layers,
            target_name=portable_name(pl_module.target_info),
            num_speculative_tokens=pl_module.loss.ttt_steps if tokens is None else tokens,
            vllm_version=self._serving_version(pl_module),
            origin={
                "step": trainer.global_step,
                "data": getattr(trainer.datamodule, "fingerprint", None),  # type: ignore[attr-defined]
                "init_from": pl_module.init_from,
            },
        )

    def _figures(self, trainer: Trainer, pl_module: LightningModule, export: Export) -> dict[str, Any]:
        assert isinstance(pl_module, Eagle3Module)
        tau, step = self._tau or (None, None)
        return {
            "simulated_tau": tau,
            "simulated_step": step,
            "simulated_on": getattr(trainer.datamodule, "held_out_files", None),  # type: ignore[attr-defined]
            "tokens_trained": int(pl_module.totals[0]),
            "vocab_coverage": None if math.isnan(pl_module.vocab_coverage) else pl_module.vocab_coverage,
            "steps": trainer.global_step,
            "seconds": self._seconds(),
            "export_dir": str(export.path),
        }

    def _knows_more(self, summary: dict[str, Any], now: int) -> bool:
        """Whether the summary of the start before has a later validation than the checkpoint it was left at.

        Lightning saves a step first and validates then, so that one at the very step of the checkpoint is not in it.
        """
        if summary.get("simulated_tau") is None:
            return False
        step = summary.get("simulated_step")
        return self._tau is None or (isinstance(step, int) and self._tau[1] < step <= now)

    def _seconds(self) -> float:
        """Of all starts; of one that was resumed from, up to its checkpoint."""
        return self._earlier_s + time.monotonic() - self._start_s

    def directory(self, trainer: Trainer) -> Path:
        """The run's directory."""
        return self.run_dir or Path(trainer.default_root_dir)

    def _serving_version(self, pl_module: Eagle3Module) -> str | None:
        """The vLLM that must serve the draft: the one that is named, else the one that is installed.

        Where there is neither, nothing is assumed: None, for a draft that every supported vLLM serves, while another
        one needs a version that is named.

        Raises:
            ConfigError: the draft needs some version, and nobody knows which one will serve it.
        """
        if self.vllm_version is not None:
            return self.vllm_version
        if (found := installed()) is not None:
            return found[1]
        if needs := needed_vllm(pl_module.draft.config):
            option, first = max(needs.items(), key=lambda need: Version(need[1]))
            raise ConfigError(
                "export.vllm_version",
                None,
                f"no vLLM is installed here to go by, and {option} needs {first} or newer",
                f"Name the vLLM that will serve the draft, or leave {option} at its default.",
            )
        return None
