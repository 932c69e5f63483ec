"""AMDIM's costs: features of one view of an image must be told from those of all other images.

Source: Bachman et al. 2019, eq. 1 to 5, and ``costs.py`` of the released code: scores are divided by the square
root of their length, their mean square is a cost, they are softly clipped after that, and each positive has
its own softmax against the negatives that an antecedent's positives share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from ...engine.collectives import Collectives, WorldOfOne
from .mixture import mixture_cost
from .sinkhorn import promote

__all__ = ["Cost", "Maps", "Mixing", "amdim_costs", "classifier_cost", "matches", "soft_clip"]

Cost = Literal["1to5", "1to7", "5to5"]
"""n-to-m: from a map of n x n positions to one of m x m."""

_ALONE = WorldOfOne()
_CLASSIFIER_CLIP = 10.0
_CLASSIFIER_REGULARIZER = 1e-3


class Maps(NamedTuple):
    """The embedded maps of one view of B images.

    Args:
        one: (B, K, D), the embeddings of the map of one position: K is 1, or the number of mixture features.
        five: (B, D, 5, 5).
        seven: (B, D, 7, 7).
    """

    one: torch.Tensor
    five: torch.Tensor
    seven: torch.Tensor


class Mixing(NamedTuple):
    """How mixture features share the consequents, see ``mixture_cost``."""

    entropy: float
    temperature: float


def soft_clip(values: torch.Tensor, limit: float) -> torch.Tensor:
    """limit * tanh(value / limit): the values, but never beyond ``limit`` in size."""
    return torch.tanh(values / limit) * limit


def matches(
    antecedents: torch.Tensor, consequents: torch.Tensor, clip: float, world: Collectives = _ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-softmax terms of eq. 2, by one product of all antecedents with all positions.

    The score of antecedent a and position c is a c / sqrt(D). A term is the logarithm of exp(s) over the sum
    of exp(s) and of exp(s-) for all positions of all other images, those of other processes included, s and
    s- being clipped scores. The positions of an image are no negatives of one another.

    Each process compares everyone's antecedents with its own positions, which are many times as large: what
    travels is the antecedents, and a sum for each of them.

    The gradient is that of the sum of all processes' results: averaged over processes (as DDP does), it is
    the gradient of the mean over all images.

    Args:
        antecedents: (B, T, D), T of each of this process's images.
        consequents: (B, D, H, W), embedded maps of the same images.
        clip: c of the soft clip.
        world: the processes that share the batch, each with as many images.

    Returns:
        The terms, (B, T, H * W), at most 0. And for each of the T the mean square of its unclipped scores,
        (T,), over everyone's antecedents and this process's positions.
    """
    size, kinds, dim = antecedents.shape
    everyone = world.gather(antecedents) / dim**0.5
    first = world.rank * size
    positions = consequents.flatten(2).transpose(1, 2)  # (B, L, D), no copy in channels-last memory
    raw = torch.mm(everyone.flatten(0, 1), positions.flatten(0, 1).T)
    raw = raw.view(len(everyone), kinds, size, -1)
    squares = raw.square().mean(dim=(0, 2, 3))
    scores = soft_clip(raw, clip)
    own = torch.zeros(len(everyone), size, dtype=torch.bool, device=raw.device)
    own[first : first + size].fill_diagonal_(True)
    negatives = scores.masked_fill(own[:, None, :, None], -torch.inf).logsumexp(dim=(2, 3))
    sums = world.gather(negatives[None]).logsumexp(dim=0)[first : first + size]
    positives = scores[first : first + size].diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return F.logsigmoid(positives - sums[:, :, None]), squares


def amdim_costs(
    views: Sequence[Maps],
    places: torch.Tensor,
    costs: Iterable[Cost] = ("1to5", "1to7", "5to5"),
    *,
    clip: float = 20.0,
    regularizer: float = 0.05,
    mixing: Mixing | None = None,
    world: Collectives = _ALONE,
) -> dict[str, torch.Tensor]:
    """The costs, by name, and their ``regularizer``; what is minimised is their sum.

    Of two views each predicts the other (eq. 4 and 5), and both directions are averaged; a single view
    predicts itself, which with ``1to7`` alone is Local DIM (eq. 1).

    Args:
        views: the maps of one view or two.
        places: (views, B), int64: the position, row by row, that an image's 5 x 5 map predicts others from.
        costs: which.
        clip: c of the soft clip; the paper's and the released code's is 20.
        regularizer: lambda, the weight of the scores' mean square before the clip: 0.05 in the released code,
            0.04 in the paper.
        mixing: of mixture features; without, the mean over them.
        world: see ``matches``, as for the gradient.

    Returns:
        Scalars in nats: means over this process's images. float64 for float64 maps and float32 otherwise.
    """
    with torch.autocast(places.device.type, enabled=False):  # products in half precision would show
        promoted = [Maps(*(promote(tensor) for tensor in view)) for view in views]
        return _costs(promoted, places, tuple(costs), clip, regularizer, mixing, world)


def _costs(
    views: Sequence[Maps],
    places: torch.Tensor,
    costs: tuple[Cost, ...],
    clip: float,
    regularizer: float,
    mixing: Mixing | None,
    world: Collectives,
) -> dict[str, torch.Tensor]:
    turns = [(0, 1), (1, 0)] if len(views) == 2 else [(0, 0)]
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: torch.Tensor) -> None:
        found[name] = found[name] + value / len(turns) if name in found else value / len(turns)

    for source, target in turns:
        for side in ("5", "7"):
            names = [name for name in costs if name.endswith(side)]
            if not names:
                continue
            antecedents = [
                views[source].one if name[0] == "1" else _picked(views[source].five, places[source])
                for name in names
            ]
            consequents = views[target].five if side == "5" else views[target].seven
            # Tasks of the same consequents share a product.
            terms, squares = matches(torch.cat(antecedents, dim=1), consequents, clip, world)
            counts = [part.shape[1] for part in antecedents]
            for name, own, square in zip(names, terms.split(counts, 1), squares.split(counts), strict=True):
                add(name, mixture_cost(own, *mixing) if mixing and name[0] == "1" else -own.mean())
                add("regularizer", regularizer * square.mean())
    return {name: found[name] for name in (*costs, "regularizer")}


def _picked(maps: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B, D, H, W) -> (B, 1, D): each image's own position."""
    positions = maps.flatten(2).transpose(1, 2)
    return positions[torch.arange(len(maps), device=maps.device), places][:, None]


def classifier_cost(
    logits: torch.Tensor, labels: torch.Tensor, labelled: float | torch.Tensor | None = None
) -> torch.Tensor:
    """What AMDIM's evaluators minimise: cross entropy of softly clipped logits, and 0.001 of their mean square.

    Args:
        logits: (N, classes).
        labels: (N,), int64; -1 for an image without a label, which counts for the mean square alone.
        labelled: what the sum of the cross entropies is divided by, if not the number of labels here.

    Returns:
        A scalar in nats.
    """
    with torch.autocast(logits.device.type, enabled=False):
        logits = promote(logits)
        clipped = soft_clip(logits, _CLASSIFIER_CLIP)
        total = F.cross_entropy(clipped, labels, ignore_index=-1, reduction="sum")
        count = (labels >= 0).sum().clamp_min(1) if labelled is None else labelled
        return total / count + _CLASSIFIER_REGULARIZER * logits.square().mean()
