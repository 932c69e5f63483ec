"""InfoNCE: a query must find its own key among others.

Source: MoCo, equation 1, and ``moco/builder.py``: a softmax over the own key, which comes first, and the
negatives; the mean over the queries.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .sinkhorn import promote

__all__ = ["contrastive_logits", "info_nce", "info_nce_in_batch"]


def info_nce(
    queries: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    temperature: float,
    excluded: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over the queries of -log( exp(q k+ / T) / (exp(q k+ / T) + sum over k- of exp(q k- / T)) ).

    Args:
        queries: (N, D), unit length.
        positives: (N, D), each query's own key, unit length.
        negatives: (D, K), a key a column, unit length; the same ones for all queries.
        temperature: T > 0.
        excluded: (N, K), true where a negative is left out for a query; none is by default.

    Returns:
        A scalar in nats, float64 for float64 queries and float32 otherwise; with equal similarities it is
        ln(K + 1).
    """
    logits = contrastive_logits(queries, positives, negatives, temperature)
    if excluded is not None:
        logits = torch.cat((logits[:, :1], logits[:, 1:].masked_fill(excluded, -torch.inf)), dim=1)
    own = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, own)


def contrastive_logits(
    queries: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Similarities over T, (N, 1 + K): with the own key in the first column, with the negatives in the rest.

    The arguments are those of ``info_nce``.
    """
    with torch.autocast(queries.device.type, enabled=False):  # products in half precision would show
        queries, positives, negatives = promote(queries), promote(positives), promote(negatives)
        own = (queries * positives).sum(dim=1, keepdim=True)
        return torch.cat((own, queries @ negatives), dim=1) / temperature


def info_nce_in_batch(
    queries: torch.Tensor, keys: torch.Tensor, own: torch.Tensor, temperature: float
) -> torch.Tensor:
    """InfoNCE whose negatives are the other keys of the batch.

    Args:
        queries: (N, D), unit length.
        keys: (B, D), unit length; gradients flow to them, too.
        own: (N,), int64: which key is the query's own.
        temperature: T > 0.

    Returns:
        As ``info_nce``; with equal similarities it is ln B.
    """
    with torch.autocast(queries.device.type, enabled=False):
        logits = promote(queries) @ promote(keys).T / temperature
    return F.cross_entropy(logits, own)
