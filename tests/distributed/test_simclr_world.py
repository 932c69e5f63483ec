"""SimCLR, training with labels and SwAV's options: the same numbers from 1, 2 and 4 processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zoo.data.loader import Batch
from zoo.engine.collectives import Collectives, TorchWorld, WorldOfOne
from zoo.engine.sync_batchnorm import synchronize_batchnorm
from zoo.pretrain.methods import METHODS
from zoo.pretrain.methods.base import Method
from zoo.pretrain.methods.config_base import RunShape

from .steps import train_steps
from .world import in_processes

VIEWS, BATCH, STEPS = 3, 8, 3
# name -> method, settings, parts that each process trains its share in
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "simclr": ("simclr", {"hidden": 6, "dim": 4}, 1),
    "simclr in parts": ("simclr", {"hidden": 0, "dim": 4}, 2),
    "supervised": ("supervised", {}, 1),
    "swav": (
        "swav",
        {
            "prototypes": [6, 4],
            "hidden": 6,
            "dim": 4,
            "freeze_prototypes_steps": 1,
            "momentum_encoder": 0.5,
            "queue_length": 16,
            "queue_start_epoch": 0,
        },
        1,
    ),
}


class SmallTrunk(torch.nn.Module):
    """A convolution, a norm and a mean; in parts no norm, since it would see other parts with more processes."""

    num_features = 6

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 6, 3)
        self.norm = torch.nn.BatchNorm2d(6) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.convolution(x))).mean(dim=(2, 3))


def build(world: Collectives, kind: str) -> Method:
    name, settings, parts = KINDS[kind]
    torch.manual_seed(0)
    shape = RunShape(VIEWS, BATCH, world.world_size, STEPS, 1, samples=32, classes=("a", "b", "c"))
    config = METHODS.config(name).model_validate(settings)
    method: Method = METHODS.code(name)(SmallTrunk(norm=parts == 1), config, shape, world).double()
    synchronize_batchnorm(method, world)
    return method.train()


def share_of(world: Collectives, step: int) -> Batch:
    """This process's images of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    views = torch.randn(VIEWS * BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    whole = Batch([views], torch.arange(BATCH), torch.arange(BATCH) % 3, 0)
    return whole.split(world.world_size)[world.rank]


def train(world: Collectives, kind: str, first: int, last: int, state: Any = None) -> dict[str, Any]:
    """Some steps of a kind, from the beginning or from a state."""
    method = build(world, kind)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        method.load_state_dict(state["learner"])
        method.load_local_state(state["local"])
        optimizer.load_state_dict(state["optimizer"])
    losses, _ = train_steps(
        method, optimizer, world, lambda step: share_of(world, step), range(first, last), KINDS[kind][2]
    )
    learner = {key: value.clone() for key, value in method.state_dict().items()}
    saved = {"learner": learner, "local": method.local_state(), "optimizer": optimizer.state_dict()}
    return {"losses": losses, **saved}


def several(world: TorchWorld) -> dict[str, Any]:
    """Each kind by two processes (twice at once) and by four."""
    found: dict[str, Any] = {}
    for part in (world.split(2), world):
        for kind in KINDS:
            straight = train(part, kind, 0, STEPS)
            result = {"losses": straight["losses"], "learner": straight["learner"]}
            # Also taken up in the middle. The sum of more than two gradients depends on their order, which DDP
            # changes after its first step.
            if part.world_size == 2:
                half = train(part, kind, 0, 2)
                rest = train(part, kind, 2, STEPS, half)
                same = (torch.equal(value, rest["learner"][key]) for key, value in result["learner"].items())
                result["resumed"] = half["losses"] + rest["losses"] == result["losses"] and all(same)
            found[f"{kind} by {part.world_size}"] = result
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What each of four processes found."""
    return in_processes(several, 4)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_do_not_depend_on_the_number_of_processes(
    kind: str, processes: int, results: list[dict[str, Any]]
) -> None:
    want = train(WorldOfOne(), kind, 0, STEPS)
    assert want["losses"][-1] != want["losses"][0]
    for result in (process[f"{kind} by {processes}"] for process in results):
        assert result["losses"] == pytest.approx(want["losses"], rel=1e-9)
        for key, value in want["learner"].items():
            torch.testing.assert_close(result["learner"][key], value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_bit_for_bit(kind: str, results: list[dict[str, Any]]) -> None:
    assert all(process[f"{kind} by 2"]["resumed"] for process in results)
