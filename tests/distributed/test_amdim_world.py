"""AMDIM and Local DIM: the same numbers from one process and from two, whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo.data.loader import Batch
from zoo.engine.collectives import Collectives, TorchWorld, WorldOfOne
from zoo.engine.sync_batchnorm import synchronize_batchnorm
from zoo.models.amdim import AMDIMEncoder
from zoo.pretrain.methods.amdim import AMDIM
from zoo.pretrain.methods.amdim_config import AMDIMConfig
from zoo.pretrain.methods.config_base import RunShape

from .steps import train_steps
from .world import in_processes

BATCH, SIZE, STEPS = 8, 32, 3
# name -> settings, parts that each process trains its share in
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "all costs": ({"classifiers": True}, 1),
    "in parts": ({}, 2),
    "mixtures": ({"mixtures": 3, "mixture_hidden": 5, "mixture_entropy": 0.5}, 1),
    "mixtures in parts": ({"mixtures": 2, "costs": ["1to7", "5to5"]}, 2),
    "Local DIM": ({"costs": ["1to7"], "across_views": False}, 1),
}


def views_of(kind: str) -> int:
    return 1 if kind == "Local DIM" else 2


def build(world: Collectives, kind: str) -> AMDIM:
    settings, parts = KINDS[kind]
    torch.manual_seed(0)
    trunk = AMDIMEncoder(encoder_size=SIZE, ndf=2, n_rkhs=8, n_depth=1)
    for module in trunk.modules():
        if hasattr(module, "use_bn") and parts > 1:
            module.use_bn = False  # norms see parts, which are other images with more processes
            module.bn.requires_grad_(False)
        if isinstance(module, nn.Conv2d) and not module.weight.any():
            nn.init.kaiming_normal_(module.weight)
    shape = RunShape(
        views_of(kind), BATCH, world.world_size, STEPS, 1, classes=("a", "b", "c"), sizes=(SIZE,)
    )
    method = AMDIM(trunk, AMDIMConfig(**settings), shape, world).double()
    for module in method.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # it draws from each process's own stream
    synchronize_batchnorm(method, world)
    return method.train()


def share_of(world: Collectives, step: int, views: int) -> Batch:
    """This process's images of a step's batch; labels are not equally many."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(views * BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, -1, -1, 1, -1])
    whole = Batch([images], torch.arange(BATCH), labels, 0)
    return whole.split(world.world_size)[world.rank]


def train(world: Collectives, kind: str, first: int, last: int, state: Any = None) -> dict[str, Any]:
    """Some steps of a kind, from the beginning or from a state."""
    method = build(world, kind)
    optimizer = torch.optim.SGD(method.param_groups(False), lr=0.05, momentum=0.9)
    if state is not None:
        method.load_state_dict(state["learner"])
        optimizer.load_state_dict(state["optimizer"])
    losses, figures = train_steps(
        method,
        optimizer,
        world,
        lambda step: share_of(world, step, views_of(kind)),
        range(first, last),
        KINDS[kind][1],
    )
    logs = [{key: value for key, value in one.items() if not key.endswith("accuracy")} for one in figures]
    learner = {key: value.clone() for key, value in method.state_dict().items()}
    return {"losses": losses, "logs": logs, "learner": learner, "optimizer": optimizer.state_dict()}


def by_two(world: TorchWorld) -> dict[str, Any]:
    """Each kind, straight on and taken up in the middle."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        straight = train(world, kind, 0, STEPS)
        half = train(world, kind, 0, 2)
        rest = train(world, kind, 2, STEPS, half)
        same = (torch.equal(value, rest["learner"][key]) for key, value in straight["learner"].items())
        resumed = half["losses"] + rest["losses"] == straight["losses"] and all(same)
        found[kind] = {key: straight[key] for key in ("losses", "logs", "learner")} | {"resumed": resumed}
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What each of two processes found."""
    return in_processes(by_two, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_with_the_joint_batch(kind: str, results: list[dict[str, Any]]) -> None:
    want = train(WorldOfOne(), kind, 0, STEPS)
    assert want["losses"][-1] != want["losses"][0]
    for result in (process[kind] for process in results):
        assert result["losses"] == pytest.approx(want["losses"], rel=1e-9)
        for mine, other in zip(result["logs"], want["logs"], strict=True):
            assert mine == pytest.approx(other, rel=1e-8)
        for key, value in want["learner"].items():
            torch.testing.assert_close(result["learner"][key], value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_bit_for_bit(kind: str, results: list[dict[str, Any]]) -> None:
    assert all(process[kind]["resumed"] for process in results)
