"""The demonstration: train the small recipe on built-in photographs, then judge it by kNN."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..data.open import open_source
from ..probe.features import evaluation_images, extract_features, pixel_features
from ..probe.knn import knn_accuracy
from .methods.config_base import RunShape
from .resolve import resolve
from .run import build_method, start
from .rundir import RunFolder

__all__ = ["run_demo"]

_RECIPE = "swav_tiny"
_DATA = "builtin:photos"
_SIDE = 48
_K = 20


def run_demo(seed: int = 0, out: str | Path | None = None, progress: str = "auto") -> dict[str, Any]:
    """Pretrain on the training patches; kNN accuracy on the validation patches for raw pixels, the
    untrained and the pretrained trunk. Train and validation patches share no pixel.

    Args:
        seed: of the initialisation and of every draw.
        out: the run's folder; a fresh one below ``runs`` by default.
        progress: see ``zoo.pretrain.run.start``.

    Returns:
        JSON: ``rows`` (features, top1 in 0..1), ``run``, ``seconds`` of pretraining, and the protocol.
    """
    began = time.monotonic()
    result = start(_RECIPE, data=_DATA, out=out, options={"seed": seed}, progress=progress)
    seconds = time.monotonic() - began
    result.require_finished()
    recipe = resolve(RunFolder(result.path).recipe).recipe
    shape = RunShape(
        views=sum(recipe.views.count), batch_size=recipe.batch_size, world_size=1, steps_per_epoch=1, epochs=1
    )
    untrained = build_method(recipe, shape).trunk
    train, val = open_source(_DATA, "train"), open_source(_DATA, "val")
    bank, bank_labels = evaluation_images(train, _SIDE, _SIDE)
    queries, query_labels = evaluation_images(val, _SIDE, _SIDE)
    norms = (recipe.views.mean, recipe.views.std)
    rows = []
    for name, trunk in (
        ("raw pixels", None),
        ("random backbone", untrained),
        ("pretrained", result.method.trunk),
    ):
        features = [
            pixel_features(images, *norms) if trunk is None else extract_features(trunk, images, *norms)
            for images in (queries, bank)
        ]
        top1 = knn_accuracy(features[0], query_labels, features[1], bank_labels, k=_K)
        rows.append({"features": name, "top1": top1})
    return {
        "schema": 1,
        "rows": rows,
        "run": str(result.path),
        "seconds": round(seconds, 1),
        "seed": seed,
        "k": _K,
        "classes": len(train.classes),
        "train_images": len(train),
        "val_images": len(val),
    }
