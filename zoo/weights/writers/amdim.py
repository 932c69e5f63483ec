"""AMDIM's checkpoint, as its released code writes and restores it.

Source of the layout: ``checkpoint.py`` and ``model.py`` of AMDIM's released code. Its ``Model`` is restored
strictly: both classifiers and the loss's masks must be there, whatever they are worth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...models.heads import feature_classifier
from ...tensors import seeded, standalone
from ..formats.amdim import ENCODER, EVALUATORS, MASKS, MLP
from .base import Source, Writer
from .torchvision import save_file

__all__ = ["AMDIMCheckpoint"]

_CLIP = 20.0
_HIDDEN = 1024  # units of the MLP classifier
_CLASSES = 1000  # of ImageNet, and of Places205 in AMDIM's code
_CURSOR = ("info_epoch", "info_step", "classifier_epoch", "classifier_step")


class AMDIMCheckpoint(Writer):
    """``{"model": tensors, "hyperparams": {...}, "cursor": {...}}``, an ``amdim_cpt.pth``.

    A classifier that the model doesn't have is written as zeros, which whoever reads the file can tell from a
    trained one.
    """

    name = "amdim"
    suffix = ".pth"
    keeps_classifier = True
    has_legacy = True

    def keeps_head(self, head: str) -> bool:
        """The MLP classifier that is trained beside the encoder."""
        return head == MLP

    def refusal(self, source: Source) -> str | None:
        """It holds AMDIM's encoders, of colour images."""
        if source.what.arch != "amdim":
            return "it holds AMDIM's encoders only"
        if source.channels != 3:
            return f"its encoders take images of 3 channels, not {source.channels}"
        return None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """The file; in the newer container the same model gives the same bytes."""
        evaluators, classes, notes = _evaluators(source)
        encoder = {f"{ENCODER}{name}": tensor for name, tensor in source.trunk.state_dict().items()}
        masks = torch.eye(25, dtype=torch.uint8).view(25, 1, 5, 5)
        tensors = {
            name: standalone(tensor.float() if tensor.is_floating_point() else tensor)
            for name, tensor in {**encoder, MASKS: masks, **evaluators}.items()
        }
        options = source.trunk.options
        clip, where = _clip(source)
        hyperparams = {  # in the order of AMDIM's own
            "ndf": options["ndf"],
            "n_classes": classes,
            "n_rkhs": options["n_rkhs"],
            "tclip": clip,
            "n_depth": options["n_depth"],
            "encoder_size": options["encoder_size"],
            "use_bn": options["use_bn"],
        }
        value = {"model": tensors, "hyperparams": hyperparams, "cursor": _cursor(source)}
        save_file(value, place, self.legacy)
        notes.append(
            f"hyperparams: {', '.join(f'{key} {said}' for key, said in hyperparams.items())} ({where})"
        )
        if clip != _CLIP or options["use_bn"]:
            notes.append(
                f"AMDIM's own code restores every file with tclip {_CLIP:g} and use_bn False, whatever it says"
            )
        if any(tensor.dtype == torch.float64 for tensor in encoder.values()):
            notes.append("the weights were made float32")
        return tuple(notes)


def _evaluators(source: Source) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Both classifiers by AMDIM's names, zeros for absent ones, the number of classes, and notes."""
    model, dim = source.model, source.trunk.num_features
    start = f"{MLP}."
    mlp = {name.removeprefix(start): tensor for name, tensor in model.heads.items() if name.startswith(start)}
    given = {MLP: mlp, "classifier": model.classifier}
    last = model.classifier.get("weight", mlp.get("6.weight"))
    classes = _CLASSES if last is None else len(last)
    found: dict[str, torch.Tensor] = {}
    notes = []
    for ours, theirs in EVALUATORS.items():
        blank = _blank(ours, dim, classes)
        fits = {name: tensor.shape for name, tensor in given[ours].items()} == {
            name: tensor.shape for name, tensor in blank.items()
        }
        if not fits:
            why = "is of another kind than AMDIM's" if given[ours] else "is not in the model"
            notes.append(f"the classifier {theirs.split('.')[1]} {why}: written as zeros, {classes} classes")
        found |= {f"{theirs}.{name}": given[ours][name] if fits else tensor for name, tensor in blank.items()}
    return found, classes, notes


def _blank(which: str, dim: int, classes: int) -> dict[str, torch.Tensor]:
    """A classifier that says nothing."""
    with seeded(0):
        whole: nn.Module = (
            feature_classifier(dim, classes, _HIDDEN) if which == MLP else nn.Linear(dim, classes)
        )
    for layer in whole.modules():
        if isinstance(layer, nn.Linear):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    return whole.state_dict()


def _clip(source: Source) -> tuple[float, str]:
    """The soft clip that the encoder was trained with, and where that is known from."""
    method = source.what.recipe.get("method", {})
    if method.get("name") == "amdim" and "clip" in method:
        return float(method["clip"]), "tclip is the recipe's"
    clip = _facts(source).get("hyperparams", {}).get("tclip")
    if isinstance(clip, int | float):
        return float(clip), "tclip is that of the file it comes from"
    return _CLIP, "nothing says which tclip it was trained with"


def _cursor(source: Source) -> dict[str, int]:
    """How far the training was: of a run by its steps, of a file as it said."""
    lineage, recipe = source.what.lineage, source.what.recipe
    known = _facts(source).get("cursor", {})
    if "step" in lineage and recipe.get("method", {}).get("name") == "amdim":
        step, an_epoch = lineage["step"], max(1, source.what.data["count"] // recipe["batch_size"])
        known = {"info_epoch": step // an_epoch, "info_step": step}
    return {name: known[name] if isinstance(known.get(name), int) else 0 for name in _CURSOR}


def _facts(source: Source) -> dict[str, Any]:
    """What the file said that the model was read from, now or when it was converted."""
    kept: dict[str, Any] = source.what.lineage.get("converted_from", {}).get("facts", {})
    return source.model.facts or kept
