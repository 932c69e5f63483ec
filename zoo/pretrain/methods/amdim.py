"""AMDIM and Local DIM. Sources: Bachman et al. 2019 and its released code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...errors import InputError
from ...keyed import keyed_key
from ...models.amdim import AMDIMEncoder, check_views
from ...models.heads import feature_classifier
from ...models.recompute import statistics_kept
from ..losses.amdim import Maps, Mixing, amdim_costs, classifier_cost
from ..losses.sinkhorn import promote
from .amdim_config import AMDIMConfig
from .base import Method, Seen
from .config_base import RunShape

__all__ = ["AMDIM", "MixtureFeatures"]

_PLACES = 25  # of a map of 5 x 5


class _Part(NamedTuple):
    """What a part of a batch must know of the whole.

    Args:
        costs: of the whole batch, by name.
        gradients: of the whole batch's loss by this part's maps, for each view; None for a map that is in no
            cost.
        parts: of the batch.
        labelled: images with a label in the whole batch, over parts and processes.
    """

    costs: dict[str, torch.Tensor]
    gradients: Sequence[Sequence[torch.Tensor | None]]
    parts: int
    labelled: torch.Tensor | None


class MixtureFeatures(nn.Module):
    """Features (B, D) -> K mixture features (B, K, D): an MLP of one hidden layer adds to each (section 4.7)."""

    def __init__(self, dim: int, count: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        # Fresh ones differ: what is alike in all respects would stay alike.
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, count * dim)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features[:, None] + self.layers(features).unflatten(1, (self.count, -1))


class AMDIM(Method):
    """An AMDIM encoder, whose maps of one view must predict those of the other; nothing else learns with it.

    The negatives are the other images of all processes. The position that an image's 5 x 5 map predicts from is
    drawn for the step and the image alone. Each view goes through the encoder by itself, as in the reference:
    BatchNorm sees one view of the batch.

    With ``classifiers`` the reference's two evaluators are trained on the features of all views, without a
    gradient for the encoder: ``classifier`` (linear) and ``mlp_classifier``. They take no part in the loss that
    is reported. The MLP's dropout draws from each process's own stream, so its numbers, but not the encoder's,
    depend on the number of processes.

    Args:
        trunk: an ``AMDIMEncoder``.
        config: the recipe's ``method`` section.
        shape: the run's sizes.
        world: the processes that share the batch.

    Raises:
        InputError: another trunk, or one for images of another size.
    """

    whole_trunk = True  # what serves no cost doesn't learn

    def __init__(self, trunk: Any, config: AMDIMConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        _check_trunk(trunk, shape)
        self.config = config
        self.world = world
        self.trunk: AMDIMEncoder = trunk
        for side, embedding in (("5", trunk.rkhs_block_5), ("7", trunk.rkhs_block_7)):
            if not any(cost.endswith(side) for cost in config.costs):
                embedding.requires_grad_(False)
        dim = trunk.num_features
        if config.mixtures:
            self.mixtures = MixtureFeatures(dim, config.mixtures, config.mixture_hidden or dim)
        if config.classifiers:
            self.classifier = nn.Linear(dim, len(shape.classes))
            self.mlp_classifier = feature_classifier(dim, len(shape.classes), hidden=1024, dropout=0.2)
        self._outcomes = _outcomes(config, shape.batch_size)
        self._step = 0

    def before_step(self, step: int, epoch: int) -> None:
        self._step = step

    def first_pass(self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]) -> list[_Part]:
        """The whole batch's costs, and their gradients by the maps of each part.

        A part then computes its maps once more, with what leads to them. Only BatchNorm sees the parts.
        """
        with statistics_kept(self):
            by_part = [self._encoded(views(), part.size)[1] for views, part in parts]
        whole = [
            Maps(
                *(torch.cat([promote(part) for part in of_parts]) for of_parts in zip(*of_view, strict=True))
            )
            for of_view in zip(*by_part, strict=True)
        ]
        leaves = [tensor.requires_grad_() for maps in whole for tensor in maps]
        with torch.enable_grad():
            costs = self._costs(whole, torch.cat([part.ids for _, part in parts]))
            loss = torch.stack(list(costs.values())).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        shares = [[None] * len(parts) if g is None else g.chunk(len(parts)) for g in gradients]
        costs = {name: cost.detach() for name, cost in costs.items()}
        labels = torch.cat([part.labels for _, part in parts]).to(leaves[0].device)
        labelled = self._labelled(labels) if self.config.classifiers else None
        width = len(Maps._fields)
        found = []
        for number in range(len(parts)):
            mine = [share[number] for share in shares]
            by_view = [mine[first : first + width] for first in range(0, len(mine), width)]
            found.append(_Part(costs, by_view, len(parts), labelled))
        return found

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: _Part | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        features, maps = self._encoded(views, batch.size)
        if self.watched:
            rows = promote(torch.cat(features).detach())
            self.seen = Seen(self._outcomes, F.normalize(rows, dim=1, p=2))
        mark("loss")
        costs = self._costs(maps, batch.ids) if given is None else given.costs
        loss = torch.stack(list(costs.values())).sum()
        if given is not None:
            share = _linear(maps, given.gradients)
            loss = loss + given.parts * (share - share.detach())
        figures = {name: cost.detach() for name, cost in costs.items()}
        if self.config.classifiers:
            evaluated, theirs = self._evaluate(features, batch.labels, given)
            loss = loss + (evaluated - evaluated.detach())
            figures |= theirs
        together = self.world.sum_(torch.stack(list(figures.values()))) / self.world.world_size
        return loss, dict(zip(figures, together.tolist(), strict=True))

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """(2, B), int64: the position of the 5 x 5 map of either view, row by row, that 5to5 starts from.

        It depends on the step and the image's id alone: not on processes, parts or interruptions.
        """
        drawn = [keyed_key(0, "amdim place", self._step, image) for image in ids.tolist()]
        return torch.tensor([[key % _PLACES for key in drawn], [key // _PLACES % _PLACES for key in drawn]])

    def _encoded(self, views: list[torch.Tensor], size: int) -> tuple[list[torch.Tensor], list[Maps]]:
        """The features (B, D) of each view, and its maps; each view is a pass of its own."""
        features, maps = [], []
        for images in (image for group in views for image in group.split(size)):
            one, five, seven = self.trunk.maps(images)
            features.append(one.flatten(1))
            antecedents = self.mixtures(features[-1]) if self.config.mixtures else features[-1][:, None]
            maps.append(Maps(antecedents, five, seven))
        return features, maps

    def _costs(self, maps: list[Maps], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        config, device = self.config, maps[0].one.device
        mixing = None
        if config.mixtures:
            temperature = config.mixture_temperature or 1.0 / config.mixture_entropy
            mixing = Mixing(config.mixture_entropy, temperature)
        return amdim_costs(
            maps,
            self.places(ids).to(device, non_blocking=True),
            config.costs,
            clip=config.clip,
            regularizer=config.regularizer,
            mixing=mixing,
            world=self.world,
        )

    def _labelled(self, labels: torch.Tensor) -> torch.Tensor:
        """Images with a label, over all processes."""
        return self.world.sum_((labels >= 0).sum())

    def _evaluate(
        self, features: list[torch.Tensor], labels: torch.Tensor, given: _Part | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Both classifiers' cost, over all labelled images of the batch, and this part's figures."""
        rows = torch.cat(features).detach()
        labels = labels.to(rows.device, non_blocking=True)
        labelled = self._labelled(labels) if given is None else given.labelled
        assert labelled is not None
        shares = self.world.world_size * (1 if given is None else given.parts)
        count = labelled.clamp_min(1) * len(features) / shares
        every = labels.repeat(len(features))
        costs, figures = [], {}
        for name, classifier in (("linear", self.classifier), ("mlp", self.mlp_classifier)):
            logits = classifier(rows)
            costs.append(classifier_cost(logits, every, count))
            hits = (logits.detach().argmax(dim=1) == every).sum()
            figures[f"{name}_loss"] = costs[-1].detach()
            figures[f"{name}_accuracy"] = hits / (every >= 0).sum().clamp_min(1)
        return torch.stack(costs).sum(), figures


def _outcomes(config: AMDIMConfig, batch_size: int) -> float:
    """The number whose logarithm the costs sum up to where all scores are alike.

    A cost is then the logarithm of the positive and its negatives. Of K mixture features each is then as
    responsible as any other, which gains their entropy.
    """
    found = 1.0
    for cost in config.costs:
        found *= 1 + (batch_size - 1) * (_PLACES if cost.endswith("5") else 49)
        if config.mixtures and cost.startswith("1"):
            found /= config.mixtures**config.mixture_entropy
    return max(1.0, found)  # less says nothing


def _linear(maps: list[Maps], gradients: Sequence[Sequence[torch.Tensor | None]]) -> torch.Tensor:
    """The function of the maps whose gradient is given."""
    terms = [
        (promote(tensor) * gradient).sum()
        for of_view, theirs in zip(maps, gradients, strict=True)
        for tensor, gradient in zip(of_view, theirs, strict=True)
        if gradient is not None
    ]
    return torch.stack(terms).sum()


def _check_trunk(trunk: Any, shape: RunShape) -> None:
    if not isinstance(trunk, AMDIMEncoder):
        raise InputError(
            "AMDIM compares a network's embedded maps of 1 x 1, 5 x 5 and 7 x 7 positions, which this one doesn't "
            "have.",
            where="trunk.arch",
            fix="use trunk.arch amdim, with trunk.options for its widths",
        )
    check_views(trunk, shape.sizes)
