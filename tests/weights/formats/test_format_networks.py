"""Which network a set of tensors is: by shapes, against the networks themselves as torchvision and timm build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision.models

from zoo.errors import InputError
from zoo.models.factory import TRUNKS, create_trunk
from zoo.weights.formats import identify
from zoo.weights.formats.base import Network
from zoo.weights.formats.resnets import Plan, fit

from .layouts import small_backbone

RESNETS = [arch for arch, (kind, _, _) in TRUNKS.items() if kind != "amdim"]


def on_meta(build: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """A network's state without values."""
    with torch.device("meta"):
        state: dict[str, torch.Tensor] = build().state_dict()
    return state


@pytest.mark.parametrize("arch", RESNETS)
def test_every_trunk_is_known_by_its_shapes(arch: str) -> None:
    state = on_meta(lambda: create_trunk(arch))
    found = fit(state)
    assert found.network == Network(arch)
    assert list(found.plan.shapes()) == list(state)
    assert found.plan.shapes() == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("arch, base", [("resnet18", 8), ("resnet50", 4), ("resnet50", 24), ("resnet34", 10)])
@pytest.mark.parametrize("stem, channels", [("imagenet", 3), ("small", 1), ("imagenet", 5)])
def test_widths_stems_and_channels(arch: str, base: int, stem: str, channels: int) -> None:
    model = identify(small_backbone(arch, base_planes=base, stem=stem, channels=channels), "file")
    assert model.network == Network(arch, stem, base_planes=base)
    assert model.trunk["conv1.weight"].shape[1] == channels
    assert len(model.preprocessing["mean"]) == len(model.preprocessing["std"]) == channels
    assert model.preprocessing["crop"] == (224 if stem == "imagenet" else 32)
    said = model.account.sentence()
    assert ("3x3" in said) == (stem == "small")
    assert (f"{channels} channels" in said) == (channels != 3)


@pytest.mark.parametrize(
    "name, arch",
    [
        ("resnet18", "resnet18"),
        ("resnet34", "resnet34"),
        ("resnet50", "resnet50"),
        ("resnet101", "resnet101"),
        ("resnet152", "resnet152"),
        ("resnext101_32x8d", "resnext101_32x8d"),
    ],
)
def test_torchvisions_own(name: str, arch: str) -> None:
    state = on_meta(lambda: torchvision.models.get_model(name))
    model = identify(state, "file")
    assert (model.format, model.network) == ("torchvision", Network(arch))
    assert model.classifier["weight"].shape == state["fc.weight"].shape
    assert model.classifier["bias"].shape == (1000,)
    assert [(group.what, len(group.keys)) for group in model.account.dropped] == [("classifier", 2)]
    assert len(model.trunk) == len(state) - 2


def test_timms_own() -> None:
    state = timm.create_model("resnet18", num_classes=7).state_dict()
    model = identify(state, "file")
    assert model.network == Network("resnet18")
    assert torch.equal(model.classifier["weight"], state["fc.weight"])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.trunk.items())
    headless = timm.create_model("resnet18", num_classes=0).state_dict()
    assert identify(headless, "file").account.dropped == ()


@pytest.mark.parametrize(
    "build, words",
    [
        (
            lambda: torchvision.models.wide_resnet50_2(),
            "torchvision's wide_resnet50_2, which widens only the inner convolutions; SwAV's w2 widens every stage",
        ),
        (lambda: torchvision.models.wide_resnet101_2(), "torchvision's wide_resnet101_2"),
        (lambda: torchvision.models.resnext50_32x4d(), "ResNeXt-50 32x4d"),
        (lambda: torchvision.models.resnext101_64x4d(), "ResNeXt-101 64x4d"),
    ],
)
def test_networks_that_the_zoo_has_not(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        identify(on_meta(build), "file.pth")
    assert words in caught.value.what
    assert caught.value.where == "file.pth"
    assert caught.value.fix is not None and "resnet50w2" in caught.value.fix


def test_vicregs_largest_is_named() -> None:
    shapes = Plan("bottleneck", (3, 24, 36, 3), base=128).shapes()
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with pytest.raises(InputError, match=r"ResNet-200 \(w2\)"):
        identify(state, "file")


def test_unheard_of_depths_are_described() -> None:
    shapes = Plan("bottleneck", (3, 4, 5, 3), base=16).shapes()
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with pytest.raises(InputError, match="bottleneck blocks 3, 4, 5, 3, a stem of 16 channels"):
        identify(state, "file")


@pytest.mark.parametrize("counters", [0, 10])
def test_counters_may_be_absent(counters: int) -> None:
    state = small_backbone()
    names = [name for name in state if name.endswith("num_batches_tracked")]
    for name in names[counters:]:
        del state[name]
    model = identify(state, "file")
    assert all(model.trunk[name].item() == 0 for name in names[counters:])
    assert all(torch.equal(model.trunk[name], state[name]) for name in names[:counters])
    assert model.account.matched == len(state)
    assert f"{len(names) - counters} counters of norms" in model.account.sentence()


def test_a_counter_may_be_a_vector_of_one() -> None:
    state = small_backbone()
    model = identify({k: v.reshape(1) if v.ndim == 0 else v for k, v in state.items()}, "file")
    assert all(torch.equal(model.trunk[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_types_become_float32(dtype: torch.dtype) -> None:
    state = small_backbone()
    half = {name: t.to(dtype) if name.endswith("weight") and t.ndim == 4 else t for name, t in state.items()}
    model = identify(half, "file")
    name = str(dtype).removeprefix("torch.")
    assert {t.dtype for t in model.trunk.values()} == {torch.float32, torch.int64}
    assert model.facts["dtype"] == [name]
    assert f"weights in {name} were made float32" in model.account.sentence()
    assert torch.equal(model.trunk["conv1.weight"], half["conv1.weight"].float())


def test_quantised_weights_are_refused() -> None:
    state = small_backbone()
    state["layer2.0.conv1.weight"] = state["layer2.0.conv1.weight"].to(torch.int8)
    with pytest.raises(InputError, match=r"layer2\.0\.conv1\.weight holds int8"):
        identify(state, "file")


def test_nothing_is_copied_that_is_right_already() -> None:
    state = small_backbone()
    model = identify(state, "file")
    assert all(tensor.data_ptr() == state[name].data_ptr() for name, tensor in model.trunk.items())
