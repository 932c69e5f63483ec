"""The swapped prediction loss: predict one view's code from the other views.

Source: SwAV eq. 2 and 6. Where the equation sums over pairs the reference code averages: for each
assigning crop over the other crops, then over the assigning crops. The average is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .sinkhorn import promote

__all__ = ["swapped_prediction_loss"]


def swapped_prediction_loss(
    scores: torch.Tensor, codes: Sequence[torch.Tensor], assign: Sequence[int], temperature: float
) -> torch.Tensor:
    """Mean over assigning crops i and other crops v of the cross entropy of softmax(s_v / T) and q_i.

    Gradients flow to ``scores``, once: a second backward pass through the same loss raises torch's
    RuntimeError, since the first one gives the memory of the gradient away.

    Args:
        scores: (V * B, K), crop-major: rows [v * B, (v + 1) * B) are view v.
        codes: for each assigning crop its codes, (B, K), rows summing to 1, without gradients; of any type.
        assign: the views that ``codes`` belong to.
        temperature: T > 0.

    Returns:
        A scalar in nats, float64 for float64 scores and float32 otherwise; with uniform predictions it
        is ln K.
    """
    scores = promote(scores)
    codes = [of_crop.to(scores.dtype) for of_crop in codes]
    loss: torch.Tensor = _SwappedPrediction.apply(scores, codes, assign, temperature)
    return loss


class _SwappedPrediction(torch.autograd.Function):
    # Each view meets the codes of all assigning crops but its own, so one softmax and one product a view
    # do for all pairs. With t_v = sum_i q_i and n_v the number of these i:
    #   loss = weight * sum_v (n_v lse(s_v / T) - <t_v, s_v / T>)
    #   gradient of s_v = weight / T * (n_v softmax(s_v / T) - t_v)
    # Both come from the same exponentials: the gradient is made on the way forward and nothing else kept.

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        codes: Sequence[torch.Tensor],
        assign: Sequence[int],
        temperature: float,
    ) -> torch.Tensor:
        batch = codes[0].shape[0]
        views = scores.unflatten(0, (-1, batch))  # V, B, K
        total = reduce(torch.add, codes)
        own = dict(zip(assign, codes, strict=True))
        gradient = torch.empty_like(views) if ctx.needs_input_grad[0] else None
        logits = torch.empty_like(total)
        loss = views.new_zeros(())
        for view, scores_of_view in enumerate(views):
            target = total - own[view] if view in own else total
            partners = len(assign) - (view in own)
            torch.div(scores_of_view, temperature, out=logits)
            fitted = torch.softmax(logits, dim=1, out=None if gradient is None else gradient[view])
            # The log-sum-exp, read off where the probability is largest and its logarithm exact.
            lse = logits.amax(dim=1) - fitted.amax(dim=1).log()
            loss += partners * lse.sum() - logits.mul_(target).sum()
            if gradient is not None:
                torch.sub(target, fitted, alpha=partners, out=gradient[view])
        weight = 1.0 / (len(assign) * (len(views) - 1) * batch)
        if gradient is not None:
            ctx.save_for_backward(gradient)
            ctx.factor = -weight / temperature
        return loss * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(of_loss * ctx.factor).flatten(0, 1), None, None, None
