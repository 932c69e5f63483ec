"""``zoo convert``: any model into any layout, with an account of every tensor, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .contents import contents_of
from .errors import InputError
from .files import disk_errors, whole_file, whole_folder
from .models.factory import create_trunk
from .weights.bundle import Description
from .weights.catalog import Remote
from .weights.fill import fill_trunk
from .weights.fingerprint import record_features
from .weights.formats.base import Account, ForeignModel, Network
from .weights.hubs.local import LocalHub, Published, check_name
from .weights.hubs.url import fetch
from .weights.lock import file_sha256
from .weights.reference import Reference, parse_reference
from .weights.writers import WRITERS
from .weights.writers.base import Source, Writer

__all__ = ["Converted", "convert"]


@dataclass(frozen=True)
class Converted:
    """What was read, where every tensor of it went, and what was written.

    Args:
        reference: the model, as it was named.
        to: the layout, a key of ``zoo.weights.writers.WRITERS``.
        path: the file or folder that was written.
        format: what was read, a key of ``zoo.weights.formats.FORMATS``, ``zoo_bundle`` or ``zoo_run``.
        what: the same for people.
        network: which network the trunk is.
        method: who trained it.
        licence: an SPDX name, or ``unspecified``.
        preprocessing: mean, std, resize, crop, interpolation.
        account: where every tensor of what was read went.
        notes: what the layout left out, what its reader should know, and what was checked; a sentence each.
        published: the revision, if it went into the local hub.
        yaml: the settings that were written beside it, if they were asked for.
        usage: lines of Python that load it, where its name alone isn't enough.
    """

    reference: str
    to: str
    path: Path
    format: str
    what: str
    network: Network
    method: str
    licence: str
    preprocessing: dict[str, Any]
    account: Account
    notes: tuple[str, ...]
    published: Published | None = None
    yaml: Path | None = None
    usage: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema 1."""
        yaml = None if self.yaml is None else str(self.yaml)
        document = {"schema": 1, **asdict(self), "path": str(self.path), "yaml": yaml}
        if self.published is not None:
            document["published"]["path"] = str(self.published.path)
        return document


def convert(
    reference: str | Path,
    *,
    to: str = "bundle",
    out: str | Path | None = None,
    name: str | None = None,
    licence: str | None = None,
    legacy: bool = False,
    yaml: bool = False,
    force: bool = False,
    progress: bool = True,
) -> Converted:
    """Write a model in a layout that somebody loads; nothing in a file of weights is ever run.

    Args:
        reference: anything that ``zoo.load`` takes but a random model; a file of weights of any known layout.
        to: a key of ``zoo.weights.writers.WRITERS``.
        out: the file or folder to write; detectron2's file is called as the model is, in the working folder,
            if nothing is said.
        name: ``org/name``: put the bundle into the local hub instead.
        licence: of the weights, if it isn't known from where they come from.
        legacy: write the container that torch wrote before version 1.6, where the layout is a file of torch's.
        yaml: write a YAML of the same name beside it, where the layout's readers have settings.
        force: replace what is at ``out``, if it is something that this layout writes.
        progress: say on standard error what is downloaded.

    Raises:
        InputError: no such model, layout or place; something is at ``out`` already; or the layout has no
            place for this network.
        RunError: the disk is full or read-only, a download failed, or what was made is not the same network.
    """
    writer: Writer = WRITERS.code(to)()
    if out is None and name is None and writer.needs_suffix:
        out = _usual_file(str(reference), writer)
    target = _target(writer, out, name, force)
    if legacy and not writer.has_legacy:
        raise _not_for(
            to, "--legacy", "is no file of torch's, which had another container once", "has_legacy"
        )
    if yaml and not writer.has_yaml:
        raise _not_for(to, "--yaml", "has no settings that its readers would need", "has_yaml")
    writer.legacy = legacy
    settings = _settings_beside(target, force) if yaml else None
    writer.ready()
    wanted = parse_reference(str(reference))
    _spare_the_source(target, wanted)
    model, known = contents_of(str(reference), progress=progress)
    trunk = fill_trunk(create_trunk, model.network, model.trunk, wanted.where, model.preprocessing).eval()
    what = _describe(model, known, wanted, licence, trunk.num_features)
    source = Source(name or target.name, model, what, trunk)
    reason = writer.refusal(source)
    if reason is not None:
        raise InputError(
            f"The layout {to} has no place for this {model.network.arch}: {reason}.",
            where=wanted.where,
            fix="--to bundle takes every network",
        )
    published, notes = None, _beside(writer, source)
    if name is not None:
        written: list[str] = []
        published = LocalHub().publish(name, lambda folder: written.extend(writer.write(folder, source)))
        notes, target = (*notes, *written), published.path
    else:
        with disk_errors("Writing the model", target), contextlib.ExitStack() as places:
            beside = None if settings is None else places.enter_context(whole_file(settings))
            notes = (*notes, *writer.write(places.enter_context(_place(writer, target)), source))
            if beside is not None:
                writer.write_yaml(beside, source, target)
    return Converted(
        reference=str(reference),
        to=to,
        path=target,
        format=model.format,
        what=model.what,
        network=model.network,
        method=model.method,
        licence=what.licence,
        preprocessing=model.preprocessing,
        account=model.account,
        notes=notes,
        published=published,
        yaml=settings,
        usage=writer.usage(target, settings),
    )


# --- what it is ---


def _describe(
    model: ForeignModel, known: dict[str, Any], wanted: Reference, licence: str | None, features: int
) -> Description:
    """The zoo's own models keep their history; of others it says what they were converted from."""
    lineage = dict(known.get("lineage", {}))
    if not {"step", "converted_from"} & lineage.keys():
        origin = {"format": model.format, "what": model.what, **lineage}
        file = _file_of(wanted, lineage)
        if file is not None:
            origin["sha256"] = file_sha256(file)
        if model.facts:
            origin["facts"] = model.facts
        lineage = {"converted_from": origin}
    network = model.network
    return Description(
        arch=network.arch,
        stem=network.stem,
        base_planes=network.base_planes,
        options=network.options,
        num_features=features,
        method=model.method,
        preprocessing=model.preprocessing,
        licence=licence or known.get("licence", "unspecified"),
        num_classes=len(model.classifier["weight"]) if model.classifier else 0,
        recipe=known.get("recipe", {}),
        data=known.get("data", {}),
        lineage=lineage,
        versions=known.get("versions", {}),
        results=known.get("results", []),
        features=record_features(network, model.trunk, model.preprocessing, wanted.where),
    )


def _file_of(wanted: Reference, lineage: dict[str, Any]) -> Path | None:
    """The file that foreign weights were read from; what was downloaded is in the cache by now."""
    if wanted.kind in ("file", "path"):
        path = Path(wanted.name).expanduser()
        return path if path.is_file() else None
    if wanted.kind == "url":
        return fetch(wanted.name, progress=False)
    if "file" in lineage:  # released: kept under its base name
        return fetch(Remote(lineage["file"]), progress=False)
    return None


def _beside(writer: Writer, source: Source) -> tuple[str, ...]:
    """What becomes of what is no trunk."""
    heads, classifier, how = source.model.heads, source.model.classifier, source.what.preprocessing
    parts = [
        (kept, _heads([head for head in heads if writer.keeps_head(head.partition(".")[0]) == kept]))
        for kept in (True, False)
    ]
    if classifier:
        parts.append((writer.keeps_classifier, f"a classifier of {source.what.num_classes} classes"))
    notes = [
        f"kept beside the trunk, {what}" if kept else f"left out, for the layout has no place for it, {what}"
        for kept, what in parts
        if what
    ]
    if not writer.keeps_preprocessing:
        notes.append(
            f"the layout doesn't say how images are prepared: shorter side {how['resize']} ({how['interpolation']}), "
            f"crop {how['crop']}, values in 0..1 normalised by mean {how['mean']} and std {how['std']}"
        )
    return tuple(notes)


def _heads(tensors: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in tensors))
    return f"heads: {names} ({len(tensors)} tensors)" if tensors else ""


# --- where it goes ---


def _usual_file(reference: str, writer: Writer) -> str:
    """The model's name without folders, kind, revision and endings, with the layout's own ending."""
    last = re.split(r"[/:]", reference.rstrip("/"))[-1]
    return (re.split(r"[.@?]", last)[0] or writer.name) + writer.suffix


def _target(writer: Writer, out: str | Path | None, name: str | None, force: bool) -> Path:
    """The place to write to, checked before anything is read.

    Raises:
        InputError: none or two were named, it can't be one, or something is there already.
    """
    if name is not None:
        if writer.name != "bundle" or out is not None:
            raise InputError(
                "A model gets a name in the local hub as a bundle, without --out.",
                where=f"--name {name}",
                fix="leave --name or the others out",
            )
        check_name(name)
        return Path()
    kind = "FOLDER" if writer.files else f"FILE{writer.suffix}"
    if out is None:
        hub = ", or --name org/name for the local hub" if writer.name == "bundle" else ""
        raise InputError("It isn't said where to write to.", where="--out", fix=f"--out {kind}{hub}")
    # A link that the user typed is his own; what it points at is replaced, not the link.
    target = Path(os.path.realpath(Path(out).expanduser()))
    if not target.parent.is_dir():
        raise InputError("The folder to write to isn't there.", where=target.parent, fix="make it first")
    if writer.needs_suffix and target.suffix != writer.suffix:
        raise InputError(
            f"What reads {writer.name} files knows them by their suffix, {writer.suffix}.",
            where=target,
            fix=f"--out {target.with_suffix(writer.suffix).name}",
        )
    if target.exists():
        _check_existing(writer, target, force)
    return target


def _not_for(to: str, option: str, why: str, ability: str) -> InputError:
    capable = ", ".join(known for known in WRITERS if getattr(WRITERS.code(known), ability))
    return InputError(
        f"The layout {to} {why}.",
        where=option,
        fix=f"leave it out, or choose a layout that has it: {capable}",
    )


def _settings_beside(target: Path, force: bool) -> Path:
    """The YAML's place: a file beside the weights, which must not be there already unless it may be replaced."""
    settings = target.with_suffix(".yaml")
    if settings.exists() and not (force and settings.is_file()):
        raise InputError(
            "There is something where the settings would be written.",
            where=settings,
            fix="choose another --out, or replace it with --force",
        )
    return settings


def _spare_the_source(target: Path, wanted: Reference) -> None:
    if wanted.kind not in ("file", "path") or not target.is_file():
        return
    source = Path(wanted.name).expanduser()
    if source.is_file() and target.samefile(source):
        raise InputError(
            "This is the file that is converted: what the new layout has no place for would be lost.",
            where=target,
            fix="choose another --out",
        )


def _check_existing(writer: Writer, target: Path, force: bool) -> None:
    if target.is_dir() != bool(writer.files):
        kind = "a folder" if writer.files else "a file"
        raise InputError(
            f"The layout {writer.name} is {kind}, and this isn't one.",
            where=target,
            fix="choose another --out",
        )
    with disk_errors("Looking at the target", target):
        inside = sorted(os.listdir(target)) if target.is_dir() else []
    strange = [entry for entry in inside if entry not in writer.files]
    if strange:
        raise InputError(
            f"The folder holds other things than a {writer.name} model, e.g. {strange[0]}; it is not replaced.",
            where=target,
            fix="choose another --out",
        )
    if not force and (inside or target.is_file()):
        raise InputError(
            "The target exists already.", where=target, fix="choose another --out, or replace it with --force"
        )


@contextlib.contextmanager
def _place(writer: Writer, target: Path) -> Iterator[Path]:
    """A temporary file or folder that becomes the target when all went well."""
    if not writer.files:
        with whole_file(target) as temporary:
            yield temporary
        return
    if not target.exists() or not os.listdir(target):
        with whole_folder(target) as temporary:
            yield temporary
        return
    # A folder can't be renamed over one that holds something: the old one steps aside when the new one is whole.
    staged, aside = (target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp") for _ in range(2))
    with whole_folder(staged) as temporary:
        yield temporary
    os.rename(target, aside)
    try:
        os.rename(staged, target)
    except BaseException:
        os.rename(aside, target)
        shutil.rmtree(staged, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)
