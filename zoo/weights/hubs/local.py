"""The local hub: a folder of models with immutable revisions, tags and ``latest``.

``<home>/<org>/<name>/revisions/<revision>/`` holds bundles, ``refs.json`` beside them says which revision
each tag means. A revision's name is the hash of its content, so publishing the same again changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError, did_you_mean
from ...files import disk_errors, read_json, whole_folder, write_json
from ...homes import hub_home
from ..bundle import SUMS, Bundle, read_bundle

__all__ = ["LATEST", "LocalHub", "Published", "check_name", "fetch_model"]

LATEST = "latest"
_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_REVISION = re.compile(r"[0-9a-f]{16}")


def check_name(name: str) -> str:
    """``org/name``, each of letters, digits, ``.``, ``_`` and ``-``.

    Raises:
        InputError: anything else, so that no name can lead out of the hub.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(_PART.fullmatch(part) and ".." not in part for part in parts):
        raise InputError(
            "A model's name is org/name, of letters, digits, '.', '_' and '-'.",
            where=name,
            fix="e.g. me/swav_tiny",
        )
    return name


@dataclass(frozen=True)
class Published:
    """What publishing did: the revision, and whether it was new."""

    name: str
    revision: str
    path: Path
    new: bool
    moved: bool
    """Whether ``latest`` or the tag pointed elsewhere before (or nowhere)."""


class LocalHub:
    """Models below a folder.

    Args:
        home: the folder; ``zoo.homes.hub_home()`` by default.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = hub_home() if home is None else home

    def names(self) -> list[str]:
        """All models, sorted."""
        found = self.home.glob("*/*/refs.json")
        return sorted(f"{file.parent.parent.name}/{file.parent.name}" for file in found)

    def _folder(self, name: str) -> Path:
        return self.home / check_name(name)

    def refs(self, name: str) -> dict[str, str]:
        """Tag -> revision, ``latest`` among them.

        Raises:
            InputError: no such model, with the nearest name.
        """
        file = self._folder(name) / "refs.json"
        if not file.is_file():
            raise InputError(
                "There is no such model in the local hub.",
                where=f"{name} (in {self.home})",
                fix=did_you_mean(name, self.names()) + "`zoo list` shows what there is",
            )
        return _read_tags(file)

    def revisions(self, name: str) -> list[str]:
        """All revisions that are on disk, oldest first."""
        folder = self._folder(name) / "revisions"
        if not folder.is_dir():
            return []
        found = [entry for entry in folder.iterdir() if _REVISION.fullmatch(entry.name)]
        return [e.name for e in sorted(found, key=lambda entry: (entry.stat().st_mtime_ns, entry.name))]

    def resolve(self, name: str, revision: str | None = None) -> Bundle:
        """Open a revision by tag, full name or unique beginning; ``latest`` by default.

        Raises:
            InputError: no such model or revision.
        """
        tags = self.refs(name)
        wanted = revision or LATEST
        found = tags.get(wanted)
        if found is None:
            matches = (
                [known for known in self.revisions(name) if known.startswith(wanted)]
                if len(wanted) >= 4
                else []
            )
            if len(matches) != 1:
                raise InputError(
                    "The model has no such revision.",
                    where=f"{name}@{wanted}",
                    fix=f"tags: {', '.join(sorted(tags))}; revisions: {', '.join(self.revisions(name))}",
                )
            found = matches[0]
        path = self._folder(name) / "revisions" / found
        sums = path / SUMS
        # The list before what it lists: with a damaged list the wrong file would be blamed.
        if sums.is_file() and hashlib.sha256(sums.read_bytes()).hexdigest()[:16] != found:
            raise InputError(
                "The list of hashes is not what was published: it is damaged or was changed.",
                where=sums,
                fix="publish or pull the model again",
            )
        return read_bundle(path)

    def newest(self) -> str:
        """The name of the model that was published last; damaged ones are passed over.

        Raises:
            InputError: there is none.
        """
        when: dict[str, int] = {}
        for name in self.names():
            with contextlib.suppress(InputError):
                when[name] = self.resolve(name).path.stat().st_mtime_ns
        if not when:
            raise InputError(
                "No model was named, and none is published.", fix="name one, or publish a run: zoo publish"
            )
        return max(when, key=lambda name: when[name])

    def publish(
        self, name: str, write: Callable[[Path], Any], tag: str | None = None, force: bool = False
    ) -> Published:
        """Add a revision, whole or not at all, and point ``latest`` (and a tag) at it.

        Args:
            name: ``org/name``.
            write: fills an empty folder with a bundle.
            tag: a second name for the revision; fixed once given.
            force: move a tag that points elsewhere.

        Raises:
            InputError: a bad name, or a tag that is taken.
            RunError: the disk is full or read-only; what was there is untouched.
        """
        folder = self._folder(name)
        if tag is not None:
            self.check_tag(tag)
        with disk_errors("Publishing", folder, "ZOO_HOME"), self._locked(folder):
            (folder / "revisions").mkdir(exist_ok=True)
            self._sweep(folder)
            self._sweep(folder / "revisions")
            known = _read_tags(folder / "refs.json") if (folder / "refs.json").is_file() else {}
            staged = folder / "revisions" / "incoming"
            shutil.rmtree(staged, ignore_errors=True)
            with whole_folder(staged) as temporary:
                write(temporary)
            revision = hashlib.sha256((staged / SUMS).read_bytes()).hexdigest()[:16]
            if tag is not None and known.get(tag, revision) != revision and not force:
                shutil.rmtree(staged)
                raise _taken(name, tag, known[tag])
            target = folder / "revisions" / revision
            new = not self._is_whole(target)
            if new:
                shutil.rmtree(target, ignore_errors=True)
                os.rename(staged, target)
            else:
                shutil.rmtree(staged)
            tags = {**known, LATEST: revision, **({tag: revision} if tag else {})}
            if tags != known:
                write_json(folder / "refs.json", {"schema": 1, "tags": tags})
        return Published(name, revision, target, new, tags != known)

    def tag(self, name: str, revision: str | None, tag: str, force: bool = False) -> str:
        """Give a revision a second name; returns the revision."""
        self.check_tag(tag)
        folder = self._folder(name)
        found = self.resolve(name, revision).path.name
        with disk_errors("Tagging", folder, "ZOO_HOME"), self._locked(folder):
            tags = self.refs(name)
            if tags.get(tag, found) != found and not force:
                raise _taken(name, tag, tags[tag])
            write_json(folder / "refs.json", {"schema": 1, "tags": {**tags, tag: found}})
        return found

    def pull(self, name: str, revision: str | None, target: Path) -> Bundle:
        """Copy a revision into a new folder, every byte checked.

        Raises:
            InputError: no such revision, a damaged file, or a target that exists.
        """
        bundle = self.resolve(name, revision)
        bundle.verify(full=True)
        with disk_errors("Copying the model", target):
            if target.exists():
                raise InputError("The target exists already.", where=target, fix="choose another --out")
            with whole_folder(target) as temporary:
                for file in (*bundle.sums, SUMS):
                    shutil.copyfile(bundle.path / file, temporary / file)
        return read_bundle(target)

    def remove(self, name: str) -> None:
        """Delete a model with all its revisions."""
        folder = self._folder(name)
        self.refs(name)
        with disk_errors("Removing", folder, "ZOO_HOME"), self._locked(folder):
            # Without refs.json it is no model any more: a removal that is cut short leaves none behind.
            (folder / "refs.json").unlink()
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()

    @staticmethod
    def _is_whole(path: Path) -> bool:
        if not path.is_dir():
            return False
        try:
            read_bundle(path).verify(full=True)
        except InputError:
            return False
        return True

    @staticmethod
    def check_tag(tag: str) -> None:
        """Refuse what can't be a tag.

        Raises:
            InputError: it can't.
        """
        if tag == LATEST or _REVISION.fullmatch(tag) or not _PART.fullmatch(tag):
            raise InputError(
                "A tag is a short word other than `latest`, of letters, digits, '.', '_' and '-'.", where=tag
            )

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Remove what a killed publisher left half-written (we hold the lock: nobody is writing)."""
        for entry in folder.iterdir():
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    @staticmethod
    @contextlib.contextmanager
    def _locked(folder: Path) -> Iterator[None]:
        lock = folder / ".lock"
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                # While we waited the model may have been removed, and its lock with it.
                if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                    yield
                    return
            finally:
                os.close(handle)


def fetch_model(
    name: str, revision: str | None = None, *, progress: bool = True, verify: bool = False
) -> Bundle:
    """A model of the user's hub; nothing has to be fetched.

    Raises:
        InputError: no such model or revision.
    """
    return LocalHub().resolve(name, revision)


def _read_tags(file: Path) -> dict[str, str]:
    try:
        tags = read_json(file)["tags"]
        if not all(isinstance(revision, str) for revision in tags.values()):
            raise ValueError("a tag names no revision")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The list of the model's tags can't be read ({error!r}).",
            where=file,
            fix=f"delete {file.name} and publish again; the revisions beside it stay",
        ) from None
    return dict(tags)


def _taken(name: str, tag: str, revision: str) -> InputError:
    return InputError(
        f"The tag {tag} of {name} points at {revision} already, and tags don't move.",
        where=f"{name}@{tag}",
        fix="choose another tag, or move it with --force",
    )
