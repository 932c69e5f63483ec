"""What SeLa-v2 has of its own: balanced codes of the whole set, and prototypes that are learned."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from distributed.deepcluster_world import BATCH, STEPS, begin, epoch_batches, method_of, one_step
from zoo.pretrain.losses.deepcluster import UNSEEN, nearest


def counts_of(labels: torch.Tensor, count: int) -> list[int]:
    return torch.bincount(labels, minlength=count).tolist()


def test_labels_share_the_set_where_the_nearest_prototypes_do_not():
    method = method_of("hard", prototypes=(4,), epsilon=0.02, sinkhorn_iterations=100)
    with torch.no_grad():  # embeddings are much alike, so one prototype is nearest to nearly all
        method.projection_head.bias.add_(4.0)
    begin(method, 0)
    (head,) = method.heads()
    assert max(counts_of(nearest(method.bank[0], head.weight), 4)) > 20
    _, labels = method._sources
    assert max(counts_of(labels[:, 0], 4)) <= 10  # of 24; 6 would be equal


def test_soft_codes_are_distributions_and_a_large_epsilon_makes_them_uniform():
    for epsilon, uniform in ((0.05, False), (1e4, True)):
        method = method_of("soft", epsilon=epsilon)
        begin(method, 0)
        for codes, count in zip(method.targets(method._table, method._known), (5, 4, 3), strict=True):
            torch.testing.assert_close(codes.sum(dim=1), method._known.double())
            spread = (codes[method._known] - 1 / count).abs().max()
            assert bool(spread < 1e-3) is uniform


def test_hard_labels_are_the_largest_of_the_soft_codes():
    hard, soft = method_of("hard"), method_of("soft")
    begin(hard, 0)
    begin(soft, 0)
    known = hard._known
    assert torch.equal(known, soft._known) and 0 < int(known.sum()) < len(known)
    pairs = zip(hard.targets(hard._table, known), soft.targets(soft._table, known), strict=True)
    for labels, codes in pairs:
        assert torch.equal(labels[known], codes[known].argmax(dim=1))
        assert (labels[~known] == UNSEEN).all() and (codes[~known] == 0).all()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_prototypes_are_learned_on_the_sphere_and_targets_wait_for_the_next_epoch(kind):
    method = method_of(kind)
    begin(method, 0)
    before = [head.weight.detach().clone() for head in method.heads()]
    targets = method.targets(method._table, method._known)
    for weight in before:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(len(weight), dtype=torch.float64))
    for step, batch in enumerate(epoch_batches(0)):
        one_step(method, batch, step)
    method.before_step(STEPS, 1)
    for head, weight in zip(method.heads(), before, strict=True):
        torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(len(weight), dtype=torch.float64))
        assert (head.weight - weight).abs().max() > 1e-3
    for a, b in zip(targets, method.targets(method._table, method._known), strict=True):
        assert torch.equal(a, b)
    begin(method, 1)
    assert not torch.equal(targets[0], method.targets(method._table, method._known)[0])


def test_targets_get_no_gradient_and_prototypes_do():
    method = method_of("soft")
    begin(method, 0)
    batch = epoch_batches(0)[0]
    method.before_step(0, 0)
    loss, _ = method.step(batch.views, batch)
    loss.backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in method.heads())
    # What is remembered is the embedding as it is, of unit length.
    ((ids, rows),) = method._seen
    assert torch.equal(ids, batch.ids) and rows.shape == (2, BATCH, 4) and not rows.requires_grad
    torch.testing.assert_close(rows, F.normalize(rows, dim=2))
