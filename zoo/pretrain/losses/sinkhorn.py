"""Sinkhorn codes: scores of samples against prototypes in, balanced assignments out.

Source: SwAV, section 3.1 and the pseudo-code of appendix A.1; ``distributed_sinkhorn`` of the
reference code, whose order (prototypes first, samples last) is kept.
"""

from __future__ import annotations

import math

import torch

from ...engine.collectives import Collectives, WorldOfOne

__all__ = ["harden", "promote", "sinkhorn"]

_ALONE = WorldOfOne()


def promote(tensor: torch.Tensor) -> torch.Tensor:
    """Half types to float32; float32 and float64 stay."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def sinkhorn(
    scores: torch.Tensor, epsilon: float, iterations: int, world: Collectives = _ALONE
) -> torch.Tensor:
    """Codes Q* = Diag(u) exp(scores / epsilon) Diag(v) (eq. 5), each row scaled to sum to 1.

    Works on logarithms, so that it stays finite where exp(scores / epsilon) overflows and where
    a shift by the largest score would leave a row of zeros. With several processes each passes its
    own rows; what is exchanged is K maxima and K sums an iteration, whatever the batch.

    Args:
        scores: (B, K) similarities, before any temperature; all rows of the batch on one process.
        epsilon: weight of the entropy, > 0; large values lead to uniform codes.
        iterations: >= 0; the paper uses 3.
        world: the processes that share the batch.

    Returns:
        (B, K) codes, float64 for float64 scores and float32 otherwise.
    """
    logits = promote(scores) / epsilon
    batch = logits.shape[0] * world.world_size
    count = logits.shape[1]
    # log Q = logits + f (a value for each prototype) + g (a value for each sample)
    f = logits.new_zeros(1, count)
    if iterations == 0:
        total = _logsumexp(logits.reshape(-1, 1), world).squeeze()
        return torch.exp(logits - total) * batch
    g = logits.new_zeros(logits.shape[0], 1)
    for iteration in range(iterations):
        if iteration > 0:
            g = -torch.logsumexp(logits + f, dim=1, keepdim=True) - math.log(batch)
        f = -_logsumexp(logits + g, world) - math.log(count)
    # The last normalisation, over each sample's prototypes, makes the row a distribution.
    return torch.softmax(logits + f, dim=1)


def _logsumexp(values: torch.Tensor, world: Collectives) -> torch.Tensor:
    """Log of the sum of exponentials over all samples of all processes: (B, K) -> (1, K)."""
    if world.world_size == 1:
        return torch.logsumexp(values, dim=0, keepdim=True)
    top = world.max_(values.amax(dim=0, keepdim=True))
    return world.sum_(torch.exp(values - top).sum(dim=0, keepdim=True)).log() + top


def harden(codes: torch.Tensor) -> torch.Tensor:
    """Round codes to one prototype a sample (the paper's inferior variant): (B, K) of zeros and ones."""
    return torch.zeros_like(codes).scatter_(1, codes.argmax(dim=1, keepdim=True), 1.0)
