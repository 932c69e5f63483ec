"""Folded networks compute what the plain ones do, and the plain ones stay as they were."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import ResNet

import zoo
from tiny import image_folder
from zoo.data.folder import open_folder
from zoo.engine.precision import Precision
from zoo.extraction import _prepared
from zoo.models.factory import create_trunk
from zoo.probe.features import PooledStages, source_features
from zoo.probe.folded import folded, for_features


def trained(arch="resnet18", **how):
    """A narrow trunk whose BatchNorms are far from the identity."""
    torch.manual_seed(0)
    trunk = create_trunk(arch, base_planes=16, **how).train()
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return trunk


def norms(network):
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_a_folded_network_is_the_plain_one_to_rounding(arch, stem):
    trunk = trained(arch, stem=stem)
    before = copy.deepcopy(trunk.state_dict())
    small = folded(trunk)
    assert norms(small) == 0 and type(small) is ResNet and not small.training
    assert trunk.training and norms(trunk) > 0
    assert all(torch.equal(value, before[key]) for key, value in trunk.state_dict().items())
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        expected, found = trunk.eval()(x), small(x)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_network_inside_another_and_one_with_a_bias_and_double_numbers():
    inside = PooledStages(trained().double(), ("layer2", "final"))
    inside.trunk.conv1.bias = nn.Parameter(torch.randn(16).double())
    x = torch.randn(2, 3, 64, 64).double()
    with torch.no_grad():
        small = folded(inside)
        torch.testing.assert_close(small(x), inside.eval()(x), rtol=1e-10, atol=1e-10)
    assert norms(small) == 0


def test_what_cannot_be_folded_stays():
    grouped = create_trunk("resnet18", base_planes=8, norm_layer=lambda width: nn.GroupNorm(2, width))
    watched = trained()
    watched.bn1.register_forward_hook(lambda *_: None)

    class OwnOrder(ResNet):  # calls its modules in another order
        def forward(self, x):
            return self.bn1(F.relu(self.conv1(x))).mean(dim=(2, 3))

    other = trained()
    other.__class__ = OwnOrder
    batch_statistics = trained()
    batch_statistics.bn1.running_mean = batch_statistics.bn1.running_var = None
    x = torch.randn(3, 3, 32, 32)
    for trunk in (grouped, watched, other, batch_statistics):
        with torch.no_grad():
            torch.testing.assert_close(folded(trunk)(x), trunk.eval()(x), rtol=1e-4, atol=1e-5)
    assert norms(folded(watched)) == 1


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_half_type_features_point_where_float32_features_do(tmp_path, arch):
    """By the cosine that is promised, through what ``zoo extract`` passes images through."""
    source = open_folder(image_folder(tmp_path, 8, side=64))
    how = {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "resize": 64,
        "crop": 64,
        "interpolation": "bilinear",
    }
    trunk = trained(arch)
    before = copy.deepcopy(trunk.state_dict())
    plain, _ = source_features(trunk, source, how, 4)
    network, mode = _prepared(trunk, Precision("bfloat16", torch.device("cpu")))
    found, _ = source_features(network, source, how, 4, mode=mode)
    assert found.dtype == torch.float32 and not torch.equal(found, plain)
    assert F.cosine_similarity(found, plain).min() > 0.999
    assert network.conv1.weight.dtype == torch.bfloat16
    assert trunk.training and all(
        torch.equal(value, before[key]) for key, value in trunk.state_dict().items()
    )


def test_a_transformer_in_half_type():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    trunk = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, patch_size=8).eval()
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        plain = trunk(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = for_features(trunk, torch.bfloat16)(x).float()
    assert F.cosine_similarity(found, plain).min() > 0.999


@pytest.fixture
def fast_hardware(monkeypatch):
    """This processor passes for one that is fast in bfloat16; it computes in it all the same."""
    monkeypatch.setattr("zoo.engine.precision._has_fast_bfloat16", lambda device: True)


def as_model(trunk):
    how = {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "resize": 64,
        "crop": 64,
        "interpolation": "bilinear",
    }
    trunk.zoo_info = {"arch": "resnet18", "preprocessing": how}
    return trunk


def precision_of(path):
    return json.loads(path.with_name(f"{path.name}.json").read_text("utf-8"))["precision"]


def test_fast_hardware_is_used_unless_exactness_is_insisted_on(fast_hardware, tmp_path):
    images = str(image_folder(tmp_path / "images", 12, side=64))
    model, out, other = as_model(trained()), tmp_path / "f.npz", tmp_path / "g.npz"
    found = zoo.extract(model, images, out=out)["features"]
    exact = zoo.extract(model, images, out=other, exact=True)["features"]
    assert (precision_of(out), precision_of(other)) == ("bfloat16", "float32")
    assert F.cosine_similarity(found, exact).min() > 0.999 and not torch.equal(found, exact)
    source, how = open_folder(tmp_path / "images"), model.zoo_info["preprocessing"]
    assert torch.equal(exact, source_features(model, source, how)[0])
    double = zoo.extract(as_model(trained().double()), images)["features"]
    torch.testing.assert_close(double, exact, rtol=1e-4, atol=1e-5)


def test_a_network_that_half_types_hurt_computes_in_float32(fast_hardware, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("zoo"), "propagate", True)
    caplog.set_level("INFO", "zoo")
    images = str(image_folder(tmp_path / "images", 8, side=64))
    model = as_model(trained())
    with torch.no_grad():  # features are small differences of large numbers
        model.fc = nn.Linear(128, 128)
        model.fc.weight.copy_(torch.eye(128) - torch.eye(128).roll(1, 0))
        model.layer4[1].bn2.bias += 1000
    out = tmp_path / "f.npz"
    found = zoo.extract(model, images, out=out)["features"]
    assert precision_of(out) == "float32" and "float32 it is" in caplog.text
    assert torch.equal(found, zoo.extract(model, images, exact=True)["features"])
