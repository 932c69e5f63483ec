"""Foreign checkpoints: any known layout of a file of weights, told by its content, as a ``ForeignModel``.

A format is a class with ``detect`` and ``read`` (``common.Format``) and one line here. They are asked in
this order: the first that knows the content reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...registry import Entry, Registry

if TYPE_CHECKING:
    from .base import ForeignClassifier, ForeignModel

__all__ = ["FORMATS", "identify", "read_classifier", "read_model"]


def _entry(name: str, code: str, summary: str) -> Entry:
    return Entry(name, code, code, summary)  # a format has nothing to configure


FORMATS = Registry(
    "format",
    __name__,
    _entry("zoo_run", "plain:Run", "a checkpoint of one of the zoo's runs (global.safetensors)"),
    _entry("amdim", "amdim:AMDIM", "AMDIM's checkpoints"),
    _entry("vissl", "libraries:VISSL", "VISSL's checkpoints and model zoo"),
    _entry("detectron2", "libraries:Detectron2", "backbones converted for detectron2 (.pkl)"),
    _entry("moco", "moco:MoCo", "MoCo v1, v2 and v3"),
    _entry("moco_lincls", "moco:LinearEvaluation", "MoCo's linear evaluation: a backbone and its classifier"),
    _entry("dino", "published:DINO", "DINO's training checkpoints"),
    _entry("lightly", "libraries:Lightly", "networks of lightly's examples"),
    _entry("solo_learn", "libraries:SoloLearn", "solo-learn's checkpoints"),
    _entry("swav", "swav:SwAV", "SwAV, DeepCluster-v2 and SeLa-v2: hub files and training checkpoints"),
    _entry(
        "swav_semisup",
        "swav:SemiSupervised",
        "SwAV's semi-supervised evaluation: a backbone and its classifier",
    ),
    _entry(
        "linear_classifier", "swav:LinearClassifier", "a linear classifier alone (SwAV's linear evaluation)"
    ),
    _entry("barlow_twins", "published:BarlowTwins", "Barlow Twins' training checkpoints"),
    _entry("vicreg", "published:VICReg", "VICReg's training checkpoints"),
    _entry("simsiam", "published:SimSiam", "SimSiam's training checkpoints"),
    _entry(
        "torchvision",
        "plain:TorchvisionResNet",
        "torchvision, timm, bundles, published backbones; in any known wrapper",
    ),
)


def read_model(path: Path) -> ForeignModel:
    """The backbone in a file of weights, whatever wrote it; nothing in the file is ever run.

    Raises:
        InputError: no file of weights, one that wants code to be run, or one without a whole backbone
            that the zoo has (with how much of which network is there).
    """
    from ..safe import read_content

    return identify(read_content(path).value, path)


def identify(value: Any, where: object) -> ForeignModel:
    """The backbone in a file's content.

    Args:
        value: plain nested data with tensors or arrays, as ``zoo.weights.safe.read_content`` gives it.
        where: the file, for messages.

    Raises:
        InputError: as ``read_model``.
    """
    from .layout import Layout

    layout = Layout(value, where)
    for name in FORMATS:
        form = FORMATS.code(name)()
        if form.detect(layout):
            model: ForeignModel = form.read(layout)
            return model
    raise layout.refusal()


def read_classifier(path: Path) -> ForeignClassifier:
    """The linear classifier in a file: alone, as SwAV's linear evaluation writes it, or on its backbone.

    Raises:
        InputError: no file of weights, or no linear classifier on pooled features in it.
    """
    from ...errors import InputError
    from ..safe import read_content
    from .base import ForeignClassifier
    from .layout import Layout
    from .swav import LinearClassifier

    value = read_content(path).value
    layout, alone = Layout(value, path), LinearClassifier()
    if alone.detect(layout):
        return alone.classifier(layout)
    model = identify(value, path)
    if not model.classifier:
        raise InputError("There is no classifier in the file.", where=path)
    return ForeignClassifier(model.format, model.what, **model.classifier, facts=model.facts)
