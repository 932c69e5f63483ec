"""AMDIM: ``{model, hyperparams, cursor}`` with the encoder, the loss's masks and two classifiers.

Source of the layout: ``checkpoint.py`` and ``model.py`` of AMDIM's released code.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...errors import InputError
from ...models.factory import create_trunk
from .base import Account, ForeignModel, Network
from .common import Format, Rest, as_trunk
from .compare import Shape, compare
from .layout import Layout
from .tables import Item, plain_facts

__all__ = ["AMDIM"]

_STANDARD = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
# encoder_size -> mean, deviation and the side that images are resized to (``datasets.py``)
_PREPROCESSING = {
    32: ([125.3 / 255, 123.0 / 255, 113.9 / 255], [63.0 / 255, 62.1 / 255, 66.7 / 255], 32),
    64: ([0.43, 0.42, 0.39], [0.27, 0.26, 0.27], 70),
    128: (*_STANDARD, 146),
}


class AMDIM(Format):
    """The encoder under ``encoder.module.`` or ``encoder.``; its linear classifier stands on r1."""

    name = "amdim"
    what = "AMDIM pretraining checkpoint"
    method = "amdim"
    linear = ("evaluator.block_glb_lin.block_forward.2",)

    def detect(self, layout: Layout) -> bool:
        """The encoder's list of layers."""
        return any(_is_encoder(item.name) for item in layout.items)

    def read(self, layout: Layout) -> ForeignModel:
        """The encoder.

        Raises:
            InputError: it isn't whole, or of shapes that no AMDIM encoder has.
        """
        homes: dict[tuple[Any, str], dict[str, Item]] = {}
        for item in layout.items:
            if _is_encoder(item.name):
                homes.setdefault((item.path, item.prefix), {})[item.name] = item
        (_, prefix), items = max(homes.items(), key=lambda home: len(home[1]))
        tensors = {name: item.tensor for name, item in items.items()}
        options, notes = _options(layout, tensors)
        try:
            wanted = _wanted(tuple(sorted(options.items())), _channels(tensors))
        except InputError as error:
            raise InputError(
                f"No AMDIM encoder has tensors like these: {error.what}", where=layout.where
            ) from None
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        problem = compare(wanted, shapes).problem("this size of AMDIM's encoder", layout.where)
        if problem is not None:
            raise problem
        trunk, said = as_trunk(tensors, tuple(wanted), layout.where)
        rest = Rest.of(layout, items.values(), self.linear, int(options["n_rkhs"]))
        mean, std, resize = _PREPROCESSING[options["encoder_size"]]
        return ForeignModel(
            format=self.name,
            what=self.what,
            network=Network("amdim", options=options),
            trunk=trunk,
            heads=rest.heads,
            classifier=rest.classifier,
            method=self.method,
            preprocessing={
                "mean": list(mean),
                "std": list(std),
                "resize": resize,
                "crop": options["encoder_size"],
                "interpolation": "bicubic",
            },
            account=Account(len(tensors), prefix, rest.dropped, (*notes, *said)),
            facts=plain_facts(layout.value),
        )


def _is_encoder(name: str) -> bool:
    return re.match(r"layer_list\.|rkhs_block_\d+\.", name) is not None


def _channels(tensors: Mapping[str, torch.Tensor]) -> int:
    stem = tensors.get("layer_list.0.conv.weight")
    return 3 if stem is None or stem.ndim != 4 else int(stem.shape[1])


def _options(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
    """What the encoder is, by its shapes; only ``use_bn`` leaves no trace in them."""
    stem, top = tensors.get("layer_list.0.conv.weight"), tensors.get("rkhs_block_5.conv1.weight")
    if stem is None or top is None or stem.ndim != 4 or top.ndim != 4:
        gone = "layer_list.0.conv.weight" if stem is None else "rkhs_block_5.conv1.weight"
        raise InputError(
            f"Only {len(tensors)} tensors of AMDIM's encoder are in the file; {gone} is missing or no convolution.",
            where=layout.where,
            fix="use a file that holds the whole encoder",
        )
    depths = [
        int(m[1]) for m in (re.match(r"layer_list\.\d+\.layer_list\.(\d{1,2})\.", k) for k in tensors) if m
    ]
    size = 64
    if "layer_list.1.conv.weight" in tensors:
        size = 128
    elif "layer_list.1.conv1.weight" in tensors:
        size = 32
    found: dict[str, Any] = {
        "encoder_size": size,
        "ndf": int(stem.shape[0]),
        "n_rkhs": int(top.shape[0]),
        "n_depth": max(depths, default=0) + 1,
    }
    said = layout.value.get("hyperparams") if isinstance(layout.value, Mapping) else None
    given = said if isinstance(said, Mapping) else {}
    notes = [
        f"hyperparams say {key} {given[key]}, the tensors {value}: the tensors count"
        for key, value in found.items()
        if key in given and given[key] != value
    ]
    if "use_bn" not in given:
        notes.append("use_bn is not in the file: taken for false, as the reference does")
    return {**found, "use_bn": bool(given.get("use_bn", False))}, notes


@lru_cache(maxsize=4)
def _wanted(options: tuple[tuple[str, Any], ...], channels: int) -> dict[str, Shape]:
    importlib.import_module("torchvision.models")  # whatever tensors its import makes must be real ones
    with torch.device("meta"):
        trunk = create_trunk("amdim", options=dict(options), channels=channels)
    return {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
