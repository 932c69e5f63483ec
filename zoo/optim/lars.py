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
            if not params:
                continue
            grads = self._adapted(group, params)
            buffers = []
            for param in params:
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
        return loss

    @staticmethod
    def _adapted(group: dict[str, Any], params: list[torch.Tensor]) -> list[torch.Tensor]:
        decay = group["weight_decay"]
        raw = [p.grad for p in params if p.grad is not None]
        decayed = torch._foreach_add(raw, params, alpha=decay)
        if not group["adapt"]:
            return list(decayed)
        out = []
        norms = zip(torch._foreach_norm(params), torch._foreach_norm(raw), strict=True)
        for (p_norm, g_norm), grad, full in zip(norms, raw, decayed, strict=True):
            rate = group["trust"] * p_norm / (g_norm + decay * p_norm + group["eps"])
            live = (p_norm != 0) & (g_norm != 0)  # decided on the device: no wait for the GPU
            out.append(torch.where(live, full * rate, grad))
        return out
