"""The named tensors of a file's content, and what its wrappers' names say."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Item", "items_of", "plain_facts", "split_branch"]

_DEPTH = 12  # a checkpoint's levels; what refers to itself has no end

# What people wrap a backbone in. They come off from the front only, in any order and number.
_WRAPPERS = frozenset(
    (
        # compiled, distributed and recomputing modules
        *("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
        # modules of the reference implementations and of people's own
        *("model", "base_model", "image_encoder", "encoder", "base_encoder", "backbone", "trunk", "net"),
        *("network", "resnet", "convnet", "features", "f", "feature_extractor", "feature_model"),
        *("_feature_blocks", "bottom_up", "learner"),
        # entries of a file around the weights, and what such an entry is called for one of several networks
        *("state_dict", "model_state", "model_state_dict", "classy_state_dict", "state", "weights", "params"),
        *("network_state_dict", "encoder_state_dict", "backbone_state_dict"),
    )
)
# One network may be in a file several times; these words say which of them it is.
_BRANCH_WORDS = {
    "average": "average",
    "averaged": "average",
    "ema": "average",
    "teacher": "teacher",
    "student": "student",
    "query": "student",
    "online": "student",
    "momentum": "momentum",
    "key": "momentum",
    "target": "momentum",
    "k": "momentum",
    "q": "",
}
# Words of that kind that say nothing by themselves, or another thing.
_NO_BRANCH = ("k", "q", "key", "query", "target", "online_classifier")
_SETTINGS = ("args", "hyperparams", "hyper_parameters", "hparams", "config", "cursor", "meta")
_SECRET = re.compile(r"token|secret|passw|api_?key|credential", re.IGNORECASE)


class Item(NamedTuple):
    """A tensor of a file.

    Args:
        path: keys of the dicts around it, outermost first.
        key: its name in the innermost.
        wrappers: the leading parts of ``path`` and ``key`` that only wrap.
        name: what is left of both.
        tensor: itself.
    """

    path: tuple[str, ...]
    key: str
    wrappers: tuple[str, ...]
    name: str
    tensor: torch.Tensor

    @property
    def prefix(self) -> str:
        """What stands before ``name`` in ``key``."""
        return self.key[: len(self.key) - len(self.name)] if self.key.endswith(self.name) else ""

    @property
    def label(self) -> str:
        """Its whole name in the file."""
        return ".".join((*self.path, self.key))


def items_of(value: Any) -> list[Item]:
    """Every tensor (or array of numbers) that nested dicts and lists hold, in order."""
    return [_item(path, key, tensor) for path, key, tensor in _walk(value, (), 0)]


def split_branch(component: str) -> tuple[str | None, str]:
    """Which of several copies a name speaks of, and the name without that.

    ``momentum_backbone`` -> (``momentum``, ``backbone``), ``encoder_q`` -> (None, ``encoder``),
    ``teacher`` -> (``teacher``, ``""``), ``projection_head`` -> (None, ``projection_head``).
    """
    if component in _NO_BRANCH:
        return None, component
    if component in _BRANCH_WORDS:
        return _BRANCH_WORDS[component] or None, ""
    before, _, rest = component.partition("_")
    if rest and before in _BRANCH_WORDS and len(before) > 1:
        return _BRANCH_WORDS[before] or None, rest
    rest, _, after = component.rpartition("_")
    if rest and after in ("momentum", "ema", "k", "q"):
        return _BRANCH_WORDS[after] or None, rest
    return None, component


def _wraps(component: str) -> bool:
    branch, base = split_branch(component)
    return component in _WRAPPERS or base in _WRAPPERS or (branch is not None and base == "")


def _item(path: tuple[str, ...], key: str, tensor: torch.Tensor) -> Item:
    parts = [part for entry in (*path, key) for part in entry.split(".")]
    count = 0
    while count < len(parts) - 1 and _wraps(parts[count]):
        count += 1
    return Item(path, key, tuple(parts[:count]), ".".join(parts[count:]), tensor)


def _walk(
    value: Any, path: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], str, torch.Tensor]]:
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        entries = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        entries = [(str(index), item) for index, item in enumerate(value)]
    else:
        return
    for name, item in entries:
        tensor = _as_tensor(item)
        if tensor is None:
            yield from _walk(item, (*path, name), depth + 1)
        else:
            # Our checkpoints write the dicts around a tensor into its name.
            *outer, key = name.split("/")
            yield (*path, *outer), key, tensor


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.itemsize <= 8:
        native = value.astype(value.dtype.newbyteorder("="), copy=not value.flags.writeable)
        return torch.from_numpy(np.ascontiguousarray(native).reshape(native.shape))
    return None


def plain_facts(value: Any) -> dict[str, Any]:
    """What a file says besides its tensors: epoch, metrics, hyperparameters; plain JSON.

    Only the last part of a path is kept, and nothing that is named like a secret.
    """
    found: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, Mapping) else ():
        settings = vars(item) if isinstance(item, Namespace) else item
        if key in _SETTINGS and isinstance(settings, Mapping):
            inner = {
                str(name): _plain(setting)
                for name, setting in settings.items()
                if not _SECRET.search(str(name))
            }
            found[str(key)] = {name: setting for name, setting in inner.items() if setting is not None}
        elif not _SECRET.search(str(key)) and "." not in str(key):  # with a dot it is one of the tensors
            fact = _plain(item)
            if fact is not None:
                found[str(key)] = fact
    return found


def _plain(value: Any) -> Any:
    """A number, a text, a truth or a short list of them; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta:
            return None
        value = value.item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value.replace("\\", "/").rsplit("/", 1)[-1][:200]
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple) and 0 < len(value) <= 16:
        items = [_plain(item) if not isinstance(item, list | tuple) else None for item in value]
        return None if None in items else items
    return None
