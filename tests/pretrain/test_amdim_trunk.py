"""AMDIM's encoder as the trunk of other methods: its features are the flattened top map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tiny import StopAfter, assert_same_state, go_on
from zoo.errors import InputError
from zoo.keyed import keyed_seed
from zoo.models.factory import create_trunk
from zoo.pretrain.run import RunResult, start
from zoo.tensors import seeded

OPTIONS = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 2, "use_bn": False}
# 24 images and batches of 8: an epoch is 3 steps.
TINY: dict[str, Any] = {
    "trunk.arch": "amdim",
    "trunk.options": OPTIONS,
    "views.size": [32],
    "views.count": [2],
    "views.min_scale": [0.2],
    "views.max_scale": [1.0],
    "evaluation.resize": 32,
    "evaluation.crop": 32,
    "batch_size": 8,
    "epochs": 1,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}
NARROW = {"method.hidden": 16, "method.dim": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "simclr_rn50_bs256": {**NARROW, "engine.activation_checkpointing": True},
    "moco_v2_rn50_200ep": {**NARROW, "method.negatives": 16, "method.shuffle_groups": 2},
    "swav_rn50_bs256_momentum": {
        **NARROW,
        "method.prototypes": 8,
        "method.queue_length": 16,
        "method.queue_start_epoch": 0,
        "engine.accumulate": 2,
    },
    "deepclusterv2_rn50_800ep": {**NARROW, "method.prototypes": [4, 4]},
    "supervised_rn50_200ep_2x224": {},
}


def train(images: Path, out: Path, recipe: str, callbacks: tuple[Any, ...] = (), **more: Any) -> RunResult:
    overrides = {**TINY, **RECIPES[recipe], **{key.replace("__", "."): value for key, value in more.items()}}
    return start(
        recipe, data=str(images), out=out, overrides=overrides, callbacks=callbacks, progress="quiet"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_resumed_bit_for_bit_and_its_trunk_has_learnt(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    whole = train(images, tmp_path / "whole", recipe)
    stopped = train(images, tmp_path / "stopped", recipe, (StopAfter(2),))
    go_on(stopped.path)
    assert_same_state(whole.path, stopped.path)
    published = zoo.publish(whole.path, name="me/amdim")
    model = zoo.load(str(published.path), progress=False).eval()
    assert model.options == OPTIONS
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(x), model.maps(x)[0].flatten(1)) and model(x).shape == (2, 16)
    with seeded(keyed_seed(0, "init")):
        before = create_trunk("amdim", options=OPTIONS).state_dict()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert {"layer_list.0.conv.weight", "layer_list.7.conv2.weight", "layer_list.8.bn.running_mean"} <= moved
    assert not [
        name for name in moved if name.startswith("rkhs_block")
    ]  # what embeds maps serves AMDIM alone


@pytest.mark.parametrize(
    ("more", "where", "words"),
    [
        (
            {"views__size": [32, 16], "views__count": [2, 2]},
            "views.size",
            ["16 x 16", "nothing else", "[32]"],
        ),
        ({"views__size": [64]}, "views.size", ["64 x 64", "encoder_size to 64"]),
        ({"evaluation__crop": 24}, "evaluation.crop", ["24 x 24", "set it to 32"]),
    ],
    ids=["multi-crop", "another size", "another test"],
)
def test_views_that_it_does_not_take_are_refused_before_a_run_begins(
    images: Path, tmp_path: Path, more: dict[str, Any], where: str, words: list[str]
) -> None:
    if len(more.get("views__size", [])) == 2:
        more = {**more, "views__min_scale": [0.2, 0.05], "views__max_scale": [1.0, 0.2]}
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", "simclr_rn50_bs256", **more)
    assert caught.value.where == where
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "run").exists()
