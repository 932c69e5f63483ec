"""Figures 2, 3, 4 and 6 of the SwAV paper (Caron et al. 2020, arXiv 2006.09882). No torch here.

A figure's points have no numbers; where the paper prints one elsewhere, the row says where.
"""

from __future__ import annotations

from .measures import FINETUNE, FROZEN, LAST_EPOCH, TOP1, row
from .model import Column, Panel, PaperTable, Row

__all__ = ["FIGURES"]

_BEST = ("swav_resnet50.800ep", "swav_rn50_800ep")
_SUPERVISED = "supervised_rn50_200ep_2x224"
_R50 = ("R50", "24")
_DRAWN = "a dash: the figure draws a point, and no number is printed"

_STANDARD = Panel(
    "Linear classifier on frozen features of a ResNet-50, ImageNet, in percent",
    "SwAV paper, figure 2 (left)",
    ("network", "parameters (M)"),
    TOP1,
    (
        row("Supervised", _R50, (76.5,), _SUPERVISED),
        Row("Colorization", _R50, (39.6,)),
        Row("Jigsaw", _R50, (45.7,)),
        Row("NPID", _R50, (54.0,)),
        Row("BigBiGAN", _R50, (56.6,)),
        Row("LA", _R50, (58.8,)),
        Row("NPID++", _R50, (59.0,)),
        row("MoCo", _R50, (60.6,), "moco_v1_resnet50.200ep", "moco_v1_rn50_200ep"),
        Row("SeLa", _R50, (61.5,)),
        Row("PIRL", _R50, (63.6,)),
        Row("CPC v2", _R50, (63.8,)),
        Row("PCL", _R50, (65.9,)),
        row("SimCLR", _R50, (70.0,), "simclr_rn50_1000ep"),
        row("MoCov2", _R50, (71.1,), "moco_v2_resnet50.800ep", "moco_v2_rn50_800ep"),
        row("SwAV", _R50, (75.3,), *_BEST),
    ),
    (LAST_EPOCH,),
)

_TABLE_5 = "table 5"
_WIDE = Panel(
    "Linear classifier on frozen features of ResNet-50s of several widths, ImageNet, in percent",
    "SwAV paper, figure 2 (right)",
    ("width",),
    TOP1,
    (
        row("Supervised", ("x1",), (76.5,), _SUPERVISED, source="figure 2 (left)"),
        row("Supervised", ("x2",), (None,), "supervised_rn50w2_200ep"),
        row("Supervised", ("x4",), (None,), "supervised_rn50w4_200ep"),
        row("Supervised", ("x5",), (None,), "supervised_rn50w5_200ep"),
        row("SimCLR", ("x1",), (70.0,), "simclr_rn50_1000ep", source="figure 2 (left)"),
        row("SimCLR", ("x2",), (None,), "simclr_rn50w2_1000ep"),
        row("SimCLR", ("x4",), (76.8,), "simclr_rn50w4_1000ep", source=_TABLE_5),
        row("SwAV", ("x1",), (75.3,), *_BEST, source="figure 2 (left)"),
        row("SwAV", ("x2",), (77.3,), "swav_resnet50w2.400ep", "swav_rn50w2_400ep", source=_TABLE_5),
        row("SwAV", ("x4",), (77.9,), "swav_resnet50w4.400ep", "swav_rn50w4_400ep", source=_TABLE_5),
        row("SwAV", ("x5",), (78.5,), "swav_resnet50w5.400ep", "swav_rn50w5_400ep", source=_TABLE_5),
    ),
    (_DRAWN, "for large networks SwAV is 0.6 points below supervised training (section 4.1)", LAST_EPOCH),
)

_TWO, _MULTI = "2x224", "2x160+4x96"
_CROPS = Panel(
    "Linear classifier on frozen features of a ResNet-50, 400 epochs (supervised: 200), ImageNet, in percent",
    "SwAV paper, figure 3 (left)",
    ("crops",),
    TOP1,
    (
        row("Supervised", (_TWO,), (76.5,), _SUPERVISED),
        row("Supervised", (_MULTI,), (76.0,), "supervised_rn50_200ep_2x160_4x96"),
        row("SimCLR", (_TWO,), (68.2,), "simclr_rn50_400ep_2x224"),
        row("SimCLR", (_MULTI,), (70.6,), "simclr_rn50_400ep_2x160_4x96"),
        row("SeLa-v2", (_TWO,), (67.2,), "selav2_resnet50.400ep_2x224", "selav2_rn50_400ep_2x224"),
        row("SeLa-v2", (_MULTI,), (71.8,), "selav2_resnet50.400ep", "selav2_rn50_400ep_2x160_4x96"),
        row(
            "DeepCluster-v2",
            (_TWO,),
            (70.2,),
            "deepclusterv2_resnet50.400ep_2x224",
            "deepclusterv2_rn50_400ep_2x224",
        ),
        row(
            "DeepCluster-v2",
            (_MULTI,),
            (74.3,),
            "deepclusterv2_resnet50.400ep",
            "deepclusterv2_rn50_400ep_2x160_4x96",
        ),
        row("SwAV", (_TWO,), (70.1,), "swav_resnet50.400ep_2x224", "swav_rn50_400ep_2x224"),
        row("SwAV", (_MULTI,), (74.1,), "swav_rn50_400ep_2x160_4x96"),
        row(
            "DeepCluster-v2",
            ("2x224+6x96, 800 epochs",),
            (75.2,),
            "deepclusterv2_resnet50.800ep",
            "deepclusterv2_rn50_800ep",
            source="section 5.1",
        ),
    ),
    (LAST_EPOCH,),
)

_LONGER = (
    row("SwAV", ("100",), (72.1,), "swav_resnet50.100ep", "swav_rn50_100ep"),
    row("SwAV", ("200",), (73.9,), "swav_resnet50.200ep", "swav_rn50_200ep"),
    row("SwAV", ("400",), (74.6,), "swav_resnet50.400ep", "swav_rn50_400ep"),
    row("SwAV", ("800",), (75.3,), *_BEST),
)
_EPOCHS = Panel(
    "Linear classifier on frozen features of a ResNet-50 trained for 100 to 800 epochs, ImageNet, in percent",
    "SwAV paper, figure 3 (right)",
    ("epochs",),
    TOP1,
    _LONGER,
    ("crops 2x224+6x96, batch 4096", LAST_EPOCH),
)

_UNCURATED = Panel(
    "ResNet-50 pretrained on a billion random images, then ImageNet: frozen features with a linear classifier, and "
    "fine-tuned; top-1 in percent",
    "SwAV paper, figure 4 (left)",
    (),
    (Column("frozen", FROZEN, "top1"), Column("finetuned", FINETUNE, "top1")),
    (
        row("Random", (), (15.0, 76.5), "random:resnet50"),
        row("MoCo", (), (None, 77.3)),
        row("SimCLR", (), (60.4, 77.2), "simclr_rn50_1b"),
        row("SwAV", (), (66.5, 77.8), "swav_rn50_1b"),
    ),
    (
        "MoCo's images were chosen by hashtags that resemble ImageNet's classes",
        "fine-tuning: the paper doesn't give its settings, these are A.4's of the larger share",
        LAST_EPOCH,
    ),
)

_CAPACITY = Panel(
    "ResNeXt-101s pretrained by SwAV on a billion random images, fine-tuned on ImageNet; top-1 in percent",
    "SwAV paper, figure 4 (right)",
    ("network",),
    (Column("finetuned", FINETUNE, "top1"),),
    tuple(
        row("SwAV", (f"ResNeXt-101 32x{width}d",), (None,), f"swav_rnx101_32x{width}d_1b")
        for width in (8, 16, 32, 48)
    ),
    (_DRAWN,),
)

_HOURS = Panel(
    "Training a ResNet-50 for longer on 64 V100 (16 GB), batch 4096: hours, and top-1 of a linear classifier on frozen "
    "features, ImageNet, in percent",
    "SwAV paper, figure 6",
    ("epochs",),
    (Column("hours"), *TOP1),
    (
        row("SwAV", ("100",), ("6h15", 72.1), *_LONGER[0].models, source="section 5.3"),
        *(
            row("SwAV", known.about, (None, *known.values), *known.models, source="figure 3 (right)")
            for known in _LONGER[1:]
        ),
        row("SimCLR", ("1000",), ("40h", None), "simclr_rn50_1000ep", source="section B.1"),
    ),
    (
        _DRAWN,
        "table 4 gives 6h15 for each 100 epochs",
        "SimCLR's number in figure 2 is 70.0",
        LAST_EPOCH,
    ),
)

FIGURES = (
    PaperTable("figure2", "linear classification on ImageNet", (_STANDARD, _WIDE)),
    PaperTable(
        "figure3", "clustering against contrast, multi-crop, and training for longer", (_CROPS, _EPOCHS)
    ),
    PaperTable("figure4", "pretraining on uncurated images", (_UNCURATED, _CAPACITY)),
    PaperTable("figure6", "accuracy by hours of training", (_HOURS,)),
)
