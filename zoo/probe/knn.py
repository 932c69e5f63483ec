"""Weighted nearest neighbours: how good are frozen features, without training anything.

Source: Wu et al. 2018 (instance discrimination), the protocol that SwAV and MoCo users report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from ..products import row_products
from .scores import true_ranks

__all__ = ["knn_accuracy", "knn_ranks", "knn_scores", "nearest", "votes"]

_QUERIES = 1024  # rows of a block
_BANK = 4096


def nearest(
    queries: torch.Tensor, bank: torch.Tensor, k: int, *, leave_one_out: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k nearest rows of the bank by cosine, exactly: all similarities are computed, a block at a time.

    Beyond the features it takes the memory of normalised queries, of one block and of the answer.

    Args:
        queries: (Q, F).
        bank: (N, F).
        k: neighbours; all of the bank if it is smaller.
        leave_one_out: the queries are the bank, and a row is no neighbour of its own.

    Returns:
        Cosines (Q, k), highest first, float64 for float64 queries and float32 otherwise; and row numbers, int64.
    """
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    k = min(k, len(bank) - int(leave_one_out))
    asked = F.normalize(queries.to(dtype), dim=1)
    best = asked.new_full((len(asked), k), -torch.inf)
    where = torch.zeros(len(asked), k, dtype=torch.int64, device=asked.device)
    for first in range(0, len(bank), _BANK):
        known = F.normalize(bank[first : first + _BANK].to(dtype), dim=1)
        for row in range(0, len(asked), _QUERIES):
            rows = slice(row, min(row + _QUERIES, len(asked)))
            cosines = row_products(asked[rows], known)
            if leave_one_out:
                start = max(row, first)
                own = torch.arange(start, max(start, min(rows.stop, first + len(known))))
                cosines[own - row, own - first] = -torch.inf
            values, index = cosines.topk(min(k, len(known)), dim=1)
            if first == 0 and values.shape[1] == k:
                best[rows], where[rows] = values, index
                continue
            values = torch.cat((best[rows], values), dim=1)
            index = torch.cat((where[rows], index + first), dim=1)
            best[rows], chosen = values.topk(k, dim=1)
            where[rows] = index.gather(1, chosen)
    return best, where


def votes(
    cosines: torch.Tensor, labels: torch.Tensor, classes: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the neighbours say of each class.

    Args:
        cosines: (Q, k).
        labels: the neighbours' classes, (Q, k).
        classes: C.
        temperature: T > 0.

    Returns:
        The sum of exp(cosine / T) divided by exp(1 / T), (Q, C); and whether a class has a vote, (Q, C).
    """
    weights = ((cosines - 1.0) / temperature).exp()
    scores = weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)
    voted = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, labels, True)
    return scores, voted


def knn_scores(
    queries: torch.Tensor,
    bank: torch.Tensor,
    bank_labels: torch.Tensor,
    classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> torch.Tensor:
    """Class scores: the sum of exp(cosine / T) over the k nearest, divided by exp(1 / T).

    Args:
        queries: (Q, F) features.
        bank: (N, F) features with labels.
        bank_labels: (N,) int64 in 0..classes - 1.
        classes: number of classes.
        k: neighbours; all of the bank if it is smaller.
        temperature: T > 0.

    Returns:
        (Q, classes), float64 for float64 features and float32 otherwise.
    """
    cosines, index = nearest(queries, bank, k)
    return votes(cosines, bank_labels[index], classes, temperature)[0]


def knn_ranks(
    queries: torch.Tensor,
    query_labels: torch.Tensor,
    bank: torch.Tensor,
    bank_labels: torch.Tensor,
    classes: int,
    k: Sequence[int],
    temperature: Sequence[float],
    *,
    leave_one_out: bool = False,
) -> Iterator[tuple[int, float, torch.Tensor]]:
    """Where the true class stands, for each k and temperature; the neighbours are looked for once.

    A class without votes is nowhere: it gets the last rank, C, however few the others are.

    Yields:
        k, temperature, int64 (Q,), see ``true_ranks``.
    """
    cosines, index = nearest(queries, bank, max(k), leave_one_out=leave_one_out)
    labels = bank_labels[index]
    for count in k:
        for degree in temperature:
            ranks = []
            for block in range(0, len(cosines), _QUERIES):
                rows = slice(block, block + _QUERIES)
                # From the nearest one's: however small T is, it is heard.
                near = cosines[rows, :count] - cosines[rows, :1] + 1.0
                scores, voted = votes(near, labels[rows, :count], classes, degree)
                truth = query_labels[rows]
                found = true_ranks(scores.masked_fill(~voted, -1.0), truth)
                ranks.append(found.masked_fill(~voted.gather(1, truth[:, None])[:, 0], classes))
            yield count, degree, torch.cat(ranks)


def knn_accuracy(
    queries: torch.Tensor,
    query_labels: torch.Tensor,
    bank: torch.Tensor,
    bank_labels: torch.Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Share of queries, 0..1, whose class gets the highest score; see ``knn_scores``."""
    classes = int(max(int(bank_labels.max()), int(query_labels.max()))) + 1
    ((_, _, ranks),) = knn_ranks(queries, query_labels, bank, bank_labels, classes, [k], [temperature])
    return float((ranks == 0).double().mean())
