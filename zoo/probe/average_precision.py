"""Average precision of many rankings at once.

Images with equal scores are one step of the curve: in which order they came says nothing about a classifier.
"""

from __future__ import annotations

import torch

__all__ = ["area_average_precision", "step_average_precision"]

_LEVELS = torch.arange(11, dtype=torch.float64) * 0.1  # of recall


def area_average_precision(
    scores: torch.Tensor,
    positive: torch.Tensor,
    counted: torch.Tensor | None = None,
    eleven_points: bool = False,
) -> torch.Tensor:
    """Area under the envelope of the precision-recall curve, or VOC 2007's mean over eleven recall levels.

    The envelope is the best precision at this recall or a larger one. Source: VISSL's VOC07 benchmark
    (the area) and the devkit of VOC 2007 (eleven points); they differ by one to three points.

    Args:
        scores: (..., N), finite; the larger the likelier.
        positive: bool, of the same shape or one that is broadcast to it.
        counted: likewise, False for what is neither right nor wrong (difficult images); all by default. Numbers
            say how often an image counts, and may have more dimensions than the scores (resamples).
        eleven_points: the mean instead of the area.

    Returns:
        (...) float64, 0..1; NaN where nothing that counts is positive.
    """
    hits, ends, precision = _curve(scores, positive, counted)
    ranks = torch.arange(hits.shape[-1], device=hits.device)
    precision = precision.where(ends == ranks, 0)  # the curve's points are where equal scores end
    total = hits.sum(-1)
    if eleven_points:
        recall = hits.cumsum(-1) / total[..., None]
        levels = [(precision * (recall >= level)).amax(-1) for level in _LEVELS.tolist()]
        return torch.stack(levels, dim=-1).mean(-1).where(total > 0, torch.nan)
    envelope = precision.flip(-1).cummax(-1).values.flip(-1)
    return (hits * envelope).sum(-1) / total


def step_average_precision(
    scores: torch.Tensor, positive: torch.Tensor, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of precision times the step of recall, without an envelope, as scikit-learn defines it.

    Arguments and result as of ``area_average_precision``.
    """
    hits, ends, precision = _curve(scores, positive, counted)
    return (hits * precision.gather(-1, ends)).sum(-1) / hits.sum(-1)


def _curve(
    scores: torch.Tensor, positive: torch.Tensor, counted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranked from the best: how often it is positive, the last rank of equal scores, the precision down to here."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    last = torch.ones_like(ranked, dtype=torch.bool)
    last[..., :-1] = ranked[..., :-1] != ranked[..., 1:]
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    ends = ranks.expand_as(order).where(last, len(ranks)).flip(-1).cummin(-1).values.flip(-1)
    hits = positive.expand_as(scores).gather(-1, order).double()
    if counted is None:
        return hits, ends, hits.cumsum(-1) / (ranks + 1)
    shape = torch.broadcast_shapes(counted.shape, scores.shape)
    times = counted.double().expand(shape).gather(-1, order.expand(shape))
    hits = hits * times
    precision = hits.cumsum(-1) / times.cumsum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return hits, ends.expand(shape), precision
