"""A trained detector on disk: ``detector.safetensors`` and ``detector.json``; nothing in them is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.errors import InputError
from zoo.files import read_json, sha256_of, whole_folder, write_json
from zoo.models.factory import create_trunk
from zoo.tensors import read_safetensors, write_safetensors

from .models.kinds import AnyDetector, make_detector, settings_from

__all__ = ["SavedDetector", "detector_digest", "load_detector", "save_detector", "start_from"]

SCHEMA = 1
_TENSORS, _FACTS = "detector.safetensors", "detector.json"


@dataclass(frozen=True)
class SavedDetector:
    """A detector and what belongs to it: class names, category ids, normalisation in 0..255, sizes."""

    detector: AnyDetector
    classes: tuple[str, ...]
    numbers: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_size: int
    most: int


def save_detector(folder: Path, saved: SavedDetector, arch: str) -> None:
    """Write a detector into a new folder, whole or not at all."""
    trunk = saved.detector.trunk
    facts = {
        "schema": SCHEMA,
        "kind": "detector",
        "arch": arch,
        "stem": _stem_of(trunk),
        "base_planes": trunk.conv1.out_channels,
        "settings": asdict(saved.detector.settings),
        "classes": list(saved.classes),
        "category_ids": list(saved.numbers),
        "mean": list(saved.mean),
        "std": list(saved.std),
        "channels": "RGB",
        "test_size": saved.test_size,
        "most": saved.most,
    }
    state = {name: value.detach().cpu().contiguous() for name, value in saved.detector.state_dict().items()}
    with whole_folder(folder) as temporary:
        write_safetensors(temporary / _TENSORS, state)
        write_json(temporary / _FACTS, facts)


def load_detector(folder: Path) -> SavedDetector:
    """Read a detector that ``zoo transfer detect`` trained.

    Args:
        folder: that of the detector, of its run, or of the whole result.

    Raises:
        InputError: there is none, or it is damaged.
    """
    home = _home_of(folder)
    try:
        facts: dict[str, Any] = read_json(home / _FACTS)
        if facts["schema"] != SCHEMA:
            raise ValueError(f"schema {facts['schema']}")
        made = settings_from(facts["settings"])
        with torch.device("meta"):
            trunk = create_trunk(facts["arch"], stem=facts["stem"], base_planes=facts["base_planes"])
            detector = make_detector(trunk, made)
        state = {name: value.clone() for name, value in read_safetensors(home / _TENSORS).items()}
        detector.load_state_dict(state, strict=True, assign=True)
        return SavedDetector(
            detector.eval(),
            tuple(facts["classes"]),
            tuple(facts["category_ids"]),
            tuple(facts["mean"]),
            tuple(facts["std"]),
            int(facts["test_size"]),
            int(facts["most"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"The detector can't be read ({type(error).__name__}: {reason}).",
            where=home,
            fix="copy it again from where it was trained, or train it again",
        ) from None


def _home_of(folder: Path) -> Path:
    homes = (folder, folder / "detector", folder / "run-0" / "detector")
    home = next((home for home in homes if (home / _FACTS).is_file()), None)
    if home is None:
        raise InputError(
            "No trained detector is there.",
            where=folder,
            fix="pass the folder that zoo transfer detect wrote (--out, or below results)",
        )
    return home


def detector_digest(folder: Path) -> str:
    """SHA-256 of the file of a trained detector's tensors.

    Raises:
        InputError: none is there.
    """
    return sha256_of(_home_of(folder) / _TENSORS)


def start_from(detector: Any, classes: Sequence[str], colours: Any, folder: Path) -> str:
    """Give a new detector the weights of a trained one; with other classes all but those of its class layers.

    Args:
        detector: is changed.
        classes: its class names.
        colours: has the ``mean`` and ``std`` that it is trained with, in 0..255.
        folder: the trained one's, as of ``load_detector``.

    Returns:
        A sentence that says what was taken, and names the tensors that stay new.

    Raises:
        InputError: none is there, or one of another network, head or normalisation.
    """
    saved = load_detector(folder)
    theirs, mine = saved.detector.state_dict(), detector.state_dict()
    new = []
    if saved.classes != tuple(classes):
        new = [name for name in mine if name.startswith(tuple(detector.class_layers))]
    taken = [name for name in mine if name not in new]
    other = [name for name in taken if name not in theirs or theirs[name].shape != mine[name].shape]
    other += [name for name in theirs if name not in mine]
    if other:
        raise InputError(
            f"The detector there is another network ({len(other)} tensors differ, such as {other[0]}).",
            where=folder,
            fix="pass the --head, and a --model of the architecture, that it was trained with",
        )
    if (saved.mean, saved.std) != (tuple(colours.mean), tuple(colours.std)):
        raise InputError(
            "The detector there was trained with another normalisation than the model's.",
            where=folder,
            fix="pass the --model that it was trained from",
        )
    detector.load_state_dict({name: theirs[name] for name in taken}, strict=False)
    if not new:
        return f"all {len(taken)} tensors are those of {folder}"
    return (
        f"{len(taken)} tensors are those of {folder}; it has {len(saved.classes)} other classes, so these are new: "
        + ", ".join(new)
    )


def _stem_of(trunk: Any) -> str:
    if trunk.conv1.kernel_size == (7, 7):
        return "imagenet"
    return "small" if isinstance(trunk.maxpool, nn.Identity) else "medium"
