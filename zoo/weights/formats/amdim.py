"""AMDIM: ``{model, hyperparams, cursor}`` with the encoder, the loss's masks and two classifiers.

Source of the layout: ``checkpoint.py`` and ``model.py`` of AMDIM's released code.
"""

from __future__ import annotations

import importlib
import re
from argparse import Namespace
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...errors import InputError
from ...models.factory import create_trunk
from .base import Account, ForeignModel, Network
from .common import Format, Rest, as_trunk
from .compare import COUNTER, Shape, compare
from .layout import Layout
from .tables import Item, plain_facts

__all__ = ["AMDIM", "ENCODER", "EVALUATORS", "MASKS", "MLP"]

ENCODER = "encoder.module."
MLP = "mlp_classifier"
EVALUATORS = {
    MLP: "evaluator.block_glb_mlp.block_forward",
    "classifier": "evaluator.block_glb_lin.block_forward.2",
}
"""What our runs call the two classifiers beside the encoder, and what their layers stand under in the file."""
MASKS = "g2l_loss.masks_r5"
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
    linear = (EVALUATORS["classifier"],)

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
        given = _hyperparams(layout.value)
        options, notes = _options(layout, tensors, given)
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
        heads, classifier, more = _evaluators(rest, given)
        mean, std, resize = _PREPROCESSING[options["encoder_size"]]
        return ForeignModel(
            format=self.name,
            what=self.what,
            network=Network("amdim", options=options),
            trunk=trunk,
            heads=heads,
            classifier=classifier,
            method=self.method,
            preprocessing={
                "mean": list(mean),
                "std": list(std),
                "resize": resize,
                "crop": options["encoder_size"],
                "interpolation": "bicubic",
            },
            account=Account(len(tensors), prefix, rest.dropped, (*notes, *more, *said)),
            facts=plain_facts(layout.value),
        )


def _is_encoder(name: str) -> bool:
    return re.match(r"layer_list\.|rkhs_block_\d+\.", name) is not None


def _channels(tensors: Mapping[str, torch.Tensor]) -> int:
    stem = tensors.get("layer_list.0.conv.weight")
    return 3 if stem is None or stem.ndim != 4 else int(stem.shape[1])


def _hyperparams(value: Any) -> Mapping[str, Any]:
    said = value.get("hyperparams") if isinstance(value, Mapping) else None
    said = vars(said) if isinstance(said, Namespace) else said
    return said if isinstance(said, Mapping) else {}


def _options(
    layout: Layout, tensors: Mapping[str, torch.Tensor], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """What the encoder is, by its shapes; ``use_bn`` leaves its trace in the norms' counters alone."""
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
    notes = [
        _contradiction(key, given[key], value) for key, value in found.items() if _differs(given, key, value)
    ]
    said, counted = given.get("use_bn"), _norms_counted(tensors)
    if said is None and counted is None:
        notes.append("use_bn is not in the file: taken for false, as the reference does")
    elif said is None:
        notes.append(f"use_bn is not in the file: {counted}, by what the norms inside have counted")
    elif counted is not None and counted != bool(said):
        how = "as many batches as the last one" if counted else "no batch"
        notes.append(
            f"hyperparams say use_bn {bool(said)}, but the norms inside have counted {how}: {counted} is used"
        )
    return {**found, "use_bn": bool(said) if counted is None else counted}, notes


def _differs(given: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in given and bool(given[key] != value)


def _contradiction(key: str, said: Any, value: Any) -> str:
    return f"hyperparams say {key} {said}, the tensors {value}: the tensors count"


def _norms_counted(tensors: Mapping[str, torch.Tensor]) -> bool | None:
    """Whether the norms inside were applied: they count batches as the last one, or none; None: can't be told."""
    counts = {
        name: tensor
        for name, tensor in tensors.items()
        if re.fullmatch(r"layer_list\..*\.bn" + COUNTER, name)
    }
    if any(tensor.is_meta or tensor.numel() != 1 for tensor in counts.values()):
        return None
    last = max((int(name.split(".")[1]) for name in counts), default=0)
    top = int(counts.pop(f"layer_list.{last}.bn{COUNTER}", torch.tensor(0)))
    inside = {int(count) for count in counts.values()}
    return bool(inside - {0}) if top and inside in ({0}, {top}) else None


def _evaluators(
    rest: Rest, given: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """The heads by our names, the linear classifier, and notes; what was never trained is all zeros."""
    start = f"{EVALUATORS[MLP]}."
    heads = {
        f"{MLP}.{name.removeprefix(start)}" if name.startswith(start) else name: tensor
        for name, tensor in rest.heads.items()
    }
    classifier, notes = rest.classifier, []
    if classifier and _differs(given, "n_classes", len(classifier["weight"])):
        notes.append(_contradiction("n_classes", given["n_classes"], len(classifier["weight"])))
    if _is_blank(classifier.get("weight")):
        classifier = {}
        notes.append("the linear classifier holds zeros alone: it was never trained, and is left out")
    if _is_blank(heads.get(f"{MLP}.6.weight")):
        heads = {name: tensor for name, tensor in heads.items() if not name.startswith(f"{MLP}.")}
        notes.append("the MLP classifier holds zeros alone: it was never trained, and is left out")
    return heads, classifier, notes


def _is_blank(weight: torch.Tensor | None) -> bool:
    return weight is not None and not weight.is_meta and not weight.any()


@lru_cache(maxsize=4)
def _wanted(options: tuple[tuple[str, Any], ...], channels: int) -> dict[str, Shape]:
    importlib.import_module("torchvision.models")  # whatever tensors its import makes must be real ones
    with torch.device("meta"):
        trunk = create_trunk("amdim", options=dict(options), channels=channels)
    return {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
