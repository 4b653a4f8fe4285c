"""AdamW's update as one Triton kernel a tensor, for CUDA.

torch's fused AdamW, told a factor on the gradients (normalization and clipping), writes the scaled gradients back to
memory; nobody reads them. This one does not, and takes 28 bytes a parameter through memory instead of 32.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import AdamW

_BLOCK = 2048


class CudaAdamW(AdamW):
    """torch's AdamW with its own state, options and checkpoints; only the arithmetic of `step` is ours.

    Attributes:
        grad_scale: what the gradients are divided by as they are read, a float32 scalar on the GPU; None is 1.
        found_inf: not 0 leaves weights, moments and step counts as they are, likewise.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run the closure, then update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            device = parameters[0].device
            one = torch.ones((), device=device)
            grad_scale = one if self.grad_scale is None else self.grad_scale
            skip = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
            states = [self._state_of(p) for p in parameters]
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, [1.0 - skip] * len(steps))  # one tensor for all would be read on the host
            exponents = torch.stack(steps).double()  # 1 - beta^step is small
            corrections = torch.stack([1 - beta**exponents for beta in group["betas"]]).float()
            for i, (p, state) in enumerate(zip(parameters, states, strict=True)):
                _update(p, state, corrections[:, i:], grad_scale, skip, group)
        return loss

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


def _update(
    p: Tensor, state: dict[str, Tensor], corrections: Tensor, grad_scale: Tensor, skip: Tensor, group: dict[str, Any]
) -> None:
    """One tensor's update, in place (Loshchilov and Hutter 2019, in the form that torch gives it).

    Args:
        p: the parameter, with its gradient.
        state: its moments.
        corrections: 1 - beta^step, the first and second moment's in the first column.
        grad_scale: see `CudaAdamW`.
        skip: its `found_inf`.
        group: learning rate, betas, epsilon and weight decay.
    """
    assert p.grad is not None
    beta1, beta2 = group["betas"]
    _adamw[(triton.cdiv(p.numel(), _BLOCK),)](
        p,
        p.grad.contiguous(),
        state["exp_avg"],
        state["exp_avg_sq"],
        corrections,
        corrections.stride(0),
        grad_scale,
        skip,
        p.numel(),
        float(group["lr"]),
        float(group["lr"] * group["weight_decay"]),
        float(1 - beta1),
        float(beta2),
        float(1 - beta2),
        float(group["eps"]),
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["corrections"])
def _adamw(
    p, g, m, v, corrections, stride, grad_scale, skip, numel, lr, decay, rest1, beta2, rest2, eps, BLOCK: tl.constexpr
):
    if tl.load(skip) != 0:
        return
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    gradient = tl.load(g + i, mask=inside, other=0.0) / tl.load(grad_scale)
    average = tl.load(m + i, mask=inside, other=0.0)
    average += rest1 * (gradient - average)
    square = beta2 * tl.load(v + i, mask=inside, other=0.0) + rest2 * gradient * gradient
    value = tl.load(p + i, mask=inside, other=0.0)
    value -= decay * value
    root = tl.sqrt(square) / tl.sqrt(tl.load(corrections + stride)) + eps
    value -= lr / tl.load(corrections) * average / root
    tl.store(m + i, average, mask=inside)
    tl.store(v + i, square, mask=inside)
    tl.store(p + i, value, mask=inside)
