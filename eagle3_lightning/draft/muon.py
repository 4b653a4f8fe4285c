"""Muon (Jordan et al. 2024) as torch has it, with products that the device is fast at.

torch's Muon multiplies in bfloat16 wherever it runs, which a CPU without instructions for it has to emulate.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as published
_ITERATIONS = 5
_EPS = 1e-7
_MOMENTUM = 0.95


class Muon(Optimizer):
    """For matrices alone. The update has AdamW's root mean square (`match_rms_adamw` in torch), decay is decoupled.

    What torch's has saved, it loads.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Take over the matrices.

        Args:
            matrices: 2-D parameters.
            lr: peak learning rate.
            weight_decay: times the learning rate, taken off at every step.
        """
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, then update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - _MOMENTUM)
                update = orthogonalize(p.grad.lerp(momentum, _MOMENTUM), product_dtype(p.device))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"])
        return loss


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where products in it are fast: on GPUs, and on CPUs with instructions for it."""
    is_fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def orthogonalize(matrix: Float[Tensor, "M N"], dtype: torch.dtype) -> Float[Tensor, "M N"]:
    """The matrix with singular values near 1, by five Newton-Schulz iterations in `dtype`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
