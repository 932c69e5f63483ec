"""``zoo.assign``: the prototype that each image of a collection is nearest to."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .cluster_folders import check_place, write_cluster_folders
from .contents import contents_of
from .data.decoding import MAX_PIXELS, Decoding
from .data.folder import FileImages
from .data.open import image_name, open_source
from .data.source import ImageSource
from .engine.precision import choose_device
from .errors import InputError
from .files import disk_errors, write_json, write_text
from .models.factory import create_trunk
from .models.heads import projection_head
from .probe.features import source_features
from .weights.fill import fill_trunk
from .weights.reference import parse_reference

__all__ = ["Assignment", "assign"]

log = logging.getLogger("zoo")

_FORMATS = (".csv", ".json")
_COLUMNS = ("image", "prototype", "score")
_HEAD, _SET = "projection_head.", re.compile(r"prototypes\.(?:prototypes(\d+)\.)?weight")
_BLOCK = 64  # images that are scored at once
_INSTEAD = "zoo neighbours finds similar images with any model, zoo transfer knn judges one"


@dataclass(frozen=True)
class Assignment:
    """The prototype of each image.

    Args:
        model: the model, as it was named.
        head: which of its sets of prototypes, counted from 0.
        heads: how many sets there are.
        sizes: (K,) int64, how many images of the whole collection each prototype has.
        images: the images' files, or their numbers in a collection without files.
        ids: (N,) int64, their places in the collection.
        prototypes: (N,) int64.
        scores: (N,) float32, the cosine of the image's embedding and its prototype.
    """

    model: str
    head: int
    heads: int
    sizes: torch.Tensor
    images: tuple[str, ...]
    ids: torch.Tensor
    prototypes: torch.Tensor
    scores: torch.Tensor

    def top(self, count: int) -> Assignment:
        """The ``count`` images nearest to each prototype: by prototype, the nearest first."""
        order = self.scores.argsort(descending=True, stable=True)
        order = order[self.prototypes[order].argsort(stable=True)]
        here = self.prototypes[order]
        rank = torch.arange(len(order)) - torch.searchsorted(here, here)
        kept = order[rank < count]
        return replace(
            self,
            images=tuple(self.images[index] for index in kept.tolist()),
            ids=self.ids[kept],
            prototypes=here[rank < count],
            scores=self.scores[kept],
        )

    def rows(self) -> list[dict[str, Any]]:
        """image, prototype and score (six decimals) of each image."""
        scores = [round(score, 6) for score in self.scores.tolist()]
        table = zip(self.images, self.prototypes.tolist(), scores, strict=True)
        return [dict(zip(_COLUMNS, row, strict=True)) for row in table]

    def summary(self) -> dict[str, Any]:
        """How the collection is spread over the prototypes.

        ``perplexity`` is the exponential of the entropy: so many prototypes with equally many images would be as
        even. It is K at best, and 1 if all images have the same one.
        """
        shares = self.sizes.double() / self.sizes.sum()
        return {
            "images": int(self.sizes.sum()),
            "prototypes": len(self.sizes),
            "used": int((self.sizes > 0).sum()),
            "largest": int(self.sizes.argmax()),
            "largest_images": int(self.sizes.max()),
            "perplexity": round(float(torch.special.entr(shares).sum().exp()), 3),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema 1."""
        about = {"schema": 1, "model": self.model, "head": self.head, "heads": self.heads}
        return {**about, "summary": self.summary(), "images": self.rows()}


def assign(
    model: str | Path,
    images: str | ImageSource,
    *,
    head: int = 0,
    top: int | None = None,
    out: str | Path | None = None,
    links: str | Path | None = None,
    copy: bool = False,
    batch_size: int = 64,
    device: str = "auto",
    max_pixels: int = MAX_PIXELS,
    progress: bool = True,
) -> Assignment:
    """The prototype of each image, for models that were trained with prototypes: SwAV, DeepCluster-v2, SeLa-v2.

    It is the prototype of highest cosine with the image's embedding, by the test transform and in eval mode.
    There is no Sinkhorn in it: the codes of training are balanced over a batch, so an image's code depends on
    the images beside it. Here an image has the same prototype alone and in any company.

    Args:
        model: a run, a published model, or anybody's file that still holds projection head and prototypes.
        images: a source, or what ``--data`` accepts.
        head: which set of prototypes, if there are several, counted from 0.
        top: give and write only so many images of each prototype, the nearest ones.
        out: a file to write, ``.csv`` or ``.json``; whole or not at all.
        links: a folder to make, with a folder of links for each prototype that has images.
        copy: copy the files into ``links`` instead.
        batch_size: images at once; another number can change the last digits of a score.
        device: where to compute.
        max_pixels: larger pictures are refused, where ``images`` is no source.
        progress: say on standard error what is downloaded.

    Raises:
        InputError: a model without prototypes, an unknown head or format, an image that can't be read, a place
            that is taken, or links to images that are no files.
        RunError: what can't be written, or an embedding that is no finite numbers.
    """
    path = None if out is None else Path(out)
    if path is not None and path.suffix not in _FORMATS:
        raise InputError("Prototypes of images are written as .csv or .json.", where=path)
    if path is not None and not path.parent.is_dir():
        raise InputError("The folder to write to isn't there.", where=path.parent, fix="make it first")
    if top is not None and top < 1:
        raise InputError("At least one image of each prototype is given.", where=f"top: {top}")
    place = None if links is None else Path(os.path.abspath(links))
    if place is not None:
        below = Path(images).expanduser() if isinstance(images, str) else None
        check_place(place, below if below is not None and below.is_dir() else None)
    elif copy:
        raise InputError("Copies need a place.", where="copy", fix="say where to: --links DIR --copy")
    network, prototypes, heads, how = _read(str(model), head, progress)
    decoding = Decoding(channels=len(how["mean"]), max_pixels=max_pixels)
    source = open_source(images, how=decoding) if isinstance(images, str) else images
    if place is not None and not isinstance(source, FileImages):
        raise InputError(
            "These images are no files of their own: there is nothing to link to.",
            where=source.name,
            fix="write a list of them (--out FILE.csv), or pass a folder of pictures",
        )
    embeddings, _ = source_features(network.to(choose_device(device)), source, how, batch_size)
    chosen, scores = _nearest(embeddings, prototypes)
    found = Assignment(
        model=str(model),
        head=head,
        heads=heads,
        sizes=chosen.bincount(minlength=len(prototypes)),
        images=tuple(image_name(source, index) for index in range(len(source))),
        ids=torch.arange(len(source)),
        prototypes=chosen,
        scores=scores,
    )
    if top is not None:
        found = found.top(top)
    if path is not None:
        _write(path, found)
    if place is not None:
        write_cluster_folders(place, found.images, found.prototypes.tolist(), len(prototypes), copy)
    return found


class _Embedding(nn.Module):
    """Trunk and projection head: images -> embeddings of unit length, (N, D)."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head.to(next(trunk.parameters()).dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(self.trunk(images)).float(), dim=1)


def _read(reference: str, head: int, progress: bool) -> tuple[nn.Module, torch.Tensor, int, dict[str, Any]]:
    """A model as far as its embeddings, its prototypes (K, D), the number of sets, and the preprocessing."""
    target = parse_reference(reference)
    if target.kind in ("random", "supervised", "timm"):
        raise InputError("Such a model has no prototypes.", where=target.where, fix=_INSTEAD)
    model, known = contents_of(reference, progress=progress)
    found = {match: tensor for key, tensor in model.heads.items() if (match := _SET.fullmatch(key))}
    sets = [tensor for _, tensor in sorted(found.items(), key=lambda item: int(item[0][1] or 0))]
    if not sets:
        raise InputError(
            f"This model ({model.method}) holds no prototypes: its images have no clusters.",
            where=target.where,
            fix=_INSTEAD,
        )
    if not 0 <= head < len(sets):
        only = f"heads 0 to {len(sets) - 1}" if len(sets) > 1 else "head 0 only"
        raise InputError(f"There is no head {head} of prototypes.", where=target.where, fix=f"it has {only}")
    if known.get("lineage", {}).get("averaged"):
        log.warning(
            "the trunk is a running average (engine.ema_decay), head and prototypes are the last ones"
        )
    trunk = fill_trunk(create_trunk, model.network, model.trunk, target.where, model.preprocessing)
    layers = {key.removeprefix(_HEAD): v for key, v in model.heads.items() if key.startswith(_HEAD)}
    prototypes = sets[head].double()
    # SwAV's are brought to unit length when the next step begins: the last update may have moved them off it.
    prototypes = F.normalize(prototypes, dim=1)
    network = _Embedding(trunk, _filled_head(trunk.num_features, layers, prototypes, target.where))
    return network, prototypes, len(sets), model.preprocessing


def _filled_head(
    features: int, tensors: Mapping[str, torch.Tensor], prototypes: torch.Tensor, where: object
) -> nn.Module:
    """The projection head that the tensors are of; every key and shape must match.

    The tensors alone say what it is: models that were converted have no recipe.
    """
    hidden = tensors["0.weight"].shape[0] if "0.weight" in tensors else 0
    with torch.device("meta"):
        head = projection_head(features, hidden, prototypes.shape[1], norm="1.weight" in tensors)
    try:
        head.load_state_dict(dict(tensors), strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:400]
        raise InputError(
            f"The projection head doesn't fit between features and prototypes ({reason}).", where=where
        ) from None
    if not all(tensor.isfinite().all() for tensor in (prototypes, *tensors.values())):
        raise InputError(
            "The projection head or the prototypes hold numbers that are not finite.",
            where=where,
            fix="look at them: zoo doctor MODEL",
        )
    return head


def _nearest(embeddings: torch.Tensor, prototypes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each embedding the prototype of the highest cosine (the first, of equal ones), and that.

    Blocks have one size and the sums are in float64, so that the company of an image changes nothing.
    """
    chosen, scores = [], []
    for block in embeddings.split(_BLOCK):
        filled = prototypes.new_zeros(_BLOCK, prototypes.shape[1])
        filled[: len(block)] = block
        cosines = (filled @ prototypes.T)[: len(block)].float()
        best = cosines.argmax(dim=1)
        chosen.append(best)
        scores.append(cosines.gather(1, best[:, None]).squeeze(1))
    return torch.cat(chosen), torch.cat(scores)


def _write(path: Path, found: Assignment) -> None:
    with disk_errors("Writing the prototypes of the images", path):
        if path.suffix == ".json":
            write_json(path, found.to_json())
            return
        text = io.StringIO()
        lines = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        lines.writeheader()
        lines.writerows(found.rows())
        write_text(path, text.getvalue())
