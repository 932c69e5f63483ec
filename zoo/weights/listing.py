"""The catalog for people: rows of ``zoo list`` and the page of ``zoo show``. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..homes import cache_home
from .catalog import CATALOG, Card, Remote
from .lock import pinned

__all__ = ["cached", "card_document", "card_lines", "catalog_rows"]


def cached(remote: Remote) -> Path | None:
    """Where a released file lies, if it was fetched; its content is not looked at."""
    path = cache_home() / "downloads" / remote.name
    return path if path.is_file() else None


def catalog_rows() -> list[dict[str, Any]]:
    """A row of plain JSON for each card.

    ``name``, ``method``, ``arch``, ``epochs``, ``licence``, ``top1`` (published accuracy on ImageNet-1k, of a
    linear classifier or the supervised network; None where it isn't known) and ``cached``.
    """
    return [
        {
            "name": card.name,
            "method": card.method,
            "arch": card.arch,
            "epochs": card.epochs,
            "licence": card.licence,
            "top1": _top1(card),
            "cached": cached(card.file) is not None,
        }
        for card in CATALOG.values()
    ]


def card_document(card: Card) -> dict[str, Any]:
    """A card as plain JSON, schema 1: ``Card.describe``, ``pinned`` (SHA-256 or None), ``cached`` (path or None).

    Raises:
        InputError: the list of pins can't be read.
    """
    place = cached(card.file)
    here = {"pinned": pinned(card.file.name), "cached": None if place is None else str(place)}
    return {"schema": 1, **card.describe(), **here}


def card_lines(card: Card) -> list[str]:
    """The card for people.

    Raises:
        InputError: the list of pins can't be read.
    """
    known = card_document(card)
    how = card.preprocessing
    pin = f"SHA-256 {known['pinned']}, pinned on this machine when it was first used"
    training = {
        "ImageNet-1k epochs": card.epochs,
        "batch": card.batch,
        "views": card.crops,
    }
    rows = {
        "method": card.method,
        "network": card.arch + "".join(f", {key} {value}" for key, value in card.options.items()),
        "size": f"{card.parameters:,} parameters, {card.num_features} features",
        "training": ", ".join(f"{key} {value}" for key, value in training.items() if value is not None),
        "head": _head(card),
        "licence": card.licence,
        "file": card.file.name,
        "from": " or ".join(card.file.mirrors) or f"nobody serves it any more; it was at {card.file.gone}",
        "page": card.page,
        "content": f"{card.file.pinning}; {pin if known['pinned'] else 'not used on this machine yet: its first use pins it'}",
        "cached": known["cached"] or "no",
        "images": f"shorter side to {how['resize']} ({how['interpolation']}), central {how['crop']} x {how['crop']}, "
        f"mean {how['mean']}, std {how['std']}",
    }
    lines = [card.name, *(f"  {key:<9} {value}" for key, value in rows.items() if value)]
    if card.metrics:
        lines += ["", "Published results"]
        lines += [f"  {m.value:<7g} {m.metric}, {m.task} on {m.dataset} ({m.source})" for m in card.metrics]
    lines += ["", "Load"]
    if not card.file.mirrors:
        lines += [f"  put {card.file.name} into a folder and set ZOO_MIRROR to it, then"]
    lines += [f'  zoo.load("{card.name}")  # the file is fetched once and kept']
    lines += [f'  zoo.load("{card.name}", classifier="{dataset}")' for dataset in card.classifiers]
    lines += [f"  zoo verify {card.name}"]
    return lines


def _top1(card: Card) -> float | None:
    wanted = {(task, "imagenet1k", "top1") for task in ("linear", "supervised")}
    return next((m.value for m in card.metrics if (m.task, m.dataset, m.metric) in wanted), None)


def _head(card: Card) -> str:
    if card.head is None:
        return ""
    head = card.head
    said = " - ".join(map(str, head.widths)) + (" with BatchNorm" if head.batchnorm else "")
    if head.prototypes:
        said += f", prototypes {', '.join(map(str, head.prototypes))}"
    return said + (" (not published: concluded from other sources)" if head.inferred else "")
