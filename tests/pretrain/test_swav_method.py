"""SwAV's thresholds: frozen prototypes, and a queue that is used only when full."""

from __future__ import annotations

import pytest
import torch

from tiny import (
    train,
)
from zoo.engine.loop import Callback
from zoo.pretrain.methods.swav import SwAV


class Prototypes(Callback):
    """The prototypes after each step."""

    def __init__(self):
        self.seen = []

    def on_start(self, loop):
        self.learner = loop.learner
        self.seen.append(loop.learner.prototypes.weight.detach().clone())

    def on_step(self, record):
        self.seen.append(self.learner.prototypes.weight.detach().clone())


@pytest.mark.parametrize("optimizer", ["lars", "adamw", "sgd"])
def test_prototypes_rest_while_frozen_and_move_after(images, tmp_path, optimizer):
    watch = Prototypes()
    train(
        images,
        tmp_path / "run",
        method__freeze_prototypes_steps=3,
        optimizer__name=optimizer,
        optimizer__lr=0.5 if optimizer == "lars" else 0.01,
        optimizer__weight_decay=0.1,
        schedule__warmup_epochs=0,
        callbacks=(watch,),
    )
    start, *steps = watch.seen
    unit = torch.nn.functional.normalize(start, dim=1)
    for weight in steps[:3]:
        torch.testing.assert_close(weight, unit, rtol=0, atol=1e-6)  # normalised, and nothing else
    moved = (torch.nn.functional.normalize(steps[3], dim=1) - unit).abs().max()
    assert moved > 1e-4


def test_prototypes_that_are_not_learned_never_move(images, tmp_path):
    watch = Prototypes()
    train(images, tmp_path / "run", method__learn_prototypes=False, callbacks=(watch,))
    unit = torch.nn.functional.normalize(watch.seen[0], dim=1)
    torch.testing.assert_close(watch.seen[-1], unit, rtol=0, atol=1e-6)


def test_no_queue_row_enters_sinkhorn_before_the_queue_is_full(images, tmp_path, monkeypatch):
    from zoo.pretrain.methods import swav as module

    rows = []

    def counting(scores, *args):
        rows.append(len(scores))
        assert not (scores == 0).all(dim=1).any()  # a row that was never filled has only zeros
        return original(scores, *args)

    original = module.sinkhorn
    monkeypatch.setattr(module, "sinkhorn", counting)
    train(images, tmp_path / "run", epochs=3, method__queue_length=16, method__queue_start_epoch=1)
    # Two assigning crops a step. Epoch 0 (3 steps): no queue. Then two steps fill it; then 16 + 8 rows.
    assert rows == [8] * 6 + [8] * 4 + [24] * 8


def test_the_queue_is_newest_first_and_holds_unit_embeddings(images, tmp_path, monkeypatch):
    seen = []
    codes = SwAV.codes

    def watching(self, embeddings, scores, batch):
        out = codes(self, embeddings, scores, batch)
        seen.append((embeddings.clone(), self.queue.clone()))
        return out

    monkeypatch.setattr(SwAV, "codes", watching)
    train(images, tmp_path / "run", epochs=1, method__queue_length=16, method__queue_start_epoch=0)
    for crop in (0, 1):
        rows = slice(8 * crop, 8 * crop + 8)
        _, queue = seen[2]
        assert torch.equal(queue[crop, :8], seen[2][0][rows])
        assert torch.equal(queue[crop, 8:], seen[1][0][rows])
        torch.testing.assert_close(queue[crop].norm(dim=1), torch.ones(16))
