"""The loop's rates of groups, and how it shortens gradients: as torch's own clipping does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Loop
from zoo.engine.precision import Precision
from zoo.engine.signals import StopRequest


class Line(nn.Module):
    """Two layers that are to give zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def step(self, views: Any, batch: Any, given: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
        return self.second(self.first(views)).square().sum(), {}

    def before_step(self, step: int, epoch: int) -> None: ...
    def before_update(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def on_epoch_start(self, epoch: int, batches: Any) -> None: ...
    def local_state(self) -> dict[str, Any]:
        return {}


def groups_of(line: Line) -> list[dict[str, Any]]:
    return [
        {"params": list(line.first.parameters())},
        {"params": list(line.second.parameters()), "lr_scale": 0.1},
    ]


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
def test_a_step_is_that_of_torch(tmp_path, clip):
    torch.manual_seed(0)
    ours = Line()
    plain = copy.deepcopy(ours)
    images = torch.randn(5, 3)
    batch = SimpleNamespace(ids=torch.arange(5), views=[images], size=5)
    loop = Loop(
        learner=ours,  # type: ignore[arg-type]
        optimizer=torch.optim.SGD(groups_of(ours), lr=9.0),
        lr_at=lambda step: 0.5 / (1 + step),
        batches=lambda first: iter([batch] * 2),
        prepare=lambda batch: images,
        precision=Precision("float32", torch.device("cpu")),
        steps_per_epoch=2,
        total_steps=2,
        checkpoints=CheckpointWriter(CheckpointFolder(tmp_path / "checkpoints"), WorldOfOne()),
        clip=clip,
    )
    with StopRequest() as stop:
        loop.run(stop)
    optimizer = torch.optim.SGD(groups_of(plain), lr=0.0)
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr, 0.1 * lr
        optimizer.zero_grad()
        plain.step(images, None)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        assert norm > 0.1 and norm < 1e6
        optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
