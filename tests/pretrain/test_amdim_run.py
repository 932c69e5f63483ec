"""Runs of AMDIM: exact resume, what they refuse, and what is published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import StopAfter, assert_same_state, go_on, image_folder, lines, trace
from zoo.errors import InputError
from zoo.pretrain.publish import read_run
from zoo.pretrain.run import RunResult, start

# 24 images and batches of 8: an epoch is 3 steps.
TINY: dict[str, Any] = {
    "trunk.options": {"ndf": 2, "n_rkhs": 8, "n_depth": 1},
    "schedule.warmup_steps": 2,
    "optimizer.lr": 0.001,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}
LOCAL_DIM = {"method__costs": ["1to7"], "method__across_views": False, "views__count": [1]}


def with_tiny(**overrides: Any) -> dict[str, Any]:
    return {**TINY, **{key.replace("__", "."): value for key, value in overrides.items()}}


def train(images: Path, out: Path, callbacks: tuple[Any, ...] = (), **overrides: Any) -> RunResult:
    return start(
        "amdim_ndf128_cifar10",
        data=str(images),
        out=out,
        overrides=with_tiny(**overrides),
        callbacks=callbacks,
        progress="quiet",
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine__accumulate": 2, "method__mixtures": 2},
        {"precision": "bfloat16", "method__mixtures": 2, "method__mixture_temperature": 3.0},
        {**LOCAL_DIM, "engine__activation_checkpointing": True, "method__classifiers": False},
    ],
    ids=["whole", "in parts", "bfloat16", "Local DIM"],
)
def test_stopping_and_going_on_is_bit_for_bit(images: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Mid-epoch: the places of 5to5, the dropout of the MLP beside the encoder, Adam's moments."""
    whole = train(images, tmp_path / "whole", **settings)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(2),), **settings)  # of three steps an epoch
    rest = go_on(half.path)
    assert (half.step, rest.step) == (2, 6)
    assert trace(half.path) == trace(whole.path)
    times = ("time", "step_time", "data_wait", "img_s")
    kept = [
        [{k: v for k, v in line.items() if k not in times} for line in lines(run.path)]
        for run in (half, whole)
    ]
    assert kept[0] == kept[1]  # the costs and the classifiers' figures, too
    assert_same_state(half.path, whole.path)


def test_classifiers_change_nothing_of_a_run_but_themselves(images: Path, tmp_path: Path) -> None:
    runs = [
        train(images, tmp_path / str(classifiers), method__classifiers=classifiers)
        for classifiers in (False, True)
    ]
    assert trace(runs[0].path) == trace(runs[1].path)
    trunks = [read_run(run.path)[1] for run in runs]
    assert trunks[0].keys() == trunks[1].keys()
    assert all(torch.equal(value, trunks[1][key]) for key, value in trunks[0].items())
    assert {"linear_accuracy", "mlp_loss"} <= lines(runs[1].path)[0].keys()


def test_a_run_learns_and_its_classifier_and_heads_are_published(images: Path, tmp_path: Path) -> None:
    """Without colour changes, which make of so few small images something harder."""
    wider = {"ndf": 8, "n_rkhs": 32, "n_depth": 1}
    plain = {"views__jitter_p": 0.0, "views__gray_p": 0.0}
    run = train(images, tmp_path / "run", epochs=12, optimizer__lr=0.003, trunk__options=wider, **plain)
    losses = [loss for _, loss, _ in trace(run.path)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    for cost, negatives in (("1to5", 7 * 25), ("1to7", 7 * 49), ("5to5", 7 * 25)):
        assert sum(line[cost] for line in lines(run.path)[-3:]) / 3 < math.log(1 + negatives) - 0.2
    first = lines(run.path)[0]
    assert first["health/chance"] == pytest.approx(2 * math.log(1 + 7 * 25) + math.log(1 + 7 * 49))
    assert 1.5 < first["health/rank"] <= 16 and first["health/spread"] > 0.5
    assert not (run.path / "events.jsonl").exists()
    what, trunk, heads = read_run(run.path)
    assert (what.method, what.arch, what.num_features) == ("amdim", "amdim", 32)
    assert what.num_classes == 2
    assert {key.partition(".")[0] for key in heads} == {"classifier", "mlp_classifier"}
    assert "rkhs_block_7.bn_out.bn.weight" in trunk


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"trunk__options": {"ndf": 8, "n_rkhs": 31}},
            ["n_rkhs is 31", "32 channels", "n_rkhs of 32 or more"],
        ),
        ({"trunk__options": {"encoder_size": 96}}, ["not 96", "the nearest is"]),
        (
            {"trunk__options": {"encoder_size": 64, "ndf": 2, "n_rkhs": 16}},
            ["32 x 32", "64 x 64", "views.size"],
        ),
        ({"views__preset": "swav"}, ["AMDIM takes two views of one size", "224 and 96", "amdim-32"]),
        ({"trunk__arch": "resnet18", "trunk__options": {}}, ["resnet18"]),
        ({"method__costs": ["5to5"]}, ["learn nothing", "1to7"]),
        ({"schedule__warmup_epochs": 1}, ["warmup_steps"]),
    ],
    ids=["n_rkhs", "no such size", "size", "multi-crop", "another trunk", "costs", "two warm-ups"],
)
def test_what_can_not_work_is_refused_before_anything_is_made(
    images: Path, tmp_path: Path, overrides: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", **overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_resnet_is_refused_with_advice(images: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="5 x 5 and 7 x 7") as caught:
        start(
            {
                "method": {"name": "amdim"},
                "trunk": {"arch": "resnet18", "base_planes": 8},
                "views": {"preset": "amdim-32"},
                "optimizer": {"name": "adam", "lr": 0.001},
                "epochs": 1,
                "batch_size": 8,
                "device": "cpu",
            },
            data=str(images),
            out=tmp_path / "run",
            progress="quiet",
        )
    assert caught.value.where == "trunk.arch"
    assert "amdim" in str(caught.value.fix)


def test_classifiers_without_labels_are_refused_with_advice(tmp_path: Path) -> None:
    flat = image_folder(tmp_path / "flat", count=8, classes=0)
    with pytest.raises(InputError, match="no labels") as caught:
        train(flat, tmp_path / "run")
    assert caught.value.where == "method.classifiers"
    assert "set it to false" in str(caught.value.fix)
    assert train(flat, tmp_path / "run", epochs=1, method__classifiers=False).step == 1
