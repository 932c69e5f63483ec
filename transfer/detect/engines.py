"""Which engine trains: our own, or detectron2, of which nothing is imported unless it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.errors import InputError
from zoo.files import sha256_of

from .config import DetectConfig

__all__ = ["check_engine", "engine_claim", "precision_for_engine"]


def check_engine(config: DetectConfig) -> None:
    """Whether the engine is there, and can do what is asked for, as far as the settings tell.

    Raises:
        InputError: it isn't, or can't.
    """
    if config.engine == "torchvision":
        if config.yaml:
            raise InputError(
                "A YAML of settings is detectron2's.",
                where=f"--yaml {config.yaml}",
                fix="add --engine detectron2",
            )
        return
    from .detectron2_engine.presence import need_detectron2

    if config.head == "detr":
        raise InputError(
            "detectron2 has no DETR.",
            where="--engine detectron2",
            fix="--engine torchvision trains --head detr",
        )
    if config.yaml and not Path(config.yaml).expanduser().is_file():
        raise InputError("There is no such file.", where=f"--yaml {config.yaml}", fix="check the path")
    need_detectron2()


def precision_for_engine(
    config: DetectConfig, device: torch.device, trunk: Any, info: Mapping[str, Any], head: str
) -> str:
    """The name of the precision that the engine trains this network in; ``auto`` may be left to the hardware.

    Raises:
        InputError: it has no such precision, or can't build such a network.
    """
    if config.engine == "torchvision":
        return config.precision
    from .detectron2_engine.engine import check_network, precision_for

    check_network(str(info["arch"]), trunk, head)
    return precision_for(config.precision, device)


def engine_claim(config: DetectConfig) -> dict[str, Any]:
    """What else a training must have been begun with to be gone on with."""
    if config.engine == "torchvision":
        return {}
    yaml = {"yaml": sha256_of(Path(config.yaml).expanduser())} if config.yaml else {}
    return {"engine": config.engine, **yaml}
