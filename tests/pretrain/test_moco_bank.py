"""MoCo's memory bank: a vector for each image, moved whenever the image is seen."""

from __future__ import annotations

import math

import pytest
import torch
from test_moco_method import BATCH, batch_of, moco, one_step
from torch.nn import functional as F

from zoo.keyed import keyed_key, keyed_uniforms
from zoo.pretrain.losses.info_nce import info_nce
from zoo.pretrain.methods import moco as moco_module


def test_the_memory_bank_moves_the_vectors_of_the_images_seen():
    method = moco(dictionary="memory_bank", bank_momentum=0.25, negatives=50)
    batch = batch_of(0)
    before = method.memory_bank.clone()
    torch.testing.assert_close(before.norm(dim=1), torch.ones(12, dtype=torch.float64))
    method.before_step(0, 0)
    method.step(batch.views, batch)
    images = list(batch.views[0].split(BATCH))
    embedding = F.normalize(method.queries(images).mean(dim=0), dim=1)
    assert torch.equal(method.memory_bank, before)
    method.after_step(0)
    wanted = F.normalize(0.25 * before[batch.ids] + 0.75 * embedding, dim=1)
    torch.testing.assert_close(method.memory_bank[batch.ids], wanted)
    unseen = [image for image in range(12) if image not in batch.ids]
    assert torch.equal(method.memory_bank[unseen], before[unseen])


def test_four_steps_with_the_memory_bank_are_those_of_a_plain_bookkeeping():
    """One vector, one query and one exponential at a time."""
    method = moco(3, dictionary="memory_bank", bank_momentum=0.25, negatives=30)
    vectors = {image: vector.tolist() for image, vector in enumerate(method.memory_bank)}

    def likeness(a: list[float], b: list[float]) -> float:
        return math.exp(sum(x * y for x, y in zip(a, b, strict=True)) / 0.2)

    for step in range(4):
        batch = batch_of(step, 2, 1)
        ids = batch.ids.tolist()
        images = [view for group in batch.views for view in group.split(BATCH)]
        queries = method.queries(images).tolist()  # of all three views: there is no norm that sees them twice
        draws = keyed_uniforms(keyed_key(0, "moco bank", step), 30)
        drawn = [int(draw * 12) for draw in draws.tolist()]
        terms = []
        for of_view in queries:
            for image, query in zip(ids, of_view, strict=True):
                own = likeness(query, vectors[image])
                others = sum(likeness(query, vectors[other]) for other in drawn if other != image)
                terms.append(-math.log(own / (own + others)))
        assert one_step(method, batch, step) == pytest.approx(sum(terms) / len(terms), rel=1e-12)
        for row, image in enumerate(ids):
            mean = [sum(values) for values in zip(*(of_view[row] for of_view in queries), strict=True)]
            length = math.hypot(*mean)
            moved = [0.25 * old + 0.75 * new / length for old, new in zip(vectors[image], mean, strict=True)]
            vectors[image] = [value / math.hypot(*moved) for value in moved]
        wanted = torch.tensor([vectors[image] for image in range(12)], dtype=torch.float64)
        torch.testing.assert_close(method.memory_bank, wanted, rtol=1e-10, atol=1e-12)


def test_an_image_is_never_its_own_negative_in_the_memory_bank(monkeypatch):
    given = []

    def watched(*arguments):
        given.append(arguments)
        return info_nce(*arguments)

    monkeypatch.setattr(moco_module, "info_nce", watched)
    method = moco(dictionary="memory_bank", negatives=40)
    batch = batch_of(0)
    method.before_step(0, 0)
    loss, _ = method.step(batch.views, batch)
    ((queries, positives, negatives, _, excluded),) = given
    assert torch.equal(positives, method.memory_bank[batch.ids].repeat(2, 1))
    own = (negatives.T[None] == positives[:, None]).all(dim=2)
    assert torch.equal(excluded, own) and own.any()
    each = [
        info_nce(query[None], positive[None], negatives[:, ~left_out], 0.2)
        for query, positive, left_out in zip(queries, positives, own, strict=True)
    ]
    assert loss.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-12)


def test_each_step_draws_other_keys_from_the_memory_bank(monkeypatch):
    drawn = []
    monkeypatch.setattr(moco_module, "info_nce", lambda *given: drawn.append(given[2]) or info_nce(*given))
    method = moco(dictionary="memory_bank", negatives=500)
    batch = batch_of(0)
    for step in (0, 1, 0):
        method.before_step(step, 0)
        method.step(batch.views, batch)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    counts = [int((drawn[0] == vector[:, None]).all(dim=0).sum()) for vector in method.memory_bank]
    assert sum(counts) == 500 and min(counts) > 20  # all of the 12 images alike


def test_an_image_seen_twice_counts_once():
    method = moco(dictionary="memory_bank", bank_momentum=0.0)
    embeddings = F.normalize(torch.randn(3, 4, dtype=torch.float64), dim=1)
    method._remember(torch.tensor([5, 2, 5]), embeddings)
    torch.testing.assert_close(method.memory_bank[[2, 5]], embeddings[[1, 2]])
