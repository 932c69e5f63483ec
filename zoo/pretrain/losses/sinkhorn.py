"""Sinkhorn codes: scores of samples against prototypes in, balanced assignments out.

Source: SwAV, section 3.1 and the pseudo-code of appendix A.1; ``distributed_sinkhorn`` of the
reference code, whose order (prototypes first, samples last) is kept.
"""

from __future__ import annotations

import torch

from ...engine.collectives import Collectives, WorldOfOne

__all__ = ["harden", "promote", "sinkhorn"]

_ALONE = WorldOfOne()

# Iterations that one exponentiation serves. Each may spread the scalings by the number of samples times that
# of prototypes; before that leaves float32's range they are taken into the logarithms.
_AT_A_TIME = 3


def promote(tensor: torch.Tensor) -> torch.Tensor:
    """Half types to float32; float32 and float64 stay."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def sinkhorn(
    scores: torch.Tensor, epsilon: float, iterations: int, world: Collectives = _ALONE
) -> torch.Tensor:
    """Codes Q* = Diag(u) exp(scores / epsilon) Diag(v) (eq. 5), each row scaled to sum to 1.

    Three iterations are products with the same exponentials. These are taken of logarithms shifted by the
    largest one of each prototype and then of each sample, so none exceeds 1, and each prototype and each
    sample has one that is 1: nothing overflows, and no sum vanishes where a shift by the largest score of
    all would leave zeros.
    With several processes each passes its own rows; what is exchanged is K maxima, and K sums an
    iteration, whatever the batch.

    Args:
        scores: (B, K) similarities, before any temperature; all rows of the batch on one process.
        epsilon: weight of the entropy, > 0; large values lead to uniform codes.
        iterations: >= 0; the paper uses 3.
        world: the processes that share the batch.

    Returns:
        (B, K) codes, float64 for float64 scores and float32 otherwise.
    """
    with torch.autocast(scores.device.type, enabled=False):  # products in half precision would show
        if iterations == 0:
            logits = promote(scores) / epsilon
            q = logits.sub_(world.max_(logits.amax())).exp_()
            return q.mul_(len(q) * world.world_size / world.sum_(q.sum()))
        # log Q = scores / epsilon + f (a value for each prototype) + g (a value for each sample), but for
        # constants, which each normalisation forgets; Q = Diag(u) q Diag(v).
        f = -world.max_(promote(scores.amax(dim=0)) / epsilon)
        v = torch.ones_like(f)
        for iteration in range(iterations):
            if iteration % _AT_A_TIME == 0:
                f += v.log()
                q = promote(scores) / epsilon
                q += f
                top = q.amax(dim=1)
                q.sub_(top[:, None]).exp_()
                u = top.exp_() if iteration == 0 else 1.0 / q.sum(dim=1)  # at first g is zero
            else:
                u = 1.0 / torch.mv(q, v)
            v = 1.0 / world.sum_(torch.mv(q.T, u))
        # The last normalisation, over each sample's prototypes, makes the row a distribution.
        q.mul_(v)
        return q.div_(q.sum(dim=1, keepdim=True))


def harden(codes: torch.Tensor) -> torch.Tensor:
    """Round codes to one prototype a sample (the paper's inferior variant): (B, K) of zeros and ones."""
    return torch.zeros_like(codes).scatter_(1, codes.argmax(dim=1, keepdim=True), 1.0)
