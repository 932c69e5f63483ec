"""Matrix products instead of convolutions: the same sums, gradients too."""

import copy
import pickle

import pytest
import torch
from torch import nn

from zoo.models import small_maps
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
            nn.Conv2d(4, 4, 1, padding=1),
            nn.Conv2d(4, 4, 3),
            nn.Conv2d(4, 4, 5, padding=2),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
            nn.Conv2d(4, 4, 3, padding=1, stride=(1, 2)),
        ]
    )
    use_matrix_products(others)
    assert all(type(layer) is nn.Conv2d for layer in others)


# --- half precision -------------------------------------------------------------------------------


def rounded(value):
    return value.to(torch.bfloat16).double()


def far(found, expected):
    """Of the whole, so that single values near zero don't count."""
    return float((found.detach().double() - expected.detach()).norm() / expected.norm().detach())


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 3), (4, 6), (7, 7), (9, 9), (14, 13), (16, 16)])
def test_bfloat16_is_the_exact_sum_rounded(size, kernel, stride, bias, units, monkeypatch):
    monkeypatch.setattr(small_maps, "_has_matrix_units", lambda: units)
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 32, kernel, stride=stride, padding=kernel // 2, bias=bias)
    exact = copy.deepcopy(layer).double()
    for parameter in exact.parameters():
        parameter.data = rounded(parameter.data)
    layer.to(memory_format=torch.channels_last)
    use_matrix_products(layer)
    images = torch.randn(4, 16, *size).to(memory_format=torch.channels_last).requires_grad_()
    doubles = rounded(images.detach()).requires_grad_()
    expected = exact(doubles)
    weights = torch.randn_like(expected, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = layer(images)
    assert maps.dtype is torch.bfloat16 and maps.shape == expected.shape
    assert maps.is_contiguous(memory_format=torch.channels_last)
    maps.add_(0)  # as an activation may
    maps.backward(weights)
    expected.backward(weights.double())
    assert far(maps, expected.detach()) < 4e-3
    assert far(images.grad, doubles.grad) < 4e-3
    for name, parameter in exact.named_parameters():
        found = layer.get_parameter(name).grad
        assert found.dtype is torch.float32
        assert far(found, parameter.grad) < 4e-3


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 3), (5, 4), (7, 7), (8, 8)])
def test_products_are_the_convolution_and_its_gradients(size, kernel, stride):
    torch.manual_seed(0)
    images = torch.randn(3, 4, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, kernel, kernel, dtype=torch.float64, requires_grad=True)
    ours = small_maps._Product.apply(images, weight, stride)
    plain = torch.conv2d(images, weight, stride=stride, padding=kernel // 2)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    factors = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, (images, weight), factors)
    for found, value in zip(torch.autograd.grad(ours, (images, weight), factors), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3])
def test_only_the_gradients_that_are_asked_for_are_computed(kernel):
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    weight = torch.randn(4, 4, kernel, kernel, dtype=torch.float64, requires_grad=True)
    small_maps._Product.apply(images, weight, 1).sum().backward()
    assert weight.grad is not None and images.grad is None
    images.requires_grad_()
    small_maps._Product.apply(images, weight.detach(), 1).sum().backward()
    assert images.grad is not None


class Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts how often something of a weight's shape goes to another type."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_weight_is_cast_once_for_all_groups_of_views_and_anew_after_a_step(kernel):
    layer = nn.Conv2d(8, 16, kernel, padding=kernel // 2, bias=False)
    use_matrix_products(layer)
    groups = [torch.randn(2, 8, side, side) for side in (24, 6, 2)]

    def gradient():
        layer.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [layer(group) for group in groups]
        sum(output.float().sum() for output in outputs).backward()
        return layer.weight.grad, outputs[1].detach()

    with Casts(layer.weight.shape) as casts:
        first, before = gradient()
    assert casts.count == 2  # there, and its gradient back
    apart = []
    for group in groups:
        layer.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(group).float().sum().backward()
        apart.append(layer.weight.grad.double())
    assert far(first, sum(apart)) < 1e-2
    with torch.no_grad():
        layer.weight.neg_()
    _, after = gradient()
    torch.testing.assert_close(after, -before)


def test_a_cast_is_never_another_weights_or_one_without_gradients():
    layer = nn.Conv2d(4, 4, 1, bias=False)
    use_matrix_products(layer)
    images = torch.randn(2, 4, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = layer(images)  # its graph holds the cast
        other = copy.deepcopy(layer)
        assert pickle.loads(pickle.dumps(layer)).weight.equal(layer.weight)
        with torch.no_grad():
            other.weight.zero_()
        assert not other(images).any()
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        assert not layer(images).any()
        layer.weight.requires_grad_(False)
        frozen = layer(images.clone().requires_grad_())
        layer.weight.requires_grad_(True)
        assert layer(images).requires_grad
    assert kept.any() and frozen.requires_grad
