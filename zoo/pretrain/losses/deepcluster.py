"""Assignments of a whole set of embeddings to prototypes, and the loss that predicts them.

Sources: ``cluster_memory`` and ``train`` of DeepCluster-v2's ``main_deepclusterv2.py``; for Sinkhorn section 3.1
and appendix A.1 of SwAV.

Each process passes the rows that it has; what is exchanged depends on the number of prototypes K, never on
that of rows. Scores, (rows, K), are made a block at a time and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ...engine.collectives import Collectives, WorldOfOne
from .sinkhorn import promote

__all__ = ["UNSEEN", "assignment_loss", "nearest", "rows_of_all", "sinkhorn_offsets", "spherical_kmeans"]

UNSEEN = -100
"""The label of an image that has none: cross entropy leaves it out."""

_ALONE = WorldOfOne()
_SCORES = 2**22  # scores of a block, about


def _blocks(embeddings: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return embeddings.split(max(1, _SCORES // count))


@torch.no_grad()
def rows_of_all(embeddings: torch.Tensor, numbers: torch.Tensor, world: Collectives = _ALONE) -> torch.Tensor:
    """Some rows of all processes, in each process.

    Args:
        embeddings: (N, D), this process's rows; as many in each.
        numbers: (K,) int64, the same in all processes: rank * N + row.
        world: the processes.

    Returns:
        (K, D).
    """
    mine = numbers - world.rank * len(embeddings)
    here = (mine >= 0) & (mine < len(embeddings))
    found = embeddings[mine.clamp(0, len(embeddings) - 1)]
    return world.sum_(torch.where(here[:, None], found, torch.zeros_like(found)))


@torch.no_grad()
def nearest(
    embeddings: torch.Tensor, prototypes: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """The prototype of the largest score, for each row; of equal ones the first.

    Args:
        embeddings: (N, D).
        prototypes: (K, D).
        offsets: (K,), added to the scores.

    Returns:
        (N,) int64.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        found = [
            F.linear(block, prototypes, offsets).argmax(dim=1)
            for block in _blocks(embeddings, len(prototypes))
        ]
    return torch.cat(found)


@torch.no_grad()
def spherical_kmeans(
    embeddings: torch.Tensor, centroids: torch.Tensor, iterations: int, world: Collectives = _ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of unit vectors by their cosine: assign to the nearest centroid, move it to the mean, in turn.

    A centroid that no row is assigned to stays where it is. The last step assigns.

    Args:
        embeddings: (N, D) unit vectors, this process's share.
        centroids: (K, D), where to start; the same in all processes.
        iterations: how often the centroids move.
        world: the processes that share the set; a move exchanges K sums and K counts.

    Returns:
        The centroids (K, D), of unit length once they moved, and the nearest one of each row, (N,) int64.
    """
    count = len(centroids)
    for _ in range(iterations):
        assigned = nearest(embeddings, centroids)
        sizes = torch.bincount(assigned, minlength=count)
        # Rows sorted by cluster are bags whose sums come out the same each time, which sums in the order in
        # which a GPU's threads happen to arrive do not.
        order = assigned.argsort(stable=True)
        sums = F.embedding_bag(order, embeddings, sizes.cumsum(0) - sizes, mode="sum")
        sizes, sums = world.sum_(sizes), world.sum_(sums)
        centroids = F.normalize(torch.where(sizes[:, None] > 0, sums, centroids), dim=1)
    return centroids, nearest(embeddings, centroids)


@torch.no_grad()
def sinkhorn_offsets(
    embeddings: torch.Tensor,
    prototypes: torch.Tensor,
    epsilon: float,
    iterations: int,
    world: Collectives = _ALONE,
) -> torch.Tensor:
    """What Sinkhorn adds to each prototype's scores so that all prototypes get an equal share of the set.

    The codes of ``zoo.pretrain.losses.sinkhorn`` are softmax(scores / epsilon + offsets), so K numbers stand
    for N x K codes. With log Q = scores / epsilon + f (prototypes) + g (samples), an iteration is
    f = -logsumexp over samples, then g = -logsumexp over prototypes. Rows are gone through once an iteration.

    Args:
        embeddings: (N, D), this process's share of the set.
        prototypes: (K, D), the same in all processes.
        epsilon: weight of the entropy, > 0.
        iterations: > 0.
        world: the processes that share the set; an iteration exchanges K maxima and K sums.

    Returns:
        (K,), but for a constant that all of them share.
    """
    weight = prototypes / epsilon
    offsets = weight.new_zeros(len(weight))
    with torch.autocast(embeddings.device.type, enabled=False):
        for iteration in range(iterations):
            total = torch.full_like(offsets, -torch.inf)
            for block in _blocks(embeddings, len(weight)):
                logits = F.linear(block, weight)
                if iteration:  # at first g is zero
                    logits -= torch.logsumexp(logits + offsets, dim=1, keepdim=True)
                total = torch.logaddexp(total, torch.logsumexp(logits, dim=0))
            top = world.max_(total.clone())
            offsets = -(top + world.sum_((total - top).exp_()).log_())
    return offsets


def assignment_loss(
    scores: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    temperature: float,
    counted: torch.Tensor | float,
) -> torch.Tensor:
    """Mean over heads, views and images of the cross entropy of softmax(scores / T) and the image's target.

    All views predict it, also the one that the target came from. Images without a target count for nothing.

    Args:
        scores: of each head, (V * B, K), crop-major.
        targets: of each head, int64 labels (B,), ``UNSEEN`` where there is none; or codes (B, K) whose rows
            sum to 1, to 0 where there is none.
        temperature: T > 0.
        counted: the number of images with a target. It is what the sum over images is divided by, so that
            parts of a batch can be given an equal share of the whole batch's number.

    Returns:
        A scalar in nats, float64 for float64 scores and float32 otherwise; with uniform predictions it is
        ln K.
    """
    losses = []
    for of_head, target in zip(scores, targets, strict=True):
        views = len(of_head) // len(target)
        repeated = target.repeat(views, *(1,) * (target.dim() - 1))
        logits = promote(of_head) / temperature
        total = F.cross_entropy(logits, repeated, ignore_index=UNSEEN, reduction="sum")
        losses.append(total / (views * counted))
    return torch.stack(losses).mean()
