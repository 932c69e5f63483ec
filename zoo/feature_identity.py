"""What features depend on, as JSON: what is equal in all of it gives the same features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .data.source import ImageSource
from .data.stamp import files_stamp
from .models.factory import TIMM
from .models.foreign import is_foreign
from .models.own_code import code_sha256
from .pretrain.environment import DISTRIBUTION, distribution_version
from .weights.bundle import weights_digest

__all__ = ["digest_of", "features_identity", "is_own_code"]

# What computes, and what makes pixels of files.
_LIBRARIES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "opencv-python-headless", "timm")


def features_identity(
    network: Any, source: ImageSource, how: Mapping[str, Any], batch_size: int, precision: str = "float32"
) -> dict[str, Any]:
    """The weights as they are now, the network, the images, the transform and what computed.

    Args:
        network: the trunk; weights don't say all of it: a pooling has none.
        source: the images.
        how: the test transform.
        batch_size, precision: of each pass.

    Returns:
        JSON. ``files`` is of this machine (``files_stamp``), all else can be published. ``code_sha256`` is there for
        a network of the user's own function.
    """
    place = next(network.parameters(), torch.empty(0)).device.type
    found = {
        "weights_sha256": weights_digest(network.state_dict()),
        "network_sha256": hashlib.sha256(f"{_arch(network)}\n{network!r}".encode()).hexdigest(),
        "arch": _arch(network),
        "transform": dict(how),
        "images": source.fingerprint(),
        "files": files_stamp(source),
        "precision": precision,
        "batch_size": batch_size,
        "device": place,
        # On a CPU the kernels share their sums out among threads: the last bits depend on how many there are.
        "threads": torch.get_num_threads() if place == "cpu" else None,
        "versions": {name: distribution_version(name) for name in (DISTRIBUTION, *_LIBRARIES)},
    }
    if is_own_code(network):
        kinds = {kind.__module__ for layer in network.modules() for kind in type(layer).__mro__}
        found["code_sha256"] = code_sha256([str(_arch(network)).partition(":")[0], *sorted(kinds)])
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def digest_of(facts: Mapping[str, Any]) -> str:
    """SHA-256 of JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def is_own_code(network: nn.Module) -> bool:
    """A network of the user's own function: neither weights nor layers say what it computes."""
    inner = getattr(network, "trunk", network)
    return is_foreign(inner) and not str(_arch(inner) or "").startswith(TIMM)


def _arch(network: Any) -> str | None:
    inner = getattr(network, "trunk", network)
    return (getattr(inner, "zoo_info", None) or {}).get("arch")
