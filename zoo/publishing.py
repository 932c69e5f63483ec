"""Models on their way to other homes and back: ``zoo publish REF --to ADDRESS`` and ``zoo pull``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from .contents import bundle_contents
from .conversion import convert
from .errors import InputError
from .files import disk_errors, sha256_of, write_json, write_text
from .homes import cache_home
from .weights.bundle import CLASSIFIER, HEADS, SUMS, WEIGHTS, Bundle, Description, config_of, read_bundle
from .weights.card import model_card
from .weights.hub_card import check_card, hub_card, is_number
from .weights.hubs.folder import AtHub, FolderHub, split_address
from .weights.hubs.hf_client import check_repo_name
from .weights.hubs.hf_publish import OnHub, Plan, Publisher
from .weights.hubs.local import LocalHub, Published, check_name
from .weights.hubs.transport import PATIENT, Patience
from .weights.load import open_bundle
from .weights.reference import Reference, parse_reference
from .weights.writers.base import Source
from .weights.writers.transformers import Transformers

__all__ = ["AtHub", "OnHub", "Plan", "publish_to", "pull"]

Results = Callable[[str], list[dict[str, Any]]]
"""From the SHA-256 of weights to the results that are known of them."""


def publish_to(
    reference: str | Path,
    to: str,
    *,
    tag: str | None = None,
    licence: str | None = None,
    results: Results | None = None,
    private: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: bool = True,
    patience: Patience = PATIENT,
) -> OnHub | AtHub | Plan:
    """Publish a model to another home, whole or not at all.

    The Hugging Face hub gets it in one commit, checked here before and there afterwards. Any other address that
    fsspec can write to is a folder laid out as the local hub is (``zoo.weights.hubs.folder``).

    Args:
        reference: anything that ``zoo.load`` takes but a random model; other people's weights are converted.
        to: ``hf:org/name``, or ``ADDRESS/org/name``, e.g. ``s3://bucket/models/org/name``.
        tag: a fixed name for it.
        licence: of the weights, if it isn't known from the model.
        results: finds the transfer results to put into the card.
        private: make a private repository, if it has to be made.
        force: replace a model that wasn't published by this toolkit, or move a tag.
        dry_run: check everything, send nothing.
        progress: show what is sent on a terminal.
        patience: how long to wait for the hub.

    Returns:
        What was done; of a dry run what would be.

    Raises:
        InputError: no such model, name, licence, token or permission; or a tag that is taken.
        RunError: the hub can't be reached, somebody else published meanwhile, or the disk is full.
    """
    if "://" in to.removeprefix("hub:"):
        if private:
            raise InputError(
                "Who may read such a hub is up to its store.", where="--private", fix="leave it out"
            )
        address, name, revision = split_address(to.removeprefix("hub:"))
        _no_revision(to, revision)
        there: _Home = _Folder(FolderHub(address, patience), name, tag, force, dry_run)
    else:
        publisher = Publisher(
            _repository(to), tag=tag, private=private, force=force, patience=patience, progress=progress
        )
        there = _HuggingFace(publisher, dry_run)
    with _staged() as place:
        bundle = _bundle_of(reference, place, licence, progress)
        found = None if results is None else results(bundle.weights_sha256)
        what = _description(bundle, licence, found)
        folder = place / "upload"
        with disk_errors("Preparing the model", place):
            sums = _compose(folder, bundle, what, there)
        return there.publish(folder, sums)


class _Home(Protocol):
    """Where a model goes: its card there, whether strangers get files of their own, and the sending."""

    strangers: bool

    def card(self, what: Description, transformers: bool) -> str: ...

    def publish(self, folder: Path, sums: dict[str, str]) -> OnHub | AtHub | Plan: ...


class _HuggingFace:
    strangers = True

    def __init__(self, publisher: Publisher, dry_run: bool) -> None:
        self.publisher = publisher
        self.dry_run = dry_run

    def card(self, what: Description, transformers: bool) -> str:
        text = hub_card(self.publisher.name, what, transformers=transformers)
        numbered = [result for result in what.results if any(map(is_number, result["metrics"].values()))]
        check_card(text, len(numbered))
        return text

    def publish(self, folder: Path, sums: dict[str, str]) -> OnHub | Plan:
        self.publisher.take(folder, sums)
        return self.publisher.plan() if self.dry_run else self.publisher.publish()


class _Folder:
    strangers = False

    def __init__(self, hub: FolderHub, name: str, tag: str | None, force: bool, dry_run: bool) -> None:
        self.hub = hub
        self.name = name
        self.settings: dict[str, Any] = {"tag": tag, "force": force, "dry_run": dry_run}

    def card(self, what: Description, transformers: bool) -> str:
        return model_card(self.name, what, f"hub:{self.hub.shown}/{self.name}")

    def publish(self, folder: Path, sums: dict[str, str]) -> AtHub | Plan:
        return self.hub.publish(self.name, folder, **self.settings)


def pull(
    reference: str,
    *,
    name: str | None = None,
    tag: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> Published:
    """Copy a published model from elsewhere into the local hub, every byte checked.

    Args:
        reference: ``hf:org/name[@revision]``, or ``ADDRESS/org/name[@revision]``.
        name: its name in the local hub; the one that it has there by default.
        tag: a fixed name for it here; by default the tag that was asked for.
        force: move a tag that points elsewhere.
        progress: say on standard error what is downloaded.

    Raises:
        InputError: no such model, no such name, or what came is not what was published.
        RunError: a download failed, or the disk is full.
    """
    if name is not None:
        check_name(name)
    target = parse_reference(reference)
    bundle = open_bundle(target, progress=progress)
    if bundle is None:
        address = str(target).removeprefix("url:")
        hub = f"from a hub that a web server shows: hub:{address}; " if target.kind == "url" else ""
        raise InputError(
            "Only published models can be pulled.",
            where=target.where,
            fix=f"{hub}other weights are converted: zoo convert {target} --name org/name",
        )
    bundle.verify(full=True)
    asked = target.revision or "main"
    if tag is None and asked not in ("main", "latest", bundle.path.name) and "/" not in asked:
        tag = asked

    def write(folder: Path) -> None:
        for file in (*bundle.sums, SUMS):
            shutil.copyfile(bundle.path / file, folder / file)

    there = "/".join(target.name.split("/")[-2:])
    return LocalHub().publish(name or there, write, tag=tag, force=force)


def _repository(to: str) -> str:
    kind, colon, name = to.partition(":")
    if not colon or kind != "hf":
        near = f"--to hf:{to}" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", to) else "--to hf:org/name"
        near += f"; for a folder --to file://{Path(to).expanduser().absolute()}" if "/" in to else ""
        raise InputError("This is no address to publish to.", where=f"--to {to}", fix=near)
    name, _, revision = name.partition("@")
    _no_revision(to, revision)
    return check_repo_name(name)


def _no_revision(to: str, revision: str | None) -> None:
    if revision:
        raise InputError(
            "The name to publish to has no revision.", where=f"--to {to}", fix="give a tag with --tag"
        )


# --- the folder to publish ---


@contextlib.contextmanager
def _staged() -> Iterator[Path]:
    """A folder of our own in the cache; those of processes that are gone are removed."""
    home = cache_home() / "publishing"
    with disk_errors("Preparing the model", home):
        home.mkdir(parents=True, exist_ok=True)
        for left in home.iterdir():
            if not _is_running(left.name.partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        place = home / f"{os.getpid()}-{uuid.uuid4().hex}"
        place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        pass
    return True


def _bundle_of(reference: str | Path, place: Path, licence: str | None, progress: bool) -> Bundle:
    """The model as a verified bundle; one is made below ``place`` if it is none yet."""
    target = parse_reference(reference)
    bundle = open_bundle(target, progress=progress)
    if bundle is not None:
        bundle.verify()
        return bundle
    if target.kind == "run":
        from .pretrain.publish import publish_run

        done = publish_run(
            Path(target.name).expanduser(), licence=licence or "unspecified", hub=LocalHub(place / "hub")
        )
        return read_bundle(done.path)
    return _converted(target, place, licence, progress)


def _converted(target: Reference, place: Path, licence: str | None, progress: bool) -> Bundle:
    named = target.name if target.kind in ("file", "path") else str(target)
    if target.kind == "url":
        named = f"url:{target.name}"  # with its query
    return read_bundle(
        convert(named, to="bundle", out=place / "bundle", licence=licence, progress=progress).path
    )


def _description(bundle: Bundle, licence: str | None, results: list[dict[str, Any]] | None) -> Description:
    fields = {field.name for field in dataclasses.fields(Description)}
    what = Description(**{key: value for key, value in bundle.info.items() if key in fields})
    changes: dict[str, Any] = {} if licence is None else {"licence": licence}
    if results is not None:
        changes["results"] = results
    return dataclasses.replace(what, **changes)


def _compose(folder: Path, bundle: Bundle, what: Description, there: _Home) -> dict[str, str]:
    """Fill the folder that goes to its home, and check its card; returns the hashes that are known."""
    folder.mkdir()
    for file in (WEIGHTS, HEADS, CLASSIFIER):
        if file in bundle.sums:
            _link(bundle.path / file, folder / file)
    writer, with_transformers = Transformers(), False
    if there.strangers:
        source = Source(writer.name, bundle_contents(bundle)[0], what, None)
        with_transformers = writer.refusal(source) is None
    if with_transformers:
        (folder / writer.name).mkdir()
        writer.write(folder / writer.name, source)
    aliases = {"aliases": bundle.info["aliases"]} if "aliases" in bundle.info else {}
    write_json(folder / "config.json", config_of(what))
    write_json(folder / "zoo.json", {**what.to_json(), **aliases})
    write_text(folder / "README.md", there.card(what, with_transformers))
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    sums = {
        file: bundle.sums[file] if file.endswith(".safetensors") else sha256_of(folder / file)
        for file in names
    }
    write_text(folder / SUMS, "".join(f"{digest}  {file}\n" for file, digest in sums.items()))
    read_bundle(folder)  # it is what it will be elsewhere
    return sums


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where that can't be."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
