"""Weighted nearest neighbours: how good are frozen features, without training anything."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["knn_accuracy", "knn_scores"]

_BLOCK = 1024


def knn_scores(
    queries: torch.Tensor,
    bank: torch.Tensor,
    bank_labels: torch.Tensor,
    classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> torch.Tensor:
    """Class scores: the sum of exp(cosine / T) over the k nearest, divided by exp(1 / T).

    Source: Wu et al. 2018 (instance discrimination), the protocol that SwAV and MoCo users report.

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
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    reference = F.normalize(bank.to(dtype), dim=1).T.contiguous()
    out = []
    for block in queries.to(dtype).split(_BLOCK):
        similarity, index = (F.normalize(block, dim=1) @ reference).topk(min(k, len(bank)), dim=1)
        weights = ((similarity - 1.0) / temperature).exp()
        scores = torch.zeros(len(block), classes, dtype=dtype, device=block.device)
        out.append(scores.scatter_add_(1, bank_labels[index], weights))
    return torch.cat(out)


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
    scores = knn_scores(queries, bank, bank_labels, classes, k, temperature)
    return float((scores.argmax(dim=1) == query_labels).double().mean())
