"""``zoo verify``: everything about a model that can be checked, a line for each check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .contents import contents_of
from .errors import InputError
from .files import disk_errors, sha256_of
from .tensors import read_safetensors
from .weights import checks
from .weights.bundle import SUMS, WEIGHTS, Bundle, read_bundle
from .weights.catalog import CATALOG, Card, Remote, find_card
from .weights.checks import NOT_RECORDED, OK, Verification
from .weights.description import check_description
from .weights.fingerprint import TOLERANCE, feature_record, features_differ
from .weights.formats import read_model
from .weights.formats.base import ForeignModel, Network
from .weights.hubs.local import LATEST, LocalHub
from .weights.hubs.url import fetch
from .weights.lock import file_sha256
from .weights.reading.notes import shown
from .weights.reference import Reference, parse_reference
from .weights.safe import look_at

__all__ = ["bundle_folder", "checked_contents", "verify"]

_AGAIN = "publish or pull the model again"
_OF_A_BUNDLE = (
    "hashes",
    "description",
    "network",
    "values",
    "preprocessing",
    "features",
    "licence",
    "lineage",
)
_OF_A_FILE = ("safe", "format", "network", "values", "preprocessing", "licence")
_KINDS = {"run": "a run", "url": "a file", "hf": "a published model", "hub": "a published model"}


def verify(reference: str, *, progress: bool = True) -> Verification:
    """Check a model, every byte of it, whatever was checked before.

    Args:
        reference: anything that ``zoo.load`` takes but a random model.
        progress: say on standard error what is downloaded.

    Raises:
        InputError: there is no such model. What is wrong with one that there is, is a failed check.
    """
    target = parse_reference(reference)
    if target.kind == "random":
        raise InputError(
            "A random network is drawn from its seed when it is loaded: there is nothing to verify.",
            where=reference,
            fix="name a file of weights, a run or a published model",
        )
    folder = bundle_folder(target)
    if folder is not None:
        return _bundle(Verification(reference, "a published model"), folder, target.kind == "local")
    if target.kind == "catalog":
        return _released(Verification(reference, "released weights"), find_card(target.name), progress)
    if target.kind in ("file", "path"):
        path = Path(target.name).expanduser()
        look_at(path)  # a file that can't be opened is bad input
        return _file(Verification(reference, "a file"), path)
    if target.kind == "run" and not Path(target.name).expanduser().exists():
        raise InputError("There is no such run.", where=target.name)
    found = Verification(reference, _KINDS.get(target.kind, "released weights"))
    if target.kind != "url":
        return _other(found, reference, progress)
    fetched = found.attempt("download", lambda: _fetched(target.name, progress))
    return found.skip(*_OF_A_FILE) if fetched is None else _file(found, fetched)


def bundle_folder(target: Reference) -> Path | None:
    """The folder of a published model, whole or not; None where a reference means something else.

    Raises:
        InputError: there is no such model, revision or folder.
    """
    if target.kind == "path":
        path = Path(target.name).expanduser().resolve()  # a link that the user typed is his own
        if not path.exists():
            raise InputError("There is no such folder.", where=path)
        return path if path.is_dir() else None
    if target.kind != "local":
        return None
    hub, wanted = LocalHub(), target.revision or LATEST
    wanted = hub.refs(target.name).get(wanted, wanted)
    matches = [known for known in hub.revisions(target.name) if known.startswith(wanted)]
    if len(matches) != 1 or len(wanted) < 4:
        return hub.resolve(target.name, target.revision).path  # it raises, and says what there is
    return hub.home / target.name / "revisions" / matches[0]


def checked_contents(reference: str, *, progress: bool = True) -> tuple[ForeignModel, dict[str, Any]]:
    """``contents_of`` for those who trust nothing: of a published model the description is checked first.

    Raises:
        InputError: as ``contents_of``, or the description is not as it should be.
        RunError: a download failed.
    """
    folder = bundle_folder(parse_reference(reference))
    if folder is not None:
        check_description(read_bundle(folder).info, folder / "zoo.json")
    return contents_of(reference, progress=progress)


# --- published by the zoo ---


def _bundle(found: Verification, folder: Path, in_hub: bool) -> Verification:
    bundle = found.attempt("listing", lambda: _listing(folder, in_hub))
    if bundle is None:
        return found.skip(*_OF_A_BUNDLE)
    info, zoo_file = bundle.info, bundle.path / "zoo.json"
    if not found.attempt("hashes", lambda: _hashes(bundle)):
        return found.skip(*_OF_A_BUNDLE[1:])
    if not found.attempt("description", lambda: _description(info, zoo_file)):
        return found.skip(*_OF_A_BUNDLE[2:])
    files = found.attempt("tensors", lambda: _tensors_of(bundle))
    if files is None:
        return found.skip(*_OF_A_BUNDLE[2:])
    expected, how = {"num_features": info["num_features"]}, info["preprocessing"]
    trunk = found.attempt(
        "network", lambda: checks.strict(bundle.network, files[WEIGHTS], bundle.weights, expected, how)
    )
    every = {f"{name} of {file}": value for file, group in files.items() for name, value in group.items()}
    sound = found.attempt("values", lambda: checks.finite(every, bundle.path))
    fits = checks.preprocessing(found, how, trunk, zoo_file)
    if not info.get("features"):
        found.add("features", NOT_RECORDED, "it was published without those of the made picture")
    elif trunk is None or not sound or not fits:
        found.skip("features")
    else:
        found.attempt("features", lambda: _features(trunk, info, zoo_file))
    checks.licence(found, info["licence"])
    checks.lineage(found, info["lineage"])
    return found


def _listing(folder: Path, in_hub: bool) -> tuple[Bundle, str]:
    with disk_errors("Reading the model", folder):
        sums = folder / SUMS
        if in_hub and sums.is_file() and not sha256_of(sums).startswith(folder.name):
            raise InputError(
                "The list of hashes is not the one that the revision is named after: it is damaged or was changed.",
                where=sums,
                fix=_AGAIN,
            )
        bundle = read_bundle(folder)
        entries = {entry.name: entry for entry in folder.iterdir()}
        listed = {*bundle.sums, SUMS}
        plain = {name for name, entry in entries.items() if entry.is_file() and not entry.is_symlink()}
    faults = {
        "not in SHA256SUMS": entries.keys() - listed,
        "missing": listed - entries.keys(),
        "no plain file": listed & entries.keys() - plain,
    }
    said = [f"{', '.join(map(shown, sorted(names)))}: {fault}" for fault, names in faults.items() if names]
    if said:
        raise InputError(
            f"The folder is not what SHA256SUMS lists ({'; '.join(said)}).", where=folder, fix=_AGAIN
        )
    return bundle, f"{len(listed)} files and nothing else"


def _hashes(bundle: Bundle) -> tuple[bool, str]:
    with disk_errors("Reading the model", bundle.path):
        size = sum((bundle.path / name).stat().st_size for name in bundle.sums)
        damaged = [name for name, digest in bundle.sums.items() if sha256_of(bundle.path / name) != digest]
    if damaged:
        raise InputError(
            f"{', '.join(damaged)}: the SHA-256 is not the one in SHA256SUMS: damaged or changed.",
            where=bundle.path,
            fix=_AGAIN,
        )
    return True, f"every byte of {len(bundle.sums)} files, {size:,} bytes; weights {bundle.weights_sha256}"


def _description(info: Mapping[str, Any], file: Path) -> tuple[bool, str]:
    unknown = check_description(info, file)
    more = f"; of a later version: {', '.join(map(shown, unknown))}" if unknown else ""
    return True, f"zoo.json, schema {info['schema']}: all fields and their types{more}"


def _tensors_of(bundle: Bundle) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """By file. The classifier is held against the description."""
    names = [name for name in bundle.sums if name.endswith(".safetensors")]
    found = {name: read_safetensors(bundle.path / name) for name in names}
    for name, aliases in bundle.info.get("aliases", {}).items():
        for alias, source in aliases.items():
            if source not in found.get(name, {}):
                raise InputError(
                    f"{shown(alias)} stands for {shown(source)}, which {shown(name)} lacks.",
                    where=bundle.path,
                )
            found[name][alias] = found[name][source]
    classes, features = bundle.info.get("num_classes", 0), bundle.info["num_features"]
    wanted = {"weight": (classes, features), "bias": (classes,)} if classes else {}
    there = {} if bundle.classifier is None else found[bundle.classifier.name]
    if {name: tuple(tensor.shape) for name, tensor in there.items()} != wanted:
        raise InputError(
            f"The classifier is not one of {classes} classes on {features} features.",
            where=bundle.classifier or bundle.path / "zoo.json",
        )
    return found, ", ".join(f"{len(group)} in {name}" for name, group in found.items())


def _features(trunk: Any, info: Mapping[str, Any], file: Path) -> tuple[bool, str]:
    recorded, now = info["features"], feature_record(trunk, info["preprocessing"], file)
    if recorded["picture"] != now["picture"]:
        raise InputError(
            f"They are recorded of the picture {shown(recorded['picture'])!r}, which this version can't draw.",
            where=file,
            fix="update the toolkit",
        )
    difference = features_differ(recorded, now)
    if difference is not None:
        raise InputError(f"The network computes others than were recorded: {difference}.", where=file)
    return True, f"{len(now['values'])} values and the norm are as recorded (within {TOLERANCE:g})"


# --- from elsewhere ---


def _fetched(what: Card | str, progress: bool) -> tuple[Path, str]:
    path = fetch(what, progress=progress, verify=True)
    return path, f"{path.stat().st_size:,} bytes, SHA-256 {file_sha256(path)}, pinned since its first use"


def _released(found: Verification, card: Card, progress: bool) -> Verification:
    path = found.attempt("download", lambda: _fetched(card, progress))
    if path is None:
        return found.skip("published hash", *_OF_A_FILE)
    _published_hash(found, path, card.file)
    return _content(found, path, card)


def _file(found: Verification, path: Path) -> Verification:
    with disk_errors("Reading the file", path):
        size, digest = path.stat().st_size, sha256_of(path)
    found.add("bytes", OK, f"{size:,} bytes, SHA-256 {digest}")
    like = next((card for card in CATALOG.values() if card.file.name == path.name), None)
    if like is not None:  # somebody's own copy of a released file
        _published_hash(found, path, like.file)
    return _content(found, path, None)


def _published_hash(found: Verification, path: Path, remote: Remote) -> None:
    stated = {kind: value for kind, value in (("sha256", remote.sha256), ("md5", remote.md5)) if value}
    if stated or remote.size is not None:
        found.attempt("published hash", lambda: _as_stated(path, remote, stated))
    else:
        found.add("published hash", NOT_RECORDED, f"the publisher of {remote.name} states none")


def _as_stated(path: Path, remote: Remote, stated: Mapping[str, str]) -> tuple[bool, str]:
    with disk_errors("Reading the file", path):
        size = path.stat().st_size
        if remote.size not in (None, size):
            raise InputError(f"It has {size} bytes; the publisher's has {remote.size}.", where=path)
        for kind, value in stated.items():
            digest = hashlib.new(kind, usedforsecurity=False)
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            if not digest.hexdigest().startswith(value):
                what = f"Its {kind} is {digest.hexdigest()}; that of the publisher's begins with {value}."
                raise InputError(what, where=path, fix="download it again")
    said = [f"{kind} {value}..." for kind, value in stated.items()]
    return True, f"{', '.join([*said, *(['size'] if remote.size else [])])}: as its publisher states"


def _content(found: Verification, path: Path, card: Card | None) -> Verification:
    """The checks of ``_OF_A_FILE``."""
    if not found.attempt("safe", lambda: _safe(path)):
        return found.skip(*_OF_A_FILE[1:])
    model = found.attempt("format", lambda: _format(path, card))
    if model is None:
        return found.skip(*_OF_A_FILE[2:])
    _model(found, model, path, card)
    if card is None and found.checks[-1].state == checks.OK:
        last = found.checks.pop()  # the numbers fit, but they are what is usual for such files
        found.add(last.name, checks.NOT_RECORDED, f"the file states none; taken: {last.detail}")
    checks.licence(found, "unspecified" if card is None else card.licence)
    return found


def _safe(path: Path) -> tuple[bool, str]:
    look = look_at(path)
    if look.problem is not None:
        raise InputError(look.problem, where=path, fix=look.fix)
    names = (
        f"all {len(look.globals)} names that it mentions are inert"
        if look.globals
        else "it mentions no names"
    )
    return True, f"{look.kind}; {names}"


def _format(path: Path, card: Card | None) -> tuple[ForeignModel, str]:
    model = read_model(path)
    if card is not None and model.format != card.format:
        raise InputError(f"The layout is {model.format}; that of {card.name} is {card.format}.", where=path)
    return model, f"{model.format}: {model.what}; {model.account.sentence()}"


def _model(found: Verification, model: ForeignModel, where: object, card: Card | None = None) -> None:
    network, how, expected = model.network, model.preprocessing, {}
    if card is not None:  # it states more than the file does
        network = Network(card.arch, card.stem, card.base_planes, dict(card.options))
        how, expected = card.preprocessing, {"num_features": card.num_features, "parameters": card.parameters}
    trunk = found.attempt("network", lambda: checks.strict(network, model.trunk, where, expected, how))
    every = {
        **model.trunk,
        **model.heads,
        **{f"classifier.{key}": value for key, value in model.classifier.items()},
    }
    found.attempt("values", lambda: checks.finite(every, where))
    checks.preprocessing(found, how, trunk, where)


def _other(found: Verification, reference: str, progress: bool) -> Verification:
    """A run, torchvision's or timm's weights."""

    def read() -> tuple[tuple[ForeignModel, dict[str, Any]], str]:
        model, known = contents_of(reference, progress=progress, verify=True)
        return (model, known), f"{model.what}; {model.account.sentence()}"

    content = found.attempt("content", read)
    if content is None:
        return found.skip("network", "values", "preprocessing", "licence", "lineage")
    model, known = content
    _model(found, model, reference)
    checks.licence(found, known.get("licence", "unspecified"))
    checks.lineage(found, known.get("lineage", {}))
    return found
