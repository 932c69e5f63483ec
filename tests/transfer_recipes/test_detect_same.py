"""What detectors compute in another order for speed is what the plain order gives: values and gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import roi_align

from transfer.detect.judge import detect_one, for_detection
from transfer.detect.models.detectors import C4Detector, DetectorSettings, build_detector
from transfer.detect.models.products import align_by_products
from transfer.detect.models.rpn import RpnSettings
from transfer.detect.training import Normalisation
from zoo.engine.precision import Precision
from zoo.models.factory import create_trunk

COLOURS = Normalisation((127.0,) * 3, (60.0,) * 3)
CPU = torch.device("cpu")


def some_boxes(count, height, width, seed=0):
    """Within the image, beyond each of its edges, thin, and of no area."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 2, generator=generator).double() * torch.tensor([width, height])
    half = torch.rand(count, 2, generator=generator).double() ** 2 * torch.tensor([width, height]) * 0.7
    boxes = torch.cat((centre - half, centre + half), dim=1)
    boxes[0] = torch.tensor([-0.6 * width, -0.4 * height, 1.7 * width, 1.3 * height])
    boxes[1, 2:] = boxes[1, :2]
    boxes[2, 2] = boxes[2, 0] + 0.5
    return boxes


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("chunk", [None, 900])
def test_roi_align_is_torchvisions(monkeypatch, every, chunk):
    if chunk:  # a few regions at a time
        monkeypatch.setattr("transfer.detect.models.products._CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 5, 9, 13, generator=generator).double().requires_grad_()
    boxes = [some_boxes(20, 144, 208), torch.zeros(0, 4).double(), some_boxes(7, 144, 208, seed=1)]
    expected = roi_align(maps, boxes, 14, 1 / 16, 0, aligned=True)[..., ::every, ::every]
    found = align_by_products(maps, boxes, 14, 16, every)
    assert found.shape == expected.shape and found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(found.shape, generator=generator).double()
    ours, theirs = (torch.autograd.grad((x * weights).sum(), maps)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert align_by_products(maps, [boxes[1]] * 3, 14, 16, every).shape == (0, 5, *expected.shape[2:])
    with torch.autocast("cpu", torch.bfloat16):  # the weights must not be rounded
        assert align_by_products(maps.float(), boxes, 14, 16).dtype == torch.float32


def moved_norms(network):
    """Norms that are far from doing nothing."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, low, high in (
                (module.weight, 0.5, 1.5),
                (module.bias, -0.2, 0.2),
                (module.running_mean, -0.2, 0.2),
                (module.running_var, 0.5, 2.0),
            ):
                nn.init.uniform_(value, low, high, generator=generator)
    return network


def detector_of(head, arch="resnet50"):
    torch.manual_seed(0)
    settings = DetectorSettings(head, 3, RpnSettings((200, 200), (40, 40), 32), fpn_norm=head != "c4")
    detector = build_detector(create_trunk(arch, base_planes=8), settings)
    nn.init.normal_(detector.predictor.cls_score.weight, std=0.03 if head == "c4" else 0.003)
    return moved_norms(detector)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_the_fourth_stage_is_that_of_each_region(arch, training):
    detector = detector_of("c4", arch).double().train(training)
    plain = copy.deepcopy(detector)
    maps = [torch.randn(2, detector.rpn.conv.in_channels, 6, 7).double().requires_grad_() for _ in range(2)]
    maps[1] = maps[0].detach().clone().requires_grad_()
    boxes = [some_boxes(9, 96, 112), some_boxes(4, 96, 112, seed=3)]
    found = detector.region_features(maps[:1], boxes)
    pooled = roi_align(maps[1], boxes, 14, 1 / 16, 0, aligned=True)
    expected = plain.norm(plain.trunk.layer4(pooled)).mean(dim=(2, 3))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(found.shape).double()
    for features in (found, expected):
        (features * weights).sum().backward()
    torch.testing.assert_close(maps[0].grad, maps[1].grad, rtol=1e-7, atol=1e-9)
    for (name, ours), theirs in zip(detector.named_parameters(), plain.parameters(), strict=True):
        if name.startswith(("trunk.layer4", "norm")):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=name)
    for (name, ours), theirs in zip(detector.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("head", ["c4", "fpn", "mask-fpn"])
def test_the_network_that_detects_says_what_the_trained_one_says(head):
    detector = detector_of(head)
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    view = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 96, 128), dtype=np.uint8))
    how = Precision("float32", CPU)
    network = for_detection(detector, how)
    left = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert left == ([network.norm] if head == "c4" else []) and not network.training
    expected = detect_one(detector.eval(), view, (192, 256), COLOURS, how)
    found = detect_one(network, view, (192, 256), COLOURS, how)
    assert len(found.scores) == len(expected.scores) >= 15
    assert (found.labels == expected.labels).mean() > 0.9  # those of like scores may change places
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-3)
    assert (found.masks is None) == (head != "mask-fpn")
    assert all(torch.equal(value, before[name]) for name, value in detector.state_dict().items())


def test_half_precision_detects_nearly_the_same():
    detector = detector_of("c4")
    assert isinstance(detector, C4Detector)
    view = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 96, 128), dtype=np.uint8))
    half, full = (Precision(name, CPU) for name in ("bfloat16", "float32"))
    network = for_detection(detector, half)
    assert network.trunk.conv1.weight.dtype == torch.bfloat16
    assert network.predictor.cls_score.weight.dtype == torch.float32
    found = detect_one(network, view, (96, 128), COLOURS, half)
    expected = detect_one(for_detection(detector, full), view, (96, 128), COLOURS, full)
    count = min(len(found.scores), len(expected.scores))
    assert count > 20 and count > 0.7 * max(len(found.scores), len(expected.scores))
    np.testing.assert_allclose(found.scores[:10], expected.scores[:10], atol=0.1)
