"""NT-Xent with several positives: SimCLR's loss over all crops of all processes.

Source: SwAV appendix A.8, eq. 7. With two views it is SimCLR's own loss (Chen et al. 2020, eq. 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...engine.collectives import Collectives, WorldOfOne
from .sinkhorn import promote

__all__ = ["WholeBatch", "nt_xent", "survey"]

_ALONE = WorldOfOne()


class WholeBatch(NamedTuple):
    """What the loss of one block of rows must know of the whole batch; without gradients.

    A block is what is differentiated at a time: a process's rows, or those of one of its parts. All blocks
    have P = M * B rows, crop-major: row v * B + b is crop v of the block's image b.

    Args:
        rows: (N, D), the unit-length embeddings of all blocks.
        sums: (N, 2), for each row l, the logarithm of its negatives' summed exponentials, and log a - l
            (see ``_NTXent``).
        block: which of the blocks this one is.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    block: int


def nt_xent(
    embeddings: torch.Tensor,
    views: int,
    temperature: float,
    world: Collectives = _ALONE,
    whole: WholeBatch | None = None,
) -> torch.Tensor:
    """Eq. 7: the mean over rows i and their positives p of log(1 + sum over negatives n of e^(s_in - s_ip)).

    s_ij is the scalar product of rows i and j over the temperature. The positives of a row are the other
    crops of its image, its negatives all crops of all other images, those of other processes included; each
    positive has its own denominator, without the other positives.

    The gradient is the one of the sum of all blocks' losses with respect to this block's rows: averaged over
    processes (as DDP does) and over parts, it is the gradient of the mean over all rows, which the losses
    themselves average to.

    Args:
        embeddings: (P, D), this block's rows, crop-major and of unit length.
        views: M >= 2, crops of an image.
        temperature: > 0; the paper uses 0.1.
        world: the processes that share the batch, each with as many rows.
        whole: of a batch that is trained in parts: what ``survey`` found for this part.

    Returns:
        A scalar in nats: the mean over this block's rows. float64 for float64 embeddings and float32
        otherwise.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        loss: torch.Tensor = _NTXent.apply(promote(embeddings), views, temperature, world, whole)
        return loss


@torch.no_grad()
def survey(
    parts: Sequence[torch.Tensor], views: int, temperature: float, world: Collectives = _ALONE
) -> list[WholeBatch]:
    """For each part of a batch that is trained in parts, what its loss must know of the whole.

    Args:
        parts: the embeddings of this process's parts, (P, D) each, as for ``nt_xent``.
        views: M, crops of an image.
        temperature: of the loss.
        world: the processes that share the batch, each with as many parts.
    """
    with torch.autocast(parts[0].device.type, enabled=False):
        mine = [promote(part) for part in parts]
        rows = world.gather(torch.cat(mine))
        blocks = [world.rank * len(mine) + number for number in range(len(mine))]
        sums = [
            _compare(part, rows, block, views, temperature).sums
            for part, block in zip(mine, blocks, strict=True)
        ]
        of_all = world.gather(torch.cat(sums))
        return [WholeBatch(rows, of_all, block) for block in blocks]


class _Compared(NamedTuple):
    """One block against all rows: what the loss and its gradient are made of.

    Args:
        scores: (P, N), s_ij; minus infinity where j is a crop of i's own image.
        places: (P, M), the columns of these crops.
        crops: (P, M), s_ij of these crops.
        margins: (P, M), l_i - s_ij of these crops; minus infinity for the row itself.
        sums: (P, 2), as in ``WholeBatch``.
    """

    scores: torch.Tensor
    places: torch.Tensor
    crops: torch.Tensor
    margins: torch.Tensor
    sums: torch.Tensor


def _compare(own: torch.Tensor, rows: torch.Tensor, block: int, views: int, temperature: float) -> _Compared:
    count = len(own)
    batch = count // views
    number = torch.arange(count, device=own.device)
    first = block * count + number % batch
    places = first[:, None] + batch * torch.arange(views, device=own.device)
    scores = torch.mm(own, rows.T).div_(temperature)
    crops = scores.gather(1, places)
    scores.scatter_(1, places, -math.inf)
    negatives = scores.logsumexp(dim=1)
    margins = negatives[:, None] - crops
    margins[number, number // batch] = -math.inf
    log_pull = torch.sigmoid(margins).sum(dim=1).log()
    return _Compared(scores, places, crops, margins, torch.stack((negatives, log_pull - negatives), dim=1))


class _NTXent(torch.autograd.Function):
    # With l_i the log-sum-exp over row i's negatives and m_ip = l_i - s_ip, row i's loss is the sum over its
    # positives of log(1 + e^m_ip). Its derivatives are
    #   by s_ip of a positive:  G_ip = -sigmoid(m_ip)
    #   by s_in of a negative:  G_in = a_i e^(s_in - l_i),  a_i = sum over positives of sigmoid(m_ip)
    # and a row's gradient is the sum over j of (G_ij + G_ji) times row j, over the temperature. Since s is
    # symmetric, G_ji needs nothing of row j but l_j and a_j: with these two numbers of every row, each block
    # finds its whole gradient in its own P x N scores, and no gradient travels.

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        views: int,
        temperature: float,
        world: Collectives,
        whole: WholeBatch | None,
    ) -> torch.Tensor:
        rows, block = (world.gather(own), world.rank) if whole is None else (whole.rows, whole.block)
        mine = _compare(own, rows, block, views, temperature)
        sums = world.gather(mine.sums) if whole is None else whole.sums
        terms = len(own) * (views - 1)
        if ctx.needs_input_grad[0]:
            negatives, shifts = sums.unbind(dim=1)
            theirs = (negatives[mine.places] - mine.crops).masked_fill_(mine.margins.isinf(), -math.inf)
            pulls = torch.sigmoid(mine.margins) + torch.sigmoid(theirs)
            weights = (mine.scores + mine.sums[:, 1:]).exp_()
            weights += mine.scores.add_(shifts).exp_()
            weights.scatter_(1, mine.places, -pulls)
            ctx.save_for_backward(torch.mm(weights, rows).div_(temperature * terms))
        return torch.logaddexp(mine.margins, torch.zeros_like(mine.margins)).sum() / terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_loss, None, None, None, None
