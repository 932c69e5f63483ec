"""The region proposal network with detectron2's labels, losses and selection.

Source: detectron2 ``modeling/proposal_generator/{rpn,proposal_utils}.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import batched_nms

from .anchors import cell_anchors, grid_anchors
from .boxes import RPN_WEIGHTS, clip_boxes, decode, encode, has_area, match, sample_labels
from .images import Images, Target

__all__ = ["ProposalNetwork", "Proposals", "RpnSettings", "select_proposals"]

_NMS = 0.7
_LOW, _HIGH = 0.3, 0.7
_POSITIVE = 0.5


@dataclass(frozen=True)
class RpnSettings:
    """How many boxes are looked at: ``before`` and ``after`` suppression in (training, test), and sampled."""

    before: tuple[int, int] = (12000, 6000)
    after: tuple[int, int] = (2000, 1000)
    sampled: int = 256
    positive: float = _POSITIVE


@dataclass
class Proposals:
    """Boxes (N, 4) of one image without gradient, and their logits (N,), the best first."""

    boxes: torch.Tensor
    logits: torch.Tensor


class ProposalNetwork(nn.Module):
    """Scores anchors and moves them.

    Args:
        channels: of each map.
        sizes: the anchors' sizes on each map.
        strides: pixels of the image between two positions of each map.
        settings: how many boxes are looked at.
    """

    def __init__(
        self, channels: int, sizes: Sequence[Sequence[float]], strides: Sequence[int], settings: RpnSettings
    ) -> None:
        super().__init__()
        self.settings = settings
        self.strides = tuple(strides)
        self.cells = [cell_anchors(level) for level in sizes]
        anchors = len(self.cells[0])
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness_logits = nn.Conv2d(channels, anchors, 1)
        self.anchor_deltas = nn.Conv2d(channels, anchors * 4, 1)
        for layer in (self.conv, self.objectness_logits, self.anchor_deltas):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def scores(self, maps: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits (N, positions x A) and offsets (N, positions x A, 4) of each map, float32 at least."""
        logits, deltas = [], []
        for level in maps:
            hidden = F.relu(self.conv(level))
            logits.append(_full(self.objectness_logits(hidden)).permute(0, 2, 3, 1).flatten(1))
            moves = _full(self.anchor_deltas(hidden)).unflatten(1, (-1, 4))
            deltas.append(moves.permute(0, 3, 4, 1, 2).flatten(1, 3))
        return logits, deltas

    def anchors(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The anchors of each map, in the order of its scores."""
        return [
            grid_anchors(cell.to(level.device), (level.shape[2], level.shape[3]), stride)
            for cell, level, stride in zip(self.cells, maps, self.strides, strict=True)
        ]

    def propose(
        self,
        anchors: Sequence[torch.Tensor],
        logits: Sequence[torch.Tensor],
        deltas: Sequence[torch.Tensor],
        sizes: Sequence[tuple[int, int]],
    ) -> list[Proposals]:
        """The proposals of each image; no gradient flows through them."""
        when = 0 if self.training else 1
        with torch.no_grad():
            boxes = [
                decode(moves.flatten(0, 1), level.repeat(len(moves), 1), RPN_WEIGHTS).view(*moves.shape)
                for level, moves in zip(anchors, deltas, strict=True)
            ]
            before, after = self.settings.before[when], self.settings.after[when]
            return select_proposals(boxes, logits, sizes, before, after, self.training)

    def losses(
        self,
        anchors: Sequence[torch.Tensor],
        logits: Sequence[torch.Tensor],
        deltas: Sequence[torch.Tensor],
        targets: Sequence[Target],
    ) -> dict[str, torch.Tensor]:
        """``loss_rpn_cls`` and ``loss_rpn_loc``: sums over the sampled anchors by what should be sampled."""
        every = torch.cat(list(anchors))
        flat_logits, flat_deltas = torch.cat(list(logits), dim=1), torch.cat(list(deltas), dim=1)
        objectness, location = flat_logits.new_zeros(()), flat_logits.new_zeros(())
        for row, target in enumerate(targets):
            index, positive, negative = self.label(every, target)
            chosen = torch.cat((positive, negative))
            wanted = torch.zeros(len(chosen), device=every.device, dtype=flat_logits.dtype)
            wanted[: len(positive)] = 1.0
            objectness = objectness + F.binary_cross_entropy_with_logits(
                flat_logits[row, chosen], wanted, reduction="sum"
            )
            if len(positive):
                moves = encode(every[positive], target.boxes[index[positive]], RPN_WEIGHTS)
                location = location + (flat_deltas[row, positive] - moves.to(flat_deltas)).abs().sum()
        share = self.settings.sampled * len(targets)
        return {"loss_rpn_cls": objectness / share, "loss_rpn_loc": location / share}

    @torch.no_grad()
    def label(self, anchors: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The object of each anchor, and the sampled object and background anchors."""
        index, labels = match(target.boxes.to(anchors.dtype), anchors, _LOW, _HIGH, keep_best=True)
        positive, negative = (torch.nonzero(labels == value).flatten() for value in (1, 0))
        settings = self.settings
        chosen = sample_labels(positive, negative, settings.sampled, settings.positive, target.generator)
        return index, *chosen

    def forward(
        self, images: Images, maps: Sequence[torch.Tensor], targets: Sequence[Target] | None = None
    ) -> tuple[list[Proposals], dict[str, torch.Tensor]]:
        """Proposals, and losses where there are targets."""
        logits, deltas = self.scores(maps)
        anchors = self.anchors(maps)
        losses = {} if targets is None else self.losses(anchors, logits, deltas, targets)
        return self.propose(anchors, logits, deltas, images.sizes), losses


def select_proposals(
    boxes: Sequence[torch.Tensor],
    logits: Sequence[torch.Tensor],
    sizes: Sequence[tuple[int, int]],
    before: int,
    after: int,
    training: bool,
) -> list[Proposals]:
    """The best boxes of each image: ``before`` of each map, cut at the image's edges, suppressed map by map.

    Args:
        boxes: for each map, (N, K, 4).
        logits: for each map, (N, K).
        sizes: (height, width) of each image.
        before: how many of each map go into the suppression.
        after: how many of all maps come out of it.
        training: a number that is not finite is an error then; at test time such boxes are dropped.

    Raises:
        FloatingPointError: training has blown up.
    """
    best_boxes, best_logits, levels = [], [], []
    for level, (moved, scores) in enumerate(zip(boxes, logits, strict=True)):
        found, order = scores.topk(min(before, scores.shape[1]), dim=1)
        best_logits.append(found)
        best_boxes.append(moved.gather(1, order.unsqueeze(2).expand(-1, -1, 4)))
        levels.append(torch.full((found.shape[1],), level, device=scores.device))
    every, scores, level_of = torch.cat(best_boxes, 1), torch.cat(best_logits, 1), torch.cat(levels)
    found_all = []
    for row, size in enumerate(sizes):
        finite = torch.isfinite(every[row]).all(dim=1) & torch.isfinite(scores[row])
        if training and not finite.all():
            raise FloatingPointError("a proposal is not finite")
        mine = clip_boxes(every[row], size)
        kept = torch.nonzero(finite & has_area(mine)).flatten()
        mine, its = mine[kept], scores[row, kept]
        chosen = batched_nms(mine.float(), its.float(), level_of[kept], _NMS)[:after]
        found_all.append(Proposals(mine[chosen], its[chosen]))
    return found_all


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
