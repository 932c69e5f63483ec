"""The swapped prediction loss: predict one view's code from the other views.

Source: SwAV eq. 2 and 6. Where the equation sums over pairs the reference code averages: for each
assigning crop over the other crops, then over the assigning crops. The average is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sinkhorn import promote

__all__ = ["swapped_prediction_loss"]


def swapped_prediction_loss(
    scores: torch.Tensor, codes: Sequence[torch.Tensor], assign: Sequence[int], temperature: float
) -> torch.Tensor:
    """Mean over assigning crops i and other crops v of the cross entropy of softmax(s_v / T) and q_i.

    Args:
        scores: (V * B, K), crop-major: rows [v * B, (v + 1) * B) are view v.
        codes: for each assigning crop its codes, (B, K), rows summing to 1, without gradients.
        assign: the views that ``codes`` belong to.
        temperature: T > 0.

    Returns:
        A scalar in nats, float64 for float64 scores and float32 otherwise; with uniform predictions it
        is ln K.
    """
    batch = codes[0].shape[0]
    logits = (promote(scores) / temperature).unflatten(0, (-1, batch))  # V, B, K
    views = logits.shape[0]
    # Each view meets the codes of all assigning crops but its own, so one log-sum-exp and one product
    # a view do for all pairs: sum_i <q_i, log p_v> = <sum_i q_i, s_v / T> - (number of i) lse(s_v / T).
    total = torch.stack(tuple(codes)).sum(dim=0)
    own = dict(zip(assign, codes, strict=True))
    weight = 1.0 / (len(assign) * (views - 1) * batch)
    loss = logits.new_zeros(())
    for view in range(views):
        target = total - own[view] if view in own else total
        partners = len(assign) - (view in own)
        if partners:
            fit = (target * logits[view]).sum()
            loss = loss + partners * torch.logsumexp(logits[view], dim=1).sum() - fit
    return loss * weight
