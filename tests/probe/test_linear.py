"""Many linear heads at once: each is what torch's own optimizer makes of it alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.probe.linear import FINAL, Head, LinearHeads, diverged, shuffled, train_heads
from zoo.probe.scores import true_ranks

WIDTHS = {"layer1": 3, FINAL: 5}
GRID = [
    Head(lr, decay, stage, norm)
    for stage in ("layer1", FINAL)
    for norm in ("none", "standard", "batch")
    for lr, decay in ((0.3, 0.0), (0.05, 0.1))
]


def made(seed=0, count=40, width=8, classes=4):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return 2 + 3 * torch.randn(count, width, generator=generator, dtype=torch.float64), labels


def by_torch(head, bank, labels, start, factors, queries):
    """The same head with nn.Linear, nn.BatchNorm1d and torch.optim.SGD."""
    columns = slice(0, 3) if head.stage == "layer1" else slice(3, 8)
    center, spread = bank[:, columns].mean(0), bank[:, columns].std(0, correction=0)
    layer = nn.Linear(*reversed(start[0].shape)).double()
    layer.weight.data.copy_(start[0])
    layer.bias.data.copy_(start[1])
    norm = nn.BatchNorm1d(layer.in_features, affine=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), head.lr, momentum=0.9, weight_decay=head.weight_decay)

    def seen(x):
        x = x[:, columns]
        return {"none": lambda: x, "standard": lambda: (x - center) / spread, "batch": lambda: norm(x)}[
            head.norm
        ]()

    batches, steps = shuffled(bank, labels, 16, seed=3)
    losses = []
    for epoch, factor in enumerate(factors):
        optimizer.param_groups[0]["lr"] = head.lr * factor
        losses.append(0.0)
        for x, y in batches(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(layer(seen(x)), y)
            loss.backward()
            optimizer.step()
            losses[-1] += float(loss.detach()) / steps
    norm.eval()
    return layer(seen(queries)).detach(), losses


def test_every_head_is_torchs():
    bank, labels = made()
    queries, _ = made(seed=1, count=7)
    heads = LinearHeads(WIDTHS, 4, GRID, seed=5, dtype=torch.float64)
    starts = [[value.clone() for value in heads.parameters(number)] for number in range(len(GRID))]
    heads.standardize(bank)
    losses = train_heads(heads, shuffled(bank, labels, 16, seed=3)[0], [1.0, 0.5, 0.1])
    logits = heads.logits(queries)
    assert losses.shape == (3, len(GRID)) and logits.shape == (len(GRID), 7, 4)
    for number, head in enumerate(GRID):
        want, want_losses = by_torch(head, bank, labels, starts[number], [1.0, 0.5, 0.1], queries)
        torch.testing.assert_close(logits[number], want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            losses[:, number], torch.tensor(want_losses).double(), rtol=1e-5, atol=1e-6
        )


def test_heads_start_alike_and_draw_from_nobody():
    state = torch.get_rng_state()
    heads = LinearHeads({FINAL: 2000}, 10, [Head(0.1, 0.0), Head(0.2, 0.0)], seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    weight, bias = heads.parameters(0)
    assert torch.equal(weight, heads.parameters(1)[0]) and not bias.any()
    assert float(weight.std()) == pytest.approx(0.01, rel=0.02)
    assert not torch.equal(weight, LinearHeads({FINAL: 2000}, 10, [Head(0.1, 0.0)], 1).parameters(0)[0])


def test_a_head_that_blows_up_is_alone():
    bank, labels = made()
    good, wild = Head(0.01, 0.0, norm="standard"), Head(1e30, 1.0, norm="standard")
    found = []
    for grid in ([good], [wild, good, wild]):
        heads = LinearHeads({FINAL: 8}, 4, grid, seed=0, dtype=torch.float64)
        heads.standardize(bank)
        losses = train_heads(heads, shuffled(bank, labels, 16, seed=3)[0], [1.0] * 4)
        found.append((losses[:, grid.index(good)], heads.logits(bank)[grid.index(good)]))
        assert diverged(losses, 4).tolist() == [head is wild for head in grid]
    for alone, among in zip(*found, strict=True):
        torch.testing.assert_close(alone, among, rtol=1e-12, atol=1e-12)


def test_a_loss_that_once_was_huge_has_diverged_even_if_it_ends_low():
    losses = torch.tensor([[1.0, 500.0, 1.0, 1.0], [0.5, 0.0, float("nan"), 10.0]])
    assert diverged(losses, 10).tolist() == [False, True, True, True]


def test_training_can_stop_after_some_steps():
    bank, labels = made()
    seen = []
    heads = LinearHeads({FINAL: 8}, 4, [Head(0.1, 0.0)], seed=0, dtype=torch.float64)
    batches, steps = shuffled(bank, labels, 16, seed=0)
    assert steps == 2
    losses = train_heads(heads, batches, [1.0] * 9, seen.append, limit=3)
    assert seen == [0, 1] and len(losses) == 2


def test_kept_views_take_turns_and_rows_stay_where_they_are():
    views = torch.stack([torch.full((6, 2), float(view)) for view in range(3)])
    labels = torch.arange(6)
    batches, steps = shuffled(views, labels, 2, seed=0, rows=torch.tensor([1, 3, 5, 4]))
    assert steps == 2
    for epoch in range(6):
        found = list(batches(epoch))
        assert all((x == epoch % 3).all() for x, _ in found)
        assert sorted(torch.cat([y for _, y in found]).tolist()) == [1, 3, 4, 5]


def test_ranks():
    scores = torch.tensor(
        [[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [float("nan"), 0.0, 1.0], [0.0, 0.0, float("nan")]]
    )
    assert true_ranks(scores, torch.tensor([0, 2, 0, 2])).tolist() == [0, 2, 3, 3]
    assert true_ranks(scores, torch.tensor([1, 0, 2, 0])).tolist() == [2, 0, 1, 1]
    random = torch.randn(50, 7)
    labels = torch.randint(0, 7, (50,))
    order = random.argsort(dim=1, descending=True)
    assert torch.equal(true_ranks(random, labels), (order == labels[:, None]).int().argmax(dim=1))
