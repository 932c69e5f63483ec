"""A trained detector on disk: ``detector.safetensors`` and ``detector.json``; nothing in them is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.errors import InputError
from zoo.files import read_json, whole_folder, write_json
from zoo.models.factory import create_trunk
from zoo.tensors import read_safetensors, write_safetensors

from .models.detectors import C4Detector, DetectorSettings, FpnDetector, build_detector
from .models.roi import RoiSettings
from .models.rpn import RpnSettings

__all__ = ["SavedDetector", "load_detector", "save_detector"]

SCHEMA = 1
_TENSORS, _FACTS = "detector.safetensors", "detector.json"


@dataclass(frozen=True)
class SavedDetector:
    """A detector and what belongs to it: class names, category ids, normalisation in 0..255, sizes."""

    detector: C4Detector | FpnDetector
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
    homes = (folder, folder / "detector", folder / "run-0" / "detector")
    home = next((home for home in homes if (home / _FACTS).is_file()), None)
    if home is None:
        raise InputError(
            "No trained detector is there.",
            where=folder,
            fix="pass the folder that zoo transfer detect wrote (--out, or below results)",
        )
    try:
        facts: dict[str, Any] = read_json(home / _FACTS)
        if facts["schema"] != SCHEMA:
            raise ValueError(f"schema {facts['schema']}")
        settings = dict(facts["settings"])
        rpn, roi = settings.pop("rpn"), settings.pop("roi")
        made = DetectorSettings(
            **settings,
            rpn=RpnSettings(**{key: _tupled(value) for key, value in rpn.items()}),
            roi=RoiSettings(**roi),
        )
        with torch.device("meta"):
            trunk = create_trunk(facts["arch"], stem=facts["stem"], base_planes=facts["base_planes"])
            detector = build_detector(trunk, made)
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
            f"The detector can't be read ({type(error).__name__}: {reason}).", where=home
        ) from None


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _stem_of(trunk: Any) -> str:
    if trunk.conv1.kernel_size == (7, 7):
        return "imagenet"
    return "small" if isinstance(trunk.maxpool, nn.Identity) else "medium"
