"""Features kept from one call to the next, in the cache. What is damaged or of something else is never used.

Kept only if asked for. Features of a small set are computed in less time than it takes to hash what they depend
on, and each view of a large set is a file of its own: a disk fills with what nobody will ask for again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..files import whole_file
from ..homes import cache_home
from ..tensors import read_safetensors, write_safetensors

__all__ = ["kept_features"]

log = logging.getLogger("zoo")

SCHEMA = 1  # to be raised when the same facts give other features


def kept_features(facts: Mapping[str, Any], count: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Features from the cache, or computed and put there.

    Of several processes that ask at once each computes, and the last one's file stays: it is whole.

    Args:
        facts: all that the features depend on, as JSON.
        count: images.
        compute: makes the features, float32 (N, F).

    Returns:
        float32 (N, F).
    """
    key = json.dumps({"schema": SCHEMA, **facts}, sort_keys=True)
    path = cache_home() / "features" / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"
    found = _read(path, key, count)
    if found is not None:
        log.info("features of %d images: from the cache", count)
        return found
    features = compute().contiguous()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            check = torch.tensor(list(_digest(key, features)), dtype=torch.uint8)
            write_safetensors(temporary, {"features": features, "sha256": check}, {"zoo": key})
    except OSError as error:  # a result needs no cache
        log.warning("the features can't be kept in %s: %s", path.parent, error.strerror or error)
    return features


def _read(path: Path, key: str, count: int) -> torch.Tensor | None:
    if not path.is_file():
        return None
    try:
        held = read_safetensors(path)
        features, check = held["features"], bytes(held["sha256"].tolist())
        if len(features) == count and check == _digest(key, features):
            return features
    except (InputError, KeyError, TypeError, ValueError, RuntimeError):
        pass  # torch opens the file a second time, and says RuntimeError if the cache was cleaned in between
    log.warning("the features kept in %s are gone or damaged: computing them anew", path)
    return None


def _digest(key: str, features: torch.Tensor) -> bytes:
    """Of what the features depend on, too: a file under another's name is not it."""
    about = json.dumps([key, str(features.dtype), list(features.shape)]).encode()
    return hashlib.sha256(about + features.numpy().tobytes()).digest()
