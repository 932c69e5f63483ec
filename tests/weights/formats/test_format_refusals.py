"""What isn't a whole backbone of the zoo's is refused, with how much of which network is there."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision.models

from zoo.errors import InputError
from zoo.weights.formats import identify
from zoo.weights.formats.others import looks_like
from zoo.weights.formats.resnets import Plan

from .layouts import linear, optimizer, small_backbone, with_prefix


def refused(value: Any) -> InputError:
    """The error that a content gives: bad input, with the file and advice or a plain statement."""
    with pytest.raises(InputError) as caught:
        identify(value, "weights.pth")
    assert caught.value.exit_code == 2
    assert caught.value.where == "weights.pth"
    return caught.value


def test_half_a_backbone() -> None:
    state = {name: tensor for name, tensor in small_backbone("resnet50").items() if "layer4" not in name}
    error = refused(with_prefix("module.", state))
    assert error.what == (
        f"Only {len(state)} of the 318 tensors of resnet50 with a stem of 4 channels, the network that fits best, "
        "are in the file; 60 tensors, the first of them layer4.0.conv1.weight, are missing."
    )


@pytest.mark.parametrize("arch, total", [("resnet18", 120), ("resnet34", 216), ("resnet50", 318)])
def test_one_tensor_is_missing(arch: str, total: int) -> None:
    for gone in (
        "conv1.weight",
        "layer1.0.conv2.weight",
        "layer2.1.bn2.running_var",
        "layer4.1.conv1.weight",
    ):
        state = small_backbone(arch)
        del state[gone]
        error = refused(state)
        assert f"Only {total - 1} of the {total} tensors of {arch}" in error.what, gone
        assert f"; {gone} is missing." in error.what


def test_a_stem_alone() -> None:
    error = refused({"conv1.weight": torch.zeros(64, 3, 7, 7)})
    assert "Only 1 of the" in error.what and "the first of them bn1.weight, are missing" in error.what


@pytest.mark.parametrize("name", ["conv1.weight", "layer1.0.conv2.weight", "layer3.1.bn1.weight", "bn1.bias"])
def test_one_tensor_has_another_shape(name: str) -> None:
    shapes = {**Plan("bottleneck", (3, 4, 6, 3)).shapes()}
    want = shapes[name]
    got = (want[0] + 1, *want[1:])
    shapes[name] = got
    error = refused({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
    assert (
        "Only 317 of the 318 tensors of resnet50, the network that fits best, have its shapes" in error.what
    )
    assert f"{name}: {got} in the file, {want} in the network" in error.what


@pytest.mark.parametrize(
    "extra",
    ["layer1.0.se.conv.weight", "layer5.0.conv1.weight", "conv1.bias", "layer2.0.downsample.2.weight"],
)
def test_a_backbone_with_more_in_it(extra: str) -> None:
    """Left out, it would compute something else."""
    error = refused({**small_backbone(), extra: torch.zeros(4)})
    assert error.what == (
        f"The backbone has more than resnet18 with a stem of 4 channels, the network that fits best: {extra} is too much."
    )


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: timm.create_model("vit_tiny_patch16_224"), "a vision transformer (ViT)"),
        (lambda: torchvision.models.mobilenet_v3_small(), "an EfficientNet or a MobileNet"),
        (lambda: torchvision.models.densenet121(), "a DenseNet"),
        (lambda: timm.create_model("resnet10t"), "a ResNet with a deep stem"),
        (lambda: timm.create_model("convnext_atto"), "a ConvNeXt"),
    ],
)
def test_other_networks(build: Any, words: str) -> None:
    error = refused({"state_dict": build().state_dict()})
    assert words in error.what


@pytest.mark.parametrize(
    "name, words",
    [
        ("module.backbone.blocks.0.attn.qkv.weight", "ViT"),
        ("vit.embeddings.patch_embeddings.projection.weight", "of transformers"),
        ("encoder.layers.encoder_layer_0.mlp.0.weight", "ViT"),
        ("layers.0.blocks.0.attn.relative_position_bias_table", "Swin"),
        ("features.1.0.layer_scale", "ConvNeXt"),
        ("visual.attnpool.positional_embedding", "CLIP"),
        ("trunk_output.block1.block1-0.proj.weight", "RegNet"),
        ("resnet.embedder.embedder.convolution.weight", "transformers' names"),
        ("Mixed_5b.branch1x1.conv.weight", "Inception"),
        ("block1.layer.0.conv1.weight", "WideResNet"),
        ("features.0.weight", "VGG or an AlexNet"),
        ("res2_0_branch2a_w", "caffe2"),
    ],
)
def test_names_that_give_a_network_away(name: str, words: str) -> None:
    found = looks_like(["epoch", name])
    assert found is not None and words in found


def test_our_own_names_look_like_nothing_else() -> None:
    names = [f"module.{name}" for name in small_backbone("resnet50")]
    assert (
        looks_like([*names, "module.projection_head.0.weight", "module.prototypes.weight", "fc.weight"])
        is None
    )


@pytest.mark.parametrize(
    "value, words",
    [
        ({}, "only an empty dict"),
        ([], "only a list of 0 things"),
        (3, "only a int"),
        ({"epoch": 3, "state_dict": {}}, "only a dict of 2 other things"),
        ([torch.zeros(3), torch.zeros(3)], "None of the file's 2 tensors"),
        ({"projection_head.0.weight": torch.zeros(3, 3)}, "the first is projection_head.0.weight"),
        (optimizer([161]), "the state of a training and no network (1 tensors)"),
        ({"optimizer": optimizer([161]), "epoch": 3}, "the state of a training and no network"),
        ({"module.queue": torch.zeros(128, 64)}, "None of the file's 1 tensors"),
    ],
)
def test_no_backbone_at_all(value: Any, words: str) -> None:
    assert words in refused(value).what


@pytest.mark.parametrize("name", ["module.linear", "fc", "classifier"])
def test_a_classifier_only(name: str) -> None:
    error = refused({"state_dict": linear(name, 32, 5)})
    assert "a linear classifier alone (5 classes on 32 features)" in error.what
    assert error.fix is not None and "read_classifier" in error.fix


def test_half_of_amdims_encoder() -> None:
    state = {
        "encoder.module.layer_list.0.conv.weight": torch.zeros(8, 3, 3, 3),
        "encoder.module.layer_list.0.conv.bias": torch.zeros(8),
        "encoder.module.rkhs_block_5.conv1.weight": torch.zeros(64, 64, 1, 1),
    }
    error = refused({"model": state})
    assert "Only 3 of the" in error.what and "layer_list.1.layer_list.0.conv1.weight" in error.what
    del state["encoder.module.rkhs_block_5.conv1.weight"]
    assert "rkhs_block_5.conv1.weight is missing" in refused({"model": state}).what


def test_a_tensor_of_amdims_encoder_has_another_shape(shared: Any) -> None:
    from .layouts import published_state, wrapped

    name = "amdim_c10_32_ndf128_rkhs1024_rd3"
    state = published_state(shared, name, narrow=True)
    key = "layer_list.3.layer_list.1.conv2.weight"
    state[f"encoder.module.{key}"] = torch.zeros(4, 4, 1, 1)
    error = refused(wrapped(name, state))
    assert f"{key}: (4, 4, 1, 1) in the file, (32, 32, 1, 1) in the network" in error.what
