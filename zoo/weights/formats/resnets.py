"""Which ResNet a set of tensors is, from its names and shapes alone, and what is wrong where it is none.

Source of the structure: torchvision ``models/resnet.py``; of the widths: SwAV ``src/resnet50.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...errors import InputError
from ...models.factory import TRUNKS
from .base import Network
from .compare import COUNTER, Comparison, Shape, compare

__all__ = ["Fit", "Plan", "fit", "in_backbone"]

_STEMS = {7: "imagenet", 3: "small"}


@dataclass(frozen=True)
class Plan:
    """What decides the names and shapes of a ResNet's tensors.

    Args:
        kind: ``basic`` or ``bottleneck``.
        layers: blocks in each of the four stages.
        base: channels of the stem.
        width: a bottleneck's inner width is ``int(planes * width / 64) * groups``.
        groups: of the bottleneck's 3x3 convolution.
        channels: of the images.
        kernel: side of the stem's convolution.
    """

    kind: str
    layers: tuple[int, ...]
    base: int = 64
    width: float = 64
    groups: int = 1
    channels: int = 3
    kernel: int = 7

    def shapes(self) -> dict[str, Shape]:
        """Every tensor but the classifier's, in torchvision's order."""
        return dict(self._convolutions_and_norms())

    def _convolutions_and_norms(self) -> Iterator[tuple[str, Shape]]:
        yield "conv1.weight", (self.base, self.channels, self.kernel, self.kernel)
        yield from _norm("bn1", self.base)
        before = self.base
        for stage, blocks in enumerate(self.layers):
            planes = self.base * 2**stage
            inner = int(planes * (self.width / 64)) * self.groups
            after = planes * (1 if self.kind == "basic" else 4)
            for index in range(blocks):
                place = f"layer{stage + 1}.{index}"
                convolutions = (
                    [(planes, before, 3, 3), (planes, planes, 3, 3)]
                    if self.kind == "basic"
                    else [
                        (inner, before, 1, 1),
                        (inner, inner // self.groups, 3, 3),
                        (after, inner, 1, 1),
                    ]
                )
                for number, shape in enumerate(convolutions, start=1):
                    yield f"{place}.conv{number}.weight", shape
                    yield from _norm(f"{place}.bn{number}", shape[0])
                if index == 0 and (stage > 0 or before != after):
                    yield f"{place}.downsample.0.weight", (after, before, 1, 1)
                    yield from _norm(f"{place}.downsample.1", after)
                before = after

    def network(self) -> Network | None:
        """The trunk of the zoo that this is, if there is one."""
        stem = _STEMS.get(self.kernel)
        same = [
            (arch, plan.base)
            for arch, plan in _trunks()
            if (plan.kind, plan.layers, plan.width, plan.groups)
            == (self.kind, self.layers, self.width, self.groups)
        ]
        if stem is None or not same:
            return None
        for arch, base in same:
            if base == self.base:
                return Network(arch, stem)
        return Network(same[0][0], stem, base_planes=self.base)

    def sentence(self) -> str:
        """The plan for people."""
        text = f"{self.kind} blocks {', '.join(map(str, self.layers))}, a stem of {self.base} channels"
        if self.kind == "bottleneck":
            text += f", {self.groups} groups of width {self.width:g}"
        return text + f", {self.kernel}x{self.kernel} stem"


def _norm(name: str, channels: int) -> Iterator[tuple[str, Shape]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (channels,)
    yield name + COUNTER, ()


# Networks that people take for one of the zoo's, and how they differ.
_ELSEWHERE = (
    (
        "torchvision's wide_resnet50_2",
        ", which widens only the inner convolutions; SwAV's w2 widens every stage",
        Plan("bottleneck", (3, 4, 6, 3), width=128),
    ),
    (
        "torchvision's wide_resnet101_2",
        ", which widens only the inner convolutions",
        Plan("bottleneck", (3, 4, 23, 3), width=128),
    ),
    ("ResNeXt-50 32x4d", "", Plan("bottleneck", (3, 4, 6, 3), width=4, groups=32)),
    ("ResNeXt-101 32x4d", "", Plan("bottleneck", (3, 4, 23, 3), width=4, groups=32)),
    ("ResNeXt-101 64x4d", "", Plan("bottleneck", (3, 4, 23, 3), width=4, groups=64)),
    ("ResNet-200 (w2)", ", which VICReg and BYOL use", Plan("bottleneck", (3, 24, 36, 3), base=128)),
    ("ResNet-200", "", Plan("bottleneck", (3, 24, 36, 3))),
    ("timm's resnet26", "", Plan("bottleneck", (2, 2, 2, 2))),
    ("lightly's resnet-9", "", Plan("basic", (1, 1, 1, 1))),
)


@lru_cache(maxsize=1)
def _trunks() -> tuple[tuple[str, Plan], ...]:
    found = []
    for arch, (kind, layers, arguments) in TRUNKS.items():
        if kind in ("basic", "bottleneck"):
            names = {"base": "base_planes", "width": "width_per_group", "groups": "groups"}
            given = {ours: arguments[theirs] for ours, theirs in names.items() if theirs in arguments}
            found.append((arch, Plan(kind, tuple(layers), **given)))
    return tuple(found)


def in_backbone(name: str) -> bool:
    """Whether a tensor of this name changes what a ResNet computes (a classifier's doesn't)."""
    return re.match(r"(conv1|bn1|layer\d+)\.", name) is not None


@dataclass(frozen=True)
class Fit:
    """The network that tensors fit best, and how well."""

    plan: Plan
    found: Comparison

    @property
    def network(self) -> Network | None:
        """The trunk, if all of it is there and the zoo has it."""
        return self.plan.network() if self.found.whole else None

    def problem(self, where: object) -> InputError:
        """What keeps the tensors from being one of the zoo's trunks."""
        elsewhere, network = self._elsewhere(), self.plan.network()
        if network is not None:
            wide = "" if network.base_planes is None else f" with a stem of {network.base_planes} channels"
            name = network.arch + wide
        else:
            name = elsewhere[0] if elsewhere else f"a ResNet of {self.plan.sentence()}"
        problem = self.found.problem(name, where)
        if problem is not None:
            return problem
        if elsewhere:
            what = f"These are the keys of {elsewhere[0]}{elsewhere[1]}."
        else:
            what = f"This is a ResNet that the zoo doesn't have: {self.plan.sentence()}."
        known = ", ".join(arch for arch, _ in _trunks())
        return InputError(what, where=where, fix=f"use weights of one of the zoo's trunks: {known}")

    def _elsewhere(self) -> tuple[str, str] | None:
        core = replace(self.plan, channels=3, kernel=7)
        return next(((name, hint) for name, hint, plan in _ELSEWHERE if plan == core), None)


def fit(tensors: Mapping[str, torch.Tensor]) -> Fit:
    """The network that a backbone's tensors, by torchvision's names, fit best.

    What the shapes say decides; where they contradict one another or are incomplete, the networks that
    are known are tried.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    observed = _observe(shapes)
    tried = [] if observed is None else [_try(observed, shapes)]
    if not tried or not tried[0].found.whole:
        tried += [_try(plan, shapes) for plan in _guesses(shapes)]
    return max(tried, key=lambda each: each.found.likeness)


def _try(plan: Plan, shapes: Mapping[str, Shape]) -> Fit:
    return Fit(plan, compare(plan.shapes(), shapes))


def _observe(shapes: Mapping[str, Shape]) -> Plan | None:
    """The plan that the shapes spell out, if they do."""
    stem, second = shapes.get("conv1.weight", ()), shapes.get("layer1.0.conv2.weight", ())
    layers = _layers(shapes)
    if len(stem) != 4 or stem[2] != stem[3] or len(second) != 4 or not all(layers) or 0 in (*stem, *second):
        return None
    plan = Plan("basic", layers, base=stem[0], channels=stem[1], kernel=stem[2])
    if "layer1.0.conv3.weight" not in shapes:
        return plan
    groups = max(1, second[0] // second[1])
    return replace(plan, kind="bottleneck", width=second[0] * 64 / (stem[0] * groups), groups=groups)


def _layers(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    counts = [0, 0, 0, 0]
    for name in shapes:
        match = re.match(r"layer([1-4])\.(\d{1,4})\.", name)
        if match:
            stage = int(match[1]) - 1
            counts[stage] = max(counts[stage], int(match[2]) + 1)
    return tuple(counts)


def _guesses(shapes: Mapping[str, Shape]) -> Iterator[Plan]:
    stem = shapes.get("conv1.weight", ())
    channels, kernel = (stem[1], stem[2]) if len(stem) == 4 else (3, 7)
    base = (*stem[:1], *shapes.get("bn1.weight", ()), *shapes.get("layer1.0.conv1.weight", ())[1:2], 0)[0]
    for known in (*(plan for _, plan in _trunks()), *(plan for _, _, plan in _ELSEWHERE)):
        if sum(known.layers) < 8:
            continue  # of very few tensors any network would be most like the smallest
        plan = replace(known, channels=channels, kernel=kernel)
        yield plan
        if base not in (0, plan.base) and plan.groups == 1:
            yield replace(plan, base=base)
