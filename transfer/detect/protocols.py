"""The published protocols of detection, and what becomes of them with fewer GPUs. No torch here.

Sources: MoCo ``detection/configs/*.yaml`` (VOC, C4), SwAV's appendix A.5 (its rate and warm-up), detectron2's
``mask_rcnn_R_50_FPN_{1x,3x}`` for COCO.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zoo.errors import InputError, did_you_mean

from .detr.protocol import DetrProtocol

__all__ = ["HEADS", "SCHEDULES", "AnyProtocol", "Protocol", "choose_protocol", "rescaled"]

HEADS = ("c4", "fpn", "mask-fpn")
SCHEDULES = ("24k", "1x", "2x", "small")
_METHODS = {"swav": "swav", "deepcluster_v2": "swav", "sela_v2": "swav"}
"""Methods whose papers use SwAV's rate on VOC; all others MoCo's."""
_VOC07_SHARE = (
    5011 / 16551
)  # as many passes over VOC07's images as 24k iterations are over those of both years


@dataclass(frozen=True)
class Protocol:
    """Everything that is fixed before training begins; steps and rate are those of ``batch`` images a step."""

    name: str
    head: str
    sizes: tuple[int, ...]
    """Shorter sides that training draws from."""
    most: int
    test_size: int
    lr: float
    warmup: int
    warmup_factor: float
    steps: int
    drops: tuple[int, ...]
    batch: int = 16
    drop: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    """Of all but the norms, whose is 0."""
    rpn_before: tuple[int, int] = (12000, 6000)
    """Boxes before suppression, in training and test; of a pyramid, of each map."""
    rpn_after: tuple[int, int] = (2000, 1000)
    anchors: int = 256
    regions: int = 512
    precise_batches: int = 200
    extra_norm: bool = True
    fpn_norm: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


AnyProtocol = Protocol | DetrProtocol

_VOC = Protocol(
    "voc07+12 24k (moco)",
    "c4",
    tuple(range(480, 801, 32)),
    1333,
    800,
    0.02,
    100,
    0.001,
    24000,
    (18000, 22000),
)
_COCO = replace(
    _VOC, name="coco 1x", sizes=tuple(range(640, 801, 32)), warmup=1000, steps=90000, drops=(60000, 80000)
)
_SMALL = Protocol(
    "small",
    "c4",
    (208, 224, 240, 256, 272),
    480,
    240,
    0.0025,
    100,
    0.001,
    1200,
    (900, 1100),
    batch=2,
    rpn_before=(1000, 500),
    rpn_after=(100, 100),
    anchors=64,
    regions=64,
    precise_batches=50,
)


def choose_protocol(
    dataset: str, family: str, method: str, head: str, schedule: str, masks: bool
) -> Protocol:
    """The protocol of a data set, a pretraining method and what the user chose of it; DETR has its own.

    Args:
        dataset: its name.
        family: ``voc``, ``coco`` or ``own``.
        method: how the trunk was pretrained.
        head: one of ``HEADS``, or empty: c4 for VOC, mask-fpn for COCO, by the annotations for others.
        schedule: one of ``SCHEDULES``, or empty: 24k for VOC, 1x for COCO, small for others.
        masks: whether the annotations have masks.

    Raises:
        InputError: a name that isn't known, or masks wanted where there are none.
    """
    head = head or ("mask-fpn" if masks else "c4")
    schedule = schedule or {"voc": "24k", "coco": "1x"}.get(family, "small")
    options = (("--head", head, (*HEADS, "detr")), ("--schedule", schedule, SCHEDULES))
    for option, word, known in options:
        if word not in known:
            raise InputError(
                f"There is no such {option[2:]}: {word}.",
                where=option,
                fix=did_you_mean(word, known) + f"known: {', '.join(known)}",
            )
    if head == "mask-fpn" and not masks:
        raise InputError(
            "Mask R-CNN needs masks, and these annotations have none.",
            where="--head mask-fpn",
            fix="take --head fpn or c4, or COCO annotations with segmentations",
        )
    if schedule == "small":
        found = _SMALL
    elif schedule == "24k":
        found = _voc(method, dataset == "voc07")
    else:
        found = _COCO if schedule == "1x" else _longer(_COCO)
    if head != "c4":
        before = found.rpn_before if schedule == "small" else (2000, 1000)
        after = found.rpn_after if schedule == "small" else (1000, 1000)
        found = replace(found, rpn_before=before, rpn_after=after, extra_norm=False, fpn_norm=True)
    return replace(found, name=f"{found.name}, {head}", head=head)


def _voc(method: str, only_2007: bool) -> Protocol:
    found = _VOC
    if _METHODS.get(method) == "swav":
        found = replace(found, name="voc07+12 24k (swav)", lr=0.1, warmup=1000, warmup_factor=0.333)
    if not only_2007:
        return found
    steps, *drops = (round(n * _VOC07_SHARE) for n in (found.steps, *found.drops))
    return replace(
        found, name=found.name.replace("07+12 24k", "07, passes of 24k"), steps=steps, drops=tuple(drops)
    )


def _longer(protocol: Protocol) -> Protocol:
    return replace(protocol, name="coco 2x", steps=180000, drops=(120000, 160000))


def rescaled(protocol: Protocol, batch: int) -> tuple[Protocol, str]:
    """The protocol with another batch: the rate in proportion, steps and warm-up against it.

    Returns:
        The protocol, and a sentence that says what changed (empty if nothing).
    """
    if batch == protocol.batch:
        return protocol, ""
    times = protocol.batch / batch
    new = replace(
        protocol,
        batch=batch,
        lr=protocol.lr / times,
        steps=round(protocol.steps * times),
        drops=tuple(round(step * times) for step in protocol.drops),
        warmup=round(protocol.warmup * times),
    )
    return new, (
        f"{batch} images a step instead of {protocol.batch}: rate {protocol.lr:g} -> {new.lr:g}, steps "
        f"{protocol.steps} -> {new.steps} (rate x{protocol.drop:g} at {', '.join(map(str, new.drops))}), warm-up "
        f"{protocol.warmup} -> {new.warmup}"
    )
