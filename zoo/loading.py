"""``zoo.load``: any model by its name, as the torchvision network that users know."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .models.factory import create_trunk
from .weights.load import Loaded, fill_trunk, load_trunk, preprocessing
from .weights.reference import parse_reference

__all__ = ["load"]


def load(
    reference: str,
    *,
    num_classes: int | None = None,
    norm_layer: Callable[..., nn.Module] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
    progress: bool = True,
    verify: bool = False,
) -> Any:
    """A published, trained, random or supervised trunk as a torchvision ``ResNet``.

    ``model.fc`` is an ``nn.Identity`` that carries ``in_features``: the output is pooled features, (N,
    F). ``model.transforms()`` makes the test transform that belongs to the weights; ``model.zoo_info``
    says where they come from (plain JSON).

    Args:
        reference: ``org/name[@tag]``, a published folder, a run, ``random:ARCH`` or ``supervised:ARCH``.
        num_classes: give the network a fresh classifier of this many classes.
        norm_layer: the normalisation, as in torchvision.
        replace_stride_with_dilation: as in torchvision.
        progress: say on standard error what matched.
        verify: read and hash every byte even if an earlier check left a receipt.

    Raises:
        InputError: no such model, a damaged file, or weights that don't fit the network.
    """
    target = parse_reference(reference)
    build = functools.partial(
        create_trunk, norm_layer=norm_layer, replace_stride_with_dilation=replace_stride_with_dilation
    )
    if target.kind == "run":
        loaded = _from_run(Path(target.name).expanduser(), str(target), build)
    else:
        loaded = load_trunk(target, build, progress=progress, verify=verify)
    model = loaded.trunk
    if num_classes is not None:
        model.fc = nn.Linear(model.fc.in_features, num_classes)
    model.zoo_info = loaded.info
    model.transforms = preprocessing(loaded.info["preprocessing"])
    if progress:
        print(f"{target}: {loaded.account}", file=sys.stderr)
    return model


def _from_run(path: Path, reference: str, build: Callable[..., Any]) -> Loaded:
    from .pretrain.publish import read_run

    what, trunk, _ = read_run(path)
    model = fill_trunk(build, what.arch, what.stem, what.base_planes, trunk, path)
    info = {
        "reference": reference,
        "arch": what.arch,
        "method": what.method,
        "preprocessing": what.preprocessing,
        "lineage": what.lineage,
    }
    return Loaded(model, info, f"{len(trunk)} tensors matched, step {what.lineage['step']} of a run")
