"""Where the true class stands among the scores of all classes."""

from __future__ import annotations

import torch

__all__ = ["true_ranks"]


def true_ranks(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many classes come before the true one: 0 is a hit, below 5 is one of the top five.

    Of equal scores the class with the lower number comes first, as ``argmax`` has it. A true class whose
    score is no number comes last, and any other such class comes before it.

    Args:
        scores: (..., N, C).
        labels: (N,) int64, from 0.

    Returns:
        int64 (..., N); C for a score that is no number.
    """
    classes = scores.shape[-1]
    index = labels.view(-1, 1).expand(*scores.shape[:-1], 1)
    own = scores.gather(-1, index)
    earlier = torch.arange(classes, device=scores.device) < index
    return (~(scores <= own) | ((scores == own) & earlier)).sum(dim=-1)
