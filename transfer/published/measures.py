"""The protocols behind the SwAV paper's columns, and what its methods are called here. No torch here."""

from __future__ import annotations

from typing import Any

from .model import Column, Measure, Row

__all__ = [
    "FINETUNE",
    "FROZEN",
    "LAST_EPOCH",
    "TOP1",
    "TRANSFER",
    "row",
    "share_of_labels",
]

LAST_EPOCH = "measured: the last epoch's; the paper reports the best epoch's (A.3's released code)"

FROZEN = Measure("linear", ("imagenet",), {"protocol": "swav"})
"""A.3: a linear classifier on frozen features of ImageNet."""
FINETUNE = Measure("finetune", ("imagenet",), {"protocol": "swav"})
"""Figure 4: the paper says nothing of how it was trained; A.4's settings for the larger share."""
TOP1 = (Column("top-1", FROZEN, "top1"),)

# A.5. A result on other scenes, plants or animals says nothing of these sets.
_PLACES = Measure("linear", ("places205",), {"protocol": "places205"}, stands_for=False)
_INAT = Measure("linear", ("inat18",), {"protocol": "inat18"}, stands_for=False)
_VOC = Measure("svm", ("voc07", "voc2007"))
_BOXES = Measure("detect", ("voc07+12",), {"head": "c4"})
_MASKS = Measure("detect", ("coco2017",), {"head": "mask-fpn"})
_DETR = Measure("detect", ("coco2017",), {"head": "detr"})
TRANSFER = (
    Column("Places205", _PLACES, "top1"),
    Column("VOC07", _VOC, "mAP"),
    Column("iNat18", _INAT, "top1"),
    Column("VOC07+12 (Faster R-CNN R50-C4)", _BOXES, "AP50"),
    Column("COCO (Mask R-CNN R50-FPN)", _MASKS, "AP"),
    Column("COCO (DETR)", _DETR, "AP"),
)
"""Top-1, mAP, AP50 and AP in percent."""

_OURS = {
    "AMDIM": "amdim",
    "DeepCluster-v2": "deepcluster_v2",
    "MoCo": "moco",
    "MoCov2": "moco",
    "Random": "random",
    "SeLa-v2": "sela_v2",
    "SimCLR": "simclr",
    "Supervised": "supervised",
    "SwAV": "swav",
}
_MOCOS_OWN = {"linear": {"protocol": "moco"}}


def share_of_labels(share: float) -> Measure:
    """A.4: fine-tuning on a share of ImageNet's labels."""
    return Measure("semisup", ("imagenet",), {"protocol": "swav", "fraction": share})


def row(
    method: str,
    about: tuple[str, ...],
    values: tuple[float | str | None, ...],
    *models: str,
    **more: Any,
) -> Row:
    """A row of a method that may be one of ours; MoCo's ImageNet numbers are by MoCo's protocol."""
    if method in ("MoCo", "MoCov2"):
        more = {"settings": _MOCOS_OWN, **more}
    return Row(method, about, values, models, _OURS.get(method, ""), **more)
