"""``zoo.extract``: the features that a model gives for a collection of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .data.decoding import Decoding
from .data.open import open_source
from .data.source import ImageSource
from .engine.precision import choose_device
from .errors import InputError
from .files import disk_errors, whole_file
from .loading import load
from .probe.features import source_features
from .tensors import write_safetensors

__all__ = ["extract"]

_FORMATS = (".safetensors", ".npz")


def extract(
    model: Any,
    images: str | ImageSource,
    *,
    out: str | Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> dict[str, torch.Tensor]:
    """Pooled features of images, by the test transform that belongs to the model.

    An image's features don't depend on the images that it shares a batch with.

    Args:
        model: a reference (see ``zoo.load``), or what ``zoo.load`` returned.
        images: a source, or what ``--data`` accepts.
        out: a file to write, ``.safetensors`` or ``.npz``; whole or not at all.
        batch_size: images at once.
        device: where to compute; a network that was passed stays where it is.

    Returns:
        ``ids`` int64 (N,), ``labels`` int64 (N,; -1 without) and ``features`` float32 (N, F).

    Raises:
        InputError: an unknown model, format or image.
    """
    path = None if out is None else Path(out)
    if path is not None and path.suffix not in _FORMATS:
        raise InputError("Features are written as .safetensors or .npz.", where=path)
    if path is not None and not path.parent.is_dir():
        raise InputError("The folder to write to isn't there.", where=path.parent)
    network = load(model).to(choose_device(device)) if isinstance(model, str) else model
    how = network.zoo_info["preprocessing"]
    decoding = Decoding(channels=len(how["mean"]))
    source = open_source(images, how=decoding) if isinstance(images, str) else images
    features, labels = source_features(network, source, how, batch_size)
    found = {"ids": torch.arange(len(source)), "labels": labels, "features": features}
    if path is not None:
        with disk_errors("Writing the features", path), whole_file(path) as temporary:
            if path.suffix == ".npz":
                with open(temporary, "wb") as file:
                    np.savez(file, **{name: tensor.numpy() for name, tensor in found.items()})  # type: ignore[arg-type]
            else:
                write_safetensors(temporary, found)
    return found
