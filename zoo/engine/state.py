"""Nested state to files and back, without pickle: tensors to safetensors, the rest to JSON."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack", "unpack"]

_TENSOR = "$tensor"
_PAIRS = "$pairs"
_TUPLE = "$tuple"


def pack(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested dicts, lists, tuples, tensors and plain values into JSON and named CPU tensors.

    Raises:
        TypeError: a value that is none of these, with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(value, "", tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # One pass, also for the channels-last ones.
        tensors[path] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {_TENSOR: path}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, _join(path, key), tensors) for key, item in value.items()}
        return {_PAIRS: [[key, _pack(item, _join(path, key), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, _join(path, index), tensors) for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state at {path or 'the top'} is a {type(value).__name__}, which can't be saved")


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _PAIRS in value:
            return {key: unpack(item, tensors) for key, item in value[_PAIRS]}
        if _TUPLE in value:
            return tuple(unpack(item, tensors) for item in value[_TUPLE])
        return {key: unpack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    return value
