"""Hubs at any address: a bucket, a shared disk, a web server's folder; laid out as the local hub is. No torch here.

``<address>/<org>/<name>/refs.json`` and ``revisions/<revision>/``. So a local hub that is copied somewhere, or
shown by a web server, is such a hub, and the other way round.

What the local hub promises, and what a store can keep of it:

- A revision never changes, and is used only if every hash is right: kept everywhere, for who reads checks.
- A revision is there whole or not at all: kept everywhere. Its ``SHA256SUMS`` is sent last, and without it
  nothing is there; on a disk each file appears under its name when it is whole, in a bucket it always does.
- An upload that failed goes on: kept everywhere, file by file. A published file that is lost or cut short is
  sent again by publishing again; one that is damaged, by force.
- A tag moves only by force, ``latest`` follows the last publisher: kept as long as one publishes at a time.
  There is no lock. Of two at the same moment, the later one's list of tags may replace the other's; each
  looks afterwards, and writes again if its own is missing. No revision is lost by it.
- A power cut undoes nothing: as the store keeps it. Nothing is removed, so half-sent revisions stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...addresses import forbidden, without_credentials
from ...errors import InputError, RunError, did_you_mean
from ...files import disk_errors, read_json, sha256_of, write_json
from ...homes import cache_home
from ..bundle import SUMS, Bundle, read_bundle, read_sums
from .hf_publish import Plan
from .local import LATEST, LocalHub, check_name
from .stores import Store, open_store
from .transport import PATIENT, Patience

__all__ = ["AtHub", "FolderHub", "fetch_model", "split_address"]

log = logging.getLogger("zoo")

_REVISION = re.compile(r"[0-9a-f]{16}")
_ATTEMPTS = 3


def split_address(text: str) -> tuple[str, str, str | None]:
    """``ADDRESS/org/name[@revision]`` -> address of the hub, ``org/name``, revision.

    Raises:
        InputError: not of that form.
    """
    head, _, last = text.rpartition("/")
    last, _, revision = last.partition("@")
    root, _, org = head.rpartition("/")
    if not root.partition("://")[2]:
        raise InputError(
            "The address of a model in such a hub is ADDRESS/org/name[@revision].",
            where=without_credentials(text),
            fix="e.g. s3://bucket/models/me/swav_tiny@v1",
        )
    return root, check_name(f"{org}/{last}"), revision or None


def _known_tags(file: Path) -> dict[str, str]:
    """The tags when they were last asked for; none if they never were."""
    try:
        return dict(read_json(file))
    except (OSError, ValueError, TypeError):
        return {}


def fetch_model(
    name: str, revision: str | None = None, *, progress: bool = True, verify: bool = False
) -> Bundle:
    """A model by the address of a hub and its name there, ``ADDRESS/org/name``, in the cache.

    Raises:
        InputError: no such model or revision, or not what was published.
        RunError: the address can't be read, or the disk is full.
    """
    address, name, _ = split_address(name)
    bundle = FolderHub(address, progress=progress).fetch(name, revision)
    if verify:
        bundle.verify(full=True)
    return bundle


@dataclass(frozen=True)
class AtHub:
    """What publishing did: the revision, where, whether it was new, and whether a tag moved."""

    name: str
    revision: str
    address: str
    new: bool
    moved: bool


class FolderHub:
    """A hub at an address.

    Args:
        address: of the hub, ``s3://bucket/models``; ``http`` and ``https`` can only be read.
        patience: how long to wait for a web server.
        progress: say on standard error what is downloaded.
    """

    def __init__(self, address: str, patience: Patience = PATIENT, progress: bool = True) -> None:
        self.address = address.rstrip("/")
        self.shown = without_credentials(self.address)
        self.patience = patience
        self.progress = progress
        self._kept = LocalHub(cache_home() / "hubs" / hashlib.sha256(self.address.encode()).hexdigest()[:16])
        """Revisions that were fetched, as a hub of their own."""

    def _where(self, name: str, revision: str | None = None) -> str:
        return f"{self.shown}/{name}" + (f"@{revision}" if revision else "")

    def _store(self) -> Store:
        return open_store(self.address, self.patience)

    # --- fetching ---

    def fetch(self, name: str, revision: str | None = None) -> Bundle:
        """A model, whole and verified, in the cache.

        A revision that was fetched before costs no network; a tag costs one question, and without an answer
        means what it meant last.

        Raises:
            InputError: no such model or revision (the tags are named), or not what was published.
            RunError: the address can't be read, or the disk is full.
        """
        check_name(name)
        wanted = revision or LATEST
        if not _REVISION.fullmatch(wanted):
            wanted = self._resolve(name, wanted)
        if wanted in self._kept.revisions(name):
            try:
                bundle = read_bundle(self._kept.home / name / "revisions" / wanted)
                bundle.verify()
                return bundle
            except InputError:
                if self._offline():
                    raise
        return self._download(name, wanted)

    def _resolve(self, name: str, wanted: str) -> str:
        tags_file = self._kept.home / name / "tags.json"
        offline = self._offline()
        if offline is not None:
            tags = _known_tags(tags_file)
            if not tags:
                raise InputError(
                    f"This model is not in the cache, and {offline} forbids the network.",
                    where=self._where(name),
                    fix=f"unset {offline} once",
                )
        else:
            tags = self._asked_tags(name, tags_file)
        if wanted not in tags:
            raise InputError(
                "The model has no such revision.",
                where=self._where(name, wanted),
                fix=did_you_mean(wanted, tags) + f"tags: {', '.join(sorted(tags))}",
            )
        return str(tags[wanted])

    def _asked_tags(self, name: str, tags_file: Path) -> dict[str, str]:
        try:
            tags = self._tags(self._store(), name)
        except RunError as error:
            tags = _known_tags(tags_file)
            if not tags:
                raise
            log.warning("%s: what its tags meant last is taken (%s)", self._where(name), error.what)
            return tags
        if not tags:
            raise InputError(
                "There is no such model in this hub.",
                where=self._where(name),
                fix="check the name and the address",
            )
        with disk_errors("Writing the cache", tags_file):
            tags_file.parent.mkdir(parents=True, exist_ok=True)
            write_json(tags_file, tags)
        return tags

    def _offline(self) -> str | None:
        """The variable that forbids to ask this hub, if one does."""
        return None if urlsplit(self.address).scheme in ("file", "local", "memory") else forbidden()

    def _tags(self, store: Store, name: str) -> dict[str, str]:
        content = store.read(f"{name}/refs.json")
        if content is None:
            return {}
        try:
            tags = json.loads(content)["tags"]
            if not all(isinstance(value, str) and _REVISION.fullmatch(value) for value in tags.values()):
                raise ValueError("a tag names no revision")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                "The list of the model's tags can't be read: is this a hub?",
                where=f"{self._where(name)}/refs.json",
            ) from None
        return dict(tags)

    def _download(self, name: str, revision: str) -> Bundle:
        if variable := self._offline():
            raise InputError(
                f"This revision is not whole in the cache, and {variable} forbids the network.",
                where=self._where(name, revision),
                fix=f"unset {variable} once",
            )
        store, base = self._store(), f"{name}/revisions/{revision}"
        if self.progress:
            print(f"fetching {self._where(name, revision)}", file=sys.stderr)

        def write(folder: Path) -> None:
            self._fetch_file(store, f"{base}/{SUMS}", folder / SUMS, revision)
            for file, digest in read_sums(folder / SUMS).items():
                self._fetch_file(store, f"{base}/{file}", folder / file, digest)

        done = self._kept.publish(name, write)
        return read_bundle(done.path)

    def _fetch_file(self, store: Store, path: str, target: Path, digest: str) -> None:
        """A file with the hash that it must have; a second time, if the first one came out wrong."""
        for attempt in range(2):
            try:
                store.get(path, target)
            except FileNotFoundError:
                raise InputError(
                    "The revision isn't there, or not whole.",
                    where=f"{self.shown}/{path}",
                    fix="publish it again, or choose another revision",
                ) from None
            if sha256_of(target).startswith(digest):
                return
            if attempt == 0:
                target.unlink()
        raise InputError(
            "What came is not what was published: its SHA-256 differs.",
            where=f"{self.shown}/{path}",
            fix="try again; if it stays so, publish it again with --force",
        )

    # --- publishing ---

    def publish(
        self, name: str, folder: Path, tag: str | None = None, force: bool = False, dry_run: bool = False
    ) -> AtHub | Plan:
        """Add a revision, and point ``latest`` (and a tag) at it; what is there is not sent again.

        Args:
            name: ``org/name``.
            folder: a bundle.
            tag: a second name for the revision; fixed once given.
            force: move a tag that points elsewhere, and send what is there again.
            dry_run: only look what there is to do.

        Raises:
            InputError: a bad name, a tag that is taken, or a place that can only be read.
            RunError: the store failed; what was published before is untouched.
        """
        check_name(name)
        if tag is not None:
            LocalHub.check_tag(tag)
        if variable := self._offline():
            raise InputError(
                f"Publishing needs the network, and {variable} forbids it.",
                where=self._where(name),
                fix=f"unset {variable}",
            )
        bundle = read_bundle(folder)
        store, revision = self._store(), sha256_of(folder / SUMS)[:16]
        store.check_writable()
        known = self._tags(store, name)
        self._check_tag(known, name, tag, revision, force)
        base = f"{name}/revisions/{revision}"
        sizes = {file: (folder / file).stat().st_size for file in (*bundle.sums, SUMS)}
        new = store.read(f"{base}/{SUMS}") != (folder / SUMS).read_bytes()
        send = [
            file
            for file in sizes
            if force or (new and file == SUMS) or store.size(f"{base}/{file}") != sizes[file]
        ]
        if dry_run:
            there = [file for file in sizes if file not in send]
            total = sum(sizes[file] for file in send)
            return Plan(name, bool(known), known.get(LATEST), send, [], [], there, total)
        for file in send:  # the list of hashes is the last one
            store.put(folder / file, f"{base}/{file}")
            if store.size(f"{base}/{file}") != sizes[file]:
                raise RunError("A file did not arrive whole.", where=f"{self.shown}/{base}/{file}")
        wanted = {LATEST: revision, **({tag: revision} if tag else {})}
        moved = False
        for _ in range(_ATTEMPTS):
            tags = self._tags(store, name)
            if wanted.items() <= tags.items():
                return AtHub(name, revision, self._where(name), new, moved)
            self._check_tag(tags, name, tag, revision, force)
            refs = {"schema": 1, "tags": {**tags, **wanted}}
            store.write(f"{name}/refs.json", (json.dumps(refs, indent=1) + "\n").encode())
            moved = True
        if wanted.items() <= self._tags(store, name).items():
            return AtHub(name, revision, self._where(name), new, moved)
        raise RunError(
            "The revision is there, but others keep changing the list of tags.",
            where=self._where(name, revision),
            fix="publish it again: nothing is sent twice",
        )

    def _check_tag(
        self, tags: dict[str, str], name: str, tag: str | None, revision: str, force: bool
    ) -> None:
        if tag is not None and tags.get(tag, revision) != revision and not force:
            raise InputError(
                f"The tag {tag} of {name} points at {tags[tag]} already, and tags don't move.",
                where=self._where(name, tag),
                fix="choose another tag, or move it with --force",
            )
