"""Start a trunk from weights that somebody made before, strictly and without running code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..tensors import read_safetensors

__all__ = ["load_trunk_weights", "read_weights"]


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Named tensors of a safetensors file, or of a torch file whose content is plain data.

    A ``state_dict`` or ``model`` entry is opened; nothing in the file is ever executed.

    Raises:
        InputError: not a file of weights, or one that wants code to be run.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"The file can't be read ({error.strerror or error}).", where=path) from None
    # The unpickler raises whatever it stumbles over, so the net is wide on purpose.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise InputError(
            f"The file holds no weights that can be read safely ({reason}).",
            where=path,
            fix="pass a safetensors file or a plain state dict",
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise InputError("The file holds no named tensors.", where=path)
    return {str(key): value for key, value in content.items() if isinstance(value, torch.Tensor)}


def load_trunk_weights(trunk: nn.Module, tensors: dict[str, torch.Tensor], where: object) -> str:
    """Fill a trunk from named tensors under any one prefix; every key of the trunk must be there.

    Returns:
        A sentence on what matched and what was left out.

    Raises:
        InputError: a key is missing or has another shape.
    """
    wanted = trunk.state_dict()
    prefix = next(
        (
            key[: -len("conv1.weight")]
            for key in tensors
            if key == "conv1.weight" or (key.endswith(".conv1.weight") and ".layer" not in f".{key}")
        ),
        "",
    )
    found = {key: tensors[prefix + key] for key in wanted if prefix + key in tensors}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise InputError(
            f"Only {len(found)} of the trunk's {len(wanted)} tensors are in the file; the first that is "
            f"missing is {missing[0]}.",
            where=where,
            fix="use weights of the same architecture (recipe key trunk.arch)",
        )
    for key, value in found.items():
        if value.shape != wanted[key].shape:
            raise InputError(
                f"{key} has shape {tuple(value.shape)} in the file, the trunk wants {tuple(wanted[key].shape)}.",
                where=where,
                fix="use weights of the same architecture (recipe keys trunk.arch, trunk.stem, trunk.base_planes)",
            )
    trunk.load_state_dict(found)
    dropped = len(tensors) - len(found)
    under = f" under the prefix {prefix!r}" if prefix else ""
    return f"{len(found)} of {len(wanted)} trunk tensors matched{under}; {dropped} others in the file were not used"
