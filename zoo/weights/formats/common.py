"""What all formats share: a backbone is taken out of a file, and everything else gets its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError
from ..fill import STANDARD_PREPROCESSING
from .base import Account, Dropped, ForeignModel
from .compare import COUNTER
from .layout import TRAINING, Backbone, Layout, head_of, tail_of
from .resnets import in_backbone
from .tables import Item, plain_facts, split_branch

__all__ = ["CLASSIFIER", "Format", "Rest", "as_trunk", "find_linear", "guess_method"]

CLASSIFIER = "classifier"
PROJECTION = "projection head"
MOMENTUM = "momentum encoder"
COPY = "other copy of the network"
UNKNOWN = "unknown tensors"

# How people call a head -> what it is, and what our own runs call it.
_HEADS = {
    **dict.fromkeys(
        ("projection_head", "projector", "projection", "projetion"), (PROJECTION, "projection_head")
    ),
    **dict.fromkeys(("proj_head", "projection_mlp", "contrastive_head"), (PROJECTION, "projection_head")),
    **dict.fromkeys(("head", "neck", "clf", "fc"), (PROJECTION, "projection_head")),
    **dict.fromkeys(("predictor", "prediction_head", "prediction_mlp"), ("predictor", "predictor")),
    **dict.fromkeys(("linear", "classifier", "online_classifier"), (CLASSIFIER, CLASSIFIER)),
    "prototypes": ("prototypes", "prototypes"),
    "queue": ("queue", "queue"),
    "queue_ptr": ("queue", "queue_ptr"),
    "queues": ("queue", "queues"),
    "memory_bank": ("queue", "memory_bank"),
    "evaluator": (CLASSIFIER, "evaluator"),  # AMDIM's
    "bn": (PROJECTION, "projection_norm"),  # Barlow Twins' norm of the embeddings
}
# Where a single linear layer on the pooled features stands.
_LINEAR = (
    "fc",
    "linear",
    "classifier",
    "head.fc",
    "head",
    "online_classifier.classification_head",
    "online_classifier",
)


class Format:
    """One layout of files: how it is known by its content, and what its parts mean.

    Subclasses say ``name`` (a key of ``FORMATS``), ``what`` and ``method``, and how ``detect`` knows a
    file. ``std`` is what images are divided by; ``linear`` the names that a classifier may have.
    """

    name = ""
    what = ""
    method = "unknown"
    std: Sequence[float] = tuple(STANDARD_PREPROCESSING["std"])
    linear: Sequence[str] = _LINEAR

    def detect(self, layout: Layout) -> bool:
        """Whether the content is of this format."""
        raise NotImplementedError

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """What differs from file to file: ``what``, ``method``, ``std``, more ``facts`` and ``notes``."""
        return {}

    def read(self, layout: Layout) -> ForeignModel:
        """The model.

        Raises:
            InputError: no whole backbone of the zoo's is in the file, or its values are no numbers.
        """
        taken, notes = layout.choose()
        network = taken.fit.network
        assert network is not None
        tensors = {name: item.tensor for name, item in taken.items.items()}
        plan = taken.fit.plan
        trunk, said = as_trunk(tensors, tuple(plan.shapes()), layout.where)
        features = plan.base * (8 if plan.kind == "basic" else 32)
        rest = Rest.of(layout, taken.items.values(), self.linear, features)
        found = {"what": self.what, "method": self.method, **self.details(layout, taken)}
        facts = {**plain_facts(layout.value), **_dtype(tensors), **found.pop("facts", {})}
        std, own_notes = found.pop("std", self.std), found.pop("notes", ())
        how, more = _preprocessing(network.stem, plan.channels, std)
        return ForeignModel(
            format=self.name,
            network=network,
            trunk=trunk,
            heads=rest.heads,
            classifier=rest.classifier,
            preprocessing=how,
            account=Account(len(tensors), taken.prefix, rest.dropped, (*notes, *said, *more, *own_notes)),
            facts=facts,
            **found,
        )


@dataclass(frozen=True)
class Rest:
    """A file's tensors beside the backbone's: heads by our names, a classifier, and the groups of all."""

    heads: dict[str, torch.Tensor]
    classifier: dict[str, torch.Tensor]
    dropped: tuple[Dropped, ...]

    @classmethod
    def of(cls, layout: Layout, backbone: Collection[Item], linear: Sequence[str], features: int) -> Rest:
        """Sort everything that isn't the backbone's.

        Args:
            layout: the file.
            backbone: the tensors that were taken.
            linear: names that a classifier may have.
            features: length of the pooled features, which a classifier takes.
        """
        first = next(iter(backbone))
        branches = _branches_of(first.wrappers)
        near = [item for item in layout.model_items if not _branches_of(_parts(item)) - branches]
        found = find_linear(layout, near, linear, features)
        classifier = {(item.path, item.key) for item in found.values()}
        taken = {(item.path, item.key) for item in backbone}
        groups: dict[str, list[str]] = {}
        heads: dict[str, torch.Tensor] = {}
        for item in layout.items:
            place = (item.path, item.key)
            if place in taken:
                continue
            what, name = (CLASSIFIER, None) if place in classifier else _role(layout, branches, item)
            groups.setdefault(what, []).append(item.key if item.path == first.path else item.label)
            if name is not None:
                heads.setdefault(name, item.tensor)
        return cls(
            heads=_numbered(heads),
            classifier=as_classifier(found),
            dropped=tuple(Dropped(what, tuple(keys), what != UNKNOWN) for what, keys in groups.items()),
        )


def as_trunk(
    tensors: dict[str, torch.Tensor], wanted: Sequence[str], where: object
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A whole trunk in the network's order, in float32, and what had to be done for it.

    Args:
        tensors: by our names, in the network's shapes; counters of norms may be absent.
        wanted: all names.
        where: the file, for messages.

    Raises:
        InputError: a weight is not a floating-point number (quantised ones aren't read).
    """
    trunk = {}
    for name in wanted:
        if name.endswith(COUNTER):
            counter = tensors.get(name)
            trunk[name] = (
                torch.zeros((), dtype=torch.int64) if counter is None else counter.reshape(()).long()
            )
            continue
        if not tensors[name].is_floating_point():
            raise InputError(
                f"{name} holds {_dtype_name(tensors[name])}, no floating-point numbers.",
                where=where,
                fix="use weights that are not quantised",
            )
        trunk[name] = tensors[name].float()
    notes = []
    made = len([name for name in wanted if name not in tensors])
    if made:
        notes.append(f"{made} counters of norms (num_batches_tracked) are not in the file and start at 0")
    others = _dtype(tensors).get("dtype")
    if others:
        notes.append(f"weights in {', '.join(others)} were made float32")
    return trunk, notes


def find_linear(
    layout: Layout, items: Sequence[Item], names: Sequence[str], features: int | None
) -> dict[str, Item]:
    """``weight`` and, if it has one, ``bias`` of a single linear layer of one of these names; or nothing.

    Args:
        layout: where the items are from.
        items: to look among.
        names: the layer's, the likeliest first.
        features: what it must take; None: anything.
    """
    by_name = {_plain_name(layout, item): item for item in items}
    for name in names:
        inside = {key[len(name) + 1 :]: item for key, item in by_name.items() if key.startswith(f"{name}.")}
        if "weight" not in inside or not inside.keys() <= {"weight", "bias"}:
            continue
        weight = inside["weight"].tensor
        if weight.ndim == 2 and weight.is_floating_point() and features in (None, weight.shape[1]):
            return inside
    return {}


def as_classifier(found: dict[str, Item]) -> dict[str, torch.Tensor]:
    """``weight`` and ``bias`` in float32; a layer without bias has one of zeros."""
    if not found:
        return {}
    tensors = {part: item.tensor.float() for part, item in found.items()}
    weight = tensors["weight"]
    return {"weight": weight, "bias": tensors.get("bias", torch.zeros_like(weight[:, 0]))}


def guess_method(layout: Layout) -> str:
    """Who trained it, as far as the heads' names tell."""
    named = [split_branch(head) for head in layout.heads]
    heads = {base for _, base in named}
    branches = {branch for branch, _ in named} | {split_branch(part)[0] for part in layout.components}
    momentum = bool(branches & {"momentum", "teacher"})
    if any(tail.startswith("last_layer.") for head in layout.heads for tail in layout.names(head)):
        return "dino"
    if any(re.fullmatch(r"prototypes\d*", head) for head in heads):
        return "swav"
    if momentum and heads & {"queue", "memory_bank"}:
        return "moco"
    if heads & {"predictor", "prediction_head"}:
        return "byol" if momentum else "simsiam"
    return "unknown"


def _role(layout: Layout, branches: frozenset[str], item: Item) -> tuple[str, str | None]:
    """What a tensor is, and its name among the heads (None: it isn't kept)."""
    name = layout.our_name(item)
    head, tail = head_of(name), tail_of(name)
    if head_of(item.name) in TRAINING:
        return TRAINING[head_of(item.name)], None
    backbone = in_backbone(name)
    other = _branches_of(_parts(item)) - branches
    if other & {"momentum", "teacher"}:
        inner = name if backbone else _head_name(head, tail, name)[1]
        return MOMENTUM, None if inner is None else f"momentum_encoder.{inner}"
    if other or backbone:
        return COPY, None
    return _head_name(head, tail, name)


def _head_name(head: str, tail: str, name: str) -> tuple[str, str | None]:
    base = split_branch(head)[1]
    prototypes = re.fullmatch(r"prototypes(\d*)", base)
    if prototypes:
        inner = re.sub(r"^heads\.(\d+)\.", r"#\1.", tail)  # lightly's
        return "prototypes", "prototypes." + (f"#{prototypes[1]}.{inner}" if prototypes[1] else inner)
    if base not in _HEADS:
        return UNKNOWN, None
    what, ours = _HEADS[base]
    if base == "clf":  # VISSL: one head after the other
        tail = name.removeprefix("heads.")
    tail = tail.removeprefix("layers.")  # lightly's
    return what, f"{ours}.{tail}" if tail else ours


def _numbered(heads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbered sets of prototypes by the reference's names; a single one needs no number."""
    numbers = {name.split(".")[1] for name in heads if name.startswith("prototypes.#")}
    out = {}
    for name, tensor in heads.items():
        if name.startswith("prototypes.#"):
            _, number, part = name.split(".", 2)
            name = f"prototypes.{part}" if len(numbers) == 1 else f"prototypes.prototypes{number[1:]}.{part}"
        out[name] = tensor
    return out


def _plain_name(layout: Layout, item: Item) -> str:
    name = layout.our_name(item)
    head, tail = split_branch(head_of(name))[1], tail_of(name)
    return f"{head}.{tail}" if tail else head


def _parts(item: Item) -> tuple[str, ...]:
    return (*item.wrappers, head_of(item.name))


def _branches_of(parts: Iterable[str]) -> frozenset[str]:
    return frozenset(branch for branch, _ in map(split_branch, parts) if branch is not None)


def _preprocessing(stem: str, channels: int, std: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
    how = {**STANDARD_PREPROCESSING, "mean": list(STANDARD_PREPROCESSING["mean"]), "std": list(std)}
    notes = []
    if stem != "imagenet":
        how.update(resize=32, crop=32)
        notes.append(
            "the stem is 3x3: taken for one without pooling, for images of about 32 pixels (one with pooling, "
            "stem medium, has the same tensors)"
        )
    if channels != len(how["mean"]):
        how.update(mean=[0.0] * channels, std=[1.0] * channels)
        notes.append(f"the images have {channels} channels: how they are normalised is not in the file")
    return how, notes


def _dtype(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The types of a trunk's weights in the file, if there are others than float32."""
    kinds = {
        _dtype_name(tensor)
        for tensor in tensors.values()
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    }
    return {"dtype": sorted(kinds)} if kinds else {}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
