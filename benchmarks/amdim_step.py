"""AMDIM's training step, ndf 64, n_rkhs 512, depth 3, two views of 64 pixels: as a run makes it, and plainly.

    python benchmarks/amdim_step.py [--batch 64] [--pairs 5] [--threads N]

Ours is the step of ``zoo pretrain --recipe amdim_ndf64_64px``: session, loop, Adam and all, from uint8 views, in the
precision that a run takes by itself here. Plain is the released formulation written by us: float32 in torch's
default memory format, modules called one after the other, a product and masks for each of the six tasks, Adam as
torch has it, from views that are normalised already. No classifiers are trained beside either. Each side lives in a
process of its own and steps when it is told to, in turn with the other. Both begin with the same weights and views.
The positions that 5to5 starts from are drawn by each side for itself, so the first losses are only nearly the same.

Peak memory: see ``sides.py``. Linux only.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
from sides import Step, arguments, compare, conclude, serve
from swav_step import make_views, normalized, our_step
from torch import nn

from zoo.heap import keep_freed_memory
from zoo.keyed import keyed_seed
from zoo.models.factory import create_trunk
from zoo.pretrain.resolve import resolve
from zoo.tensors import seeded

RECIPE = "amdim_ndf64_64px"
WARMUP = 3
TARGETS = (2.0, 0.8)  # times as fast as the plain step, and the share of its memory, at most
SIDE = 64
CLIP = 20.0
REGULARIZER = 0.05


class PlainNorm(nn.Module):
    def __init__(self, channels: int, used: bool) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x) if self.used else x


class PlainStem(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.conv(x))


class PlainResidual(nn.Module):
    def __init__(self, n_in: int, n_out: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, width, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 1, bias=False)
        self.bn1 = PlainNorm(n_out, False)
        self.pool = nn.AvgPool2d(width, stride) if width > 1 else None
        self.more = n_out - n_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.conv2(self.relu(self.bn1(self.conv1(x))))
        kept = x if self.pool is None else self.pool(x)
        if self.more:
            zeros = torch.zeros(len(x), self.more, *kept.shape[2:])
            kept = torch.cat([kept, zeros], dim=1)
        return kept + added


class PlainBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, width: int, stride: int, depth: int) -> None:
        super().__init__()
        layers = [PlainResidual(n_in, n_out, width, stride)]
        layers += [PlainResidual(n_out, n_out, 1, 1) for _ in range(depth - 1)]
        self.layer_list = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_list(x)  # type: ignore[no-any-return]


class PlainEmbedding(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 1, bias=False)
        self.bn_hid = PlainNorm(n_out, False)
        self.bn_out = PlainNorm(n_out, True)
        self.shortcut = nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.conv2(self.relu(self.bn_hid(self.conv1(x))))
        return self.bn_out(added + self.shortcut(x))  # type: ignore[no-any-return]


class PlainEncoder(nn.Module):
    """The encoder for 64 pixels; every layer's result is kept until the maps are chosen by their height."""

    def __init__(self, ndf: int, n_rkhs: int, depth: int) -> None:
        super().__init__()
        self.layer_list = nn.ModuleList(
            [
                PlainStem(3, ndf),
                PlainBlock(ndf, 2 * ndf, 4, 2, depth),
                PlainBlock(2 * ndf, 4 * ndf, 4, 2, depth),
                PlainBlock(4 * ndf, 8 * ndf, 2, 2, depth),
                PlainNorm(8 * ndf, False),
                PlainBlock(8 * ndf, 8 * ndf, 3, 1, depth),
                PlainBlock(8 * ndf, 8 * ndf, 3, 1, depth),
                PlainResidual(8 * ndf, n_rkhs, 3, 1),
                PlainNorm(n_rkhs, True),
            ]
        )
        self.rkhs_block_5 = PlainEmbedding(8 * ndf, n_rkhs)
        self.rkhs_block_7 = PlainEmbedding(8 * ndf, n_rkhs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        results = []
        for layer in self.layer_list:
            x = layer(x)
            results.append(x)
        last = {result.shape[2]: result for result in results}
        return last[1], self.rkhs_block_5(last[5]), self.rkhs_block_7(last[7])


def plain_task(
    source: torch.Tensor, target: torch.Tensor, mine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One task: (B, D) predicts (D, B * L); the cost, and the mean square of the scores."""
    size = len(source)
    scores = (torch.mm(source, target) / source.shape[1] ** 0.5).reshape(size, size, -1)
    square = (scores**2).mean()
    scores = CLIP * torch.tanh(scores / CLIP)
    positive_mask = mine.unsqueeze(2).expand(-1, -1, scores.shape[2])
    negative_mask = 1.0 - positive_mask
    positives = (positive_mask * scores).sum(dim=1)
    negatives = ((negative_mask * scores) - CLIP * positive_mask).reshape(size, -1)
    largest = negatives.max(dim=1, keepdim=True)[0]
    sums = (negative_mask.reshape(size, -1) * torch.exp(negatives - largest)).sum(dim=1, keepdim=True)
    whole = torch.log(torch.exp(positives - largest) + sums)
    return -(positives - largest - whole).mean(), square


def plain_loss(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The three costs in both directions and the regulariser, task by task."""
    size, dim = first[0].shape[:2]
    mine = torch.eye(size)
    places = torch.eye(25, dtype=torch.bool).view(25, 1, 5, 5)
    total = torch.zeros(())
    for source, target in ((first, second), (second, first)):
        one = source[0].reshape(size, dim)
        five = torch.masked_select(source[1], places[torch.randint(0, 25, (size,))]).reshape(size, dim)
        flat = {
            side: maps.permute(1, 0, 2, 3).reshape(dim, -1) for side, maps in ((5, target[1]), (7, target[2]))
        }
        for antecedent, side in ((one, 5), (one, 7), (five, 5)):
            cost, square = plain_task(antecedent, flat[side], mine)
            total = total + 0.5 * (cost + REGULARIZER * square)
    return total


def plain_step(views: torch.Tensor) -> Step:
    """A function that trains on one batch of normalised views, crop-major, and gives the loss."""
    recipe = resolve(RECIPE).recipe
    options, adam = recipe.trunk.options, recipe.optimizer
    network = PlainEncoder(options["ndf"], options["n_rkhs"], options["n_depth"])
    with seeded(keyed_seed(0, "init")):  # as the run's
        network.load_state_dict(create_trunk("amdim", options=options).state_dict())
    network.train()
    optimizer = torch.optim.Adam(
        network.parameters(), lr=adam.lr, betas=adam.betas, weight_decay=adam.weight_decay
    )
    first, second = (view.contiguous() for view in views.chunk(2))

    def step() -> float:
        loss = plain_loss(network(first), network(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _build(side: str, batch: int, about: dict[str, Any]) -> Step:
    views = make_views(batch, ((SIDE, 2),))
    if side == "plain":
        torch.manual_seed(0)
        return plain_step(normalized(views, RECIPE)[0])
    keep_freed_memory()  # as a run on a CPU does
    step, session = our_step(batch, views=views, recipe=RECIPE)
    about["precision"] = session.precision.name
    return step


def main() -> int:
    options = arguments(__doc__, batch=64, pairs=5)
    if options.serve:
        serve(partial(_build, options.serve, options.batch), WARMUP)
        return 0
    alike = partial(math.isclose, rel_tol=0.02)
    found, _ = compare(__file__, options.batch, options.threads, options.pairs, alike)
    settings = {"recipe": RECIPE, "batch": options.batch, "threads": options.threads}
    return conclude("amdim_step", found, settings, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
