"""Tables 1 to 6 of the SwAV paper (Caron et al. 2020, arXiv 2006.09882). No torch here."""

from __future__ import annotations

from .measures import LAST_EPOCH, TOP1, TRANSFER, row, share_of_labels
from .model import Column, Panel, PaperTable, Row

__all__ = ["TABLES"]

_SWAV = ("swav_resnet50.800ep", "swav_rn50_800ep")
_MOCO_V2 = ("moco_v2_resnet50.800ep", "moco_v2_rn50_800ep")

_ONE, _TEN = share_of_labels(0.01), share_of_labels(0.1)
_SEMISUP = Panel(
    "ResNet-50 fine-tuned with 1 % and 10 % of ImageNet's labels, in percent",
    "SwAV paper, table 1",
    ("kind",),
    (
        Column("1 % top-1", _ONE, "top1"),
        Column("1 % top-5", _ONE, "top5"),
        Column("10 % top-1", _TEN, "top1"),
        Column("10 % top-5", _TEN, "top5"),
    ),
    (
        row("Supervised", ("labels alone",), (25.4, 48.4, 56.4, 80.4)),
        row("UDA", ("label propagation",), (None, None, 68.8, 88.5)),
        row("FixMatch", ("label propagation",), (None, None, 71.5, 89.1)),
        row("PIRL", ("self-supervision only",), (30.7, 57.2, 60.4, 83.8)),
        row("PCL", ("self-supervision only",), (None, 75.6, None, 86.2)),
        row("SimCLR", ("self-supervision only",), (48.3, 75.5, 65.6, 87.8), "simclr_rn50_1000ep"),
        row("SwAV", ("self-supervision only",), (53.9, 78.5, 70.2, 89.9), *_SWAV),
    ),
    (
        "the supervised row is a network that saw these labels alone, not one that was pretrained on all of them",
        LAST_EPOCH,
    ),
)

_DOWNSTREAM = Panel(
    "Features of a ResNet-50 trained on ImageNet; top-1 of linear classifiers (VOC07: mAP of SVMs), AP50 and AP of "
    "detectors, in percent",
    "SwAV paper, table 2",
    (),
    TRANSFER,
    (
        row("Supervised", (), (53.2, 87.5, 46.7, 81.3, 39.7, 40.8)),
        row("SwAV", (), (56.7, 88.9, 48.6, 82.6, 41.6, 42.1), *_SWAV),
    ),
    ("VOC07+12: the paper's is the mean of 5 runs (--runs 5)",),
)

_ON, _OFF = "yes", "no"
_SMALL_BATCH = Panel(
    "Linear classifier on frozen features of a ResNet-50 trained with batches of 256, ImageNet, in percent",
    "SwAV paper, table 3",
    ("momentum encoder", "stored features", "crops", "epochs", "batch"),
    TOP1,
    (
        row("SimCLR", (_OFF, "0", "2x224", "200", "256"), (61.9,), "simclr_rn50_bs256"),
        row(
            "MoCov2",
            (_ON, "65,536", "2x224", "200", "256"),
            (67.5,),
            "moco_v2_resnet50.200ep",
            "moco_v2_rn50_200ep",
        ),
        row("MoCov2", (_ON, "65,536", "2x224", "800", "256"), (71.1,), *_MOCO_V2),
        row("SwAV", (_OFF, "3,840", "2x160+4x96", "200", "256"), (72.0,), "swav_rn50_bs256_2x160_4x96"),
        row(
            "SwAV",
            (_OFF, "3,840", "2x224+6x96", "200", "256"),
            (72.7,),
            "swav_resnet50.200ep_bs256",
            "swav_rn50_bs256",
        ),
        row(
            "SwAV",
            (_OFF, "3,840", "2x224+6x96", "400", "256"),
            (74.3,),
            "swav_resnet50.400ep_bs256",
            "swav_rn50_bs256_400ep",
        ),
    ),
    (LAST_EPOCH,),
)

_COST = Panel(
    "Training a ResNet-50 on 64 V100 (16 GB), batch 4096, mixed precision",
    "SwAV paper, table 4",
    ("crops",),
    (Column("time / 100 epochs"), Column("peak memory / GPU")),
    (
        row("SimCLR", ("2x224",), ("4h00", "8.6G")),
        row("SwAV", ("2x224",), ("4h09", "8.6G")),
        row("SwAV", ("2x160+4x96",), ("4h50", "8.5G")),
        row("SwAV", ("2x224+6x96",), ("6h15", "12.8G")),
    ),
    (
        "no transfer result measures a training's cost: zoo plan RECIPE forecasts it, zoo report shows a run's",
    ),
)

_W2, _W4, _W5 = (f"R50-w{width}" for width in (2, 4, 5))
_LARGE = Panel(
    "Linear classifier on frozen features of large networks, ImageNet, in percent",
    "SwAV paper, table 5",
    ("network", "parameters (M)"),
    TOP1,
    (
        row("Supervised", ("EffNet-B7", "66"), (84.4,)),
        row("Rotation", ("RevNet50-4w", "86"), (55.4,)),
        row("BigBiGAN", ("RevNet50-4w", "86"), (61.3,)),
        row(
            "AMDIM",
            ("Custom-RN", "626"),
            (68.1,),
            "amdim_large.in128",
            "amdim_ndf320_in128",
            # The authors' own evaluator (AMDIM's train.py: 30 epochs on ImageNet, drops at 15 and 25).
            settings={"linear": {"protocol": "amdim", "epochs": 30, "drop_at": (15, 25)}},
            sizes=(146, 128),
        ),
        row("CMC", (_W2, "188"), (68.4,)),
        row("MoCo", (_W4, "375"), (68.6,), "moco_v1_rn50w4_200ep"),
        row("CPC v2", ("R161", "305"), (71.5,)),
        row("SimCLR", (_W4, "375"), (76.8,), "simclr_rn50w4_1000ep"),
        row("SwAV", (_W2, "188"), (77.3,), "swav_resnet50w2.400ep", "swav_rn50w2_400ep"),
        row("SwAV", (_W4, "375"), (77.9,), "swav_resnet50w4.400ep", "swav_rn50w4_400ep"),
        row("SwAV", (_W5, "586"), (78.5,), "swav_resnet50w5.400ep", "swav_rn50w5_400ep"),
    ),
    (LAST_EPOCH, "SwAV's R50-w2: the paper prints 188 million parameters; the trunk has 94"),
)

_LINEAR = ("Places205", "VOC07", "iNat18")
_OTHERS = Panel(
    _DOWNSTREAM.title,
    "SwAV paper, table 6",
    (),
    TRANSFER,
    (
        row("Supervised", (), (53.2, 87.5, 46.7, 81.3, 39.7, 40.8)),
        Row("RotNet", (), (45.0, 64.6, None, None, None, None)),
        Row("NPID++", (), (46.4, 76.6, 32.4, 79.1, None, None)),
        row(
            "MoCo",
            (),
            (46.9, 79.8, 31.5, 81.5, None, None),
            "moco_v1_resnet50.200ep",
            "moco_v1_rn50_200ep",
            by_authors=_LINEAR,
            settings={},
        ),
        Row("PIRL", (), (49.8, 81.1, 34.1, 80.7, None, None)),
        Row("PCL", (), (49.8, 84.0, None, None, None, None)),
        Row("BoWNet", (), (51.1, 79.3, None, 81.3, None, None)),
        row("SimCLR", (), (53.3, 86.4, 36.2, None, None, None), "simclr_rn50_1000ep", by_authors=_LINEAR),
        row(
            "MoCov2",
            (),
            (52.9, 87.1, 38.9, 82.5, 39.8, 42.0),
            *_MOCO_V2,
            by_authors=(*_LINEAR, "COCO (DETR)"),
            settings={},
        ),
        row("SwAV", (), (56.7, 88.9, 48.6, 82.6, 41.6, 42.1), *_SWAV),
    ),
    (*_DOWNSTREAM.notes, "+: of another method, run by SwAV's authors"),
)

TABLES = (
    PaperTable("table1", "semi-supervised learning on ImageNet", (_SEMISUP,)),
    PaperTable("table2", "transfer to other tasks", (_DOWNSTREAM,)),
    PaperTable("table3", "training with small batches", (_SMALL_BATCH,)),
    PaperTable("table4", "what training costs", (_COST,)),
    PaperTable("table5", "large networks", (_LARGE,)),
    PaperTable("table6", "transfer to other tasks, with other methods", (_OTHERS,)),
)
