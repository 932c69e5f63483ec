"""Files in other people's layouts: real tensors under the published keys, in the published wrappers."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.models.factory import create_trunk

__all__ = [
    "narrow_shape",
    "published_state",
    "save",
    "small_backbone",
    "under",
    "with_prefix",
    "wrapped",
]

_TYPES = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
# A number that divides the widths of all published networks and no number of classes or prototypes.
DIVISOR = 16


def manifest(shared: Path, name: str) -> dict[str, Any]:
    """A published list of keys and shapes."""
    path = shared / "golden" / "manifests" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def narrow_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its channel counts divided."""
    return tuple(
        size // DIVISOR if place < 2 and size >= 64 and size % DIVISOR == 0 else size
        for place, size in enumerate(shape)
    )


def published_state(shared: Path, name: str, narrow: bool) -> dict[str, torch.Tensor]:
    """Tensors of all keys of a manifest: narrow with random values, or at full width without any."""
    listed = manifest(shared, name)["state_dict"]
    if name.startswith("detectron2_map"):
        plain = name.removeprefix("detectron2_map_")
        before = published_state(shared, plain, narrow)
        return {new: before[old] for old, new in listed.items()}
    generator = torch.Generator().manual_seed(7)
    state = {}
    for key, text in listed.items():
        kind, _, sizes = text.partition(" ")
        shape = tuple(int(size) for size in sizes.split(",") if size)
        if not narrow:
            state[key] = torch.empty(shape, dtype=_TYPES[kind], device="meta")
        elif kind == "F32":
            state[key] = torch.randn(narrow_shape(shape), generator=generator)
        else:
            state[key] = torch.randint(0, 9, shape, generator=generator).to(_TYPES[kind])
    return state


def wrapped(name: str, state: Mapping[str, torch.Tensor]) -> Any:
    """The state in the wrapper that a manifest describes, plain values as the reference writes them."""
    if name.endswith("_hub"):
        return OrderedDict(state)
    if name.startswith("amdim"):
        ndf = int(state["encoder.module.layer_list.0.conv.weight"].shape[0])
        n_rkhs = int(state["encoder.module.rkhs_block_5.conv1.weight"].shape[0])
        size, depth = (
            (128, int(name.rpartition("rd")[2])) if "in128" in name else (32 if "_32_" in name else 64, 3)
        )
        hyperparams = {
            "ndf": ndf,
            "n_classes": 10,
            "n_rkhs": n_rkhs,
            "tclip": 20.0,
            "n_depth": depth,
            "encoder_size": size,
            "use_bn": False,
        }
        cursor = {"info_epoch": 3, "info_step": 40, "classifier_epoch": 0, "classifier_step": 0}
        return {"model": OrderedDict(state), "hyperparams": hyperparams, "cursor": cursor}
    if name.startswith("detectron2_map"):
        arrays = {key: tensor.numpy() for key, tensor in state.items()}
        return {"model": arrays, "__author__": "MOCO", "matching_heuristics": True}
    groups = {
        "swav_eval_linear": [2],
        "moco_lincls_rn50": [2],
        "swav_eval_semisup": [159, 2],
    }.get(name, [161])
    value: dict[str, Any] = {
        "epoch": 100,
        "state_dict": OrderedDict(state),
        "optimizer": optimizer(groups),
    }
    if name.startswith("moco"):
        value["arch"] = "resnet50"
    if name == "moco_lincls_rn50":
        value["best_acc1"] = torch.tensor(67.5)
    if name.startswith("swav_eval"):
        value["scheduler"] = {"T_max": 100, "eta_min": 0, "base_lrs": [0.3], "last_epoch": 100}
        value["best_acc"] = 75.25 if name.endswith("linear") else (70.25, 89.5)
    if name == "swav_rn50_training_checkpoint":
        value["amp"] = OrderedDict(loss_scaler0={"loss_scale": 65536.0, "unskipped": 12})
    return value


def optimizer(groups: list[int]) -> dict[str, Any]:
    """The state of SGD over so many parameters; the rate is a numpy number, as SwAV's schedule gives it."""
    first = 0
    param_groups = []
    for count in groups:
        numbers = list(range(first, first + count))
        param_groups.append({"lr": np.float64(0.25), "momentum": 0.9, "nesterov": False, "params": numbers})
        first += count
    return {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": param_groups}


def save(path: Path, value: Any, container: str = "zip") -> Path:
    """Write a value as torch does (``zip``, ``legacy``), or as a plain pickle."""
    if container == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=container == "zip")
    return path


def small_backbone(arch: str = "resnet18", seed: int = 0, **arguments: Any) -> dict[str, torch.Tensor]:
    """The state of a narrow trunk of the zoo, every value random."""
    trunk = create_trunk(arch, **{"base_planes": 4, **arguments})
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(0, 9, tensor.shape, generator=generator)
        if key.endswith("num_batches_tracked")
        else torch.randn(tensor.shape, generator=generator)
        for key, tensor in trunk.state_dict().items()
    }


def with_prefix(prefix: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with longer names."""
    return {prefix + key: tensor for key, tensor in state.items()}


def under(keys: list[str], value: Any) -> Any:
    """A value inside of dicts, the outermost key first."""
    for key in reversed(keys):
        value = {key: value, "epoch": 3}
    return value


def linear(prefix: str, n_in: int, n_out: int, bias: bool = True, seed: int = 1) -> dict[str, torch.Tensor]:
    """``weight`` and ``bias`` of a linear layer."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"{prefix}.weight": torch.randn(n_out, n_in, generator=generator)}
    if bias:
        state[f"{prefix}.bias"] = torch.randn(n_out, generator=generator)
    return state


def norm(prefix: str, width: int, affine: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of a BatchNorm."""
    names = ("weight", "bias") if affine else ()
    state = {f"{prefix}.{name}": torch.ones(width) for name in (*names, "running_mean", "running_var")}
    state[f"{prefix}.num_batches_tracked"] = torch.tensor(4)
    return state


def namespace(**values: Any) -> Namespace:
    """What argparse gives, as training scripts save it."""
    return Namespace(**values)
