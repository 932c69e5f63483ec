"""Linear classifiers on features, any number of them at once, by SGD with momentum 0.9.

Each is trained as ``torch.optim.SGD`` would train it alone: mean cross-entropy, weight decay on the bias too.
Weights start from N(0, 0.01), biases from 0 (SwAV's appendix A.3, MoCo's ``main_lincls.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..keyed import keyed_key, keyed_permutation, keyed_seed
from .scores import true_ranks

__all__ = [
    "FINAL",
    "Batches",
    "Head",
    "LinearHeads",
    "diverged",
    "linear_accuracy",
    "shuffled",
    "train_heads",
]

# (epoch) -> batches of features (N, D) and labels (N,)
Batches = Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]

FINAL = "final"
"""What the trunk's own output is called among the stages."""
_MOMENTUM = 0.9
_NORM_MOMENTUM, _NORM_EPS = 0.1, 1e-5  # torch's BatchNorm
_ROWS = 4096  # judged at once
_STEPS = 300
_BATCH = 256
_RATE = 0.1
_DECAY = 1e-6


@dataclass(frozen=True)
class Head:
    """A classifier: how fast it learns, and what it sees.

    Args:
        lr: learning rate.
        weight_decay: of weights and bias.
        stage: whose features it sees.
        norm: ``none``: the features as they are; ``standard``: each shifted and scaled by the training set's
            mean and deviation; ``batch``: a BatchNorm without weights of its own.
    """

    lr: float
    weight_decay: float
    stage: str = FINAL
    norm: str = "none"


class _Group:
    """Heads that see the same numbers: one matrix for all of them, a single product whatever their number.

    Its columns are class by class, of each class all heads: that makes the softmax fast.
    """

    def __init__(self, columns: slice, norm: str, heads: Sequence[Head], first: torch.Tensor) -> None:
        classes = first.shape[1]
        self.columns = columns
        self.count = len(heads)
        self.learns_norm = norm == "batch"
        self.weight = first.repeat_interleave(self.count, dim=1)
        self.bias = torch.zeros(self.weight.shape[1], dtype=first.dtype)
        self.rates = self._spread([head.lr for head in heads], classes)
        decays = [head.lr * head.weight_decay for head in heads]
        self.decays = self._spread(decays, classes) if any(decays) else None
        # SGD's momenta times the learning rate: the update then needs no other product.
        self.momenta = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        # What is subtracted and divided by outside training; the spread's square is what BatchNorm averages.
        self.center = first.new_zeros(len(first)) if norm != "none" else None
        self.variance = first.new_ones(len(first))

    def _spread(self, values: Sequence[float], classes: int) -> torch.Tensor:
        return torch.tensor(values, dtype=self.weight.dtype).repeat(classes)

    def seen(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        x = x[:, self.columns]
        if self.center is None:
            return x
        center, variance = self.center, self.variance
        if training and self.learns_norm:
            variance, center = torch.var_mean(x, dim=0, correction=0)
            self.center.lerp_(center, _NORM_MOMENTUM)
            self.variance.lerp_(variance * (len(x) / max(1, len(x) - 1)), _NORM_MOMENTUM)
        scale = (variance + _NORM_EPS).rsqrt() if self.learns_norm else variance.rsqrt()
        return torch.addcmul(-center * scale, x, scale)

    def product(self, seen: torch.Tensor) -> torch.Tensor:
        """(N, classes, heads)"""
        return torch.addmm(self.bias, seen, self.weight).view(len(seen), -1, self.count)

    def step(self, x: torch.Tensor, labels: torch.Tensor, factor: float) -> torch.Tensor:
        seen = self.seen(x, training=True)
        slope = F.log_softmax(self.product(seen), dim=1)
        truth = labels.view(-1, 1, 1).expand(-1, 1, self.count)
        losses = -slope.gather(1, truth).mean(dim=(0, 1))
        # A probability below e^-60 changes nothing, but products with denormal numbers are slow.
        slope.clamp_(min=-60.0).exp_().scatter_add_(
            1, truth, slope.new_full((1, 1, 1), -1.0).expand(truth.shape)
        )
        slope = slope.flatten(1).mul_(self.rates / len(labels))
        for value, momentum in zip((self.weight, self.bias), self.momenta, strict=True):
            if value.ndim == 2:
                momentum.addmm_(seen.T, slope, beta=_MOMENTUM)
            else:
                momentum.mul_(_MOMENTUM).add_(slope.sum(dim=0))
            if self.decays is not None:
                momentum.addcmul_(value, self.decays)
            value.sub_(momentum, alpha=factor)
        return losses


class LinearHeads:
    """H classifiers on the same features, on the CPU. No generator but its own is drawn from.

    Args:
        widths: features of each stage, in the order of the columns.
        classes: C.
        heads: what to train; all start from the same weights.
        seed: of these.
        dtype: of weights and features.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        classes: int,
        heads: Sequence[Head],
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heads = tuple(heads)
        self.classes = classes
        columns: dict[str, slice] = {}
        for stage, width in widths.items():
            first = sum(widths[other] for other in columns)
            columns[stage] = slice(first, first + width)
        kinds: dict[tuple[str, str], list[int]] = {}
        for number, head in enumerate(self.heads):
            kinds.setdefault((head.stage, head.norm), []).append(number)
        self._groups: list[tuple[list[int], _Group]] = []
        for (stage, norm), members in kinds.items():
            generator = torch.Generator().manual_seed(keyed_seed(seed, "classifier"))
            first_weight = torch.randn(widths[stage], classes, generator=generator).mul_(0.01).to(dtype)
            group = _Group(columns[stage], norm, [self.heads[n] for n in members], first_weight)
            self._groups.append((members, group))

    def start_from(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Let all heads start from a weight (C, D) and a bias (C,)."""
        for _, group in self._groups:
            group.weight.copy_(weight.T.repeat_interleave(group.count, dim=1))
            group.bias.copy_(bias.repeat_interleave(group.count))

    def standardize(self, bank: torch.Tensor) -> None:
        """Tell the heads that see standardised features what to standardise by: (N, D) of the training set."""
        for _, group in self._groups:
            if group.center is not None and not group.learns_norm:
                mine = bank[:, group.columns]
                group.center = mine.mean(dim=0)
                group.variance = mine.var(dim=0, correction=0).clamp_min(1e-12)

    def step(self, x: torch.Tensor, labels: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """One update with ``factor`` times each learning rate; the losses before it, (H,)."""
        losses = torch.empty(len(self.heads), dtype=x.dtype)
        for members, group in self._groups:
            losses[members] = group.step(x, labels, factor)
        return losses

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(N, D) -> (H, N, C)"""
        out = x.new_empty(len(self.heads), len(x), self.classes)
        for members, group in self._groups:
            out[members] = group.product(group.seen(x, training=False)).permute(2, 0, 1)
        return out

    def ranks(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Where each head ranks the true class of features (N, D): int64 (H, N), see ``true_ranks``."""
        pairs = zip(x.split(_ROWS), labels.split(_ROWS), strict=True)
        return torch.cat([true_ranks(self.logits(part), mine) for part, mine in pairs], dim=1)

    def parameters(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (C, D) and bias (C,) of one head."""
        for members, group in self._groups:
            if number in members:
                mine = slice(members.index(number), None, group.count)
                return group.weight[:, mine].T, group.bias[mine]
        raise IndexError(number)


def shuffled(
    bank: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
    seed: int,
    rows: torch.Tensor | None = None,
) -> tuple[Batches, int]:
    """Batches of features that are there already, in a keyed order, and how many an epoch has.

    Args:
        bank: (N, D), or (V, N, D) of V views, which take turns from epoch to epoch.
        labels: (N,) int64.
        batch_size: the last short batch is left out.
        seed: of the order.
        rows: which images; all by default.
    """
    views = bank if bank.ndim == 3 else bank[None]
    among = torch.arange(len(labels)) if rows is None else rows
    size = min(batch_size, len(among))

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.from_numpy(keyed_permutation(keyed_key(seed, "linear", epoch), len(among)))
        view = views[epoch % len(views)]
        for chosen in among[order[: len(among) // size * size]].split(size):
            yield view[chosen], labels[chosen]

    return batches, len(among) // size


@torch.no_grad()
def train_heads(
    heads: LinearHeads,
    batches: Batches,
    factors: Sequence[float],
    after_epoch: Callable[[int], None] | None = None,
    limit: int = 0,
) -> torch.Tensor:
    """Train all heads at once.

    Args:
        heads: the classifiers.
        batches: of features and labels, for each epoch.
        factors: what the learning rates are multiplied by in each epoch.
        after_epoch: called with the epoch's number.
        limit: stop after so many steps; 0 is no limit.

    Returns:
        Each head's mean loss over each epoch, (epochs, H).
    """
    losses, done = [], 0
    for epoch, factor in enumerate(factors):
        total, steps = torch.zeros(len(heads.heads)), 0
        for x, labels in batches(epoch):
            total = total + heads.step(x, labels, factor)
            steps, done = steps + 1, done + 1
            if done == limit:
                break
        losses.append(total / steps)
        if after_epoch is not None:
            after_epoch(epoch)
        if done == limit:
            break
    return torch.stack(losses)


def diverged(losses: torch.Tensor, classes: int) -> torch.Tensor:
    """Which heads' training went wrong, of their mean losses over each epoch (epochs, H): bool (H,).

    Guessing costs log(C). A loss that ends above twice that, or was above ten times that over a whole
    epoch, comes from steps that are too large for the data, even where a set of a few images is learnt by
    heart afterwards.
    """
    guessing = math.log(max(2, classes))
    return ~((losses[-1] <= 2 * guessing) & (losses <= 10 * guessing).all(dim=0))


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
    batches, steps = shuffled(bank, bank_labels, _BATCH, seed)
    classes = int(max(int(bank_labels.max()), int(query_labels.max()))) + 1
    epochs = max(1, round(_STEPS / steps))
    heads = LinearHeads(
        {FINAL: bank.shape[1]}, classes, [Head(_RATE, _DECAY, norm="standard")], seed, bank.dtype
    )
    heads.standardize(bank)
    train_heads(heads, batches, [0.5 * (1.0 + math.cos(math.pi * e / epochs)) for e in range(epochs)])
    return float((heads.ranks(queries, query_labels)[0] == 0).double().mean())
