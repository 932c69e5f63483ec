"""LARS as the reference runs it: NVIDIA apex's ``LARC(SGD, clip=False)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["LARS"]


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose gradients are scaled layer by layer.

    g <- (g + wd p) * trust |p| / (|g| + wd |p| + eps), then momentum on g; the learning rate multiplies
    the momentum buffer. Where |p| or |g| is zero the raw gradient is used, without weight decay: so
    zero-initialised biases take an unscaled first step, as in the reference. Parameters without
    a gradient are left alone, momentum included.

    Source: You, Gitman and Ginsburg 2017; apex ``parallel/LARC.py`` with ``clip=False``.

    Args:
        params: parameters or groups; a group's ``adapt: False`` makes it plain SGD.
        lr: global learning rate.
        momentum: 0..1.
        weight_decay: added inside the adapted gradient.
        trust: the trust coefficient.
        eps: keeps the quotient finite.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust": trust,
                "eps": eps,
                "adapt": True,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            rates = self._rates(group, params) if group["adapt"] and params else [1.0] * len(params)
            # On a CPU one parameter goes through all operations while the cache holds it; elsewhere each
            # operation takes all parameters at once, since starting it is what costs.
            size = 1 if params and params[0].device.type == "cpu" else max(1, len(params))
            for first in range(0, len(params), size):
                self._update(group, params[first : first + size], rates[first : first + size])
        return loss

    @staticmethod
    def _rates(group: dict[str, Any], params: list[torch.Tensor]) -> list[float]:
        """What each gradient, its weight decay included, is multiplied by."""
        p_norm = torch.stack(torch._foreach_norm(params))
        g_norm = torch.stack(torch._foreach_norm([p.grad for p in params if p.grad is not None]))
        rate = group["trust"] * p_norm / (g_norm + group["weight_decay"] * p_norm + group["eps"])
        rate = torch.where(p_norm == 0, 1.0, rate)  # zeros have no decay to leave out
        # One wait for the device; a thousand tiny kernels would take longer.
        return torch.where(g_norm == 0, 0.0, rate).tolist()

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], rates: list[float]) -> None:
        buffers = []
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffers.append(state["momentum_buffer"])
        grads = [p.grad for p in params if p.grad is not None]
        steps = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(steps, rates)
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, steps)
        torch._foreach_add_(params, buffers, alpha=-group["lr"])
