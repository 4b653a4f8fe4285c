"""Eagle3Module: an EAGLE-3 draft under training."""

import warnings
from dataclasses import asdict, replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch, check_batch
from eagle3_lightning.checkpoints import check_record
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.loss import HeadOutput
from eagle3_lightning.draft.metrics import DraftMetrics, Scores, scores
from eagle3_lightning.draft.model import Eagle3Draft, Table
from eagle3_lightning.draft.plan import UnrollPlan, plan_unroll
from eagle3_lightning.draft.ttt import ttt_loss
from eagle3_lightning.draft.vocab import Calibration, choose_draft_vocab, coverage, share_inside
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import ExportedDraft
from eagle3_lightning.export.start import load_start, open_start
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.optim import StepGuard, build_optimizer, run_clock, scale_gradients, schedule
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.target import inspect_target, load_embeddings, load_lm_head

# Lightning asks which of the two hooks is meant when a data module is used; only the module has one.
warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device`")
_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_BEST_CHUNK_ELEMENTS = 1 << 26  # of target logits at once, where the teacher's best token is looked for


class Eagle3Module(L.LightningModule):
    """Trains a draft on the hidden states of its target by test-time training (Li et al. 2025, EAGLE-3).

    Attributes:
        target_info: facts of the target.
        layers: which of its layers are read.
        draft: the draft.
        vocab_coverage: share of supervised text inside the draft vocabulary, measured on samples left out of its
            choice; NaN before calibration and where they were too few. Of a vocabulary that came with `init_from`, its
            share of all the first samples.
        init_from: the draft that training started from; a checkpoint remembers it.
    """

    totals: Tensor

    def __init__(
        self,
        target: TargetOptions,
        draft: DraftOptions,
        loss: LossOptions,
        optim: OptimOptions,
        init_from: str | None = None,
    ) -> None:
        """Read the target's sizes and build the draft.

        Args:
            target: the model to be made faster.
            draft: shape of the draft.
            loss: test-time training.
            optim: optimizer and schedule.
            init_from: directory of a draft, in the speculators format, to start from with its weights and its
                vocabulary; None (the default) starts from random weights. A checkpoint has weights of its own, and the
                draft is not looked for.

        Raises:
            ConfigError: a target that cannot be read, or options that do not fit it.
        """
        super().__init__()
        self.save_hyperparameters(  # plain dicts, so that a checkpoint loads with weights_only
            {"target": asdict(target), "draft": asdict(draft), "loss": asdict(loss), "optim": asdict(optim)}
        )
        self.target_options, self.loss, self.optim_options = target, loss, optim
        self.target_info = inspect_target(target)
        self.layers = plan_layers(target.layers, self.target_info.num_layers, target.layer_convention)
        config = DraftConfig.resolve(draft, self.target_info)
        frozen_dtype = getattr(torch, self.target_info.dtype)
        self.init_from = init_from
        self._start: ExportedDraft | None = None
        self.draft = Eagle3Draft(config, frozen_dtype)
        self._host_head: Tensor | None = None  # the target's whole lm_head, where it is not the embedding
        self.teacher_head = (
            Table(config.draft_vocab_size, config.hidden_size, frozen_dtype) if config.train_head else None
        )
        self.train_metrics = DraftMetrics(loss.ttt_steps, loss.ttt_decay)
        self.val_metrics = DraftMetrics(loss.ttt_steps, loss.ttt_decay)
        self.register_buffer("totals", torch.zeros(2, dtype=torch.float64))  # slots and supervised tokens, all ranks
        self.vocab_coverage = float("nan")
        self._calibrated = self._target_loaded = False
        self._guard = StepGuard()
        self._copies: torch.cuda.Stream | None = None  # of batches to the GPU
        self._sums: Tensor | None = None  # loss, supervised tokens and slots of this optimizer step
        self._sample_ids: list[int] = []
        # Buffers are the same on every rank; DDP would broadcast them, embeddings and all, at every step.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    # ---- one step ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Eagle3Batch, batch_idx: int) -> Tensor:
        """The loss *summed* over supervised tokens; `configure_gradient_clipping` divides by their global count."""
        plan = _plan(batch)
        logged = self._logged
        loss = self._zero_loss()
        if plan.num_pairs:
            head = self.unroll(batch, want_best=logged)
            loss = head.loss
            if logged:
                self.train_metrics.update(self._score(batch, head))
        self._count(loss, plan, batch.sample_ids)
        return loss

    def unroll(self, batch: Eagle3Batch, want_best: bool = False) -> HeadOutput:
        """Test-time training on one batch, see `ttt_loss`.

        Args:
            batch: packed documents with their plan, on the module's device.
            want_best: also return the draft's best tokens.
        """
        weight, info = self.draft.fc.weight, self.target_info
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        teacher_head = None if self.teacher_head is None else self.teacher_head.weight
        return ttt_loss(
            self.draft,
            batch,
            _plan(batch),
            self.loss,
            dtype,
            teacher_head,
            info.logit_scale,
            info.logit_softcap,
            want_best,
        )

    @property
    def _logged(self) -> bool:
        """Whether the optimizer step under way is one that Lightning logs."""
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (self.global_step + 1) % interval == 0

    def _zero_loss(self) -> Tensor:
        """A loss without supervision that still gives every parameter a gradient, so that no rank falls out of step."""
        return sum(
            (p.sum() * 0.0 for p in self.draft.parameters() if p.requires_grad), torch.zeros((), device=self.device)
        )

    @torch.no_grad()
    def _score(self, batch: Eagle3Batch, head: HeadOutput) -> Scores:
        assert head.best is not None
        plan = _plan(batch)
        return scores(
            plan,
            head.kl,
            head.best,
            self.teacher_best(batch.teacher[plan.supervised]),
            self.draft.draft_token_ids,
            self.draft.t2d,
            batch.ids,
            batch.doc,
        )

    @torch.no_grad()
    def teacher_best(self, last: Float[Tensor, "S H"]) -> Int[Tensor, " S"]:
        """The target's best token over its whole vocabulary.

        Args:
            last: the target's last hidden states, after its final norm.
        """
        best = torch.full((len(last),), -1, device=last.device)
        score = torch.full((len(last),), float("-inf"), device=last.device)
        rows = max(1, _BEST_CHUNK_ELEMENTS // max(1, len(last)))
        for start, part in enumerate(self.target_head.split(rows)):
            part = part.to(last.device, non_blocking=True)
            found, where = (last.to(part.dtype) @ part.t()).float().max(dim=-1)
            best = torch.where(found > score, where + start * rows, best)
            score = torch.maximum(found, score)
        return best

    @property
    def target_head(self) -> Float[Tensor, "V H"]:
        """The target's lm_head; only logged steps need all of it, so unless it is the embedding it is on the host."""
        return self.draft.embed_tokens.weight if self._host_head is None else self._host_head

    # ---- batches -----------------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Plan the batch while it is on the host, then start its copy without waiting for it.

        On a GPU the copy has its own stream: the host runs ahead, so a batch travels while the step before it computes.
        """
        if not isinstance(batch, Eagle3Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        check_batch(batch, self.draft.config)
        plan = plan_unroll(batch, self.loss.ttt_steps)
        if device.type != "cuda":
            return replace(batch.to(device), plan=plan.to(device))
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)
        step = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._copies):
            moved = replace(batch.to(device, non_blocking=True), plan=plan.to(device, non_blocking=True))
        step.wait_stream(self._copies)
        moved.record_stream(step)
        return moved

    def validation_step(self, batch: Eagle3Batch, batch_idx: int) -> None:
        """Add one batch to the validation metrics."""
        if _plan(batch).num_pairs:
            self.val_metrics.update(self._score(batch, self.unroll(batch, want_best=True)))

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics and start anew."""
        named = self.val_metrics.compute()
        self.log_dict({f"val/{name}": value for name, value in named.items()}, prog_bar=False)
        self.val_metrics.reset()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _count(self, loss: Tensor, plan: UnrollPlan, sample_ids: list[int]) -> None:
        if self._sums is None:
            self._sums = torch.zeros(3, dtype=torch.float64, device=loss.device)
        self._sums[0] += loss.detach()
        self._sums[1] += plan.num_supervised
        self._sums[2] += plan.num_slots
        self._sample_ids += sample_ids

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Normalize the gradients of an optimizer step by its supervised tokens on all ranks, and clip them."""
        if gradient_clip_algorithm == "value":
            raise ConfigError(
                "trainer.gradient_clip_algorithm",
                "value",
                "gradients are clipped by their global norm",
                "Leave it out, or give norm.",
            )
        assert self._sums is not None
        sums, world = self._sums, self.trainer.world_size
        if world > 1:
            dist.all_reduce(sums)
        loss, supervised, slots = sums
        self.totals += torch.stack([slots, supervised])
        # Lightning divided each micro-batch's loss by their number, and DDP averaged the ranks' gradients.
        factor = world * self.trainer.accumulate_grad_batches / supervised.clamp(min=1.0)
        norm = scale_gradients(optimizer, factor, gradient_clip_val)
        self._guard.check(optimizer, loss, supervised, self.global_step, self._sample_ids)
        if self._logged:
            self._log_training(norm)
        self._sums, self._sample_ids = None, []

    def _log_training(self, grad_norm: Tensor) -> None:
        named = {f"train/{name}": value for name, value in self.train_metrics.compute().items()}
        self.train_metrics.reset()
        named["train/grad_norm"] = grad_norm.float()
        named["train/lr"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        slots, supervised = self.totals.tolist()
        named["train/tokens"] = torch.tensor(slots)
        named["train/tokens_supervised"] = torch.tensor(supervised)
        self.log_dict(named)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop if a step whose flag has arrived was not finite."""
        self._guard.poll()

    def on_train_epoch_end(self) -> None:
        """Stop if any step was not finite, before an epoch counts as done."""
        self._guard.poll(wait=True)

    def configure_optimizers(self) -> Any:
        """AdamW or Muon, and the schedule by optimizer step."""
        optimizer = build_optimizer(self.optim_options, self.draft)
        factor = schedule(self.optim_options, self.trainer.max_steps, run_clock(self.trainer))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # ---- start and resume --------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read the target's matrices, before the module moves to its device."""
        if self.trainer.precision not in _PRECISIONS:
            raise ConfigError(
                "trainer.precision",
                self.trainer.precision,
                "the optimizer needs float32 weights",
                f"Use one of {', '.join(_PRECISIONS)}.",
            )
        self.load_target()

    def check_start(self) -> None:
        """Refuse a draft that training cannot start from; the command asks before vLLM starts, and the fit once more.

        Raises:
            ConfigError: no such draft, or one that is not of this target, these layers or these options.
        """
        if self.init_from is not None and self._start is None:
            self._start = open_start(self.init_from, self.draft.config, self.target_info, self.layers)

    def load_target(self) -> None:
        """Fill the frozen matrices that no checkpoint holds, once."""
        if self._target_loaded:
            return
        self.draft.embed_tokens.weight.copy_(load_embeddings(self.target_info))
        if not self.target_info.tie_word_embeddings:
            head = load_lm_head(self.target_info, None)
            self._host_head = head.pin_memory() if torch.cuda.is_available() else head
        self._target_loaded = True
        self._fill_teacher_head()

    def on_fit_start(self) -> None:
        """On a fresh run, measure vocabulary and feature scale on the first samples and start the head from them."""
        if not self._calibrated:
            self.calibrate(self.trainer.datamodule.calibrate())  # type: ignore[attr-defined]

    @torch.no_grad()
    def calibrate(self, calibration: Calibration) -> None:
        """Set draft vocabulary, feature scale and head, in place.

        Args:
            calibration: of the run's first samples, the same on every rank.
        """
        config = self.draft.config
        if config.feature_scale:
            self.draft.set_feature_rms(calibration.feature_rms)
        self.check_start()
        if self._start is not None:
            load_start(self.draft, self._start, self.target_info)
            self.vocab_coverage = share_inside(calibration, self.draft.draft_token_ids.cpu())
            rank_zero_info(
                f"training starts from {self.init_from}, whose {config.draft_vocab_size:,} tokens are "
                f"{self.vocab_coverage:.2%} of the supervised text of the first samples"
            )
        elif not config.full_vocab:
            size, always = config.draft_vocab_size, self.target_info.eos_token_ids
            self.draft.set_vocab(choose_draft_vocab(calibration, size, always))
            measured = coverage(calibration, size, always)
            self.vocab_coverage = measured.share
            rank_zero_info(measured.sentence(size))
        else:
            self.vocab_coverage = 1.0
        if self._start is None:
            self.draft.lm_head.weight.copy_(self._target_rows())
        self._calibrated = True
        self._fill_teacher_head()

    def on_validation_start(self) -> None:
        """Without a checkpoint and without a fit, what is validated is the draft that training would start from."""
        if self._calibrated:
            return
        self.check_start()
        if self._start is not None:
            load_start(self.draft, self._start, self.target_info)
            self._calibrated = True
            self._fill_teacher_head()

    def _fill_teacher_head(self) -> None:
        if self.teacher_head is not None and self._target_loaded:
            self.teacher_head.weight.copy_(self._target_rows())

    def _target_rows(self) -> Float[Tensor, "D H"]:
        """The target's lm_head rows of the draft vocabulary."""
        return self.target_head[self.draft.draft_token_ids.to(self.target_head.device)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the weights belong to; refuse to save a run that a late flag would have stopped."""
        self._guard.poll(wait=True)
        checkpoint["eagle3"] = {
            "target_fingerprint": self.target_info.fingerprint,
            "target_name": self.target_info.name,
            "draft": self.draft.config.as_dict(),
            "aux_layers": list(self.layers.aux),
            "last_layer": self.layers.last,
            "vocab_coverage": self.vocab_coverage,
            "init_from": self.init_from,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another target, of other layers or of another draft.

        Raises:
            ConfigError: see above, or a file that this module did not write.
        """
        record = check_record(checkpoint, self.target_info, self.draft.config, self.layers, self.init_from)
        self.vocab_coverage, self.init_from = record["vocab_coverage"], record.get("init_from")
        self._calibrated = True

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load, then bring the teacher's rows in line with the draft vocabulary that was loaded."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._fill_teacher_head()
        return result


def _plan(batch: Eagle3Batch) -> UnrollPlan:
    assert batch.plan is not None, "transfer_batch_to_device makes the plan"
    return batch.plan
