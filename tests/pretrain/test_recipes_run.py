"""Every recipe that comes with the package runs: two steps, with only data, batch and widths made small.

A new recipe is picked up by itself. What it must be, by its sources, belongs into ``EXPECTED``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tiny import StopAfter, as_options, image_folder, lines
from zoo.data.views.presets import find_preset
from zoo.engine.loop import Callback, Loop
from zoo.errors import EXIT_SAVED
from zoo.pretrain import run
from zoo.pretrain.config import Recipe
from zoo.pretrain.resolve import list_recipes, resolve

BATCH, IMAGES = 4, 8  # two steps an epoch
# Widths and counts of methods, by the names of their settings; one that is not there stays as it is.
NARROW: dict[str, Any] = {
    "hidden": 16,
    "dim": 8,
    "prototypes": 4,
    "queue_length": 4,
    "negatives": 8,
    "shuffle_groups": 2,
}

Crops = tuple[tuple[int, int, float, float], ...]  # (views, pixels, smallest, largest share of the area)
SWAV = ((2, 224, 0.14, 1.0), (6, 96, 0.05, 0.14))
TWO = ((2, 224, 0.08, 1.0),)
CHEAP = ((2, 160, 0.08, 1.0), (4, 96, 0.05, 0.14))
WIDE = ((2, 224, 0.14, 1.0), (4, 96, 0.05, 0.14))
A7 = ((2, 224, 0.08, 1.0), (6, 96, 0.05, 0.14))


class Rates(NamedTuple):
    """The optimizer and its schedule: linear from ``start`` to ``peak`` in ``warmup`` epochs, cosine to ``final``."""

    optimizer: str
    peak: float
    final: float
    start: float
    warmup: float
    decay: float
    decays_all: bool  # biases and norms, too


class Expected(NamedTuple):
    """A recipe by its sources, which its header names; ``method`` has what is not the method's default."""

    arch: str
    crops: Crops
    batch: int
    epochs: int
    rates: Rates
    method: Mapping[str, Any]


BIG = Rates("lars", 4.8, 0.0048, 0.3, 10, 1e-6, True)  # released scripts at batch 4096, A.1
SMALL = Rates("lars", 0.6, 0.0006, 0.0, 0, 1e-6, True)  # released scripts at batch 256, A.6
BILLION = BIG._replace(warmup=0.0128)
CHEN = Rates("lars", 4.8, 0.0, 0.0, 10, 1e-6, False)  # SimCLR's paper and code
LABELS = Rates("sgd", 1.6, 0.0, 0.1, 5, 1e-4, False)
FROZEN = {"freeze_prototypes_steps": 313}
QUEUE = {"freeze_prototypes_steps": 5005, "queue_length": 3840, "queue_start_epoch": 15}
EXPECTED: dict[str, Expected] = {
    **{
        f"swav_rn50_{epochs}ep": Expected("resnet50", SWAV, 4096, epochs, BIG, FROZEN)
        for epochs in (100, 200, 400, 800)
    },
    "swav_rn50_400ep_2x224": Expected("resnet50", TWO, 4096, 400, BIG, FROZEN),
    "swav_rn50_400ep_2x160_4x96": Expected("resnet50", CHEAP, 4096, 400, BIG, FROZEN),
    "swav_rn50_bs256": Expected("resnet50", SWAV, 256, 200, SMALL, QUEUE),
    "swav_rn50_bs256_400ep": Expected("resnet50", SWAV, 256, 400, SMALL, QUEUE),
    "swav_rn50_bs256_2x160_4x96": Expected(
        "resnet50", ((2, 160, 0.14, 1.0), (4, 96, 0.05, 0.14)), 256, 200, SMALL, QUEUE
    ),
    "swav_rn50_bs256_momentum": Expected(
        "resnet50", SWAV, 256, 200, SMALL, {**QUEUE, "queue_length": 65536, "momentum_encoder": 0.999}
    ),
    "swav_rn50w2_400ep": Expected("resnet50w2", WIDE, 4096, 400, BIG, {**FROZEN, "hidden": 8192}),
    "swav_rn50w4_400ep": Expected(
        "resnet50w4",
        ((2, 224, 0.08, 1.0), (4, 96, 0.08, 0.14)),
        2560,
        400,
        BIG,
        {**FROZEN, "hidden": 8192, "queue_length": 2560, "queue_start_epoch": 0},
    ),
    "swav_rn50w5_400ep": Expected(
        "resnet50w5",
        WIDE,
        1536,
        400,
        BIG._replace(final=0.0, start=0.1875),
        {**FROZEN, "hidden": 10240, "head_norm": False, "queue_length": 1536, "queue_start_epoch": 0},
    ),
    "swav_rn50_1b": Expected("resnet50", A7, 4096, 1, BILLION, FROZEN),
    **{
        f"swav_rnx101_32x{width}d_1b": Expected(f"resnext101_32x{width}d", A7, 4096, 1, BILLION, FROZEN)
        for width in (8, 16, 32, 48)
    },
    "simclr_rn50_400ep_2x224": Expected("resnet50", TWO, 4096, 400, BIG, {}),
    "simclr_rn50_400ep_2x160_4x96": Expected("resnet50", CHEAP, 4096, 400, BIG, {}),
    "simclr_rn50_1000ep": Expected("resnet50", TWO, 4096, 1000, CHEN, {}),
    "simclr_rn50w2_1000ep": Expected("resnet50w2", TWO, 4096, 1000, CHEN, {"hidden": 4096}),
    "simclr_rn50w4_1000ep": Expected("resnet50w4", TWO, 4096, 1000, CHEN, {"hidden": 8192}),
    "simclr_rn50_bs256": Expected("resnet50", TWO, 256, 200, CHEN._replace(peak=0.3), {}),
    "simclr_rn50_1b": Expected("resnet50", TWO, 4096, 1, BILLION, {}),
    "supervised_rn50_200ep_2x224": Expected("resnet50", TWO, 4096, 200, LABELS, {}),
    "supervised_rn50_200ep_2x160_4x96": Expected("resnet50", CHEAP, 4096, 200, LABELS, {}),
    **{
        f"supervised_rn50w{width}_200ep": Expected(f"resnet50w{width}", TWO, 4096, 200, LABELS, {})
        for width in (2, 4, 5)
    },
    "deepclusterv2_rn50_800ep": Expected("resnet50", SWAV, 4096, 800, BIG, {}),
    **{
        f"{method}_rn50_400ep_{name}": Expected("resnet50", crops, 4096, 400, BIG, {})
        for method in ("deepclusterv2", "selav2")
        for name, crops in (("2x224", TWO), ("2x160_4x96", CHEAP))
    },
}
# Epochs and drops of MoCo's recipes; their other numbers are held against the golden facts in test_moco_run.
MOCO: dict[str, tuple[int, tuple[int, ...]]] = {
    "moco_v1_rn50_200ep": (200, (120, 160)),
    "moco_v1_rn50w4_200ep": (200, (120, 160)),
    "moco_v2_rn50_200ep": (200, ()),
    "moco_v2_rn50_800ep": (800, ()),
}


class ExpectedAMDIM(NamedTuple):
    """An AMDIM recipe by its sources; the rest is alike for all (the released code's defaults)."""

    preset: str
    size: int
    ndf: int
    n_rkhs: int
    n_depth: int
    batch: int
    epochs: int
    drops: tuple[int, int]


AMDIM = {
    "amdim_ndf128_in128": ExpectedAMDIM("amdim-128", 128, 128, 1024, 3, 480, 50, (30, 45)),
    "amdim_ndf192_in128": ExpectedAMDIM("amdim-128", 128, 192, 1536, 8, 480, 50, (30, 45)),
    "amdim_ndf256_in128": ExpectedAMDIM("amdim-128", 128, 256, 2048, 10, 1008, 100, (60, 90)),
    "amdim_ndf320_in128": ExpectedAMDIM("amdim-128", 128, 320, 2560, 10, 1008, 100, (60, 90)),
    "amdim_ndf192_places205": ExpectedAMDIM("amdim-128", 128, 192, 1536, 8, 480, 50, (30, 45)),
    "amdim_ndf128_stl10": ExpectedAMDIM("amdim-64", 64, 128, 1024, 3, 200, 300, (250, 280)),
    "amdim_ndf128_cifar10": ExpectedAMDIM("amdim-32", 32, 128, 1024, 3, 200, 300, (250, 280)),
    "amdim_ndf128_cifar100": ExpectedAMDIM("amdim-32", 32, 128, 1024, 3, 200, 300, (250, 280)),
}
BANK = {
    "prototypes": (3000, 3000, 3000),
    "hidden": 2048,
    "dim": 128,
    "temperature": 0.1,
    "crops_for_assign": (0, 1),
}
# What the SwAV paper and its released scripts have in common (A.1), and A.8.
DEFAULTS: dict[str, dict[str, Any]] = {
    "swav": {
        "prototypes": 3000,
        "hidden": 2048,
        "head_norm": True,
        "dim": 128,
        "temperature": 0.1,
        "epsilon": 0.05,
        "sinkhorn_iterations": 3,
        "codes": "soft",
        "crops_for_assign": (0, 1),
        "learn_prototypes": True,
        "queue_length": 0,
        "momentum_encoder": None,
    },
    "simclr": {"hidden": 2048, "dim": 128, "temperature": 0.1},
    "supervised": {},
    "deepcluster_v2": {**BANK, "kmeans_iterations": 10},
    "sela_v2": {**BANK, "codes": "hard", "epsilon": 0.05, "sinkhorn_iterations": 10},
}


class Watch(Callback):
    """The loop of a run."""

    loop: Loop

    def on_start(self, loop: Loop) -> None:
        self.loop = loop


def reduced(recipe: Recipe) -> dict[str, Any]:
    """Overrides: pixels, channels, widths, images and processors; rates, epochs and views stay."""
    method = {
        f"method.{key}": (value,) * len(given) if isinstance(given, tuple) else min(value, given)
        for key, value in NARROW.items()
        if (given := getattr(recipe.method, key, 0))
    }
    network: dict[str, Any] = {
        "trunk.base_planes": 8,  # the fewest of which a ResNeXt's groups get one
        "views.size": [max(8, size // 14) for size in recipe.views.size],
    }
    if recipe.trunk.arch == "amdim":  # its pixels are the encoder's
        network = {"trunk.options": {"ndf": 2, "n_rkhs": 16, "n_depth": 1}}
    return {
        **method,
        **network,
        "batch_size": BATCH,
        "device": "cpu",
        "precision": "float32",
        "data.workers": 0,
        "data.augment_on": "worker",
        "checkpoint.every_steps": None,
        "checkpoint.every_epochs": None,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), count=IMAGES)


@pytest.mark.parametrize("name", list_recipes())
def test_two_steps(
    name: str,
    folder: Path,
    tmp_path: Path,
    zoo: Callable[..., tuple[int | str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = resolve(name).recipe
    watch, out = Watch(), tmp_path / "run"
    # The command as it is, but for somebody who looks on.
    monkeypatch.setattr(run, "start", functools.partial(run.start, callbacks=(watch, StopAfter(2))))
    words = ("--data", folder, "--out", out, "--quiet", *as_options(reduced(recipe)))
    code, _, err = zoo("pretrain", name, *words)
    assert code == (EXIT_SAVED if watch.loop.total_steps > 2 else 0), err
    first, second = lines(out)
    assert math.isfinite(first["loss"])
    assert math.isfinite(second["loss"])
    assert [line["lr"] for line in (first, second)] == [watch.loop.lr_at(step) for step in (0, 1)]
    if name in EXPECTED:
        check_rates(EXPECTED[name].rates, watch.loop, recipe.epochs)
        check_groups(EXPECTED[name].rates, watch.loop)
    if name in MOCO:
        check_rates_by_epoch(*MOCO[name], watch.loop)
        check_groups(Rates("sgd", 0.03, 0.0, 0.0, 0, 1e-4, True), watch.loop)
    if name in AMDIM:
        check_adam(AMDIM[name], watch.loop)


def check_rates_by_epoch(epochs: int, drops: tuple[int, ...], loop: Loop) -> None:
    """MoCo's rates (``main_moco.py``): 0.03, a tenth at each drop, or a cosine; they move between epochs."""
    assert loop.total_steps == epochs * loop.steps_per_epoch
    for epoch in (0, 119, 120, 159, 160, epochs // 2, epochs - 1):
        cosine = (1 + math.cos(math.pi * epoch / epochs)) / 2
        rate = 0.03 * (0.1 ** sum(epoch >= drop for drop in drops) if drops else cosine)
        for step in (0, loop.steps_per_epoch - 1):
            assert loop.lr_at(epoch * loop.steps_per_epoch + step) == pytest.approx(rate, rel=1e-9), epoch


def check_adam(want: ExpectedAMDIM, loop: Loop) -> None:
    """AMDIM's optimizer and rates (``task_self_supervised.py``), which don't depend on an epoch's length."""
    groups = loop.optimizer.param_groups
    assert type(loop.optimizer) is torch.optim.Adam
    assert {(group["betas"], group["weight_decay"], group["eps"]) for group in groups} == {
        ((0.8, 0.999), 1e-5, 1e-8)
    }
    trained = [parameter for parameter in loop.learner.parameters() if parameter.requires_grad]
    assert len(trained) == sum(len(group["params"]) for group in groups)
    for step in (0, 1, 250, 499, 500):
        rate = 2e-4 * min(1.0, (step + 1) / 500)
        if step == 500:
            rate *= 0.2 ** sum(step >= loop.steps_per_epoch * epoch for epoch in want.drops)
        assert loop.lr_at(step) == pytest.approx(rate, rel=1e-9), step
    first, second = (loop.steps_per_epoch * epoch for epoch in (1000, 10000))
    assert (loop.lr_at(first), loop.lr_at(second)) == (pytest.approx(2e-4 * 0.04),) * 2


def check_rates(want: Rates, loop: Loop, epochs: int) -> None:
    """The rate of some steps of the whole run, by the formula of the reference (``main_swav.py``)."""
    steps = epochs * loop.steps_per_epoch
    assert loop.total_steps == steps
    warmup = round(want.warmup * loop.steps_per_epoch)
    for step in {0, warmup // 2, max(0, warmup - 1), warmup, steps // 2, steps - 1}:
        if step < warmup:
            rate = want.start + (want.peak - want.start) * step / (warmup - 1)
        else:
            part = (step - warmup) / (steps - warmup)
            rate = want.final + (want.peak - want.final) * (1 + math.cos(math.pi * part)) / 2
        assert loop.lr_at(step) == pytest.approx(rate, rel=1e-9, abs=1e-12), step


def check_groups(want: Rates, loop: Loop) -> None:
    """Which parameters are decayed (and by LARS adapted), and that none is forgotten."""
    groups = loop.optimizer.param_groups
    assert type(loop.optimizer).__name__.lower() == want.optimizer
    trained = [parameter for parameter in loop.learner.parameters() if parameter.requires_grad]
    grouped = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in trained}
    assert len(grouped) == len(trained)
    for group in groups:
        assert group["momentum"] == 0.9
        flat = {parameter.ndim <= 1 for parameter in group["params"]}
        if want.decays_all:
            assert group["weight_decay"] == want.decay
        else:
            assert len(flat) == 1
            assert group["weight_decay"] == (0.0 if flat == {True} else want.decay)
        if want.optimizer == "lars":
            assert group["trust"] == 0.001
            assert group["adapt"] is (want.decays_all or flat == {False})


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_is_what_its_sources_say(name: str) -> None:
    recipe, want = resolve(name).recipe, EXPECTED[name]
    views = recipe.views
    kinds = zip(views.count, views.size, views.min_scale, views.max_scale, strict=True)
    assert tuple(kinds) == want.crops
    assert (recipe.trunk.arch, recipe.batch_size, recipe.epochs) == (want.arch, want.batch, want.epochs)
    assert (recipe.trunk.stem, recipe.trunk.base_planes, recipe.seed) == ("imagenet", None, 0)
    settings = recipe.method.model_dump()
    for key, value in {**DEFAULTS[settings["name"]], **want.method}.items():
        assert settings[key] == value, key
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert want.rates == Rates(
        optimizer.name,
        optimizer.lr,
        schedule.final_lr,
        schedule.start_lr,
        schedule.warmup_epochs,
        optimizer.weight_decay,
        not optimizer.exclude_one_dimensional,
    )
    assert (optimizer.momentum, recipe.engine.sync_batchnorm) == (0.9, True)
    # SimCLR's distortions everywhere (A.2): strength 1, grayscale 0.2, blur in half of the views.
    assert (views.jitter, views.jitter_p, views.gray_p) == ((0.8, 0.8, 0.8, 0.2), 0.8, 0.2)
    assert (views.blur_p, views.blur_radius, views.flip_p) == (0.5, (0.1, 2.0), 0.5)
    own = name.endswith("_1000ep") or name == "simclr_rn50_bs256"  # SimCLR's release; the others are SwAV's
    assert views.std == ((0.229, 0.224, 0.225) if own else (0.228, 0.224, 0.225))
    assert views.interpolation == ("bicubic" if own else "bilinear")


@pytest.mark.parametrize("name", AMDIM)
def test_an_amdim_recipe_is_what_its_sources_say(name: str) -> None:
    recipe, want = resolve(name).recipe, AMDIM[name]
    preset = find_preset(want.preset)
    assert recipe.views.plan() == preset.plan
    assert recipe.views.shared_flip
    assert (recipe.views.count, recipe.views.size) == ((2,), (want.size,))
    test = recipe.evaluation
    assert (test.resize, test.crop, test.interpolation) == (
        preset.test.resize,
        preset.test.crop,
        preset.test.interpolation,
    )
    assert (recipe.trunk.arch, recipe.trunk.options) == (
        "amdim",
        {
            "encoder_size": want.size,
            "ndf": want.ndf,
            "n_rkhs": want.n_rkhs,
            "n_depth": want.n_depth,
            "use_bn": False,
        },
    )
    assert (recipe.batch_size, recipe.epochs, recipe.seed) == (want.batch, want.epochs, 0)
    settings = recipe.method.model_dump()
    assert settings == {
        "name": "amdim",
        "costs": ("1to5", "1to7", "5to5"),
        "across_views": True,
        "clip": 20.0,
        "regularizer": 0.05,
        "classifiers": True,
        "mixtures": 0,
        "mixture_hidden": None,
        "mixture_entropy": 1.0,
        "mixture_temperature": None,
    }
    schedule = recipe.schedule
    assert (schedule.name, schedule.per, schedule.warmup_steps, schedule.drop) == ("step", "step", 500, 0.2)
    assert schedule.drop_at == want.drops
    own = {"stl10": ("stl10",), "cifar10": ("cifar10",), "cifar100": ("cifar100",)}
    assert recipe.data.sources == own.get(name.rpartition("_")[2], ())


def test_every_published_recipe_is_checked() -> None:
    own = {name for name in list_recipes() if name.endswith("px")} | {"swav_tiny"}
    assert {*EXPECTED, *MOCO, *AMDIM} == set(list_recipes()) - own


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipes_header_says_where_its_numbers_come_from(name: str) -> None:
    text = (Path(run.__file__).parent / "recipes" / f"{name}.yaml").read_text("utf-8")
    header = text[: text.index("\nsummary:")]
    assert all(line.startswith("#") for line in header.splitlines())
    assert "Sources" in header
    assert "Published" in header
    assert "Measured here: " in header or "Evidence" in header
    assert "ardware" in header
    assert resolve(name).recipe.summary
