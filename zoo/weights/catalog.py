"""The catalog of released weights: what there is, where it lies, and what is known of it. No torch here.

Names are ``entry.tag``; of each entry the first tag is the best one. Numbers carry their source; what no
source gives is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["CATALOG", "Card", "Head", "Metric", "Remote", "find_card"]


@dataclass(frozen=True)
class Remote:
    """A file that somebody published.

    Args:
        name: its base name; the catalog has each only once.
        mirrors: its addresses, in the order they are tried; none if nobody serves it any more.
        size: in bytes, where it is known.
        md5: the beginning of the MD5 that the publisher states, in hexadecimal.
        sha256: the same for the SHA-256.
        gone: the address that it had, if it is no longer served.
    """

    name: str
    mirrors: tuple[str, ...] = ()
    size: int | None = None
    md5: str = ""
    sha256: str = ""
    gone: str = ""

    @property
    def pinning(self) -> str:
        """What the publisher says about the content, for people."""
        stated = [
            f"{kind} {value}..." for kind, value in (("MD5", self.md5), ("SHA-256", self.sha256)) if value
        ]
        return f"upstream states {', '.join(stated)}" if stated else "unpinned upstream"


@dataclass(frozen=True)
class Metric:
    """A published result: task, data set, metric, value (percent) and where it is published."""

    task: str
    dataset: str
    metric: str
    value: float
    source: str


@dataclass(frozen=True)
class Head:
    """What follows the trunk in the file.

    Args:
        widths: features in front of, between and behind the linear layers (each with a bias).
        batchnorm: whether BatchNorm stands behind all of them but the last; ReLU does in any case.
        prototypes: how many rows each set of prototypes has.
        inferred: nobody has published the layout; it was concluded from other sources.
    """

    widths: tuple[int, ...]
    batchnorm: bool = False
    prototypes: tuple[int, ...] = ()
    inferred: bool = False


@dataclass(frozen=True)
class Card:
    """One set of released weights.

    Args:
        name: ``entry.tag``.
        arch: with ``stem``, ``base_planes`` and ``options`` what ``zoo.models.factory.create_trunk`` takes.
        method: who trained it, e.g. ``swav``.
        file: the released file.
        format: a key of ``zoo.weights.formats.FORMATS``.
        licence: of the weights, an SPDX name.
        parameters: of the trunk.
        num_features: length of a pooled feature.
        preprocessing: mean, std, resize, crop, interpolation of the test images.
        page: where the weights are published.
        epochs: of training on ImageNet-1k.
        batch: images in a batch, over all processes.
        crops: views of an image, e.g. ``2x224+6x96``.
        head: what follows the trunk in the file.
        metrics: published results.
        classifiers: files of released classifiers, by data set; the file itself if they are in it.
        manifest: where the keys and shapes of the file are written down (``golden/manifests``).
    """

    name: str
    arch: str
    method: str
    file: Remote
    format: str
    licence: str
    parameters: int
    num_features: int
    preprocessing: dict[str, Any]
    page: str
    epochs: int | None = None
    batch: int | None = None
    crops: str | None = None
    head: Head | None = None
    metrics: tuple[Metric, ...] = ()
    classifiers: dict[str, Remote] = field(default_factory=dict)
    manifest: str | None = None
    stem: str = "imagenet"
    base_planes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Everything as fresh plain JSON, with what the publisher says about the file's content."""
        out: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        out["pinning"] = self.file.pinning
        return out


def _preprocessing(
    std: tuple[float, ...] = (0.229, 0.224, 0.225),
    resize: int = 256,
    crop: int = 224,
    interpolation: str = "bilinear",
) -> dict[str, Any]:
    how = {"mean": [0.485, 0.456, 0.406], "std": list(std), "resize": resize, "crop": crop}
    return {**how, "interpolation": interpolation}


def _reported(task: str, dataset: str, metric: str, value: float, place: str) -> Metric:
    """A result that stands in the SwAV paper."""
    return Metric(task, dataset, metric, value, f"SwAV paper, {place}")


# --- SwAV, DeepCluster-v2, SeLa-v2 ---

_DEEPCLUSTER = "https://dl.fbaipublicfiles.com/deepcluster"
_RESNET50 = 23_508_032  # parameters
_MULTI, _SMALL_MULTI, _WIDE_MULTI, _TWO = "2x224+6x96", "2x160+4x96", "2x224+4x96", "2x224"
_THREE_SETS = (3000, 3000, 3000)

# entry: method, parameters, features, head, manifest
_ENTRIES = {
    "swav_resnet50": ("swav", _RESNET50, 2048, Head((2048, 2048, 128), True, (3000,)), "swav_rn50_hub"),
    "swav_resnet50w2": ("swav", 93_907_072, 4096, Head((4096, 8192, 128), True, (3000,)), "swav_rn50w2_hub"),
    "swav_resnet50w4": ("swav", 375_378_176, 8192, Head((8192, 8192, 128), True, (3000,)), "swav_rn50w4_hub"),
    # The author confirmed that there is no BatchNorm; the hidden width is another project's setting.
    "swav_resnet50w5": (
        "swav",
        586_450_240,
        10240,
        Head((10240, 10240, 128), prototypes=(3000,), inferred=True),
        "swav_rn50w5_hub",
    ),
    "deepclusterv2_resnet50": (
        "deepcluster_v2",
        _RESNET50,
        2048,
        Head((2048, 2048, 128), True, _THREE_SETS),
        "deepclusterv2_rn50_hub",
    ),
    "selav2_resnet50": (
        "sela_v2",
        _RESNET50,
        2048,
        Head((2048, 2048, 128), True, _THREE_SETS, inferred=True),
        "selav2_rn50_hub",
    ),
}
# entry, tag, beginning of the file's name, epochs, batch, crops, top-1 of a linear classifier, where that stands
_RELEASES = (
    ("swav_resnet50", "800ep", "swav_800ep", 800, 4096, _MULTI, 75.3, "figure 2"),
    ("swav_resnet50", "400ep", "swav_400ep", 400, 4096, _MULTI, 74.6, "figure 3"),
    ("swav_resnet50", "200ep", "swav_200ep", 200, 4096, _MULTI, 73.9, "figure 3"),
    ("swav_resnet50", "100ep", "swav_100ep", 100, 4096, _MULTI, 72.1, "figure 3"),
    ("swav_resnet50", "400ep_bs256", "swav_400ep_bs256", 400, 256, _MULTI, 74.3, "table 3"),
    ("swav_resnet50", "200ep_bs256", "swav_200ep_bs256", 200, 256, _MULTI, 72.7, "table 3"),
    ("swav_resnet50", "400ep_2x224", "swav_400ep_2x224", 400, 4096, _TWO, 70.1, "figure 3"),
    ("swav_resnet50w2", "400ep", "swav_RN50w2_400ep", 400, 4096, _WIDE_MULTI, 77.3, "table 5"),
    ("swav_resnet50w4", "400ep", "swav_RN50w4_400ep", 400, 2560, _WIDE_MULTI, 77.9, "table 5"),
    ("swav_resnet50w5", "400ep", "swav_RN50w5_400ep", 400, 1536, _WIDE_MULTI, 78.5, "table 5"),
    ("deepclusterv2_resnet50", "800ep", "deepclusterv2_800ep", 800, 4096, _MULTI, 75.2, "section 5.1"),
    ("deepclusterv2_resnet50", "400ep", "deepclusterv2_400ep", 400, 4096, _SMALL_MULTI, 74.3, "figure 3"),
    ("deepclusterv2_resnet50", "400ep_2x224", "deepclusterv2_400ep_2x224", 400, 4096, _TWO, 70.2, "figure 3"),
    ("selav2_resnet50", "400ep", "selav2_400ep", 400, 4096, _SMALL_MULTI, 71.8, "figure 3"),
    ("selav2_resnet50", "400ep_2x224", "selav2_400ep_2x224", 400, 4096, _TWO, 67.2, "figure 3"),
)
_SWAV_800EP = (
    _reported("semisup-1%", "imagenet1k", "top1", 53.9, "table 1"),
    _reported("semisup-1%", "imagenet1k", "top5", 78.5, "table 1"),
    _reported("semisup-10%", "imagenet1k", "top1", 70.2, "table 1"),
    _reported("semisup-10%", "imagenet1k", "top5", 89.9, "table 1"),
    _reported("linear", "places205", "top1", 56.7, "table 6"),
    _reported("linear", "inat18", "top1", 48.6, "table 6"),
    _reported("svm", "voc07", "mAP", 88.9, "table 6"),
    _reported("detect-faster-rcnn-c4", "voc07+12", "AP50", 82.6, "table 6"),
    _reported("detect-mask-rcnn-fpn", "coco", "AP", 41.6, "table 6"),
    _reported("detect-detr", "coco", "AP", 42.1, "table 6"),
)


def _deepcluster(stem: str) -> Remote:
    name = f"{stem}.pth.tar"
    return Remote(name, (f"{_DEEPCLUSTER}/{name}",))


def _clustered(
    entry: str, tag: str, file: str, epochs: int, batch: int, crops: str, top1: float, place: str
) -> Card:
    method, parameters, num_features, head, manifest = _ENTRIES[entry]
    best = (entry, tag) == ("swav_resnet50", "800ep")
    return Card(
        name=f"{entry}.{tag}",
        arch=entry.partition("_")[2],
        method=method,
        file=_deepcluster(f"{file}_pretrain"),
        format="swav",
        licence="CC-BY-NC-4.0",
        parameters=parameters,
        num_features=num_features,
        preprocessing=_preprocessing(std=(0.228, 0.224, 0.225)),  # the release's own first number
        page="https://github.com/facebookresearch/swav",
        epochs=epochs,
        batch=batch,
        crops=crops,
        head=head,
        metrics=(_reported("linear", "imagenet1k", "top1", top1, place), *(_SWAV_800EP if best else ())),
        classifiers={"imagenet1k": _deepcluster("swav_800ep_eval_linear")} if best else {},
        manifest=manifest,
    )


# --- MoCo ---


def _moco(version: int, epochs: int, md5: str, top1: float, place: str) -> Card:
    stem = f"moco_v{version}_{epochs}ep"
    name = f"{stem}_pretrain.pth.tar"
    return Card(
        name=f"moco_v{version}_resnet50.{epochs}ep",
        arch="resnet50",
        method="moco",
        file=Remote(name, (f"https://dl.fbaipublicfiles.com/moco/moco_checkpoints/{stem}/{name}",), md5=md5),
        format="moco",
        licence="MIT",
        parameters=_RESNET50,
        num_features=2048,
        preprocessing=_preprocessing(),
        page="https://github.com/facebookresearch/moco",
        epochs=epochs,
        batch=256,
        crops=_TWO,
        head=Head((2048, 128)) if version == 1 else Head((2048, 2048, 128)),
        metrics=(_reported("linear", "imagenet1k", "top1", top1, place),),
        manifest=f"moco_v{version}_rn50",
    )


_MOCO_CARDS = (
    _moco(1, 200, "b251726a", 60.6, "figure 2"),
    _moco(2, 800, "a04e12f8", 71.1, "table 3"),
    _moco(2, 200, "59fd9945", 67.5, "table 3"),
)

# --- AMDIM: the authors' storage is gone; the files live on where people kept them ---


def _amdim(size: str, ndf: int, n_rkhs: int, parameters: int, *metrics: Metric) -> Card:
    name = f"amdim_ndf{ndf}_rkhs{n_rkhs}_rd10.pth"
    return Card(
        name=f"amdim_{size}.in128",
        arch="amdim",
        method="amdim",
        file=Remote(name, gone=f"https://amdimmodels.blob.core.windows.net/amdim/{name}"),
        format="amdim",
        licence="MIT",
        parameters=parameters,
        num_features=n_rkhs,
        preprocessing=_preprocessing(resize=146, crop=128, interpolation="bicubic"),
        page="https://github.com/Philip-Bachman/amdim-public",
        crops="2x128",
        metrics=metrics,
        manifest=f"amdim_in128_ndf{ndf}_rkhs{n_rkhs}_rd10",
        options={"encoder_size": 128, "ndf": ndf, "n_rkhs": n_rkhs, "n_depth": 10},
    )


_AMDIM_CARDS = (
    _amdim("medium", 256, 2048, 426_255_616),
    _amdim("large", 320, 2560, 665_960_000, _reported("linear", "imagenet1k", "top1", 68.1, "table 5")),
)

# --- torchvision's supervised ResNet-50: what the others are compared with ---


def _supervised(version: int, digest: str, top1: float, top5: float, resize: int = 256) -> Card:
    name = f"resnet50-{digest}.pth"
    file = Remote(name, (f"https://download.pytorch.org/models/{name}",), sha256=digest)
    source = f"torchvision, ResNet50_Weights.IMAGENET1K_V{version}"
    return Card(
        name=f"supervised_resnet50.v{version}",
        arch="resnet50",
        method="supervised",
        file=file,
        format="torchvision",
        licence="BSD-3-Clause",
        parameters=_RESNET50,
        num_features=2048,
        preprocessing=_preprocessing(resize=resize),
        page="https://docs.pytorch.org/vision/stable/models.html",
        metrics=tuple(
            Metric("supervised", "imagenet1k", metric, value, source)
            for metric, value in (("top1", top1), ("top5", top5))
        ),
        classifiers={"imagenet1k": file},
    )


_SUPERVISED_CARDS = (
    _supervised(2, "11ad3fa6", 80.858, 95.434, resize=232),
    _supervised(1, "0676ba61", 76.130, 92.862),
)

_CARDS = (*(_clustered(*row) for row in _RELEASES), *_MOCO_CARDS, *_AMDIM_CARDS, *_SUPERVISED_CARDS)
CATALOG: Mapping[str, Card] = MappingProxyType({card.name: card for card in _CARDS})
"""Every card by its name, the best of an entry first."""


def find_card(name: str) -> Card:
    """A card by its name.

    Raises:
        InputError: there is none, with the tags of the entry or the nearest names.
    """
    if name in CATALOG:
        return CATALOG[name]
    tags = [known for known in CATALOG if known.startswith(f"{name}.")]
    near = f"say which: {', '.join(tags)}" if tags else did_you_mean(name, CATALOG, count=3, likeness=0.4)
    raise InputError(
        "There are no released weights of this name in the catalog.",
        where=name,
        fix=near or "`zoo list` shows what there is",
    )
