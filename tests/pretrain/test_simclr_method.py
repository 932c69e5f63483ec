"""SimCLR as a method: parts of a batch, runs, resume, what is published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tiny import StopAfter, assert_same_state, go_on, state, trace
from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.simclr import SimCLR
from zoo.pretrain.methods.simclr_config import SimCLRConfig
from zoo.pretrain.publish import read_run
from zoo.pretrain.run import RunResult, start

VIEWS, BATCH = 3, 8
TINY = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 8,
    "views.size": [16, 8],
    "views.count": [2, 1],
    "method.hidden": 16,
    "method.dim": 8,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}


class PlainTrunk(nn.Module):
    """No norm: its rows know nothing of one another."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.flatten(1)))


def simclr(hidden: int = 0, **settings: bool) -> SimCLR:
    torch.manual_seed(0)
    shape = RunShape(views=VIEWS, batch_size=BATCH, world_size=1, steps_per_epoch=4, epochs=1)
    config = SimCLRConfig(hidden=hidden, dim=4, **settings)
    return SimCLR(PlainTrunk(), config, shape, WorldOfOne()).double()


def batch_of(seed: int) -> tuple[list[torch.Tensor], Batch]:
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randn(VIEWS * BATCH, 3, 2, 2, generator=generator, dtype=torch.float64)]
    return views, Batch(views, torch.arange(BATCH), torch.full((BATCH,), -1), 0)


def train(images: Any, out: Any, callbacks: tuple[Any, ...] = (), **overrides: Any) -> RunResult:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return start(
        "simclr_rn50_400ep_2x160_4x96",
        data=str(images),
        out=out,
        overrides={**TINY, **dotted},
        callbacks=callbacks,
        progress="quiet",
    )


@pytest.mark.parametrize("count", [2, 4])
def test_parts_give_the_loss_and_gradient_of_the_whole_batch(count):
    whole, parted = simclr(), simclr()
    views, batch = batch_of(1)
    loss, _ = whole.step(views, batch)
    loss.backward()
    parts = batch.split(count)
    with torch.no_grad():
        given = parted.first_pass([(lambda p=part: p.views, part) for part in parts])
    total = 0.0
    for part, known in zip(parts, given, strict=True):
        partial, _ = parted.step(part.views, part, known)
        (partial / count).backward()
        total += partial.item() / count
    assert total == pytest.approx(loss.item(), rel=1e-14)
    for (name, a), b in zip(whole.named_parameters(), parted.named_parameters(), strict=True):
        torch.testing.assert_close(b[1].grad, a.grad, rtol=1e-12, atol=1e-15, msg=name)
    # without the rest of the batch it would be another loss
    alone, _ = parted.step(parts[0].views, parts[0])
    assert alone.item() != pytest.approx(parted.step(parts[0].views, parts[0], given[0])[0].item(), rel=1e-3)


@pytest.mark.parametrize("hidden", [0, 5])
def test_embeddings_with_a_norm_are_those_without_it_standardised(hidden):
    plain, normed = simclr(hidden), simclr(hidden, output_norm=True)
    views, _ = batch_of(3)
    projected = plain.projection_head(plain.trunk(views[0]))
    wanted = (projected - projected.mean(0)) / (projected.var(0, unbiased=False) + 1e-5).sqrt()
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    torch.testing.assert_close(normed(views), wanted, rtol=1e-10, atol=1e-12)


def test_the_first_pass_leaves_running_statistics_alone():
    method = simclr(hidden=5)
    _, batch = batch_of(2)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    parts = batch.split(2)
    with torch.no_grad():
        given = method.first_pass([(lambda p=part: p.views, part) for part in parts])
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    method.step(parts[0].views, parts[0], given[0])
    assert int(method.state_dict()["projection_head.1.num_batches_tracked"]) == 1


def test_one_view_has_no_positive(images, tmp_path):
    with pytest.raises(InputError, match="two views") as caught:
        train(images, tmp_path / "run", views__count=[1], views__size=[16], views__min_scale=[0.1],
              views__max_scale=[1.0])  # fmt: skip
    assert caught.value.where == "views.count"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stopping_and_going_on_is_bit_for_bit(images, tmp_path, accumulate):
    settings = {"engine__accumulate": accumulate, "optimizer__lr": 0.5, "schedule__warmup_epochs": 1}
    whole = train(images, tmp_path / "whole", **settings)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(2),), **settings)  # of three steps an epoch
    rest = go_on(half.path)
    assert (half.step, rest.step) == (2, 6)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)
    assert not any(
        isinstance(value, torch.Tensor) for key, value in state(half.path).items() if "local/learner" in key
    )


def test_a_run_learns_and_its_head_is_published_beside_the_trunk(images, tmp_path):
    run = train(images, tmp_path / "run", epochs=8, optimizer__name="adamw", optimizer__lr=0.003)
    losses = [loss for _, loss, _ in trace(run.path)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    what, trunk, heads = read_run(run.path)
    assert what.method == "simclr"
    assert {key.partition(".")[0] for key in heads} == {"projection_head"}
    assert heads["projection_head.3.weight"].shape == (8, 16)
    assert "conv1.weight" in trunk
