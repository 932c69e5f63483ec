"""Named view plans, every number with its source, and the test transforms that go with them.

Where the sources disagree the released code wins; what is this project's own choice says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import InputError, did_you_mean
from .params import CropSpec, ViewPlan

__all__ = ["PRESETS", "SHORT", "Preset", "TestTransform", "crop_and_flip", "find_preset"]

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SWAV_STD = (0.228, 0.224, 0.225)  # the released SwAV code's, in training and evaluation


@dataclass(frozen=True)
class TestTransform:
    """Shorter side to ``resize`` pixels, then the central ``crop`` x ``crop``."""

    resize: int
    crop: int
    interpolation: str = "bilinear"


@dataclass(frozen=True)
class Preset:
    """A named plan: ``source`` says where its numbers come from, ``test`` belongs to the same protocol."""

    name: str
    summary: str
    source: str
    plan: ViewPlan
    test: TestTransform


def _crops(*kinds: tuple[int, int, float, float]) -> tuple[CropSpec, ...]:
    """(count, size, smallest, largest share of the area) of each kind of crop."""
    return tuple(CropSpec(size, low, high) for count, size, low, high in kinds for _ in range(count))


_TEST_224 = TestTransform(256, 224)
# ViewPlan's defaults are SwAV's distortions (multicropdataset.py; A.2: "exactly following SimCLR").
_SWAV = ViewPlan(_crops((2, 224, 0.14, 1.0), (6, 96, 0.05, 0.14)), std=_SWAV_STD)
_SWAV_SOURCE = "SwAV src/multicropdataset.py and appendix A.2; crops: "
_MOCO_V2 = ViewPlan(
    _crops((2, 224, 0.2, 1.0)),
    jitter=(0.4, 0.4, 0.4, 0.1),
    mean=_IMAGENET_MEAN,
    std=_IMAGENET_STD,
)
_AMDIM = ViewPlan(
    _crops((2, 128, 0.3, 1.0)),
    ratio=(0.7, 1.4),
    interpolation="bicubic",
    shared_flip=True,
    jitter=(0.4, 0.4, 0.4, 0.1),
    gray_p=0.25,
    blur_p=0.0,
    mean=_IMAGENET_MEAN,
    std=_IMAGENET_STD,
)


def crop_and_flip(size: int) -> ViewPlan:
    """What classifiers on features are trained on: one random crop (scale 0.08-1) and a flip."""
    return ViewPlan(_crops((1, size, 0.08, 1.0)), jitter_p=0.0, gray_p=0.0, blur_p=0.0)


_LINEAR = replace(crop_and_flip(224), mean=_IMAGENET_MEAN, std=_IMAGENET_STD)
_SMALL_SOURCE = (
    "this project's choice: SwAV's distortions; the crops keep SwAV's ratio of large to small (224 : 96) "
    "at sides that a ResNet with a small stem halves evenly; scales from A.7 (0.08-1) raised for images "
    "of few pixels"
)

_ALL = (
    Preset(
        "swav-2x224+6x96",
        "SwAV multi-crop, the released 100 to 800 epoch models",
        _SWAV_SOURCE + "scripts swav_{100,200,400,800}ep and the batch-256 ones",
        _SWAV,
        _TEST_224,
    ),
    Preset(
        "swav-2x224",
        "SwAV without small crops",
        _SWAV_SOURCE + "script swav_400ep_2x224, scale 0.08-1",
        replace(_SWAV, crops=_crops((2, 224, 0.08, 1.0))),
        _TEST_224,
    ),
    Preset(
        "swav-2x160+4x96",
        "cheaper multi-crop (DeepCluster-v2's release, table 4 of the paper)",
        _SWAV_SOURCE + "script deepclusterv2_400ep_2x160_4x96, scales 0.08-1 and 0.05-0.14",
        replace(_SWAV, crops=_crops((2, 160, 0.08, 1.0), (4, 96, 0.05, 0.14))),
        _TEST_224,
    ),
    Preset(
        "swav-2x224+4x96",
        "SwAV multi-crop of the twice as wide ResNet-50",
        _SWAV_SOURCE + "script swav_RN50w2_400ep, scales 0.14-1 and 0.05-0.14",
        replace(_SWAV, crops=_crops((2, 224, 0.14, 1.0), (4, 96, 0.05, 0.14))),
        _TEST_224,
    ),
    Preset(
        "swav-w4-2x224+4x96",
        "SwAV multi-crop of the four times as wide ResNet-50",
        _SWAV_SOURCE + "script swav_RN50w4_400ep, scales 0.08-1 and 0.08-0.14",
        replace(_SWAV, crops=_crops((2, 224, 0.08, 1.0), (4, 96, 0.08, 0.14))),
        _TEST_224,
    ),
    Preset(
        "swav-a7-2x224+6x96",
        "SwAV's ablations: SimCLR's scale for the large crops",
        _SWAV_SOURCE + "appendix A.7, scale 0.08-1 for the large crops",
        replace(_SWAV, crops=_crops((2, 224, 0.08, 1.0), (6, 96, 0.05, 0.14))),
        _TEST_224,
    ),
    Preset(
        "swav-opencv-2x224+6x96",
        "SwAV multi-crop with the blur that the released weights were trained with",
        _SWAV_SOURCE + "as swav-2x224+6x96; blur: OpenCV 23 x 23, sigma U(0.1, 2) (git history 9ad22d9)",
        replace(_SWAV, blur="gaussian"),
        _TEST_224,
    ),
    Preset(
        "small-32",
        "multi-crop for 32-pixel images (CIFAR)",
        _SMALL_SOURCE + "; no blur, as SimCLR's B.9 does for CIFAR-10",
        replace(
            _SWAV,
            crops=_crops((2, 32, 0.3, 1.0), (4, 16, 0.08, 0.3)),
            jitter=(0.4, 0.4, 0.4, 0.1),
            blur_p=0.0,
        ),
        TestTransform(32, 32),
    ),
    Preset(
        "small-64",
        "multi-crop for 64-pixel images (Tiny-ImageNet)",
        _SMALL_SOURCE,
        replace(_SWAV, crops=_crops((2, 64, 0.2, 1.0), (4, 32, 0.05, 0.2)), blur_radius=(0.1, 1.0)),
        TestTransform(64, 64),
    ),
    Preset(
        "small-128",
        "multi-crop for 96- to 160-pixel images (STL-10, ImageNet reduced)",
        _SMALL_SOURCE,
        replace(_SWAV, crops=_crops((2, 128, 0.14, 1.0), (6, 64, 0.05, 0.14)), blur_radius=(0.1, 1.2)),
        TestTransform(146, 128),
    ),
    Preset(
        "simclr",
        "SimCLR's two views",
        "SimCLR appendix A and data_util.py (crop 0.08-1, bicubic, colour strength 1, blur: kernel a tenth of "
        "the side, p 0.5); normalisation: ImageNet's usual (SimCLR itself has none)",
        ViewPlan(
            _crops((2, 224, 0.08, 1.0)),
            interpolation="bicubic",
            blur="gaussian",
            blur_kernel=23,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
        ),
        replace(_TEST_224, interpolation="bicubic"),
    ),
    Preset(
        "moco-v1",
        "MoCo v1's two views: grayscale first, jitter always, no blur",
        "MoCo main_moco.py without --aug-plus",
        replace(_MOCO_V2, jitter=(0.4, 0.4, 0.4, 0.4), jitter_p=1.0, gray_first=True, blur_p=0.0),
        _TEST_224,
    ),
    Preset("moco-v2", "MoCo v2's two views", "MoCo main_moco.py with --aug-plus", _MOCO_V2, _TEST_224),
    Preset(
        "amdim-128",
        "AMDIM's two views for ImageNet and Places",
        "AMDIM datasets.py, TransformsImageNet128",
        _AMDIM,
        TestTransform(146, 128, "bicubic"),
    ),
    Preset(
        "amdim-64",
        "AMDIM's two views for STL-10",
        "AMDIM datasets.py, TransformsSTL10",
        replace(
            _AMDIM,
            crops=_crops((2, 64, 0.3, 1.0)),
            jitter=(0.4, 0.4, 0.4, 0.2),
            mean=(0.43, 0.42, 0.39),
            std=(0.27, 0.26, 0.27),
        ),
        TestTransform(70, 64, "bicubic"),
    ),
    Preset(
        "amdim-32",
        "AMDIM's two views for CIFAR: moved by up to 4 pixels with reflection",
        "AMDIM datasets.py, TransformsC10",
        replace(
            _AMDIM,
            crops=_crops((2, 32, 1.0, 1.0)),
            translate=4,
            translate_p=0.8,
            jitter=(0.4, 0.4, 0.4, 0.2),
            mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
            std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
        ),
        TestTransform(32, 32),
    ),
    Preset(
        "linear",
        "training a linear classifier on frozen features",
        "MoCo main_lincls.py (SwAV eval_linear.py likewise, with std 0.228)",
        _LINEAR,
        _TEST_224,
    ),
    Preset(
        "linear-swav",
        "training a linear classifier on SwAV features",
        "SwAV src/eval_linear.py",
        replace(_LINEAR, std=_SWAV_STD),
        _TEST_224,
    ),
)
PRESETS = {preset.name: preset for preset in _ALL}
SHORT = {"swav": "swav-2x224+6x96"}
"""Other names of presets."""


def find_preset(name: str) -> Preset:
    """A preset by its name, or ``swav`` for the best known one.

    Raises:
        InputError: no such preset, with the nearest name.
    """
    full = SHORT.get(name, name)
    if full not in PRESETS:
        raise InputError(
            "There is no view preset of this name.",
            where=name,
            fix=did_you_mean(name, [*PRESETS, *SHORT]) + "Known presets: " + ", ".join([*SHORT, *PRESETS]),
        )
    return PRESETS[full]
