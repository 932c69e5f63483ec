"""SwAV's loss, codes and queue: the product's method around a trunk that passes embeddings through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.pretrain.methods import swav
from zoo.pretrain.methods.config_base import RunShape

from .cases import Case, case_ids, load

QUEUE_STARTS = 1


class PassedThrough(nn.Identity):
    """A trunk whose images are the embeddings already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


class WatchedSwAV(swav.SwAV):
    """SwAV without a head, which remembers its last scores and codes."""

    def __init__(self, case: Case, batch: int, queue: int = 0) -> None:
        args = case.args
        count, dim = case.inputs["prototypes_before"].shape
        config = swav.SwAVConfig(
            name="swav",
            prototypes=count,
            dim=dim,
            hidden=0,
            temperature=args["temperature"],
            epsilon=args["epsilon"],
            sinkhorn_iterations=args["sinkhorn_iterations"],
            crops_for_assign=tuple(args["crops_for_assign"]),
            queue_length=queue,
            queue_start_epoch=QUEUE_STARTS,
        )
        shape = RunShape(
            views=sum(args["nmb_crops"]), batch_size=batch, world_size=1, steps_per_epoch=8, epochs=4
        )
        super().__init__(PassedThrough(dim), config, shape, WorldOfOne())
        self.projection_head = nn.Identity()
        self.to(case.inputs["prototypes_before"].dtype)
        self.prototypes.load_state_dict({"weight": case.inputs["prototypes_before"]})
        self.batch = batch

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings, self.scores = super().forward(views)
        self.scores.retain_grad()
        return embeddings, self.scores

    def codes(self, *args: Any) -> list[torch.Tensor]:
        self.last_codes = super().codes(*args)
        return self.last_codes

    def one_step(self, embeddings: torch.Tensor, step: int, epoch: int) -> torch.Tensor:
        """A step as the loop makes it, but for the update: the loss, with gradients."""
        self.zero_grad()
        self.before_step(step, epoch)
        ids = torch.arange(self.batch)
        loss, _ = self.step([embeddings], Batch([embeddings], ids, ids, epoch))
        loss.backward()
        return loss


@pytest.mark.parametrize("name", case_ids("swav_loss_", without=["swav_loss_queue"]))
def test_one_step(shared: Path, name: str) -> None:
    case = load(shared, name)
    embeddings = case.inputs["embeddings"]
    method = WatchedSwAV(case, batch=len(embeddings) // sum(case.args["nmb_crops"]))
    loss = method.one_step(embeddings, 0, 0)
    assert loss.dtype == embeddings.dtype
    case.check("prototypes_normalized", method.prototypes.weight)
    case.check("output", method.scores)
    case.check("q_per_assign_crop", torch.stack(method.last_codes))
    case.check("loss", loss)
    case.check("grad_output", method.scores.grad)
    case.check("grad_prototypes", method.prototypes.weight.grad)


@pytest.mark.parametrize("name", case_ids("swav_loss_queue"))
def test_queue(shared: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = load(shared, name)
    batch, rows = case.args["batch"], case.args["queue_rows_per_rank"]
    seen: list[int] = []
    real = swav.sinkhorn

    def counting(scores: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(scores))
        return real(scores, *args)

    monkeypatch.setattr(swav, "sinkhorn", counting)
    method = WatchedSwAV(case, batch, queue=rows + batch - 1)  # rounded down to whole batches
    assert method.queue.shape == case.outputs["it0_queue_after"].shape

    method.one_step(case.inputs["it0_embeddings"], 0, QUEUE_STARTS - 1)
    assert not method.queue.any(), "the queue was filled before its epoch"

    seen.clear()
    first = case.args["iterations_in_first_queue_epoch"]
    steps = first + case.args["iterations_in_next_epoch"]
    for step in range(steps):
        epoch = QUEUE_STARTS + (step >= first)
        loss = method.one_step(case.inputs[f"it{step}_embeddings"], step, epoch)
        case.check(f"it{step}_q", torch.stack(method.last_codes))
        case.check(f"it{step}_loss", loss)
        case.check(f"it{step}_grad_output", method.scores.grad)
        case.check(f"it{step}_queue_after", method.queue)
    # While it fills, the queue takes no part; a queue that just became full joins at the next step.
    filling = rows // batch
    of_step = [batch] * filling + [rows + batch] * (steps - filling)
    assert seen == [n for n in of_step for _ in case.args["crops_for_assign"]]


@pytest.mark.parametrize("name", case_ids("swav_loss_queue"))
def test_queue_survives_a_restart(shared: Path, name: str) -> None:
    case = load(shared, name)
    steps = case.args["iterations_in_first_queue_epoch"] + case.args["iterations_in_next_epoch"]
    batch, rows = case.args["batch"], case.args["queue_rows_per_rank"]
    method = WatchedSwAV(case, batch, queue=rows)
    for step in range(steps):
        fresh = WatchedSwAV(case, batch, queue=rows)
        fresh.load_state_dict(method.state_dict())
        fresh.load_local_state(method.local_state())
        method = fresh
        case.check(f"it{step}_loss", method.one_step(case.inputs[f"it{step}_embeddings"], step, QUEUE_STARTS))
        case.check(f"it{step}_queue_after", method.queue)
