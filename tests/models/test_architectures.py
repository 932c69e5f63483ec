"""The trunks: equal to torchvision's and timm's where these have them, and plain about what they can't be."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import timm.models.resnet as timm_resnet
import torch
import torchvision
from torch import nn

from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.models.recompute import recompute_blocks
from zoo.models.resnet import stage_features

X = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TINY: dict[str, Any] = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 2}


def on_meta(arch: str, **arguments: Any) -> Any:
    with torch.device("meta"):
        return create_trunk(arch, **arguments)


def filled(module: nn.Module) -> dict[str, torch.Tensor]:
    """Values for a network on the meta device: weights that keep a map's variance, norms that do something."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for key, value in module.state_dict().items():
        state[key] = torch.zeros(value.shape, dtype=value.dtype)
        if value.ndim > 1:
            bound = math.sqrt(3.0 / math.prod(value.shape[1:]))
            state[key].uniform_(-bound, bound, generator=generator)
        elif value.ndim == 1:
            low, high = (-0.1, 0.1) if key.endswith(("bias", "mean")) else (0.8, 1.2)
            state[key].uniform_(low, high, generator=generator)
    return state


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in module.state_dict().items() if not key.startswith("fc.")}


# --- torchvision's and timm's networks ---


@pytest.mark.parametrize(
    "arch", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext101_32x8d"]
)
@torch.no_grad()
def test_torchvisions_networks_are_torchvisions(arch: str) -> None:
    with torch.device("meta"):
        theirs = torchvision.models.get_model(arch)
    ours = on_meta(arch)
    assert type(ours) is type(theirs)
    state = filled(theirs)
    theirs.load_state_dict(state, assign=True)
    theirs.fc = nn.Identity()
    kept = {key: value for key, value in state.items() if not key.startswith("fc.")}
    assert list(ours.state_dict()) == list(kept)
    ours.load_state_dict(kept, assign=True)
    expected = theirs.eval()(X)
    assert expected.isfinite().all() and expected.std() > 0
    assert torch.equal(ours.eval()(X), expected)


def test_a_seed_gives_torchvisions_values() -> None:
    arch = "resnet18"
    torch.manual_seed(5)
    expected = torchvision.models.get_model(arch).state_dict()
    torch.manual_seed(5)
    got = create_trunk(arch).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in got.items())


def test_the_widest_resnext_is_timms() -> None:
    """timm has no name for it; for the others see the tests of bundles."""
    with torch.device("meta"):
        block = timm_resnet.Bottleneck
        theirs = timm_resnet.ResNet(block, (3, 4, 23, 3), cardinality=32, base_width=48, num_classes=0)
    assert shapes(on_meta("resnext101_32x48d")) == shapes(theirs)


@pytest.mark.parametrize(
    ("arch", "millions"),
    [
        ("resnext101_32x8d", 88.79),
        ("resnext101_32x16d", 194.03),
        ("resnext101_32x32d", 468.53),
        ("resnext101_32x48d", 828.41),
    ],
)
def test_the_resnexts_have_the_published_sizes(arch: str, millions: float) -> None:
    """Mahajan et al. 2018 count the classifier of 1,000 classes, too."""
    trunk = on_meta(arch)
    count = sum(p.numel() for p in trunk.parameters()) + (trunk.num_features + 1) * 1000
    assert round(count / 1e6, 2) == millions


# --- stages ---


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        ("resnet18", {"base_planes": 8}),
        ("resnet50", {"base_planes": 8, "stem": "small"}),
        ("resnet50", {"base_planes": 8, "stem": "medium"}),
        ("resnet50", {"base_planes": 8, "replace_stride_with_dilation": [False, True, True]}),
        ("resnext101_32x8d", {"base_planes": 8}),
        ("resnet50w2", {"base_planes": 8}),
    ],
)
@torch.no_grad()
def test_a_resnet_says_what_its_stages_give(arch: str, arguments: dict[str, Any]) -> None:
    trunk = create_trunk(arch, **arguments).eval()
    images = torch.zeros(1, 3, 75, 61)
    maps = stage_features(trunk, images)
    told = {name: (channels, -(-75 // step), -(-61 // step)) for name, channels, step in trunk.feature_info}
    assert told == {name: tuple(each.shape[1:]) for name, each in maps.items()}
    assert trunk.feature_info[-1][1] == trunk.num_features == trunk.fc.in_features
    assert trunk(images).shape == (1, trunk.num_features)


@pytest.mark.parametrize(
    ("size", "sides", "channels", "reductions"),
    [
        (32, [30, 14, 7, 5, 3, 1], [4, 8, 16, 16, 16, 40], [1, 2, 4, 4, 4, 4]),
        (64, [62, 30, 14, 7, 5, 3, 1], [4, 8, 16, 32, 32, 32, 40], [1, 2, 4, 8, 8, 8, 8]),
        (128, [62, 30, 14, 7, 5, 3, 1], [4, 8, 16, 32, 32, 32, 40], [2, 4, 8, 16, 16, 16, 16]),
    ],
)
@torch.no_grad()
def test_amdim_says_what_its_stages_give(
    size: int, sides: list[int], channels: list[int], reductions: list[int]
) -> None:
    trunk = create_trunk("amdim", options={"encoder_size": size, "ndf": 4, "n_rkhs": 40, "n_depth": 1}).eval()
    maps = stage_features(trunk, torch.zeros(1, 3, size, size))
    names = ["stem", *(f"layer{i}" for i in range(1, len(sides)))]
    assert trunk.feature_info == list(zip(names, channels, reductions, strict=True))
    assert list(maps) == names
    assert [tuple(m.shape) for m in maps.values()] == [
        (1, width, side, side) for width, side in zip(channels, sides, strict=True)
    ]
    # Neighbours on a map are `reduction` pixels apart: one position more for that many pixels more.
    for more in (reductions[-1], 3 * reductions[-1]):
        larger = stage_features(trunk, torch.zeros(1, 3, size + more, size + more))
        grown = [m.shape[-1] for m in larger.values()]
        assert grown == [side + more // step for side, step in zip(sides, reductions, strict=True)]


# --- AMDIM ---


def test_an_amdim_encoder_takes_a_classifier_as_a_resnet_does() -> None:
    trunk = create_trunk("amdim", options=TINY)
    assert type(trunk.fc) is nn.Identity
    assert trunk(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    keys = list(trunk.state_dict())
    trunk.fc = nn.Linear(trunk.fc.in_features, 5)
    assert trunk(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    assert list(trunk.state_dict()) == [*keys, "fc.weight", "fc.bias"]


def test_an_amdim_encoder_of_four_channels_can_be_copied_and_pickled() -> None:
    trunk = create_trunk("amdim", options={**TINY, "encoder_size": 128, "n_rkhs": 32}, channels=4).eval()
    x = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(1))
    expected = trunk(x)
    assert torch.equal(copy.deepcopy(trunk)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(trunk))(x), expected)


def test_the_defaults_are_the_references() -> None:
    trunk = on_meta("amdim")
    assert (trunk.encoder_size, trunk.num_features, trunk.feature_info[0][1]) == (32, 1024, 128)
    assert len(trunk.layer_list[2].layer_list) == 3
    assert not trunk.layer_list[4].use_bn


def test_a_fresh_encoder_starts_as_pooling() -> None:
    """No block adds anything, and the embeddings are nearly the identity before their norm."""
    trunk = create_trunk("amdim", options=TINY).eval()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    stem, *_, five, _, _ = stage_features(trunk, x).values()
    pooled = nn.functional.avg_pool2d(stem, 4, 2)
    pooled = nn.functional.avg_pool2d(pooled, 2, 2)
    pooled = nn.functional.avg_pool2d(pooled, 3, 1)
    torch.testing.assert_close(five[:, :4], pooled)
    assert bool((five[:, 4:] == 0.0).all())
    shortcut = trunk.rkhs_block_5.shortcut.weight.detach()[:, :, 0, 0]
    assert torch.equal(shortcut.diagonal(), torch.ones(16))
    rest = shortcut - torch.eye(16)
    assert 0.0 < float(rest.abs().max()) <= 0.01


@pytest.mark.parametrize("size", [(40, 40), (32, 31), (64, 64)])
def test_images_of_another_size_are_refused(size: tuple[int, int]) -> None:
    trunk = create_trunk("amdim", options=TINY)
    for call in (trunk, trunk.maps):
        with pytest.raises(InputError, match=f"32 x 32 pixels, not {size[0]} x {size[1]}"):
            call(torch.zeros(1, 3, *size))


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"encoder_size": 96}, "encoder_size", "32, 64 or 128"),
        ({"encoder_size": "32"}, "encoder_size", "32, 64 or 128"),
        ({"encoder_size": [32]}, "encoder_size", "32, 64 or 128"),
        ({"ndf": 0}, "ndf", "whole number"),
        ({"ndf": 4.0}, "ndf", "whole number"),
        ({"ndf": True}, "ndf", "whole number"),
        ({"n_depth": -1}, "n_depth", "whole number"),
        ({"n_rkhs": None}, "n_rkhs", "whole number"),
        ({"use_bn": 1}, "use_bn", "true or false"),
        ({"n_rkhs": 511}, "n_rkhs", "less than the 512 channels"),
        ({"encoder_size": 64, "n_rkhs": 1023}, "n_rkhs", "less than the 1024 channels"),
        ({"encoder_size": 128, "ndf": 129}, "n_rkhs", "less than the 1032 channels"),
        ({"n_rkh": 512}, "n_rkh", "no such option"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        on_meta("amdim", options=options)
    assert caught.value.where == f"options.{field}"


def test_a_misspelt_option_gets_the_right_name() -> None:
    with pytest.raises(InputError) as caught:
        on_meta("amdim", options={"encoder_sise": 32})
    assert caught.value.fix is not None and "encoder_size?" in caught.value.fix


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_least_length_of_an_embedding_is_taken(size: int) -> None:
    least = (4 if size == 32 else 8) * 6
    assert on_meta("amdim", options={"encoder_size": size, "ndf": 6, "n_rkhs": least}).num_features == least


@pytest.mark.parametrize(
    ("arch", "arguments", "where"),
    [
        ("amdim", {"stem": "small"}, "stem"),
        ("amdim", {"base_planes": 64}, "base_planes"),
        ("amdim", {"norm_layer": nn.BatchNorm2d}, "norm_layer"),
        ("amdim", {"replace_stride_with_dilation": [False, False, True]}, "replace_stride_with_dilation"),
        ("resnet50", {"options": {"ndf": 64}}, "options.ndf"),
        ("resnext101_32x16d", {"options": {"use_bn": True}}, "options.use_bn"),
        ("resnet18", {"stem": "tiny"}, "stem"),
        ("resnet18", {"base_planes": 0}, "base_planes"),
        ("resnext101_32x8d", {"base_planes": 4}, "base_planes"),
        ("resnet51", {}, "resnet51"),
    ],
)
def test_what_a_trunk_does_not_take_is_refused(arch: str, arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        on_meta(arch, **arguments)
    assert caught.value.where == where and caught.value.fix


def test_no_options_are_no_options() -> None:
    assert shapes(on_meta("resnet18", options={})) == shapes(on_meta("resnet18"))


# --- activation checkpointing ---


def gradients(trunk: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    trunk.train()
    (trunk(x) ** 3).sum().backward()  # a norm keeps the sum of squares
    return {name: p.grad for name, p in trunk.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("use_bn", [False, True])
def test_recomputed_blocks_of_amdim_train_alike(use_bn: bool) -> None:
    torch.manual_seed(0)
    plain = create_trunk("amdim", options={**TINY, "use_bn": use_bn}).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)  # a fresh network's blocks add nothing
    frugal = copy.deepcopy(plain)
    recompute_blocks(frugal)
    calls = []
    first = frugal.layer_list[2].layer_list[0].conv1
    first.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    expected, got = gradients(plain, x), gradients(frugal, x)
    assert len(calls) == 2
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
    state = plain.state_dict()
    for key, value in frugal.state_dict().items():
        torch.testing.assert_close(value, state[key])


def test_shortcuts_of_a_resnet_are_not_recomputed_by_themselves() -> None:
    trunk = create_trunk("resnet18", base_planes=8)
    recompute_blocks(trunk)
    kinds = {name: type(m).__name__ for name, m in trunk.named_modules() if isinstance(m, nn.Sequential)}
    changed = {name for name, kind in kinds.items() if kind != "Sequential"}
    assert changed == {"layer1", "layer2", "layer3", "layer4"}
