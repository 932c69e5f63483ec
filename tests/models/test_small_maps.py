"""Matrix products instead of convolutions over small maps: the same sums, gradients too."""

import copy

import pytest
import torch
from torch import nn

from zoo.models.factory import create_trunk
from zoo.models.small_maps import use_matrix_products


def gradients(layer, images):
    images = images.clone().requires_grad_()
    maps = layer(images)
    weights = torch.linspace(-1, 1, maps.numel(), dtype=maps.dtype).view_as(maps)
    (maps * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"maps": maps.detach(), "images": images.grad, **found}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 3), (4, 4), (5, 5)])
def test_the_sums_are_those_of_the_convolution(size, stride, groups, bias):
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, stride=stride, padding=1, groups=groups, bias=bias).double()
    ours = copy.deepcopy(plain)
    use_matrix_products(ours)
    assert type(ours) is not nn.Conv2d and ours.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(3, 4, *size, dtype=torch.float64)
    expected, found = gradients(plain, images), gradients(ours, images)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", [32, 64, 128])
def test_a_trunk_gives_the_same_features_and_gradients(side):
    torch.manual_seed(0)
    plain = create_trunk("resnet18", base_planes=4).double()
    ours = copy.deepcopy(plain)
    use_matrix_products(ours)
    images = torch.randn(4, 3, side, side, dtype=torch.float64)
    expected, found = gradients(plain, images), gradients(ours, images)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_maps_stay_in_channels_last_memory():
    layer = nn.Conv2d(8, 8, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    use_matrix_products(layer)
    for side in (2, 3):
        images = torch.randn(2, 8, side, side).to(memory_format=torch.channels_last)
        assert layer(images).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_weight_gradient_in_bfloat16_is_written_whole(stride):
    layer = nn.Conv2d(16, 16, 3, stride=stride, padding=1, bias=False)
    use_matrix_products(layer)
    images = torch.randn(8, 16, 1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(images).sum().backward()
    unused = torch.ones(3, 3, dtype=torch.bool)
    unused[1, 1] = False
    assert torch.isfinite(layer.weight.grad).all()
    assert not layer.weight.grad[..., unused].any()
    assert layer.weight.grad[..., 1, 1].any()


def test_other_convolutions_are_left_alone():
    others = nn.ModuleList(
        [
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 4, 3),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
            nn.Conv2d(4, 4, 3, padding=1, stride=(1, 2)),
        ]
    )
    use_matrix_products(others)
    assert all(type(layer) is nn.Conv2d for layer in others)
