"""A grid of linear heads at once, against the same heads one after the other.

    python benchmarks/linear_heads.py [--pairs 3] [--images 20000] [--epochs 20]

48 heads (12 learning rates x 4 weight decays), 10 classes, 2,048 features of 20,000 images that are kept, batch
256. The peer is what a user would write: for each head an ``nn.Linear``, ``torch.optim.SGD`` and a cosine schedule
over the same features. The second case is this toolkit's own code, a head at a time. Before anything is timed, two
epochs of both sides have to give the same weights.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # read when torch is first imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
from runner import Case, measure
from torch import nn
from torch.nn import functional as F

from zoo.probe.linear import FINAL, Head, LinearHeads, shuffled, train_heads

TARGET = 6.0
CLASSES, WIDTH, BATCH, SEED = 10, 2048, 256, 0
HEADS = [Head(0.003 * 1.5**n, decay) for n in range(12) for decay in (0.0, 1e-6, 1e-5, 1e-4)]


def _cosine(epochs: int) -> list[float]:
    return [0.5 * (1.0 + math.cos(math.pi * epoch / epochs)) for epoch in range(epochs)]


def _together(bank: torch.Tensor, labels: torch.Tensor, heads: list[Head], epochs: int) -> LinearHeads:
    found = LinearHeads({FINAL: WIDTH}, CLASSES, heads, SEED)
    train_heads(found, shuffled(bank, labels, BATCH, SEED)[0], _cosine(epochs))
    return found


def _plain(bank: torch.Tensor, labels: torch.Tensor, head: Head, epochs: int) -> nn.Linear:
    layer = nn.Linear(WIDTH, CLASSES)
    weight, bias = LinearHeads({FINAL: WIDTH}, CLASSES, [head], SEED).parameters(0)
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    optimizer = torch.optim.SGD(layer.parameters(), head.lr, momentum=0.9, weight_decay=head.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    batches, _ = shuffled(bank, labels, BATCH, SEED)
    for epoch in range(epochs):
        for x, y in batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(layer(x), y).backward()
            optimizer.step()
        schedule.step()
    return layer


def _agree(bank: torch.Tensor, labels: torch.Tensor) -> float:
    """The largest difference of weights after two epochs, of the largest weight."""
    together = _together(bank, labels, HEADS, 2)
    worst = 0.0
    for number in (0, 21, 47):
        layer = _plain(bank, labels, HEADS[number], 2)
        weight, bias = together.parameters(number)
        for got, want in ((weight, layer.weight.detach()), (bias, layer.bias.detach())):
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(0, CLASSES, (options.images,), generator=generator)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    bank = torch.randn(options.images, WIDTH, generator=generator).add_(centers[labels], alpha=0.1)
    worst = _agree(bank, labels)
    print(f"weights after two epochs differ by {worst:.2g} of the largest at most")
    if not worst < 1e-3:
        return 1
    epochs = options.epochs

    def ours() -> object:
        return _together(bank, labels, HEADS, epochs)

    def plain() -> object:
        return [_plain(bank, labels, head, epochs) for head in HEADS]

    def single() -> object:
        return [_together(bank, labels, [head], epochs) for head in HEADS]

    cases = [
        Case("48 heads at once / plain torch, one by one", ours, plain, TARGET, options.pairs, 0),
        Case("48 heads at once / our own, one by one", ours, single, None, options.pairs, 0),
    ]
    settings = {"images": options.images, "width": WIDTH, "heads": len(HEADS), "epochs": epochs}
    more = {**settings, "weights_differ_by": worst, "threads": torch.get_num_threads()}
    return 0 if measure("linear_heads", cases, more) else 1


if __name__ == "__main__":
    sys.exit(main())
