"""DETR's protocols, and what becomes of them with another batch or another set. No torch here.

Sources: SwAV's appendix A.5, DETR (Carion et al. 2020) and its ``main.py`` and ``datasets/coco.py``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zoo.errors import InputError, did_you_mean

from ..annotations import BoxSet
from ..config import DetectConfig

__all__ = [
    "DETR_SCHEDULES",
    "DetrProtocol",
    "DetrShape",
    "check_objects",
    "choose_detr",
    "refuse_detr_options",
    "settled_detr",
]

DETR_SCHEDULES = ("300ep", "small")
_PER_PROCESS = 2
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class DetrShape:
    """How large a detector is: ``layers`` of the encoder, and as many of the decoder."""

    queries: int = 100
    width: int = 256
    heads: int = 8
    hidden: int = 2048
    layers: int = 6
    dropout: float = 0.1
    head: str = "detr"


@dataclass(frozen=True)
class DetrProtocol(DetrShape):
    """Everything that is fixed before training begins.

    The rate is the same for every batch, as in the reference. ``epochs`` count passes over the set, of which
    ``steps`` and ``drops`` follow; a protocol of 0 epochs has its steps from the beginning.
    """

    name: str
    sizes: tuple[int, ...]
    """Shorter sides that training draws from."""
    most: int
    test_size: int
    crop_shorts: tuple[int, ...]
    """Half of the views are first resized to one of these shorter sides and cropped; none: no crops."""
    crop_sides: tuple[int, int]
    """The least and the most of a crop's height and width."""
    epochs: int = 300
    drop_epoch: int = 200
    steps: int = 0
    drops: tuple[int, ...] = ()
    drop: float = 0.1
    batch: int = 64
    lr: float = 1e-4
    backbone_lr: float = 1e-5
    weight_decay: float = 1e-4
    """Of every parameter, norms and biases included."""
    clip: float = 0.1
    """The gradient of all parameters is at most so long."""
    warmup: int = 0
    warmup_factor: float = 0.001
    precise_batches: int = 0
    """The norms are frozen: nothing is measured afterwards."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_FULL = DetrProtocol(
    "coco 300 epochs, detr", tuple(range(480, 801, 32)), 1333, 800, (400, 500, 600), (384, 600)
)
_SMALL = DetrProtocol(
    "small, detr",
    (208, 224, 240, 256, 272),
    480,
    240,
    (120, 150, 180),
    (115, 180),
    epochs=0,
    drop_epoch=0,
    steps=1500,
    drops=(1200,),
    batch=4,
    lr=4e-4,
    backbone_lr=4e-5,
    queries=25,
    width=128,
    heads=4,
    hidden=512,
    layers=3,
    dropout=0.0,
)


def choose_detr(family: str, schedule: str) -> DetrProtocol:
    """The protocol of a data set's family (``voc``, ``coco`` or ``own``) and a schedule, if one is named.

    Raises:
        InputError: a schedule that DETR has no protocol for.
    """
    schedule = schedule or ("small" if family == "own" else "300ep")
    if schedule not in DETR_SCHEDULES:
        raise InputError(
            f"DETR has no schedule {schedule}.",
            where="--schedule",
            fix=did_you_mean(schedule, DETR_SCHEDULES)
            + f"known with --head detr: {', '.join(DETR_SCHEDULES)}",
        )
    return _SMALL if schedule == "small" else _FULL


def settled_detr(config: DetectConfig, family: str, images: int, processes: int) -> tuple[DetrProtocol, str]:
    """The protocol for a set of so many images, with what was asked for, and a sentence that says what changed.

    Raises:
        InputError: an unknown schedule.
    """
    found = choose_detr(family, config.schedule)
    batch = config.batch_size or min(found.batch, _PER_PROCESS * processes)
    sentence = ""
    if batch != found.batch:
        sentence = f"{batch} images a step instead of {found.batch}; the rate stays {found.lr:g}, as in the reference"
    if found.epochs:
        steps, drop = (max(1, epochs * images // batch) for epochs in (found.epochs, found.drop_epoch))
        changes: dict[str, Any] = {"steps": steps, "drops": (drop,)}
    else:
        times = found.batch / batch
        changes = {
            "steps": round(found.steps * times),
            "drops": tuple(round(step * times) for step in found.drops),
        }
    changes["batch"] = batch
    if config.backbone_lr:
        changes["backbone_lr"] = config.backbone_lr[0]
    if config.queries:
        changes["queries"] = config.queries
    if config.min_size:  # crops in proportion
        times = config.min_size / found.test_size
        changes["crop_shorts"] = tuple(round(side * times) for side in found.crop_shorts)
        changes["crop_sides"] = tuple(round(side * times) for side in found.crop_sides)
    if not config.crops:
        changes["crop_shorts"] = ()
    return replace(found, **changes), sentence


def refuse_detr_options(config: DetectConfig) -> None:
    """Options that other detectors have no use for.

    Raises:
        InputError: one was given.
    """
    given = {"--backbone-lr": config.backbone_lr, "--queries": config.queries, "--no-crops": not config.crops}
    for option, value in given.items():
        if value:
            raise InputError(
                f"Only DETR has {option}.", where=option, fix="leave it out, or take --head detr"
            )


def check_objects(images: BoxSet, queries: int) -> list[str]:
    """What should be said of the training set before training.

    Raises:
        InputError: no image has an object.
    """
    counts = [len(picture.objects) for picture in images.pictures]
    if not any(counts):
        raise InputError(
            f"None of the {len(images)} images of {images.name} has an object: there is nothing to learn.",
            where=images.pictures[0].where if images.pictures else images.name,
            fix="check that annotations and images belong together",
        )
    names = [p.name for p, count in zip(images.pictures, counts, strict=True) if count > queries]
    if not names:
        return []
    some = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
    return [
        f"{len(names)} images of {images.name} have more objects (up to {max(counts)}) than the detector has "
        f"queries ({queries}): the objects beyond are never learned; --queries {max(counts)} has room for all: {some}"
    ]
