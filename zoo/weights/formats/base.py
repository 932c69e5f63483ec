"""What reading a file of foreign weights gives: the backbone by our names, and an account of every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # naming a network takes no torch
    import torch

__all__ = ["Account", "Dropped", "ForeignClassifier", "ForeignModel", "Network"]


@dataclass(frozen=True)
class Network:
    """Which network a trunk is: what ``zoo.models.factory.create_trunk`` takes.

    Args:
        arch: a key of ``zoo.models.factory.TRUNKS``, ``timm:NAME`` or ``MODULE:FUNCTION``.
        stem: see ``zoo.models.resnet.resnet``.
        base_planes: channels of the stem, if not the architecture's own.
        options: what else the architecture takes (AMDIM: encoder_size, ndf, n_rkhs, n_depth, use_bn; timm's
            networks and functions: keyword arguments).
    """

    arch: str
    stem: str = "imagenet"
    base_planes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dropped:
    """Tensors of a file that are no part of the backbone.

    Args:
        what: what they are, e.g. ``projection head``.
        keys: their names in the file.
        expected: whether a file of this format has them.
    """

    what: str
    keys: tuple[str, ...]
    expected: bool = True


@dataclass(frozen=True)
class Account:
    """Where every tensor of a file went; ``matched`` is the whole backbone, or reading has failed.

    Args:
        matched: tensors of the backbone.
        prefix: what stood before their names in the file, e.g. ``module.encoder_q.``.
        dropped: the others.
        notes: what else was decided on the way, a sentence each.
    """

    matched: int
    prefix: str = ""
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The account in a line, for people."""
        text = f"{self.matched} of {self.matched} backbone tensors matched"
        if self.prefix:
            text += f" under {self.prefix!r}"
        for group in self.dropped:
            expected = "as expected" if group.expected else "NOT expected"
            text += f"; {group.what} ({len(group.keys)} tensors) left out, {expected}"
        return "; ".join((text, *self.notes))


@dataclass(frozen=True)
class ForeignModel:
    """A backbone out of somebody's file.

    Args:
        format: name of the format, a key of ``zoo.weights.formats.FORMATS``.
        what: what the file is, for people, e.g. ``SwAV pretraining weights``.
        network: which network the trunk is.
        trunk: its tensors by our names (torchvision's for a ResNet), all of them and no others.
        heads: projection head, prototypes, queue ... by the names of ``heads.safetensors``.
        classifier: ``weight`` (classes, F) and ``bias`` (classes) of a linear classifier, or empty.
        method: who trained it, e.g. ``swav``; ``unknown`` where the file can't tell.
        preprocessing: mean, std, resize, crop, interpolation.
        account: where every tensor went.
        facts: what else the file says, plain JSON: epoch, hyperparameters, metrics.
    """

    format: str
    what: str
    network: Network
    trunk: dict[str, torch.Tensor]
    heads: dict[str, torch.Tensor]
    classifier: dict[str, torch.Tensor]
    method: str
    preprocessing: dict[str, Any]
    account: Account
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignClassifier:
    """A linear classifier out of somebody's file, to stand on the trunk it was trained on.

    Args:
        format: name of the format, a key of ``zoo.weights.formats.FORMATS``.
        what: what the file is, for people.
        weight: (classes, F) in float32.
        bias: (classes) in float32.
        facts: what else the file says, plain JSON: epoch, best accuracy.
    """

    format: str
    what: str
    weight: torch.Tensor
    bias: torch.Tensor
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_features(self) -> int:
        """F: length of the pooled features that it takes."""
        return int(self.weight.shape[1])

    @property
    def num_classes(self) -> int:
        """How many classes it tells apart."""
        return int(self.weight.shape[0])
