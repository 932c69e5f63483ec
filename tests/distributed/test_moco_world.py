"""MoCo in two processes: the same numbers as one, queues that stay equal, and an exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiny import StopAfter, assert_same_state, go_on, image_folder, state, trace
from zoo.data.loader import Batch
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.moco import MoCo
from zoo.pretrain.methods.moco_config import MoCoConfig
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunFolder
from zoo.pretrain.session import Session

from .steps import train_steps
from .world import in_processes

BATCH, STEPS, VIEWS = 16, 4, 3
# Without norms, and with BatchNorm in four groups that any number of processes up to four shares.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"dictionary": name, "key_views": [0, 1]} for name in ("queue", "batch", "memory_bank")},
    "queue in parts": {"dictionary": "queue", "accumulate": 2},
    "batch in parts": {"dictionary": "batch", "key_views": [0, 1], "accumulate": 2},
    "shuffled queue": {"dictionary": "queue", "shuffle_groups": 4},
    "shuffled batch": {"dictionary": "batch", "shuffle_groups": 4},
    "shuffled, in parts": {"dictionary": "queue", "shuffle_groups": 4, "accumulate": 2},
}
RUN: dict[str, Any] = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 4,
    "views.size": [16],
    "method.negatives": 20,
    "method.hidden": 16,
    "method.dim": 8,
    "method.shuffle_groups": 2,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float64",
    "device": "cpu",
    "data.workers": 0,
}


class Trunk(nn.Module):
    num_features = 6

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 2)
        self.bn = nn.BatchNorm2d(6) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.bn(self.conv(x))).mean(dim=(2, 3))


def share_of(world: Collectives, step: int) -> Batch:
    """This process's images of a step."""
    generator = torch.Generator().manual_seed(step)
    views = torch.randn(VIEWS, BATCH, 3, 4, 4, generator=generator, dtype=torch.float64)
    ids = torch.randperm(20, generator=generator)[:BATCH]
    mine, ids = (tensor.chunk(world.world_size, dim=-1)[world.rank] for tensor in (torch.arange(BATCH), ids))
    return Batch([views[:, mine].flatten(0, 1)], ids, torch.full((len(ids),), -1), 0)


def trained(world: Collectives, case: dict[str, Any]) -> dict[str, Any]:
    """A few steps of the loop; losses, and the shared state afterwards."""
    case = dict(case)
    parts = case.pop("accumulate", 1)
    config = MoCoConfig(negatives=40, dim=4, temperature=0.2, momentum=0.9, **case)
    shape = RunShape(VIEWS, BATCH, world.world_size, STEPS, 1, samples=20, accumulate=parts)
    torch.manual_seed(0)
    method = MoCo(Trunk("shuffle_groups" in case), config, shape, world).double().train()
    (group,) = method.param_groups(exclude_one_dimensional=False)
    optimizer = torch.optim.SGD([group], lr=0.1, momentum=0.9)
    losses, _ = train_steps(method, optimizer, world, lambda step: share_of(world, step), range(STEPS), parts)
    learned = {key: value for key, value in method.state_dict().items() if "running" not in key}
    return {"losses": losses, "state": learned}


def session_of(world: Collectives, images: str) -> Session:
    overrides = {**RUN, "data.sources": [images]}
    session = Session(resolve("moco_v2_rn50_200ep", overrides), torch.device("cpu"), world)
    session.images.place(session.method.trunk, session.device)
    return session


def begin(world: Collectives, images: str, out: Path, stop: int | None) -> None:
    session = session_of(world, images)
    folder = RunFolder(out)
    if world.rank == 0:
        info = {"created": "now", "total_steps": 6, "init_from": None, "resumed": []}
        folder.create(info, session.resolved.to_yaml(), session.images.source.fingerprint())
    world.barrier()
    session.train(folder, [StopAfter(stop)] if stop is not None and world.rank == 0 else [])


def everything(world: Collectives, images: str, out: str) -> dict[str, Any]:
    """All that the processes do, in one start."""
    results: dict[str, Any] = {name: trained(world, case) for name, case in CASES.items()}
    begin(world, images, Path(out) / "whole", None)
    begin(world, images, Path(out) / "half", 2)
    begin(world, images, Path(out) / "left", 2)
    folder = RunFolder(Path(out) / "half")
    results["stopped after"] = len(trace(folder.path))
    world.barrier()
    session_of(world, images).train(folder, [], info=folder.read())
    return results


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images: an epoch is three steps of eight."""
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(images: Path, out: Path) -> list[dict[str, Any]]:
    return in_processes(everything, 2, str(images), str(out), timeout=300)


# A part of two processes' batch holds other images than one of one process's: other BatchNorm groups.
@pytest.mark.parametrize("name", [name for name in CASES if name != "shuffled, in parts"])
def test_two_processes_learn_what_one_learns(pair: list[dict[str, Any]], name: str) -> None:
    alone = trained(WorldOfOne(), CASES[name])
    assert len(set(alone["losses"])) == STEPS
    for process in pair:
        got = process[name]
        assert got["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for key, value in alone["state"].items():
            if key.endswith("num_batches_tracked"):
                continue  # a process sees its own groups alone
            torch.testing.assert_close(
                got["state"][key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize("name", CASES)
def test_the_processes_dictionaries_and_encoders_stay_equal(pair: list[dict[str, Any]], name: str) -> None:
    first, second = (process[name]["state"] for process in pair)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def test_shuffling_makes_a_difference() -> None:
    shuffled = trained(WorldOfOne(), CASES["shuffled queue"])["losses"]
    other = trained(WorldOfOne(), {**CASES["shuffled queue"], "shuffle_groups": 2})["losses"]
    assert shuffled != pytest.approx(other, rel=1e-3)


def test_a_run_of_two_processes_goes_on_bit_for_bit(pair: list[dict[str, Any]], out: Path) -> None:
    assert pair[0]["stopped after"] == 2
    assert trace(out / "half") == trace(out / "whole")
    assert len(trace(out / "whole")) == 6
    assert_same_state(out / "half", out / "whole")


def test_the_number_of_processes_changes_no_number_and_may_change(
    pair: list[dict[str, Any]], images: Path, out: Path, tmp_path: Path
) -> None:
    begin(WorldOfOne(), str(images), tmp_path / "alone", None)
    go_on(out / "left")  # what two processes began
    for run in (out / "whole", out / "left"):
        assert_close(tmp_path / "alone", run)


def assert_close(first: Path, second: Path) -> None:
    for (step, loss, lr), (other, other_loss, other_lr) in zip(trace(first), trace(second), strict=True):
        assert (step, lr) == (other, other_lr)
        assert loss == pytest.approx(other_loss, rel=1e-6)
    one, two = state(first), state(second)
    for key in ("queue", "queue_ptr", "trunk.conv1.weight", "momentum_encoder.layer4.1.conv2.weight"):
        a, b = (found[f"shared/learner/{key}"] for found in (one, two))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
