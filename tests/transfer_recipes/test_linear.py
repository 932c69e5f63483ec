"""The linear recipe: a grid chosen without the test images, the last and the best epoch, what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from tiny import image_folder
from transfer import RECIPES
from transfer.datasets import SubsetImages
from transfer.linear.config import LARGE, LinearConfig
from transfer.linear.run import held_out_rows
from transfer.run import open_context, transfer
from weights.published import assert_clear
from zoo.errors import InputError
from zoo.probe.linear import FINAL

run = RECIPES.code("linear")
GRID = {
    "epochs": 4,
    "batch_size": 12,
    "lr": [0.01, 0.3],
    "weight_decay": [0.0, 1e-3],
    "stages": ["layer1", "layer4", "final"],
    "norm": ["none", "batch"],
}


def shuffled_labels(context, seed):
    """The same images with test labels that mean nothing."""
    labels = [context.val.label(index) for index in range(len(context.val))]
    mixed = np.random.default_rng(seed).permutation(labels).tolist()
    val = SubsetImages(context.val, range(len(labels)), mixed)
    return dataclasses.replace(context, labelled=dataclasses.replace(context.labelled, val=val), _features={})


@pytest.mark.parametrize("protocol", ["cached", "swav"])
def test_the_choice_never_sees_the_test_images(small, greys, protocol):
    config = LinearConfig.model_validate({**GRID, "protocol": protocol})
    context = open_context(small, str(greys))
    found = run(context, config)
    assert len(found["grid"]) == 2 * 2 * 3 * 2
    assert found["held_out"] == 7 and found["trained_again_on_all"] is (protocol == "cached")
    best = max(row["top1"] for row in found["grid"] if not row["diverged"])
    assert found["held_out_top1"] == best
    chosen = {name: found["chosen"][name] for name in ("lr", "weight_decay", "stage", "norm")}
    assert any({**chosen, "top1": best, "diverged": False} == row for row in found["grid"])
    for seed in (0, 1):
        other = run(shuffled_labels(context, seed), config)
        assert (other["chosen"], other["grid"]) == (found["chosen"], found["grid"])
        assert other["metrics"]["train_loss"] == found["metrics"]["train_loss"]
        assert other["metrics"]["top1"] < found["metrics"]["top1"]


def test_held_out_images_leave_every_class_one():
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    held, rest = held_out_rows(labels, 0.9, seed=0)
    assert sorted([*held, *rest]) == list(range(13)) and set(labels[rest].tolist()) == {0, 1, 2}
    assert 12 not in held and len(held) == 10
    again, _ = held_out_rows(labels, 0.9, seed=0)
    assert np.array_equal(held, again)
    assert not np.array_equal(held, held_out_rows(labels, 0.9, seed=1)[0])
    with pytest.raises(InputError, match="every class has a single"):
        held_out_rows(torch.arange(5), 0.2, seed=0)


def test_stages_are_what_the_network_gives(small, greys):
    context = open_context(small, str(greys))
    together, _ = context.features("val", ("layer2", "final", "layer4"))
    final, _ = context.features("val")
    assert together.shape == (12, 16 + 64 + 64)
    torch.testing.assert_close(together[:, 16:80], final)
    torch.testing.assert_close(together[:, 80:], final)
    layer2, _ = context.features("val", ("layer2",))
    torch.testing.assert_close(together[:, :16], layer2)
    with pytest.raises(InputError, match="no stage 'layer5'") as caught:
        run(context, LinearConfig(stages=("layer5",)))
    assert "layer4" in caught.value.fix


def test_kept_views_are_those_of_the_first_epochs(small, greys):
    """The same crops as the uncached protocol draws, so training on them is the same for so many epochs."""
    context = open_context(small, str(greys))
    first, labels = context.features("train", view=0, seed=3)
    second, _ = context.features("train", view=1, seed=3)
    assert not torch.equal(first, second)
    again = dataclasses.replace(context, _features={}).features("train", view=1, seed=3)[0]
    assert torch.equal(second, again)
    other, _ = context.features("train", view=0, seed=4)
    assert not torch.equal(first, other)
    from transfer.linear.common import augmented
    from zoo.data.views.presets import crop_and_flip

    batches, _ = augmented(context, context.train, crop_and_flip(32), 36, 3)
    x, y = next(iter(batches(0)))
    order = y.argsort(stable=True)
    assert torch.equal(y[order], labels)
    by_norm = lambda rows: rows.norm(dim=1).sort().values  # noqa: E731
    torch.testing.assert_close(by_norm(x), by_norm(first), rtol=1e-4, atol=1e-5)
    found = run(context, LinearConfig(protocol="cached", views=2, lr=(0.03,), epochs=6))
    assert found["kept_views"] == {"center": 1, "random": 2} and found["train_view"]["crop"] == 32


def test_the_last_and_the_best_epoch_are_told_apart(small, greys):
    context = open_context(small, str(greys))
    found = run(context, LinearConfig(protocol="swav", epochs=8, lr=(3.0,), batch_size=12))
    metrics = found["metrics"]
    assert metrics["best_top1"] >= metrics["top1"] and 1 <= found["best_epoch"] <= found["last_epoch"] == 8
    until = {"protocol": "swav", "lr": (3.0,), "batch_size": 12, "epochs": 8}
    stopped = run(context, LinearConfig(**until, limit=3 * found["best_epoch"]))
    assert stopped["last_epoch"] == found["best_epoch"]
    assert stopped["metrics"]["top1"] == metrics["best_top1"]


def test_auto_is_the_papers_protocol_for_large_sets():
    auto = LinearConfig(epochs=7, seed=3)
    small_, large = auto.settled(LARGE - 1), auto.settled(LARGE)
    assert (small_.protocol, small_.epochs, small_.norms, len(small_.lr)) == ("cached", 7, ("standard",), 4)
    assert (large.protocol, large.epochs, large.lr, large.norms) == ("swav", 7, (0.3,), ("none",))
    assert large.seed == 3 and large.settled(10) is large
    assert LinearConfig(protocol="exact").protocol == "swav"


def test_forty_images_and_a_rate_of_thirty_have_diverged(command, tmp_path):  # case 31
    image_folder(tmp_path / "d" / "train", 40, 4, 16)
    for index, name in enumerate(("class0", "class1")):
        image_folder(tmp_path / "e", 4 + index, 1, 24)
        (tmp_path / "d" / "val").mkdir(exist_ok=True)
        (tmp_path / "e" / "class0").rename(tmp_path / "d" / "val" / name)
    words = ("transfer", "linear", "--model", "random:resnet18", "--dataset", tmp_path / "d")
    flags = ("--resize", 24, "--crop", 24, "--protocol", "moco", "--epochs", 3, "--allow-overlap")
    answer = command(*words, *flags, "--out", tmp_path / "out")
    assert_clear(answer, "diverged", "lower the lr", code=1)
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["details"]["diverged"] is True and written["details"]["chosen"]["lr"] == 30


def test_a_grid_prefers_what_did_not_diverge(noise):
    context = open_context("pixels:1", str(noise))
    found = run(context, LinearConfig(protocol="cached", epochs=3, lr=(1e6, 0.03)))
    assert found["chosen"]["lr"] == 0.03 and found["diverged"] is False
    assert [row["diverged"] for row in found["grid"]] == [True, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"protocol": "swav", "norm": ["standard"]}, ["cached", "batch"]),
        ({"protocol": "moco", "views": 2}, ["views"]),
        ({"protocol": "amdim", "stages": ["layer1"]}, ["no stages"]),
        ({"lr": [-1.0]}, ["greater than 0"]),
        ({"norm": ["layer"]}, ["norm"]),
        ({"stages": ["layer9"]}, ["no stage"]),
    ],
)
def test_what_can_not_be(small, greys, settings, words):
    with pytest.raises(InputError) as caught:
        transfer("linear", model=small, dataset=str(greys), settings=settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_raw_pixels_have_one_stage(greys):
    found = run(open_context("pixels:8", str(greys)), LinearConfig(epochs=3, lr=(0.01,)))
    assert found["chosen"]["stage"] == FINAL and found["metrics"]["top1"] > 0.5
