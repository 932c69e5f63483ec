"""Mixture-based features: several antecedents share the work of predicting each consequent.

Source: Bachman et al. 2019, section 4.7, eq. 6 and 7.
"""

from __future__ import annotations

import torch

__all__ = ["mixture_cost", "responsibilities"]


def responsibilities(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 7: q(j | i), the softmax of ``temperature`` times the scores over the mixture features j.

    Args:
        scores: (B, K, L), the log-softmax term of each of K mixture features for each of L consequents.
        temperature: tau > 0. 1 / alpha makes q the maximum of eq. 6, larger ones are greedier.

    Returns:
        (B, K, L), which sums to 1 over K.
    """
    return torch.softmax(temperature * scores, dim=1)


def mixture_cost(scores: torch.Tensor, entropy: float, temperature: float) -> torch.Tensor:
    """Minus eq. 6: the mean over images and consequents i of sum_j q(j | i) s_ij + alpha H(q(. | i)).

    q is that of eq. 7. No gradient flows through it: each mixture feature learns from the consequents that it
    is responsible for.

    Args:
        scores: s, (B, K, L), as for ``responsibilities``; at most 0.
        entropy: alpha >= 0, the weight of q's entropy H in nats.
        temperature: tau > 0 of eq. 7.

    Returns:
        A scalar in nats.
    """
    q = responsibilities(scores.detach(), temperature)
    expected = (q * scores).sum(dim=1)
    spread = torch.special.entr(q).sum(dim=1)
    return -(expected + entropy * spread).mean()
