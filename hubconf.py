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
