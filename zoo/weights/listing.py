"""What models there are, and what each is: ``zoo list`` and ``zoo show``. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from ..homes import cache_home
from .bundle import Bundle
from .catalog import CATALOG, Card, Remote, find_card
from .hubs import HUBS
from .hubs.local import LATEST, LocalHub
from .lock import pinned
from .reference import parse_reference

__all__ = [
    "bundle_document",
    "cached",
    "card_document",
    "card_lines",
    "card_named",
    "catalog_rows",
    "describe",
    "is_elsewhere",
    "list_models",
    "local_name",
    "published",
]


def list_models() -> dict[str, Any]:
    """The models of the local hub and the released weights of the catalog, as plain JSON, schema 1.

    ``home``; ``models``, each with ``model``, ``latest`` (its newest revision, or ``damaged``), ``tags`` (all others)
    and ``revisions`` (how many); and ``catalog``, see ``catalog_rows``.
    """
    hub = LocalHub()
    rows = []
    for name in hub.names():
        try:
            tags = hub.refs(name)
            found = {"latest": tags.get(LATEST), "tags": sorted(tag for tag in tags if tag != LATEST)}
        except InputError:
            found = {"latest": "damaged", "tags": []}
        rows.append({"model": name, **found, "revisions": len(hub.revisions(name))})
    return {"schema": 1, "home": str(hub.home), "models": rows, "catalog": catalog_rows()}


def describe(model: str, *, progress: bool = True, verify: bool = False) -> dict[str, Any]:
    """What a model is, as plain JSON, schema 1: see ``card_document`` and ``bundle_document``.

    Args:
        model: a name of the catalog (``swav_resnet50.800ep``), ``org/name[@tag]`` of the local hub, or an address
            of another hub (``hf:org/name``, ``s3://bucket/org/name``), from which the model is fetched.
        progress: say on standard error what is fetched.
        verify: hash every byte of a published model, whatever was checked before.

    Raises:
        InputError: no such model, or one that isn't whole.
        RunError: a download failed.
    """
    card = card_named(model)
    if card is not None:
        return card_document(card)
    return bundle_document(published(model, progress, verify), verify)


def card_named(model: str) -> Card | None:
    """The card, where a name can only be one of the catalog.

    Raises:
        InputError: there is none of this name.
    """
    if "/" in model or model.startswith(("local:", "hf:", "hub:")):
        return None
    return find_card(model.removeprefix("catalog:"))


def is_elsewhere(model: str) -> bool:
    """Whether a reference means another home than the local hub."""
    return model.startswith(("hf:", "hub:")) or "://" in model


def published(model: str, progress: bool, verify: bool) -> Bundle:
    """A published model of any hub; arguments and errors as of ``describe``."""
    if is_elsewhere(model):
        target = parse_reference(model)
        fetch = HUBS.code(target.kind)
        return fetch(target.name, target.revision, progress=progress, verify=verify)  # type: ignore[no-any-return]
    return LocalHub().resolve(*local_name(model))


def local_name(model: str) -> tuple[str, str | None]:
    """``[local:]org/name[@revision]`` in its two parts."""
    name, _, revision = model.removeprefix("local:").partition("@")
    return name, revision or None


def bundle_document(bundle: Bundle, verify: bool) -> dict[str, Any]:
    """A published model as plain JSON, schema 1: ``path``, ``files`` (SHA-256), ``checked``, and its description.

    Raises:
        InputError: it isn't whole.
    """
    checked = bundle.verify(full=verify)
    return {"schema": 1, "path": str(bundle.path), "files": bundle.sums, "checked": checked, **bundle.info}


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
