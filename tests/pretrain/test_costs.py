"""A step's costs: against hand calculations, and against what really runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned import GRADIENTS, PARAMETERS, shape_of, tiny

from tiny import ROOT
from zoo.data.loader import Batch
from zoo.engine.collectives import TorchWorld, WorldOfOne
from zoo.engine.efficiency import ModuleCalls, flops_of
from zoo.pretrain.build import build_method
from zoo.pretrain.costs import StepCosts, count_step
from zoo.pretrain.resolve import Resolved, resolve
from zoo.pretrain.run import start


def resnet50_forward(size: int) -> int:
    """Operations of a ResNet-50's convolutions over one image: two for each multiply-add."""
    half = math.ceil(size / 2)
    total = half**2 * 64 * 3 * 49
    side, inputs = math.ceil(half / 2), 64
    for stage, (blocks, planes) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            before, side = side, math.ceil(side / 2) if block == 0 and stage else side
            total += before**2 * inputs * planes + side**2 * (9 * planes**2 + 4 * planes**2)
            if block == 0:
                total += side**2 * inputs * 4 * planes
            inputs = 4 * planes
    return 2 * total


@pytest.fixture(scope="module")
def swav() -> StepCosts:
    resolved = resolve("swav_rn50_800ep")
    return count_step(resolved.recipe, shape_of(resolved, 64), half=True)


# --- counted against hand calculations ---


def test_parameters_of_swavs_network(swav):
    assert swav.parameters == PARAMETERS
    assert swav.trained == sum(PARAMETERS.values()) == 28_354_752
    assert swav.weights == swav.optimizer == GRADIENTS  # LARS has one momentum


def test_operations_of_the_crops(swav):
    large, small = swav.crops
    assert (large.size, large.count, large.flops) == (224, 2, resnet50_forward(224))
    assert (small.size, small.count, small.flops) == (96, 6, resnet50_forward(96))
    views = 2 * large.flops + 6 * small.flops
    assert large.share == pytest.approx(2 * large.flops / views)
    # A layer's gradients cost as much as its forward pass, twice; the first has no gradient of the images.
    first = sum(n * 2 * (size // 2) ** 2 * 64 * 3 * 49 for size, n in ((224, 2), (96, 6)))
    heads = 3 * 8 * 2 * (2048 * 2048 + 2048 * 128 + 128 * 3000)
    assert swav.flops / swav.images == pytest.approx(3 * views - first + heads, rel=1e-3)


def test_what_64_processes_say_in_a_step(swav):
    said = {of: [e for e in swav.exchanges if e.of == of] for of in ("gradients", "batchnorm", "method")}
    assert [e.payload for e in said["gradients"]] == [GRADIENTS]
    # 53 norms of the trunk for two sizes, one in the head; each says something forward and backward.
    assert len(said["batchnorm"]) == 2 * (2 * 53 + 1)
    # For both crops K maxima, and K sums for each of three iterations.
    assert [e.payload for e in said["method"]] == [4 * 3000] * 8
    assert {e.kind for e in said["method"]} == {"reduce"}


def test_memory_is_that_of_the_kept_activations(swav):
    # Of each normalised layer its input and its output are kept, in half precision, and the views as they are.
    outputs = sum(n * kept_by_resnet50(size) for size, n in ((224, 2), (96, 6)))
    views = (2 * 224**2 + 6 * 96**2) * 3 * (4 + 2)
    assert swav.step == pytest.approx(64 * (2 * 2 * outputs + views), rel=0.05)
    assert swav.memory == swav.weights + swav.kept + swav.optimizer + swav.step


def kept_by_resnet50(size: int) -> int:
    """Numbers that the convolutions of a ResNet-50 put out for one image."""
    half = math.ceil(size / 2)
    total, side = half**2 * 64, math.ceil(half / 2)
    for stage, (blocks, planes) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            before, side = side, math.ceil(side / 2) if block == 0 and stage else side
            total += before**2 * planes + side**2 * 5 * planes + (side**2 * 4 * planes if block == 0 else 0)
    return total


# --- counted against what really runs ---

METHODS: dict[str, dict[str, Any]] = {
    "swav_tiny": {"method__queue_length": 16, "method__queue_start_epoch": 0},
    "moco_v2_rn50_200ep": {"method__negatives": 24, "method__shuffle_groups": 2},
    "simclr_rn50_bs256": {},
    "selav2_rn50_400ep_2x224": {"method__prototypes": [8, 4], "method__codes": "soft"},
    "supervised_rn50_200ep_2x224": {"method__hidden": None, "method__dim": None},
}


def small(name: str) -> Resolved:
    own = {"trunk__arch": "resnet18", "method__freeze_prototypes_steps": None, "method__prototypes": None}
    if name == "swav_tiny":
        own = {}
    own |= {"views__min_scale": [0.2, 0.05], "views__max_scale": [1.0, 0.2]}
    return tiny(name, **own | METHODS[name])


@pytest.mark.parametrize("name", ["swav_tiny", "selav2_rn50_400ep_2x224"])
def test_a_checkpoint_is_as_large_as_planned(name, images, tmp_path):
    resolved = small(name)
    run = start(resolved.recipe.to_dict(), data=str(images), out=tmp_path / "run", progress="quiet")
    shape = shape_of(resolved, 1, 24, classes=("a", "b"))
    costs = count_step(resolved.recipe, shape, half=False)
    (*_, newest) = sorted((run.path / "checkpoints").glob("step-*"))
    real = sum(file.stat().st_size for file in newest.iterdir())
    assert costs.checkpoint + costs.checkpoint_each == pytest.approx(real, rel=0.02)
    assert sum(costs.parameters.values()) == sum(p.numel() for p in run.method.parameters())


@pytest.mark.parametrize("name", ["swav_tiny", "supervised_rn50_200ep_2x224"])
def test_operations_are_those_of_the_efficiency_report(name):
    resolved = small(name)
    shape = shape_of(resolved, 1, 24, classes=("a", "b"))
    costs = count_step(resolved.recipe, shape, half=False)
    method = build_method(resolved.recipe, shape, WorldOfOne())
    listener = ModuleCalls(method)
    method.step(*views_of(resolved))
    listener.stop()
    assert costs.flops == pytest.approx(flops_of(listener.calls), rel=0.01)


def views_of(resolved: Resolved) -> tuple[list[torch.Tensor], Batch]:
    size = resolved.recipe.batch_size
    views = [torch.rand(n * size, 3, side, side) for side, n in resolved.recipe.views.plan().groups]
    return views, Batch([], torch.arange(size), torch.zeros(size, dtype=torch.int64), 0)


@pytest.fixture()
def alone(tmp_path: Path) -> Iterator[TorchWorld]:
    """A process group of one: what it is given to say is counted."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield TorchWorld()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["swav_tiny", "moco_v2_rn50_200ep", "simclr_rn50_bs256"])
def test_bytes_exchanged_are_those_of_real_processes(name, alone):
    resolved = small(name)
    shape = shape_of(resolved, 1, 24)
    method = build_method(resolved.recipe, shape, alone)
    method.before_step(0, 0)
    loss, _ = method.step(*views_of(resolved))
    loss.backward()
    costs = count_step(resolved.recipe, shape, half=False)
    assert sum(e.payload for e in costs.exchanges if e.of == "method") == alone.bytes_exchanged > 0


_MEASURE = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.resolve import resolve
from zoo.pretrain.build import build_method

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

torch.set_num_threads(1)
autocast = torch.autocast("cpu", torch.bfloat16)
recipe = resolve("swav_tiny", json.loads(sys.argv[1])).recipe
shape = RunShape(views=2, batch_size=12, world_size=1, steps_per_epoch=4, epochs=2)
with torch.no_grad(), autocast:  # what is loaded at first use is loaded now
    nn.Linear(8, 8)(nn.BatchNorm2d(8)(nn.Conv2d(3, 8, 3)(torch.zeros(2, 3, 6, 6))).mean((2, 3)))
before = resident()
method = build_method(recipe, shape, WorldOfOne())
method.before_step(0, 0)
views = [torch.rand(24, 3, 128, 128)]
with autocast:
    loss, _ = method.step(views, Batch([], torch.arange(12), torch.zeros(12, dtype=torch.int64), 0))
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_is_what_a_process_holds_when_the_backward_pass_begins():
    settings = {
        "views.count": [2],
        "views.size": [128],
        "views.min_scale": [0.2],
        "views.max_scale": [1.0],
        "batch_size": 12,
    }
    words = [sys.executable, "-c", _MEASURE, json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    resolved = resolve("swav_tiny", settings)
    costs = count_step(resolved.recipe, shape_of(resolved, 1, 96), half=True)
    # Moments come with the first update.
    assert costs.memory - costs.optimizer == pytest.approx(int(done.stdout), rel=0.15)


def test_memory_of_other_numbers_of_images_is_proportional():
    resolved = tiny(batch_size=64, views__size=[64, 32])
    counted = {n: count_step(resolved.recipe, shape_of(resolved, n, 96), half=False) for n in (1, 4)}
    assert counted[4].images == 16
    assert counted[1].memory_with(16) == pytest.approx(counted[4].memory, rel=0.1)


def test_parts_checkpointing_and_an_average_change_what_they_say():
    def count(**more: Any) -> StepCosts:
        resolved = tiny(batch_size=32, views__size=[64, 32], **more)
        return count_step(resolved.recipe, shape_of(resolved, 1, 96), half=False)

    plain, parts = count(), count(engine__accumulate=2)
    again, averaged = count(engine__activation_checkpointing=True), count(engine__ema_decay=0.9)
    assert parts.step < 0.6 * plain.step and again.step < 0.9 * plain.step
    assert parts.flops == pytest.approx(4 / 3 * plain.flops, rel=0.05)  # a forward pass more, for the codes
    assert 1.2 * plain.flops < again.flops < 1.4 * plain.flops
    trunk = averaged.checkpoint - plain.checkpoint
    assert averaged.average == trunk > 4 * plain.parameters["trunk"]


def test_counting_leaves_torch_as_it_was():
    before = torch.get_rng_state(), torch.get_default_dtype()
    resolved = tiny()
    count_step(resolved.recipe, shape_of(resolved, 3 - 1, 24), half=True)
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_default_dtype() == before[1]
    assert not torch.is_autocast_enabled("cpu") and (torch.zeros(2) + 1).sum() == 2
