"""k-means, Sinkhorn over a whole set and the loss, beside the same written out plainly."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from zoo.pretrain.losses import deepcluster
from zoo.pretrain.losses.deepcluster import (
    UNSEEN,
    assignment_loss,
    nearest,
    rows_of_all,
    sinkhorn_offsets,
    spherical_kmeans,
)
from zoo.pretrain.losses.sinkhorn import sinkhorn


def unit(count: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def plain_kmeans(rows: torch.Tensor, centroids: torch.Tensor, iterations: int):
    """One row and one cluster at a time, with plain numbers."""
    points, centres = rows.tolist(), centroids.tolist()

    def best(point: list[float]) -> int:
        scores = [sum(a * b for a, b in zip(point, centre, strict=True)) for centre in centres]
        return scores.index(max(scores))

    for _ in range(iterations):
        labels = [best(point) for point in points]
        for cluster in range(len(centres)):
            members = [point for point, label in zip(points, labels, strict=True) if label == cluster]
            if members:
                mean = [sum(values) / len(members) for values in zip(*members, strict=True)]
                length = math.hypot(*mean)
                centres[cluster] = [value / length for value in mean]
    return centres, [best(point) for point in points]


@pytest.mark.parametrize("iterations", [0, 1, 7])
@pytest.mark.parametrize("block", [1, 7, 1000])  # rows whose scores are made at once
def test_kmeans_is_the_plain_one(monkeypatch, iterations, block):
    monkeypatch.setattr(deepcluster, "_SCORES", 6 * block)
    rows = unit(40, 3)
    start = rows[[3, 1, 4, 15, 9, 2]]
    centroids, labels = spherical_kmeans(rows, start, iterations)
    want_centroids, want_labels = plain_kmeans(rows, start, iterations)
    assert labels.tolist() == want_labels
    torch.testing.assert_close(centroids, torch.tensor(want_centroids, dtype=torch.float64))


@pytest.mark.parametrize("place", [0, 1, 2])  # also the last of the bags
def test_an_empty_cluster_stays_where_it_is(place):
    rows = F.normalize(unit(20, 4).abs(), dim=1)
    start = rows[:3].clone()
    start[place] = -torch.ones(4) / 2  # farther from every row than any row is
    centroids, labels = spherical_kmeans(rows, start, 5)
    assert place not in labels.tolist()
    torch.testing.assert_close(centroids[place], start[place])
    others = [cluster for cluster in range(3) if cluster != place]
    torch.testing.assert_close(centroids[others].norm(dim=1), torch.ones(2, dtype=torch.float64))


def test_sums_come_out_the_same_each_time_and_in_float32():
    rows = unit(2000, 8, dtype=torch.float32)
    first, labels = spherical_kmeans(rows, rows[:50], 10)
    again, same = spherical_kmeans(rows, rows[:50], 10)
    assert first.dtype == torch.float32
    assert torch.equal(first, again) and torch.equal(labels, same)


def test_clustering_is_not_done_in_half_precision():
    rows = unit(64, 8, dtype=torch.float32)
    want = spherical_kmeans(rows, rows[:5], 3), sinkhorn_offsets(rows, rows[:5], 0.05, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = spherical_kmeans(rows, rows[:5], 3), sinkhorn_offsets(rows, rows[:5], 0.05, 3)
    assert torch.equal(got[0][0], want[0][0]) and torch.equal(got[1], want[1])


def test_the_nearest_may_be_handicapped():
    rows = unit(10, 4)
    offsets = torch.tensor([0.0, 100.0, 0.0], dtype=torch.float64)
    assert nearest(rows, rows[:3], offsets).tolist() == [1] * 10
    assert nearest(rows, torch.stack([rows[0]] * 3)).tolist() == [0] * 10


def test_rows_by_number():
    rows = unit(10, 4)
    assert torch.equal(rows_of_all(rows, torch.tensor([3, 0, 9])), rows[[3, 0, 9]])


@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
@pytest.mark.parametrize("block", [1, 5, 1000])
def test_offsets_give_sinkhorns_codes(monkeypatch, iterations, epsilon, block):
    monkeypatch.setattr(deepcluster, "_SCORES", 7 * block)
    rows, prototypes = unit(32, 5), unit(7, 5, seed=1)
    offsets = sinkhorn_offsets(rows, prototypes, epsilon, iterations)
    codes = F.softmax(rows @ prototypes.T / epsilon + offsets, dim=1)
    want = sinkhorn(rows @ prototypes.T, epsilon, iterations)
    torch.testing.assert_close(codes, want, rtol=1e-9, atol=1e-14)
    assert torch.equal(nearest(rows, prototypes / epsilon, offsets), want.argmax(dim=1))


def test_offsets_stay_finite_where_exponentials_do_not():
    rows = F.normalize(torch.tensor([[1.0, 0.0], [0.999, 0.04], [0.0, 1.0]]), dim=1)
    offsets = sinkhorn_offsets(rows, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1e-4, 10)
    assert offsets.isfinite().all()


def test_many_iterations_share_the_set_equally():
    rows, prototypes = unit(60, 4), unit(6, 4, seed=1)
    prototypes[3:] = -F.normalize(rows.sum(dim=0), dim=0)  # nobody's favourites
    offsets = sinkhorn_offsets(rows, prototypes, 0.5, 200)
    codes = F.softmax(rows @ prototypes.T / 0.5 + offsets, dim=1)
    torch.testing.assert_close(
        codes.sum(dim=0), torch.full((6,), 10.0, dtype=torch.float64), rtol=1e-6, atol=0
    )


def plain_loss(scores, targets, temperature):
    """Means of means, a row at a time; targets are labels or codes."""
    of_heads = []
    for of_head, target in zip(scores, targets, strict=True):
        terms = []
        for row, values in enumerate((of_head / temperature).tolist()):
            wanted = target[row % len(target)]
            total = math.log(sum(math.exp(v) for v in values))
            if wanted.dim():
                if float(wanted.sum()):
                    terms.append(sum(q * (total - v) for q, v in zip(wanted.tolist(), values, strict=True)))
            elif int(wanted) != UNSEEN:
                terms.append(total - values[int(wanted)])
        of_heads.append(sum(terms) / len(terms))
    return sum(of_heads) / len(of_heads)


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_is_the_plain_one(soft):
    views, batch, counts = 3, 5, (4, 6)
    scores = [unit(views * batch, count, seed=count).requires_grad_() for count in counts]
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randint(count, (batch,), generator=generator) for count in counts]
    for target in targets:
        target[[1, 4]] = UNSEEN
    if soft:
        targets = [
            F.softmax(unit(batch, count, seed=9), dim=1) * (target != UNSEEN)[:, None]
            for count, target in zip(counts, targets, strict=True)
        ]
    loss = assignment_loss(scores, targets, 0.1, 3)
    assert loss.item() == pytest.approx(plain_loss(scores, targets, 0.1), rel=1e-12)
    loss.backward()
    for of_head in scores:
        gradient = of_head.grad.unflatten(0, (views, batch))
        assert (gradient[:, [1, 4]] == 0).all() and (gradient[:, [0, 2, 3]] != 0).any(dim=2).all()


def test_a_batch_of_unseen_images_costs_nothing():
    scores = [unit(6, 4).requires_grad_()]
    loss = assignment_loss(scores, [torch.full((3,), UNSEEN)], 0.1, 1)
    loss.backward()
    assert loss.item() == 0 and (scores[0].grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_scores_cost_the_logarithm_of_their_number(dtype):
    loss = assignment_loss([torch.ones(4, 8, dtype=dtype)], [torch.tensor([1, 2])], 0.1, 2)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(math.log(8), rel=1e-6)
