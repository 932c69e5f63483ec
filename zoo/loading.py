"""``zoo.load``: any model by its name, as the torchvision network that users know."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import InputError
from .models.factory import create_trunk
from .models.foreign import is_foreign, put_classifier
from .models.resnet import stage_features
from .weights.fill import fill_trunk, preprocessing
from .weights.load import Loaded, load_trunk, own_classifier
from .weights.reference import parse_reference

__all__ = ["FeatureMaps", "load"]


def load(
    reference: str,
    *,
    num_classes: int | None = None,
    classifier: str | None = None,
    features_only: bool = False,
    norm_layer: Callable[..., nn.Module] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
    progress: bool = True,
    verify: bool = False,
) -> Any:
    """A published, released, trained, random or foreign trunk; a ResNet is torchvision's own class.

    A network of timm's is timm's own class; a user's function runs only where ``ZOO_OWN_TRUNKS`` names it.

    ``model.fc`` is an ``nn.Identity`` that carries ``in_features``: the output is pooled features, (N,
    F). ``model.transforms()`` makes the test transform that belongs to the weights; ``model.zoo_info``
    says where they come from (plain JSON). Nothing in a file of weights is ever run.

    Args:
        reference: ``org/name[@tag]``, a name of the catalog (``swav_resnet50.800ep``), a published folder, a
            file of weights of any known layout, ``hf:org/name[@revision]``, ``s3://bucket/org/name[@tag]`` or
            any other address of a hub, ``url:ADDRESS``, ``timm:NAME``, a run, ``random:ARCH`` or
            ``supervised:ARCH``.
        num_classes: give the network a fresh classifier of this many classes.
        classifier: give it the trained classifier of this data set, ``imagenet1k``, where there is one; ``own``
            takes what lies beside the weights, whatever it is for.
        features_only: a ``FeatureMaps``, which gives the map after each stage.
        norm_layer: the normalisation, as in torchvision.
        replace_stride_with_dilation: as in torchvision.
        progress: say on standard error what is downloaded and what matched.
        verify: read and hash every byte even if an earlier check left a receipt.

    Raises:
        InputError: no such model, a damaged or refused file, or weights that don't fit the network.
        RunError: a download failed.
    """
    if sum((num_classes is not None, classifier is not None, features_only)) > 1:
        raise InputError("Only one of num_classes, classifier and features_only can be had.", where=reference)
    if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
        raise InputError(
            "num_classes is a whole number from 1 on.",
            where=f"num_classes={num_classes!r}",
            fix="leave it out for features",
        )
    target = parse_reference(reference)
    build = functools.partial(
        create_trunk, norm_layer=norm_layer, replace_stride_with_dilation=replace_stride_with_dilation
    )
    if target.kind == "run":
        loaded = _from_run(Path(target.name).expanduser(), str(target), build, classifier)
    else:
        loaded = load_trunk(target, build, classifier=classifier, progress=progress, verify=verify)
    model = loaded.trunk
    if num_classes is not None:
        put_classifier(model, nn.Linear(model.num_features, num_classes))
    if loaded.classifier is not None:
        weight, bias = loaded.classifier["weight"], loaded.classifier["bias"]
        with torch.device("meta"):
            put_classifier(model, nn.Linear(weight.shape[1], weight.shape[0]))
        model.fc.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    if features_only:
        if is_foreign(model):
            raise InputError(
                f"The stages of {loaded.info['arch']} are not known: it gives pooled features only.",
                where=reference,
                fix="leave features_only away; timm's own create_model(..., features_only=True) has maps",
            )
        model = FeatureMaps(model)
    model.zoo_info = loaded.info
    model.transforms = preprocessing(loaded.info["preprocessing"])
    if progress:
        print(f"{target}: {loaded.account}", file=sys.stderr)
    return model


class FeatureMaps(nn.Module):
    """A trunk that gives the map after each stage: (N, C, H, W) -> a dict by stage.

    ``feature_info`` lists (name, channels, reduction): a map has the image's side divided by ``reduction``.
    """

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.feature_info: list[tuple[str, int, int]] = trunk.feature_info

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return stage_features(self.trunk, images)


def _from_run(path: Path, reference: str, build: Callable[..., Any], classifier: str | None) -> Loaded:
    from .pretrain.publish import read_run, split_classifier

    what, trunk, heads = read_run(path)
    found = None
    if classifier is not None:
        found = own_classifier(parse_reference(reference), classifier, split_classifier(heads)[1])
    model = fill_trunk(build, what.network, trunk, path, what.preprocessing)
    info = {
        "reference": reference,
        "arch": what.arch,
        "method": what.method,
        "preprocessing": what.preprocessing,
        "recipe": what.recipe,
        "data": what.data,
        "lineage": what.lineage,
    }
    return Loaded(model, info, f"{len(trunk)} tensors matched, step {what.lineage['step']} of a run", found)
