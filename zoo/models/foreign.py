"""Trunks that are not the zoo's own: a network of timm's by its name, and what a user's function makes.

The network stays what it is, under its own tensor names. What comes out of it, pooled features (N, F) or maps
(N, C, H, W), becomes features in a forward hook, which goes where the network goes: into copies, DDP and
``torch.compile``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, ZooError, did_you_mean
from ..tensors import kept_buffers
from .factory import TIMM

__all__ = ["OWN", "check_sizes", "foreign_trunk", "is_foreign", "put_classifier"]

log = logging.getLogger("zoo")

OWN = "ZOO_OWN_TRUNKS"
"""The variable that names the functions of the user's own that may be imported, ``module:function,...``."""

_HALF = (torch.float16, torch.bfloat16)
_SIDE = 224  # pixels, where nobody says what a network is for
_INSTALL = "pip install 'vision-model-zoo[timm]'"
_WANTED = "pooled features (N, F), or maps (N, C, H, W), which are averaged over space"
# What the zoo hangs onto a trunk, beside a classifier.
_OURS = ("num_features", "projection_head", "takes_classifier", "transforms", "zoo_info")
# What the zoo says itself, and what would read a file or the network because a recipe or a model says so.
_NOT_FOR_RECIPES = ("num_classes", "in_chans", "features_only", "checkpoint_path", "cache_dir")


def foreign_trunk(
    arch: str, options: Mapping[str, Any], channels: int = 3, size: int | None = None
) -> nn.Module:
    """A freshly initialised network of timm's or of the user's own, as a trunk.

    It has ``num_features``, found by passing two images, and ``fc``: an ``nn.Identity`` that carries
    ``in_features`` and may be replaced by a classifier, as in the zoo's own trunks. A network with another
    kind of ``fc`` keeps it and has no place for a classifier. What its forward pass uses beyond its
    parameters and buffers must be the same each time that it is built.

    Args:
        arch: ``timm:NAME`` (built with ``pretrained=False, num_classes=0, in_chans=channels``), or
            ``MODULE:FUNCTION``. A function is code, and a recipe or a model that names it does not run it:
            the variable ``ZOO_OWN_TRUNKS`` has to name it, too. The module is looked for as Python does, and
            then in the current folder, which a console script does not have on its path.
        options: keyword arguments of timm's network or of the function, which gets nothing else.
        channels: of the images.
        size: side of the images that it is tried with; by default what timm says, or 224.

    Raises:
        InputError: no such network or function, one that is not allowed, options that it doesn't take, or a
            network that is no trunk: it takes no such images, or gives something else than features.
    """
    if arch.startswith(TIMM):
        network = _from_timm(arch, options, channels)
        size = size or int(network.pretrained_cfg["input_size"][-1])
    else:
        network = _from_function(arch, options)
    _check_network(network, arch)
    if _pooled not in network._forward_hooks.values():  # a function may give the same network each time
        network.register_forward_hook(_pooled)
    added = not hasattr(network, "fc")
    if added:
        network.fc = nn.Identity()
    fc: Any = network.fc
    seen: list[Any] = []
    watch = None
    if isinstance(fc, nn.Identity):
        watch = fc.register_forward_hook(lambda module, inputs, output: seen.append(output))
    features = _passed(network, arch, channels, size or _SIDE)
    if watch is not None:
        watch.remove()
    if added and seen:
        raise InputError(
            "The network calls all of its children one after the other; it would call the heads that a training "
            "hangs onto it, too.",
            where=arch,
            fix="let its forward name its layers, or return an nn.Sequential",
        )
    if added:
        network.register_forward_hook(_classified)
    network.num_features = features.shape[1]
    network.takes_classifier = added or (bool(seen) and seen[-1] is features)
    if network.takes_classifier:
        fc.in_features = features.shape[1]
    return network


def is_foreign(trunk: nn.Module) -> bool:
    """Whether a trunk was made by ``foreign_trunk``."""
    return _pooled in trunk._forward_hooks.values()


def put_classifier(trunk: Any, classifier: nn.Module) -> None:
    """Let a trunk's features go through a classifier, ``trunk.fc``, on any of the zoo's trunks.

    Raises:
        InputError: the network has an ``fc`` of its own, which makes its features.
    """
    if is_foreign(trunk) and not trunk.takes_classifier:
        raise InputError(
            "The network has a layer of its own called fc, where a classifier would stand.",
            where=f"{type(trunk).__module__}.{type(trunk).__qualname__}.fc",
            fix="put a layer behind the features, nn.Sequential(model, nn.Linear(model.num_features, N)); or, if "
            "the network is yours, call its layer something else",
        )
    trunk.fc = classifier


def check_sizes(trunk: nn.Module, arch: str, channels: int, sizes: Iterable[int]) -> None:
    """Pass two images of each size, which leaves no trace in the trunk; warn if it can't be trained.

    Raises:
        InputError: images of a size can't be taken, with what the network says, or give other features than
            ``num_features``.
    """
    reached = True
    for size in sorted(set(sizes)):
        features = _passed(trunk, arch, channels, size, gradients=True)
        reached = reached and features.requires_grad
        count = features.shape[1]
        if count != trunk.num_features:
            raise InputError(
                f"The trunk gives {count} features of images of {size} x {size} pixels, but "
                f"{trunk.num_features} of others: heads take one number of features.",
                where=f"trunk.arch: {arch}",
                fix="let it average over space, or give all views (views.size) and the test's crop "
                "(evaluation.crop) one size",
            )
    if not reached:
        log.warning(
            "trunk.arch %s: no gradient reaches its parameters (frozen, or its features are detached): the trunk "
            "stays as it is, only the heads are trained",
            arch,
        )


# --- features ---


def _pooled(module: nn.Module, inputs: Any, output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        if output.ndim == 2:
            return output
        if output.ndim == 4:
            channels_last = getattr(module, "output_fmt", "NCHW") == "NHWC"  # as timm's networks say it
            return output.mean((1, 2) if channels_last else (2, 3))
    advice = ""
    if isinstance(output, torch.Tensor) and output.ndim == 3:
        advice = "; (N, tokens, C) has to be averaged over the tokens, or the class token taken"
    raise InputError(
        f"The network gives {_described(output)}, which is no features.",
        where=f"{type(module).__module__}.{type(module).__qualname__}",
        fix=f"a trunk gives {_WANTED}{advice}",
    )


def _classified(module: Any, inputs: Any, features: torch.Tensor) -> torch.Tensor:
    return module.fc(features)  # type: ignore[no-any-return]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, list(value)[:5]))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_described, value[:3]))}"
    return f"a {type(value).__name__}"


def _passed(
    network: nn.Module, arch: str, channels: int, size: int, *, gradients: bool = False
) -> torch.Tensor:
    """The features of two images."""
    values = (p for p in network.parameters() if not is_lazy(p) and p.is_floating_point())
    like = next(values, torch.empty(0))
    try:
        images = torch.zeros(2, channels, size, size, dtype=like.dtype, device=like.device)
        with _without_traces(network, like.device), torch.set_grad_enabled(gradients):
            features = network(images)
    except (ZooError, MemoryError):
        raise
    except Exception as error:
        fix = "it sees the sizes of views.size and evaluation.crop, and data.channels"
        if arch.startswith(TIMM) and hasattr(network, "patch_embed"):
            fix += (
                ": trunk.options.dynamic_img_size=true lets most of timm's ViTs take any size, "
                "trunk.options.img_size=N sets the one that they take"
            )
        elif not arch.startswith(TIMM):
            fix += "; the function itself gets trunk.options alone"
        raise InputError(
            f"The trunk can't take images of {size} x {size} pixels and {channels} channel"
            f"{'' if channels == 1 else 's'} ({_said(error)}).",
            where=f"trunk.arch: {arch}",
            fix=fix,
        ) from error
    if len(features) != len(images) or features.shape[1] == 0:
        raise InputError(
            f"The network gives features of shape {tuple(features.shape)} for {len(images)} images.",
            where=f"trunk.arch: {arch}",
            fix=f"a trunk gives {_WANTED}, N being the number of images",
        )
    if features.dtype in _HALF and like.dtype not in _HALF:
        raise InputError(
            f"The network gives {_described(features)} for images of {str(like.dtype).removeprefix('torch.')}, "
            "which the heads can't take.",
            where=f"trunk.arch: {arch}",
            fix="leave half precision to the recipe (precision: bfloat16 or float16), or bring the features back: "
            "features.to(images.dtype)",
        )
    return features  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_traces(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation; afterwards modes, buffers and generators are as they were."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with kept_buffers(network), torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes:
            module.training = training


# --- where a network comes from ---


def _from_timm(arch: str, options: Mapping[str, Any], channels: int) -> Any:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise InputError(f"timm can't be imported ({error}).", where=arch, fix=_INSTALL) from None
    name = arch.removeprefix(TIMM)
    known = timm.list_models()
    if name not in known:
        plain, _, tag = name.partition(".")
        if plain in known:
            fix = f"leave .{tag} away: it names weights, and a training starts without"
        else:
            fix = did_you_mean(plain.lower(), known, count=3) + "timm.list_models() gives all of them"
        raise InputError("timm has no network of this name.", where=arch, fix=fix)
    for option in options:
        if option in _NOT_FOR_RECIPES or option.startswith("pretrained"):
            raise InputError(
                "This option is not for a recipe to set.",
                where=f"options.{option}",
                fix="leave it out: a trunk has no classifier, data.channels says what the images have, and "
                "--init-from names weights to start from",
            )
    with _explained(f"timm can't make {name}", options):
        return timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels, **options)


def _from_function(arch: str, options: Mapping[str, Any]) -> Any:
    module, _, name = arch.partition(":")
    if not module or not name.isidentifier():
        raise InputError(
            "This is not of the form MODULE:FUNCTION.",
            where=f"trunk.arch: {arch}",
            fix="such as my_networks:narrow, a function that returns an nn.Module; or timm:NAME",
        )
    _check_allowed(arch, module)
    with _current_folder_on_path():
        return _called(arch, _imported(arch, module, name), options)


def _called(arch: str, function: Any, options: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise InputError(
            f"It is a {type(function).__name__}, which can't be called.",
            where=arch,
            fix="name a function that returns an nn.Module",
        )
    with _explained(f"{arch} failed", options):
        network = function(**options)
    if not isinstance(network, nn.Module) or isinstance(network, torch.jit.ScriptModule):
        raise InputError(
            f"The function returned a {type(network).__name__}, not an nn.Module.",
            where=arch,
            fix=f"return a network that maps images (N, C, H, W) to {_WANTED}",
        )
    return network


def _check_allowed(arch: str, module: str) -> None:
    allowed = [name.strip() for name in os.environ.get(OWN, "").split(",") if name.strip()]
    if arch in allowed:
        return
    kind = TIMM.removesuffix(":")
    meant = did_you_mean(module, [kind], likeness=0.7) and f"did you mean {kind}:{arch.partition(':')[2]}? "
    raise InputError(
        "This trunk is somebody's own code. A recipe, a run or a model that names it does not make it run: "
        "only you can.",
        where=f"trunk.arch: {arch}",
        fix=f"{meant}If you trust it: export {OWN}={','.join([*allowed, arch])}",
    )


def _imported(arch: str, module: str, name: str) -> Any:
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"The module {module} can't be imported ({_said(error)}).",
            where=arch,
            fix="install it, or go to the folder that it is in",
        ) from error
    try:
        return getattr(found, name)
    except AttributeError:
        names = [known for known in vars(found) if not known.startswith("_")]
        raise InputError(
            f"The module {module} has no {name}.",
            where=f"{arch} ({getattr(found, '__file__', None) or 'built in'})",
            fix=did_you_mean(name, names) or "name a function of it",
        ) from None


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    added = "" not in sys.path
    if added:
        sys.path.append("")
    try:
        yield
    finally:
        if added and "" in sys.path:
            sys.path.remove("")


@contextlib.contextmanager
def _explained(what: str, options: Mapping[str, Any]) -> Iterator[None]:
    """An error of somebody else's constructor, with the options that it was given."""
    try:
        yield
    except (ZooError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
        raise InputError(
            f"{what} ({_said(error)}).",
            where=f"trunk.options: {given}",
            fix="they are its keyword arguments, as they stand",
        ) from error


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()).removesuffix(".")
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


# --- whether it can be a trunk ---


class _OwnLayers(nn.Sequential):
    """A sequence that goes on calling the layers that it had: training hangs heads onto its copy."""

    own_layers: tuple[str, ...] = ()

    def forward(self, input: Any) -> Any:
        for name in self.own_layers:
            input = self._modules[name](input)  # type: ignore[misc]
        return input


def _check_network(network: Any, arch: str) -> None:
    kind = type(network)
    held = {**network._modules, **network._parameters, **network._buffers}
    taken = [name for name in _OURS if name in held or isinstance(getattr(kind, name, None), property)]
    if taken:
        raise InputError(
            f"The network has a part called {taken[0]}, which is what the zoo calls one of its own on it.",
            where=arch,
            fix="call it something else",
        )
    odd = [name for name, value in network.state_dict().items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise InputError(
            f"The network keeps something beside tensors in its state ({odd[0]}); checkpoints hold tensors.",
            where=arch,
            fix="keep it in a buffer",
        )
    empty = [name for name, value in network.state_dict().items() if value.is_meta]
    if empty and torch.get_default_device().type != "meta":  # where shapes alone are wanted
        raise InputError(
            f"The network has a tensor without content ({empty[0]} is on the device meta).",
            where=arch,
            fix="let the function make it on the CPU",
        )
    if kind.forward is nn.Sequential.forward:
        plain = kind is nn.Sequential
        network.__class__ = _OwnLayers if plain else type(kind.__name__, (_OwnLayers, kind), {})
        network.own_layers = tuple(network._modules)
