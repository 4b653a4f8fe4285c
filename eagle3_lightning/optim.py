"""Optimizer, schedule, and what stands between a bad gradient and the weights."""

import math
from collections import deque
from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from eagle3_lightning.draft.muon import Muon
from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.options import OptimOptions


def build_optimizer(options: OptimOptions, module: nn.Module) -> Optimizer:
    """The optimizer of every parameter of `module` that is trained; weight decay on matrices only.

    Args:
        options: see `OptimOptions`.
        module: its parameters are the float32 masters.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    if options.name == "muon":
        return MuonWithAdamW(matrices, vectors, options)
    return _adamw([(matrices, options.weight_decay), (vectors, 0.0)], options)


def _adamw(groups: list[tuple[list[nn.Parameter], float]], options: OptimOptions) -> AdamW:
    kind = AdamW
    if all(p.is_cuda and p.dtype == torch.float32 for params, _ in groups for p in params):
        from eagle3_lightning.draft.adamw import CudaAdamW

        kind = CudaAdamW
    return kind(
        [{"params": params, "weight_decay": decay} for params, decay in groups],
        lr=options.lr,
        betas=options.betas,
        fused=True,
    )


class MuonWithAdamW(Optimizer):
    """Muon for the matrices and AdamW for the vectors, as one optimizer with one schedule.

    Muon's update is scaled to AdamW's root mean square, so that one learning rate serves both.
    """

    def __init__(self, matrices: list[nn.Parameter], vectors: list[nn.Parameter], options: OptimOptions) -> None:
        """See `build_optimizer`."""
        self.parts = [
            Muon(matrices, options.lr, options.weight_decay),
            _adamw([(vectors, 0.0)], options),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure, then both parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, object]:
        """The states of both parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, list[dict[str, object]]]) -> None:
        """The inverse of `state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        # The schedule writes to this optimizer's groups, so they must be the very dicts that the parts read.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state.clear()
        for part in self.parts:
            self.state.update(part.state)


def run_clock(trainer: Trainer) -> Callable[[], float] | None:
    """The share of `trainer.max_time` that has passed; None without one, or with several ranks, whose clocks differ."""
    timers = [c for c in trainer.callbacks if isinstance(c, Timer) and c.time_remaining() is not None]  # type: ignore[attr-defined]
    if not timers or trainer.world_size > 1:
        return None

    def share() -> float:
        passed_s, left_s = timers[0].time_elapsed(), timers[0].time_remaining()
        assert left_s is not None
        return passed_s / max(passed_s + left_s, 1e-9)

    return share


def schedule(options: OptimOptions, max_steps: int, clock: Callable[[], float] | None = None) -> Callable[[int], float]:
    """Learning rate over its peak, by optimizer step, or by time where the run ends by it.

    Args:
        options: see `OptimOptions`.
        max_steps: `trainer.max_steps`; -1 only with a constant schedule or a clock.
        clock: see `run_clock`; where both are given, what is further on decides.

    Raises:
        ConfigError: a schedule that ends, without an end; or a warm-up that ends behind the run.
    """
    warmup = options.warmup_steps
    if options.schedule != "constant":
        if max_steps < 1 and clock is None:
            raise ConfigError(
                "trainer.max_steps",
                max_steps,
                f"a {options.schedule} schedule needs to know when the run ends",
                "Give --trainer.max_steps, on a single rank --trainer.max_time, or --model.optim.schedule constant.",
            )
        if 1 <= max_steps < warmup:
            raise ConfigError(
                "model.optim.warmup_steps",
                warmup,
                f"the run ends at step {max_steps}, before the warm-up does",
                f"Give at most {max_steps} steps of warm-up.",
            )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if options.schedule == "constant":
            return 1.0
        by_step = (step - warmup) / max(1, max_steps - warmup) if max_steps > 0 else 0.0
        progress = min(1.0, max(by_step, clock() if clock else 0.0))
        shape = 1 - progress if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return options.final_lr_ratio + (1 - options.final_lr_ratio) * shape

    return factor


@torch.no_grad()
def scale_gradients(optimizer: Optimizer, factor: Tensor, clip_norm: float | None) -> Tensor:
    """Multiply all gradients by `factor` and clip their global norm.

    Fused AdamW is told the factor and applies it as it reads the gradients, which spares a pass over all of them; until
    its step, `p.grad` is without the factor.

    Args:
        optimizer: of the parameters.
        factor: on their device.
        clip_norm: largest global norm after the factor; None or 0 does not clip.

    Returns:
        The global norm after the factor and before clipping, on the device.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) * factor
    if clip_norm:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, AdamW):
        optimizer.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm


class StepGuard:
    """Stops a run whose loss is not finite, before the weights see it, without waiting for the GPU.

    On CUDA, fused AdamW skips a step whose `found_inf` is set, on the device; the flag travels to the host behind the
    step, and the run stops when it arrives, a step or two later, with weights and moments as they were before. Where
    the optimizer cannot skip (Muon) or there is nothing to wait for (CPU), the flag is read at once.
    """

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._pending: deque[tuple[Tensor, torch.cuda.Event, int, list[int]]] = deque()

    def check(self, optimizer: Optimizer, loss: Tensor, supervised: Tensor, step: int, sample_ids: list[int]) -> None:
        """Judge one optimizer step, before it is made.

        Args:
            optimizer: that will make it.
            loss: sum over all ranks, on the device.
            supervised: number of supervised tokens over all ranks, on the device.
            step: its number.
            sample_ids: samples of this rank that it was computed from.

        Raises:
            SampleError: this step's loss, or that of a step whose flag has arrived since, is not finite.
        """
        flags = torch.stack([~torch.isfinite(loss), supervised == 0]).float()
        if not loss.is_cuda or not isinstance(optimizer, AdamW):
            _judge(flags.cpu(), step, sample_ids)
            return
        optimizer.found_inf = flags.amax()  # type: ignore[attr-defined]
        host = torch.empty(2, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((host, event, step, sample_ids))
        self.poll()

    def poll(self, wait: bool = False) -> None:
        """Judge the flags that have arrived; with `wait`, all of them.

        Raises:
            SampleError: see `check`.
        """
        while self._pending and (wait or self._pending[0][1].query()):
            host, event, step, sample_ids = self._pending.popleft()
            event.synchronize()
            _judge(host, step, sample_ids)


def _judge(flags: Tensor, step: int, sample_ids: list[int]) -> None:
    not_finite, empty = flags.tolist()
    shown = ", ".join(map(str, sample_ids[:20])) + (", ..." if len(sample_ids) > 20 else "")
    if not_finite:
        raise SampleError(
            f"the loss of step {step} is not finite; the weights are those before it. Samples of this rank in "
            f"the step: [{shown}]. Look for NaN or huge hidden states, or lower model.optim.lr."
        )
    if empty:
        raise SampleError(
            f"no token of step {step} is supervised, on any rank. Samples of this rank in the step: [{shown}]. "
            "Look at the masks: every sample needs a response."
        )
