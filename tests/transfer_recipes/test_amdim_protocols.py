"""AMDIM's evaluators: the clean protocol beside that of its authors, and AMDIM's encoder in every recipe."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import zoo
from transfer import RECIPES
from transfer.linear.amdim import amdim_view, norms_learning
from transfer.results import results_of
from transfer.run import open_context, transfer
from weights.published import assert_clear, describe
from zoo.data.views.presets import find_preset
from zoo.errors import InputError, RunError
from zoo.models.factory import create_trunk
from zoo.weights.bundle import write_bundle

from .test_recipes import fingerprint

FEW = {"epochs": 6, "batch_size": 12, "lr": [0.03]}
BOTH = ("amdim", "amdim-train-bn")
OPTIONS = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 1, "use_bn": True}


def settings_of(protocol, **more):
    return RECIPES.config("linear").model_validate({"protocol": protocol, **FEW, **more})


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A published AMDIM encoder, as a reference; treat it as read-only."""
    folder = tmp_path_factory.mktemp("bundles") / "amdim"
    folder.mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = create_trunk("amdim", options=OPTIONS)
        for _ in range(30):  # what its norms remember, or eval mode gives next to nothing
            trunk.train()(0.5 * torch.randn(8, 3, 32, 32) + torch.randn(8, 1, 1, 1))
    how = {**describe().preprocessing, "resize": 32, "crop": 32}
    what = describe(arch="amdim", base_planes=None, num_features=16, options=OPTIONS, preprocessing=how)
    write_bundle(folder, what, trunk.state_dict(), {}, "# A card\n")
    return str(folder)


# --- the trunk ---


@pytest.mark.parametrize(("protocol", "training"), [("amdim", False), ("amdim-train-bn", True)])
def test_the_trunk_stays_as_it_was(small, greys, protocol, training):
    where = open_context(small, str(greys))
    where.trunk.train(training)
    modes = [module.training for module in where.trunk.modules()]
    before = fingerprint(where.trunk)
    state = torch.get_rng_state()
    found = RECIPES.code("linear")(where, settings_of(protocol))
    assert fingerprint(where.trunk) == before
    assert [module.training for module in where.trunk.modules()] == modes
    assert all(p.grad is None for p in where.trunk.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    metrics = found["metrics"]
    assert set(metrics) == {f"{start}{n}" for start in ("", "mlp_") for n in ("top1", "top5", "train_loss")}
    assert metrics["top1"] > 0.5 and metrics["mlp_top1"] > 0.5
    assert found["trunk"].startswith("eval" if protocol == "amdim" else "BatchNorm in train mode")


def test_only_the_authors_protocol_makes_up_for_what_the_norms_remember(small, greys):
    """Statistics that make all features alike: batches' own, and those of the test images, hide that."""
    where = open_context(small, str(greys))
    for module in where.trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(1e20)
            module.momentum = 1.0  # so few batches would not wash it out
    clean, theirs = (RECIPES.code("linear")(where, settings_of(name))["metrics"] for name in BOTH)
    assert clean["top1"] == clean["mlp_top1"] == pytest.approx(1 / 3)
    assert theirs["top1"] > 0.5


def test_batchnorm_alone_is_in_train_mode():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    network[0].eval()
    with norms_learning(network):
        assert [module.training for module in network.modules()] == [False, False, True, False]
        assert not torch.is_grad_enabled()
    assert [module.training for module in network.modules()] == [True, False, True, True]


# --- settings, views, numbers ---


def test_what_is_not_given_is_the_references():
    for protocol in BOTH:
        config = RECIPES.config("linear")(protocol=protocol)
        assert (config.epochs, config.batch_size, config.drop_at) == (120, 200, (80, 110))
        assert (config.lr, config.weight_decay) == ((2e-4,), (1e-5,))
        assert RECIPES.config("linear")(protocol=protocol, epochs=30, drop_at=(15, 25)).lr == (2e-4,)
    config = RECIPES.config("linear")().settled(1000)
    assert (config.protocol, config.epochs, config.drop_at, len(config.lr)) == ("cached", 100, (), 4)


@pytest.mark.parametrize(
    ("size", "nearest"), [(32, 32), (24, 32), (48, 64), (64, 64), (128, 128), (224, 128)]
)
def test_the_views_are_amdims(size, nearest):
    plan, preset = amdim_view(size), find_preset(f"amdim-{nearest}").plan
    assert [crop.size for crop in plan.crops] == [size]
    for name in ("ratio", "translate", "flip_p", "jitter", "gray_p", "interpolation", "jitter_p", "blur_p"):
        assert getattr(plan, name) == getattr(preset, name)
    assert plan.crops[0].min_scale == preset.crops[0].min_scale
    gray = amdim_view(size, channels=1)
    assert (gray.gray_p, gray.jitter[2:]) == (0.0, (0.0, 0.0)) and gray.jitter[:2] == preset.jitter[:2]


def test_the_cost_is_amdims_and_the_rates_drop(small, greys):
    """Fresh classifiers are at chance; a rate that has dropped out of sight leaves them where they are."""
    where = open_context(small, str(greys))
    run = RECIPES.code("linear")
    fresh = run(where, settings_of("amdim", epochs=1, lr=[1e-9]))["metrics"]
    assert fresh["train_loss"] == pytest.approx(math.log(3), abs=0.3)
    once = run(where, settings_of("amdim", epochs=1))["metrics"]
    stopped = run(where, settings_of("amdim", epochs=3, drop_at=[1] * 30))["metrics"]
    going = run(where, settings_of("amdim", epochs=3))["metrics"]
    assert going["train_loss"] < stopped["train_loss"] < fresh["train_loss"]
    assert (stopped["top1"], stopped["top5"]) == (once["top1"], once["top5"])
    assert run(where, settings_of("amdim", epochs=1))["metrics"] == once


# --- labelled ---


def test_what_flatters_says_so_and_stays_out_of_the_card(command, small, greys):
    words = ("transfer", "linear", "--model", small, "--data", greys, "--epochs", "2", "--batch-size", "12")
    digest = zoo.load(small, progress=False).zoo_info["weights_sha256"]
    for protocol in BOTH:
        code, out, err = command(*words, "--protocol", protocol)
        assert code == 0, err
        assert f"linear ({protocol}):" in out and "mlp_top1" in out
        assert ("not for comparison" in out) is (protocol == "amdim-train-bn")
    table = command("results")[1]
    assert "linear (amdim)" in table and "linear (amdim-train-bn)" in table
    listed = json.loads(command("results", "--json")[1])["results"]
    labels = {found["protocol"]["protocol"]: found["details"]["flatters"] for found in listed}
    assert labels["amdim"] is None and "test images" in labels["amdim-train-bn"]
    assert [found["protocol"]["protocol"] for found in results_of(digest)] == ["amdim"]


# --- refused ---


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("pixels:8", {"protocol": "amdim-train-bn"}, ["no BatchNorm", "--protocol amdim"]),
        (None, {"protocol": "amdim", "batch_size": 1}, ["batches of two", "batch_size"]),
        (None, {"protocol": "amdim", "lr": [0.1, 0.2]}, ["one learning rate"]),
        (None, {"protocol": "amdim", "views": 2}, ["no views"]),
        (None, {"protocol": "amdim-bn"}, ["protocol"]),
    ],
)
def test_what_can_not_work(small, greys, tmp_path, model, settings, words):
    with pytest.raises(InputError) as caught:
        transfer("linear", model=model or small, dataset=str(greys), settings=settings, out=tmp_path / "out")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "out").exists()


def test_raw_pixels_can_be_judged_cleanly(greys):
    settings = {"protocol": "amdim", **FEW}
    assert (
        transfer("linear", model="pixels:8", dataset=str(greys), settings=settings)["metrics"]["top1"] > 0.5
    )


def test_a_training_that_diverges_is_written_and_said(small, greys, tmp_path):
    settings = {**FEW, "protocol": "amdim-train-bn", "lr": [1e30]}
    with pytest.raises(RunError, match="diverged"):
        transfer("linear", model=small, dataset=str(greys), settings=settings, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["details"]["diverged"] is True


def test_a_wrong_word_is_one_message(command, small, greys):
    answer = command("transfer", "linear", "--model", small, "--data", greys, "--protocol", "amdin")
    assert_clear(answer, "linear: protocol")


# --- AMDIM's encoder in every recipe ---


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("knn", {}),
        ("linear", {"epochs": 20}),
        ("linear", {"protocol": "swav", "epochs": 2, "lr": [0.1], "batch_size": 12}),
        ("linear", {"protocol": "amdim", **FEW}),
        ("linear", {"protocol": "amdim-train-bn", **FEW}),
        ("semisup", {"fraction": 0.5, "epochs": 2, "batch_size": 6, "lr": 0.001}),
    ],
    ids=["knn", "cached", "swav", "amdim", "amdim-train-bn", "semisup"],
)
def test_amdims_encoder_is_a_trunk_like_any_other(encoder, greys, recipe, settings):
    result = transfer(recipe, model=encoder, dataset=str(greys), settings=settings)
    assert result["metrics"]["top1"] > 0.5
    assert result["preprocessing"]["crop"] == 32


def test_its_feature_is_the_flattened_top_map(encoder, greys):
    where = open_context(encoder, str(greys))
    features, _ = where.features("val")
    assert features.shape == (12, 16)
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(where.trunk.eval()(images), where.trunk.maps(images)[0].flatten(1))


@pytest.mark.parametrize("recipe", ["knn", "semisup"])
def test_images_of_another_size_than_its_own_are_refused(encoder, greys, recipe):
    with pytest.raises(InputError, match="32 x 32 pixels, not 16 x 16"):
        transfer(recipe, model=encoder, dataset=str(greys), resize=16, crop=16)


def test_a_resnet_of_gray_images_has_its_views(tmp_path, greys):
    how = {**describe().preprocessing, "mean": [0.5], "std": [0.25]}
    folder = tmp_path / "gray"
    folder.mkdir()
    trunk = create_trunk("resnet18", base_planes=8, channels=1)
    write_bundle(folder, describe(preprocessing=how), trunk.state_dict(), {}, "# A card\n")
    settings = {"protocol": "amdim", **FEW}
    assert (
        transfer("linear", model=str(folder), dataset=str(greys), settings=settings)["metrics"]["top1"] > 0.5
    )
