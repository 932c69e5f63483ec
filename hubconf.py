"""Entry points for ``torch.hub``: released backbones by name, and ``load`` for any other model.

    model = torch.hub.load(repo, "swav_resnet50")
    model = torch.hub.load(repo, "load", "me/model")

Nothing is imported until an entry is called. The toolkit is imported below a module of its own, so
that a package called ``zoo`` (or ``cli``, ``transfer``, ``utils``) in the user's program, and a second
checkout of this repository, stay out of the way.
"""

import importlib as _importlib
import os as _os
import sys as _sys
import types as _types
import zlib as _zlib
from pathlib import Path as _Path

dependencies = ["torch", "torchvision", "numpy", "PIL", "safetensors", "pydantic", "yaml"]


def _zoo(module):
    """A module of this checkout's own toolkit."""
    home = str(_Path(__file__).resolve().parent)
    name = f"_zoo_hub_{_zlib.crc32(home.encode()):08x}"
    if name not in _sys.modules:
        parent = _types.ModuleType(name)
        parent.__path__ = [home]
        _sys.modules[name] = parent
    return _importlib.import_module(f"{name}.zoo.{module}")


def _released(entry, best, pretrained, weights, arguments):
    """Weights of an entry of the catalog, other weights for the same network, or the bare network."""
    load = _zoo("loading").load
    if not pretrained and weights is not None:
        raise _zoo("errors").InputError(
            "pretrained=False and weights= contradict each other.",
            where=str(weights),
            fix="leave one of them out",
        )
    if not pretrained:
        return load(f"random:{entry}.{best}", **arguments)
    catalog, errors = _zoo("weights.catalog").CATALOG, _zoo("errors")
    word = best if weights is None else str(weights)
    tags = {name.partition(".")[2]: name for name in catalog if name.startswith(f"{entry}.")}
    reference = tags.get(word, word)
    if reference not in catalog and not ("/" in word or ":" in word or _os.path.exists(word)):
        raise errors.InputError(
            f"{entry} has no such weights.",
            where=word,
            fix=f"{errors.did_you_mean(word, tags)}Known: {', '.join(tags)}; or pass a reference or a file",
        )
    model = load(reference, **arguments)
    card = catalog[tags[best]]
    found = (model.zoo_info["arch"], getattr(model, "num_features", card.num_features))
    if found != (card.arch, card.num_features):
        raise errors.InputError(
            f"This is {found[0]} with {found[1]} features, not {card.arch} with {card.num_features}.",
            where=reference,
            fix="load it with the entry `load`",
        )
    options = getattr(getattr(model, "trunk", model), "options", card.options)
    for name, value in card.options.items():
        if options[name] != value:
            raise errors.InputError(
                f"This is {found[0]} with {name} {options[name]}, not {value}.",
                where=reference,
                fix="load it with the entry `load`",
            )
    return model


def load(reference, **kwargs):
    """Any model of the zoo by its reference. The output is pooled features, (N, F).

    reference: a name of the catalog (swav_resnet50.800ep), org/name[@tag] of the local hub, a published folder,
    a file of weights of any known layout, hf:org/name[@revision] of the Hugging Face hub, url:https://..., a run,
    random:resnet50 or supervised:resnet50.

    Keywords of this and of all other entries:
    num_classes: a fresh classifier of this many classes.
    classifier: "imagenet1k" for the released classifier, where there is one (swav_resnet50.800ep,
        supervised_resnet50.v1 and .v2); "own" for that beside the weights, whatever it is for.
    features_only: give a dict of the maps after each stage instead of pooled features (one of these three at most).
    norm_layer, replace_stride_with_dilation: as in torchvision.
    progress: say on standard error what is downloaded and what matched.
    verify: hash every byte, whatever was checked before.

    model.transforms() makes the test transform that belongs to the weights; model.zoo_info says where they come
    from. Files are downloaded once, verified, and pinned to their SHA-256. ZOO_MIRROR names folders or addresses
    to look at first, ZOO_CACHE where downloads are kept, ZOO_OFFLINE=1 forbids the network.
    """
    return _zoo("loading").load(reference, **kwargs)


def swav_resnet50(pretrained=True, weights=None, **kwargs):
    """ResNet-50 by SwAV (Caron et al., 2020; CC-BY-NC-4.0), 2,048 features, a drop-in for the supervised one.

    weights: 800ep (the default; 75.3 % top-1 of a linear classifier on ImageNet), 400ep (74.6), 200ep (73.9),
        100ep (72.1), 400ep_bs256 (74.3), 200ep_bs256 (72.7), 400ep_2x224 (70.1); or a reference or a file (see
        ``load``) of a ResNet-50.
    pretrained: False gives the network with random weights.
    classifier: "imagenet1k" is released for 800ep.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("swav_resnet50", "800ep", pretrained, weights, kwargs)


def swav_resnet50w2(pretrained=True, weights=None, **kwargs):
    """ResNet-50 of double width by SwAV (CC-BY-NC-4.0), 4,096 features.

    weights: 400ep (the default; 77.3 % top-1 of a linear classifier on ImageNet), or a reference or a file.
    pretrained: False gives the network with random weights.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("swav_resnet50w2", "400ep", pretrained, weights, kwargs)


def swav_resnet50w4(pretrained=True, weights=None, **kwargs):
    """ResNet-50 of fourfold width by SwAV (CC-BY-NC-4.0), 8,192 features; a file of 1.8 GB.

    weights: 400ep (the default; 77.9 % top-1 of a linear classifier on ImageNet), or a reference or a file.
    pretrained: False gives the network with random weights.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("swav_resnet50w4", "400ep", pretrained, weights, kwargs)


def swav_resnet50w5(pretrained=True, weights=None, **kwargs):
    """ResNet-50 of fivefold width by SwAV (CC-BY-NC-4.0), 10,240 features; a file of 2.8 GB.

    weights: 400ep (the default; 78.5 % top-1 of a linear classifier on ImageNet), or a reference or a file.
    pretrained: False gives the network with random weights.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("swav_resnet50w5", "400ep", pretrained, weights, kwargs)


def deepclusterv2_resnet50(pretrained=True, weights=None, **kwargs):
    """ResNet-50 by DeepCluster-v2 (Caron et al., 2020; CC-BY-NC-4.0), 2,048 features.

    weights: 800ep (the default; 75.2 % top-1 of a linear classifier on ImageNet), 400ep (74.3), 400ep_2x224
        (70.2); or a reference or a file (see ``load``) of a ResNet-50.
    pretrained: False gives the network with random weights.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("deepclusterv2_resnet50", "800ep", pretrained, weights, kwargs)


def selav2_resnet50(pretrained=True, weights=None, **kwargs):
    """ResNet-50 by SeLa-v2 (Caron et al., 2020; CC-BY-NC-4.0), 2,048 features.

    weights: 400ep (the default; 71.8 % top-1 of a linear classifier on ImageNet), 400ep_2x224 (67.2); or a
        reference or a file (see ``load``) of a ResNet-50.
    pretrained: False gives the network with random weights.

    Pixels are normalised by a std of 0.228, 0.224, 0.225: use model.transforms(). Other keywords as of ``load``.
    """
    return _released("selav2_resnet50", "400ep", pretrained, weights, kwargs)


def moco_v1_resnet50(pretrained=True, weights=None, **kwargs):
    """ResNet-50 by MoCo (He et al., 2019; MIT), 2,048 features.

    weights: 200ep (the default; 60.6 % top-1 of a linear classifier on ImageNet), or a reference or a file (see
        ``load``) of a ResNet-50.
    pretrained: False gives the network with random weights.

    Other keywords as of ``load``.
    """
    return _released("moco_v1_resnet50", "200ep", pretrained, weights, kwargs)


def moco_v2_resnet50(pretrained=True, weights=None, **kwargs):
    """ResNet-50 by MoCo v2 (Chen et al., 2020; MIT), 2,048 features.

    weights: 800ep (the default; 71.1 % top-1 of a linear classifier on ImageNet), 200ep (67.5); or a reference
        or a file (see ``load``) of a ResNet-50.
    pretrained: False gives the network with random weights.

    Other keywords as of ``load``.
    """
    return _released("moco_v2_resnet50", "800ep", pretrained, weights, kwargs)


def amdim_medium(pretrained=True, weights=None, **kwargs):
    """AMDIM's encoder (Bachman et al., 2019; MIT) for images of 128 x 128 pixels, 2,048 features.

    weights: your copy of amdim_ndf256_rkhs2048_rd10.pth. The authors' storage is gone: without it the file is
        looked for in the cache and in the folders that ZOO_MIRROR names.
    pretrained: False gives the network with random weights.

    Other keywords as of ``load``.
    """
    return _released("amdim_medium", "in128", pretrained, weights, kwargs)


def amdim_large(pretrained=True, weights=None, **kwargs):
    """AMDIM's encoder (Bachman et al., 2019; MIT) for images of 128 x 128 pixels, 2,560 features; 2.7 GB.

    weights: your copy of amdim_ndf320_rkhs2560_rd10.pth (68.1 % top-1 of a linear classifier on ImageNet). The
        authors' storage is gone: without it the file is looked for in the cache and in the folders that
        ZOO_MIRROR names.
    pretrained: False gives the network with random weights.

    Other keywords as of ``load``.
    """
    return _released("amdim_large", "in128", pretrained, weights, kwargs)
