"""Linear classifiers on features, several at once.

Source: SwAV's appendix A.3: weights N(0, 0.01), bias 0, SGD with momentum 0.9, cosine to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from ..keyed import keyed_key, keyed_permutation, keyed_seed

__all__ = ["Batches", "linear_accuracy", "shuffled", "train_linear"]

# (epoch) -> batches of features (N, D) and labels (N,)
Batches = Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]

_STEPS = 300
_BATCH = 256
_RATE = 0.1
_DECAY = 1e-6


def shuffled(bank: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int) -> tuple[Batches, int]:
    """Batches of features (N, D) that are there already, in a keyed order, and how many an epoch has."""
    size = min(batch_size, len(bank))

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.from_numpy(keyed_permutation(keyed_key(seed, "linear", epoch), len(bank)))
        for rows in order[: len(bank) // size * size].split(size):
            yield bank[rows], labels[rows]

    return batches, len(bank) // size


def train_linear(
    batches: Batches,
    steps: int,
    features: int,
    classes: int,
    pairs: Sequence[tuple[float, float]],
    epochs: int,
    seed: int,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[float]]:
    """Train a classifier for each pair, all at once, on the CPU; no generator but its own is drawn from.

    Args:
        batches: of features and labels, for each epoch.
        steps: of an epoch.
        features: D.
        classes: C.
        pairs: (learning rate, weight decay) of each of the H classifiers.
        epochs: passes.
        seed: of the initial weights.

    Returns:
        (N, D) -> logits (H, N, C), and each classifier's loss over the last epoch.
    """
    generator = torch.Generator().manual_seed(keyed_seed(seed, "classifier"))
    heads = len(pairs)
    # One matrix for all classifiers: a single product a step, whatever their number.
    weight = torch.randn(features, 1, classes, generator=generator).mul_(0.01).repeat(1, heads, 1).flatten(1)
    bias = torch.zeros(heads * classes)
    rates = torch.tensor([lr for lr, _ in pairs]).repeat_interleave(classes)
    decays = torch.tensor([decay for _, decay in pairs]).repeat_interleave(classes)
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight + bias).view(len(x), heads, classes).transpose(0, 1)

    losses = torch.zeros(heads)
    for epoch in range(epochs):
        cosine = 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))
        losses = torch.zeros(heads)
        for x, y in batches(epoch):
            log_p = F.log_softmax(logits_of(x), dim=2)
            rows = torch.arange(len(y))
            losses -= log_p[:, rows, y].mean(dim=1) / steps
            slope = log_p.exp()
            slope[:, rows, y] -= 1.0
            slope = slope.transpose(0, 1).reshape(len(y), heads * classes) / len(y)
            for value, gradient, momentum in zip(
                (weight, bias), (x.T @ slope, slope.sum(dim=0)), momenta, strict=True
            ):
                momentum.mul_(0.9).add_(gradient + decays * value)
                value.sub_(rates * cosine * momentum)
    return logits_of, losses.tolist()


@torch.no_grad()
def linear_accuracy(
    queries: torch.Tensor,
    query_labels: torch.Tensor,
    bank: torch.Tensor,
    bank_labels: torch.Tensor,
    seed: int = 0,
) -> float:
    """Share of queries, 0..1, that a classifier trained on the bank is right about: quick, for watching a run.

    About 300 steps at one learning rate, on features standardised by the bank; ``zoo transfer linear`` chooses
    the rate and trains for longer.

    Args:
        queries: (Q, D) float32.
        query_labels: (Q,) int64.
        bank: (N, D) float32.
        bank_labels: (N,) int64, from 0.
        seed: of the initial weights and the order.
    """
    center, spread = bank.mean(0), bank.std(0, correction=0).clamp_min(1e-6)
    batches, steps = shuffled((bank - center) / spread, bank_labels, _BATCH, seed)
    classes = int(max(int(bank_labels.max()), int(query_labels.max()))) + 1
    epochs = max(1, round(_STEPS / steps))
    logits_of, _ = train_linear(batches, steps, bank.shape[1], classes, [(_RATE, _DECAY)], epochs, seed)
    found = logits_of((queries - center) / spread)[0].argmax(dim=1)
    return float((found == query_labels).double().mean())
