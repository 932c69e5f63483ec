"""Entry points for ``torch.hub``: ``torch.hub.load(repo, 'load', 'me/model')`` and named backbones.

Nothing is imported until an entry is called. The toolkit is imported below a module of its own, so
that a package called ``zoo`` (or ``cli``, ``transfer``, ``utils``) in the user's program, and a second
checkout of this repository, stay out of the way.
"""

import importlib as _importlib
import sys as _sys
import types as _types
import zlib as _zlib
from pathlib import Path as _Path

dependencies = ["torch", "torchvision", "numpy", "PIL", "safetensors", "pydantic", "yaml"]


def _load(reference, **arguments):
    home = str(_Path(__file__).resolve().parent)
    name = f"_zoo_hub_{_zlib.crc32(home.encode()):08x}"
    if name not in _sys.modules:
        parent = _types.ModuleType(name)
        parent.__path__ = [home]
        _sys.modules[name] = parent
    return _importlib.import_module(f"{name}.zoo.loading").load(reference, **arguments)


def load(reference, **kwargs):
    """Any model of the zoo by its reference, as a torchvision ResNet that gives pooled features.

    reference: org/name[@tag] of the local hub, a published folder, a run, random:resnet50 or
    supervised:resnet50. Keywords: num_classes, norm_layer, replace_stride_with_dilation, progress, verify.
    """
    return _load(reference, **kwargs)


def swav_resnet50(pretrained=True, weights=None, **kwargs):
    """A ResNet-50 that gives pooled features, a drop-in for the supervised one.

    weights: a reference to published ResNet-50 weights, e.g. "me/model@v1"; pretrained=False: random weights.
    Keywords as of ``load``.
    """
    if weights is None and pretrained:
        raise ValueError(
            "this version can't fetch the released SwAV weights: pass weights='org/name' of a published model, "
            "or pretrained=False for the bare network"
        )
    reference = weights if pretrained and weights is not None else "random:resnet50"
    model = _load(reference, **kwargs)
    arch = model.zoo_info["arch"]
    if arch != "resnet50":
        raise ValueError(f"{reference} is a {arch}, not a resnet50; load it with the entry `load`")
    return model
