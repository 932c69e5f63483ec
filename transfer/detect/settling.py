"""What is trained: the protocol as it was asked for, and the detector that it makes of a trunk."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from zoo.errors import InputError
from zoo.keyed import keyed_seed
from zoo.tensors import seeded

from .config import DetectConfig
from .datasets import Sets, family_of
from .detr.detector import DetrSettings
from .detr.protocol import DetrProtocol, DetrShape, refuse_detr_options, settled_detr
from .models.detectors import DetectorSettings
from .models.kinds import AnyDetector, AnySettings, make_detector
from .models.roi import RoiSettings
from .models.rpn import RpnSettings
from .protocols import AnyProtocol, choose_protocol, rescaled

__all__ = ["detector_for", "settled"]

_PER_PROCESS = 2
_MOST_IMAGES = 16


def settled(
    config: DetectConfig, dataset: str, sets: Sets, method: str, processes: int
) -> tuple[AnyProtocol, str]:
    """The protocol that is trained by, rescaled to the batch, and a sentence that says how.

    Raises:
        InputError: a batch that can't be shared out, or an unknown name.
    """
    family = family_of(dataset)
    protocol: AnyProtocol
    if config.head == "detr":
        protocol, sentence = settled_detr(config, family, len(sets.train), processes)
    else:
        refuse_detr_options(config)
        chosen = choose_protocol(dataset, family, method, config.head, config.schedule, sets.train.has_masks)
        batch = config.batch_size or min(_MOST_IMAGES, _PER_PROCESS * processes)
        protocol, sentence = rescaled(chosen, batch)
    if protocol.batch % processes:
        raise InputError(
            f"{protocol.batch} images a step can't be shared out among {processes} processes.",
            where=f"--batch-size {protocol.batch}",
            fix=f"take a multiple of {processes}",
        )
    changes: dict[str, Any] = {}
    if config.lr:
        changes["lr"] = config.lr
    if config.warmup_steps >= 0:
        changes["warmup"] = config.warmup_steps
    if config.min_size:
        changes |= {"sizes": (config.min_size,), "test_size": config.min_size}
    if config.max_size:
        changes["most"] = config.max_size
    if config.precise_batches >= 0:
        changes["precise_batches"] = config.precise_batches
    return replace(protocol, **changes), sentence


def detector_for(trunk: Any, protocol: AnyProtocol, classes: int, seed: int) -> AnyDetector:
    """The protocol's detector around a trunk; the new layers follow from the seed."""
    settings: AnySettings
    if isinstance(protocol, DetrProtocol):
        shape = {field.name: getattr(protocol, field.name) for field in fields(DetrShape)}
        settings = DetrSettings(classes, **shape)
    else:
        settings = DetectorSettings(
            protocol.head,
            classes,
            RpnSettings(protocol.rpn_before, protocol.rpn_after, protocol.anchors),
            RoiSettings(protocol.regions),
            protocol.extra_norm,
            protocol.fpn_norm,
        )
    with seeded(keyed_seed(seed, "detector")):
        return make_detector(trunk, settings)
