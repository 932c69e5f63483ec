"""From a reference to a filled trunk: verified and strict."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, did_you_mean
from ..files import read_json
from ..keyed import keyed_seed
from ..tensors import read_safetensors, seeded
from .bundle import WEIGHTS, Bundle, read_bundle
from .catalog import CATALOG, Card, Remote, find_card
from .description import check_description, check_preprocessing
from .fill import STANDARD_PREPROCESSING, Build, fill_trunk
from .formats import identify, read_classifier, read_model
from .formats.base import ForeignModel, Network
from .hubs import HUBS
from .hubs.url import fetch, forbidden
from .lock import lock_path
from .reference import Reference

__all__ = ["Loaded", "bundle_tensors", "load_trunk", "open_bundle", "own_classifier", "read_foreign"]


OWN = "own"
"""What to ask for to get a model's classifier whatever it is for."""
_CLASSES = {"imagenet1k": 1000}


@dataclass(frozen=True)
class Loaded:
    """A trunk, what is known of it (plain JSON), and a sentence on how the loading went.

    ``classifier`` is that of the weights, ``weight`` (classes, F) and ``bias`` (classes), if it was asked for.
    """

    trunk: Any
    info: dict[str, Any]
    account: str
    classifier: dict[str, torch.Tensor] | None = None


def load_trunk(
    target: Reference, build: Build, *, classifier: str | None = None, progress: bool, verify: bool
) -> Loaded:
    """A published, released, random or foreign trunk.

    Args:
        target: what is wanted; a run is not read here (``zoo.loading``).
        build: ``zoo.models.factory.create_trunk``, with the user's arguments in it.
        classifier: the data set whose classifier is wanted as well, or ``own``.
        progress: show a download's progress.
        verify: read and hash every byte even if an earlier check left a receipt.
    """
    if target.kind == "random":
        return _random(target, build, classifier)
    bundle = open_bundle(target, progress=progress, verify=verify)
    if bundle is not None:
        return _from_bundle(bundle, target, build, classifier, verify)
    model, more = read_foreign(target, progress=progress, verify=verify)
    # Out of the mapped file: saving a fine-tuned model under the file's own name would pull it away.
    trunk = fill_trunk(build, model.network, _cloned(model.trunk), target.where, model.preprocessing)
    found = None
    if classifier is not None:
        found = _released_classifier(target, classifier, progress, verify)
        found = _cloned(found or own_classifier(target, classifier, model.classifier))
    info = {
        "reference": str(target),
        "arch": model.network.arch,
        "method": model.method,
        "preprocessing": model.preprocessing,
        **more,
        "facts": model.facts,
    }
    return Loaded(trunk, info, f"{model.what}; {model.account.sentence()}", found)


def _cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def read_foreign(
    target: Reference, *, progress: bool = True, verify: bool = False
) -> tuple[ForeignModel, dict[str, Any]]:
    """The backbone that a reference to somebody else's weights means, downloaded if need be.

    Returns:
        The backbone, and what is known beside the file: licence, lineage.

    Raises:
        InputError: not there, not what was published, or no backbone.
        RunError: the download failed.
    """
    if target.kind in ("file", "path"):
        path = Path(target.name).expanduser()
        return _beside_config(read_model(path), path), {"lineage": {"file": path.name}}
    if target.kind == "url":
        path = fetch(target.name, progress=progress, verify=verify)
        return read_model(path), {"lineage": {"file": path.name}}
    if target.kind == "catalog":
        return _released(find_card(target.name), progress, verify)
    if target.kind == "timm":
        return _from_timm(target)
    if target.kind == "supervised":
        return _supervised(target, progress, verify)
    raise InputError("This is no foreign model.", where=target.where)


# --- random ---


def _random(target: Reference, build: Build, classifier: str | None) -> Loaded:
    card = CATALOG.get(target.name)
    network = Network(target.name) if card is None else _network(card)
    if classifier is not None:
        raise InputError("A random network has no trained classifier.", where=target.where)
    with seeded(keyed_seed(_random_seed(target), "init")):  # as a pretraining run of that seed starts
        trunk = build(
            network.arch, stem=network.stem, base_planes=network.base_planes, options=network.options
        )
    how = copy.deepcopy(STANDARD_PREPROCESSING) if card is None else card.describe()["preprocessing"]
    info = {"reference": str(target), "arch": network.arch, "preprocessing": how}
    return Loaded(trunk, info, "random weights")


def _random_seed(target: Reference) -> int:
    revision = target.revision or "0"
    if not revision.isdecimal() or int(revision) >= 2**63:
        raise InputError(
            "What follows the @ of a random model is its seed, a whole number below 2**63.",
            where=target.where,
        )
    return int(revision)


# --- published by the zoo ---


def open_bundle(target: Reference, *, progress: bool = True, verify: bool = False) -> Bundle | None:
    """The bundle that a reference means, its listing checked; none where it means anything else.

    Args:
        target: what is wanted; it is fetched if it isn't on this machine.
        progress: say on standard error what is downloaded.
        verify: of what was fetched before, read and hash every byte.

    Raises:
        InputError: no such model or folder, or one whose listing is damaged.
        RunError: a download failed.
    """
    if target.kind in HUBS:
        fetch_model: Callable[..., Bundle] = HUBS.code(target.kind)
        return fetch_model(target.name, target.revision, progress=progress, verify=verify)
    if target.kind != "path":
        return None
    path = Path(target.name).expanduser().resolve()  # a link that the user typed is his own
    if path.is_file():
        return None
    if not path.is_dir():
        raise InputError("There is no such folder.", where=path)
    return read_bundle(path)


def bundle_tensors(bundle: Bundle, file: str) -> dict[str, torch.Tensor]:
    """All tensors of a bundle's file, those too that are stored once under another name.

    Raises:
        InputError: a damaged file, or one that lacks what the description says is in it.
    """
    tensors = read_safetensors(bundle.path / file)
    for name, source in bundle.info.get("aliases", {}).get(file, {}).items():
        if source not in tensors:
            raise InputError(
                f"{name} is said to be {source}, which is not in {file}.",
                where=bundle.path / "zoo.json",
                fix="publish or pull the model again",
            )
        tensors[name] = tensors[source]
    return tensors


def _from_bundle(
    bundle: Bundle, target: Reference, build: Build, classifier: str | None, verify: bool
) -> Loaded:
    how = bundle.verify(full=verify)
    info = bundle.info
    check_description(info, bundle.path / "zoo.json")
    tensors = bundle_tensors(bundle, bundle.weights.name)
    trunk = fill_trunk(build, bundle.network, tensors, bundle.weights, info["preprocessing"])
    found = None
    if classifier is not None:
        kept = {} if bundle.classifier is None else read_safetensors(bundle.classifier)
        found = own_classifier(target, classifier, kept)
    described = {
        "reference": str(target),
        "revision": bundle.path.name,
        "weights_sha256": bundle.weights_sha256,
        **{
            key: info[key]
            for key in ("arch", "method", "licence", "preprocessing", "recipe", "data", "lineage")
        },
    }
    hashed = "hashes checked" if how == "full" else "hashes checked before, files unchanged"
    count = len(tensors)
    return Loaded(trunk, described, f"{count} of {count} tensors matched, none dropped; {hashed}", found)


# --- released by others ---


def _network(card: Card) -> Network:
    return Network(card.arch, card.stem, card.base_planes, dict(card.options))


def _words(network: Network) -> str:
    details = [f"{name} {value}" for name, value in network.options.items()]
    if network.base_planes is not None:
        details.append(f"{network.base_planes} planes")
    return network.arch + (f" ({', '.join(details)})" if details else "")


def _released(card: Card, progress: bool, verify: bool) -> tuple[ForeignModel, dict[str, Any]]:
    path = fetch(card, progress=progress, verify=verify)
    model = read_model(path)
    fix = f"look at where it came from (ZOO_MIRROR); then delete it, and its entry in {lock_path()}"
    if model.format != card.format:
        raise InputError(
            f"The layout is {model.format}; that of {card.name} is {card.format}.", where=path, fix=fix
        )
    found, wanted = model.network, _network(card)
    same = all(found.options.get(name) == value for name, value in wanted.options.items())
    if (found.arch, found.stem, found.base_planes) != (
        wanted.arch,
        wanted.stem,
        wanted.base_planes,
    ) or not same:
        raise InputError(
            f"The file holds {_words(found)}, not {_words(wanted)}, which was released as {card.name}.",
            where=path,
            fix=fix,
        )
    # What a file can't tell about itself, the catalog knows.
    how = card.describe()["preprocessing"]
    model = dataclasses.replace(model, method=card.method, preprocessing=how)
    return model, {"licence": card.licence, "lineage": {"released": card.name, "file": path.name}}


def _released_classifier(
    target: Reference, dataset: str, progress: bool, verify: bool
) -> dict[str, torch.Tensor] | None:
    """The classifier of a catalog entry, which may be in a file of its own; none for other references."""
    if target.kind == "supervised":
        known: Mapping[str, Remote | None] = {"imagenet1k": None}
    elif target.kind == "catalog":
        known = find_card(target.name).classifiers
    else:
        return None
    if dataset == OWN and len(known) == 1:
        dataset = next(iter(known))
    if dataset not in known:
        raise _no_classifier(target, dataset, known)
    remote = known[dataset]
    if remote is None or (target.kind == "catalog" and remote == find_card(target.name).file):
        return None  # it is in the model's own file
    found = read_classifier(fetch(remote, progress=progress, verify=verify))
    return {"weight": found.weight, "bias": found.bias}


def own_classifier(
    target: Reference, dataset: str, classifier: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The classifier that lies beside a model's weights, if it can be the one that is asked for.

    Raises:
        InputError: there is none, or it is not known to be for that data.
    """
    if not classifier:
        raise _no_classifier(target, dataset)
    classes = len(classifier["weight"])
    if dataset != OWN and classes != _CLASSES.get(dataset):
        raise InputError(
            f"Nothing says that the classifier of {classes} classes in it is for {dataset!r}.",
            where=target.where,
            fix=f"classifier={OWN!r} takes it as it is",
        )
    return classifier


def _no_classifier(target: Reference, dataset: str, known: Mapping[str, Any] | None = None) -> InputError:
    fix = "leave classifier away, or ask for num_classes=N to get a fresh one"
    if known:
        fix = did_you_mean(dataset, known) + f"known: {', '.join(known)}"
    return InputError(
        f"There is no classifier of {dataset!r} for these weights.", where=target.where, fix=fix
    )


def _supervised(target: Reference, progress: bool, verify: bool) -> tuple[ForeignModel, dict[str, Any]]:
    """torchvision's weights: from torch's own folder of downloads if they are there, else fetched."""
    from torchvision.models import get_model_weights

    try:
        weights = get_model_weights(target.name)[target.revision or "IMAGENET1K_V1"]
    except (ValueError, KeyError) as error:
        raise InputError(f"torchvision has no such weights ({error}).", where=target.where) from None
    name = Path(weights.url).name
    kept = Path(torch.hub.get_dir(), "checkpoints", name).absolute()
    mirrors = ((kept.as_uri(),) if kept.is_file() else ()) + (weights.url,)
    remote = Remote(name, mirrors, sha256=Path(name).stem.rpartition("-")[2])
    model = read_model(fetch(remote, progress=progress, verify=verify))
    preset = weights.transforms()
    how = {
        "mean": list(preset.mean),
        "std": list(preset.std),
        "resize": preset.resize_size[0],
        "crop": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
    }
    model = dataclasses.replace(model, method="supervised", preprocessing=how)
    return model, {"licence": "BSD-3-Clause", "lineage": {"released": str(weights), "file": name}}


def _timm_preprocessing(cfg: Mapping[str, Any]) -> dict[str, Any]:
    size = cfg["input_size"][-1]
    return {
        "mean": list(cfg["mean"]),
        "std": list(cfg["std"]),
        "resize": int(size / cfg["crop_pct"]),
        "crop": size,
        "interpolation": cfg["interpolation"],
    }


def _beside_config(model: ForeignModel, path: Path) -> ForeignModel:
    """The preprocessing that timm's ``config.json`` beside the file states; the tensors can't tell it."""
    config = path.with_name("config.json")
    if path.name != WEIGHTS or not config.is_file():
        return model
    try:
        how = _timm_preprocessing(read_json(config)["pretrained_cfg"])
        check_preprocessing(how, config)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return model  # another library's, or none that says
    return dataclasses.replace(model, preprocessing=how)


def _from_timm(target: Reference) -> tuple[ForeignModel, dict[str, Any]]:
    """A model of timm's by its name there, e.g. ``resnet50.a1_in1k``, if the zoo has the network."""
    if (variable := forbidden()) is not None:
        raise InputError(
            f"timm fetches its weights itself, and {variable} forbids the network.",
            where=target.where,
            fix=f"unset {variable}, or pass the path of a file of these weights",
        )
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError:
        raise InputError(
            "timm is not installed.", where=target.where, fix="install it: pip install timm"
        ) from None
    create: Callable[..., Any] = timm.create_model
    try:
        network = create(target.name, pretrained=True)
    except RuntimeError as error:  # what timm raises for a name that it doesn't have
        known = timm.list_models(pretrained=True)
        raise InputError(
            f"timm can't make this model ({str(error).splitlines()[0]}).",
            where=target.where,
            fix=did_you_mean(target.name, known, count=3),
        ) from None
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"timm's weights are not on this machine and could not be downloaded ({reason}).",
            where=target.where,
            fix="go online once",
        ) from None
    model = identify(network.state_dict(), target)
    cfg = network.pretrained_cfg
    how = _timm_preprocessing(cfg)
    tag = cfg.get("tag") or "untagged"
    model = dataclasses.replace(model, method=f"timm {tag}", preprocessing=how)
    return model, {"licence": cfg.get("license") or "unspecified", "lineage": {"released": str(target)}}
