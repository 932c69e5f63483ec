"""Training with labels: the loss of all crops, data without labels, resume, what is published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tiny import StopAfter, assert_same_state, go_on, image_folder, trace
from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.supervised import Supervised
from zoo.pretrain.methods.supervised_config import SupervisedConfig
from zoo.pretrain.publish import read_run
from zoo.pretrain.run import RunResult, start

TINY = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 8,
    "views.size": [16, 8],
    "views.count": [2, 1],
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


def supervised(classes: int = 3) -> Supervised:
    torch.manual_seed(0)
    names = tuple(f"class{number}" for number in range(classes))
    shape = RunShape(
        views=3, batch_size=8, world_size=1, steps_per_epoch=4, epochs=1, samples=32, classes=names
    )
    return Supervised(PlainTrunk(), SupervisedConfig(), shape, WorldOfOne()).double()


def batch_of(labels: list[int]) -> tuple[list[torch.Tensor], Batch]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 2), (1, 2))  # two runs of views: 2 crops, then 1
    views = [
        torch.randn(count * 8, 3, side, side, generator=generator, dtype=torch.float64)
        for count, side in sizes
    ]
    return views, Batch(views, 100 + torch.arange(8), torch.tensor(labels), 0)


def train(images: Any, out: Any, callbacks: tuple[Any, ...] = (), **overrides: Any) -> RunResult:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return start(
        "supervised_rn50_200ep_2x160_4x96",
        data=[str(source) for source in images] if isinstance(images, list) else str(images),
        out=out,
        overrides={**TINY, **dotted},
        callbacks=callbacks,
        progress="quiet",
    )


LABELS = [0, 1, 2, 0, 1, 2, 2, 1]


def test_the_loss_is_the_mean_of_the_crops_cross_entropies():
    method = supervised()
    views, batch = batch_of(LABELS)
    loss, _ = method.step(views, batch)
    crops = [*views[0].split(8), views[1]]
    each = [F.cross_entropy(method.classifier(method.trunk(crop)), batch.labels) for crop in crops]
    torch.testing.assert_close(loss, torch.stack(each).mean(), rtol=1e-14, atol=0)
    assert loss.dtype == torch.float64


def test_parts_give_the_gradient_of_the_whole_batch():
    whole, parted = supervised(), supervised()
    views, batch = batch_of(LABELS)
    loss, _ = whole.step(views, batch)
    loss.backward()
    parts = batch.split(4)
    given = parted.first_pass([(lambda p=part: p.views, part) for part in parts])
    for part, known in zip(parts, given, strict=True):
        (parted.step(part.views, part, known)[0] / 4).backward()
    for (name, a), b in zip(whole.named_parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-15, msg=name)


def test_an_unlabelled_image_among_labelled_ones_is_named():
    views, batch = batch_of([0, 1, -1, 0, 1, 2, -1, 1])
    with pytest.raises(InputError, match="2 of 8 images") as caught:
        supervised().step(views, batch)
    assert "number 102 of the data" in caught.value.what


def test_data_without_labels_are_refused_before_anything_is_trained(tmp_path):
    flat = image_folder(tmp_path / "flat", classes=0)
    with pytest.raises(InputError, match="24 carry no labels") as caught:
        train(flat, tmp_path / "run")
    assert caught.value.where == str(flat)
    assert "sub-folder for each class" in caught.value.fix
    assert not (tmp_path / "run").exists()


def test_one_class_and_sources_that_disagree_are_refused(tmp_path, images):
    single = image_folder(tmp_path / "single", classes=1)
    with pytest.raises(InputError, match="one class, 'class0'"):
        train(single, tmp_path / "run")
    with pytest.raises(InputError, match="no labels"):
        train([images, single], tmp_path / "run")


def test_stopping_and_going_on_is_bit_for_bit(images, tmp_path):
    whole = train(images, tmp_path / "whole")
    half = train(images, tmp_path / "half", callbacks=(StopAfter(2),))
    rest = go_on(half.path)
    assert (half.step, rest.step) == (2, 6)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)


def test_a_run_learns_and_its_classifier_is_published_beside_the_trunk(images, tmp_path):
    run = train(images, tmp_path / "run", epochs=8, optimizer__name="adamw", optimizer__lr=0.01)
    losses = [loss for _, loss, _ in trace(run.path)]
    assert losses[0] == pytest.approx(0.69, abs=0.4)  # ln 2: two classes, not yet known
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    what, _, heads = read_run(run.path)
    assert what.method == "supervised"
    assert {key: tuple(value.shape) for key, value in heads.items()} == {
        "classifier.weight": (2, 64),
        "classifier.bias": (2,),
    }
