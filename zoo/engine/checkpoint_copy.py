"""A copy of a run's checkpoints at another address, whatever fsspec can write to."""

from __future__ import annotations

import logging
import posixpath
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..addresses import shown_urls, without_credentials
from ..errors import InputError, RunError
from ..files import write_json
from .checkpoint import MANIFEST, CheckpointFolder, step_name, step_of

__all__ = ["CheckpointCopy", "check_address", "without_credentials"]

log = logging.getLogger("zoo")

_OWNER = "copy.json"
_SHORTEST = 4  # blotting out every "a" would leave no message


class CheckpointCopy:
    """Keeps ``<address>/step-N/`` like the folder: the same steps, pruned by the same rule.

    Every copy brings the address up to date, so that what failed once is made up for by the next. Of a
    step the manifest comes last: without it the copy of a step is not whole.

    An address belongs to one run: ``copy.json``, here and there, holds the same random id, and where
    another run's is found nothing is written or removed.

    Args:
        folder: the checkpoints; copies are ordinary checkpoints, so one that was fetched back loads.
        address: a path or URL for fsspec.

    Raises:
        InputError: no address, one that needs a package which isn't there, or the folder itself.
    """

    def __init__(self, folder: CheckpointFolder, address: str) -> None:
        self._folder = folder
        self._address = address
        self._label = without_credentials(address)
        self._secrets = sorted(_secrets(address), key=len, reverse=True)
        self._there: set[int] = set()  # known to be whole at the address
        self._damaged: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._check_address()

    def start(self) -> None:
        """Bring the copy up to date in the background; a copy under way is followed by another."""
        with self._lock:
            self._again = True
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name="checkpoint copy")
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no threads any more
            self._run()

    def join(self) -> None:
        """Wait for the copy under way."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._bring_up_to_date()
            except Exception as error:  # the run must go on without a copy
                said = f"{type(error).__name__}: {error}"
                if isinstance(error, RunError):
                    said = f"{error.what} ({error.fix})"
                log.warning(
                    "copying checkpoints to %s failed and is tried again with the next one: %s",
                    self._label,
                    self._masked(said),
                )

    def _bring_up_to_date(self) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(self._address)
        root = root.rstrip("/")
        files.invalidate_cache()
        there = {step for step, _ in _listed(files, root)}
        self._claim(files, root, bool(there))
        self._there &= there
        steps = self._folder.steps()
        if not steps:
            return
        for step in reversed(steps):
            with self._folder.held(step) as path:
                if step not in self._there and path.is_dir() and step not in self._damaged:
                    self._put(files, step, path, f"{root}/{step_name(step)}")
        self._prune(files, root, steps[-1])

    def _claim(self, files: Any, root: str, occupied: bool) -> None:
        """Make the address this run's own."""
        mine = self._folder.folder / _OWNER
        if not mine.is_file():
            write_json(mine, {"schema": 1, "id": uuid.uuid4().hex})
        content = mine.read_bytes()
        theirs = _content(files, f"{root}/{_OWNER}")
        if theirs is None and not occupied:
            _make_folder(files, root)
            files.put_file(str(mine), f"{root}/{_OWNER}")
        elif theirs != content:
            raise RunError(
                "The address holds checkpoints of another run.",
                where=self._label,
                fix="give each run an address of its own; if they are this run's, put the address's "
                f"{_OWNER} into {self._folder.folder}",
            )

    def _put(self, files: Any, step: int, path: Path, target: str) -> None:
        there = _content(files, f"{target}/{MANIFEST}")
        if there != (path / MANIFEST).read_bytes():
            try:
                self._folder.verify(step)
            except InputError as error:
                log.warning("a checkpoint is not copied: %s %s", error.what, error.where)
                self._damaged.add(step)
                return
            if there is not None:
                files.rm_file(f"{target}/{MANIFEST}")
            _make_folder(files, target)
            names = sorted(file.name for file in path.iterdir() if file.name != MANIFEST)
            for name in [*names, MANIFEST]:
                files.put_file(str(path / name), f"{target}/{name}")
        self._there.add(step)

    def _prune(self, files: Any, root: str, newest: int) -> None:
        listed = dict(_listed(files, root))
        whole = [s for s, name in listed.items() if s in self._there or files.exists(f"{name}/{MANIFEST}")]
        keep = set(whole) - set(self._folder.superfluous(whole, newest))
        for step in listed.keys() - keep:
            if step in whole:
                files.rm_file(f"{listed[step]}/{MANIFEST}")  # half removed must not look whole
            files.rm(listed[step], recursive=True)
            self._there.discard(step)

    def _check_address(self) -> None:
        kind, protocol = _file_system(self._address)
        if protocol in ("file", "local"):
            # Absolute, whatever becomes the working folder later.
            self._address = kind._strip_protocol(self._address)
            if Path(self._address).resolve() == self._folder.folder.resolve():
                raise InputError(
                    "The copy of the checkpoints would be the checkpoints.",
                    where=self._label,
                    fix="choose another",
                )

    def _masked(self, text: str) -> str:
        from .trackers import without_secrets  # which imports the loop, and that one the checkpoints

        for secret in self._secrets:
            text = text.replace(secret, "***")
        return shown_urls(without_secrets(text))


def check_address(address: str) -> None:
    """Refuse an address that no copy can be kept at, before anything is made; nothing is asked of it.

    Raises:
        InputError: no address, or one that needs a package which isn't there.
    """
    _file_system(address)


def _file_system(address: str) -> tuple[Any, str]:
    """fsspec's class for an address, and what its kind is called."""
    from fsspec.registry import (  # type: ignore[import-untyped]
        get_filesystem_class,
        known_implementations,
    )
    from fsspec.utils import get_protocol  # type: ignore[import-untyped]

    fix, label = "give a path or an address such as s3://bucket/folder", without_credentials(address)
    if not address.strip():
        raise InputError("The address for copies of checkpoints is empty.", fix=fix)
    protocol = get_protocol(address)
    try:
        return get_filesystem_class(protocol), protocol
    except ValueError:
        raise InputError(
            f"Nothing is known of addresses of the kind {protocol}://.", where=label, fix=fix
        ) from None
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise InputError(
            f"Copies of checkpoints to {protocol}:// need a package that isn't installed "
            f"({error.__cause__ or error}).",
            where=label,
            fix=f'pip install "{f"fsspec[{protocol}]" if package == "fsspec" else package}"',
        ) from None


def _secrets(address: str) -> set[str]:
    """What must not be shown of an address, in the spellings that an error message could have."""
    rest = address.partition("://")[2]
    user, query = rest.rpartition("@")[0], rest.partition("?")[2]
    values = [pair.partition("=")[2] for pair in re.split("[&;]", query)]
    found = {user, user.partition(":")[2], query, *values}
    return {text for secret in found for text in (secret, unquote(secret)) if len(text) >= _SHORTEST}


def _listed(files: Any, root: str) -> Iterator[tuple[int, str]]:
    """(step, name) of the copies at the address, whole or not."""
    try:
        names = files.ls(root, detail=False)
    except FileNotFoundError:
        return
    for name in names:
        step = step_of(posixpath.basename(name.rstrip("/")))
        if step is not None:
            yield step, name.rstrip("/")


def _content(files: Any, name: str) -> bytes | None:
    try:
        return bytes(files.cat_file(name))
    except FileNotFoundError:
        return None


def _make_folder(files: Any, path: str) -> None:
    """Folders where there are such things; never a bucket, which a mistyped address would create."""
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    if isinstance(files, LocalFileSystem):
        files.makedirs(path, exist_ok=True)
        return
    for level in (posixpath.dirname(path), path):
        if "/" in level.strip("/"):
            try:
                files.mkdir(level, create_parents=False)
            except Exception as error:  # it is there, or the writing that follows says what is wrong
                log.debug("no folder made at %s: %s", without_credentials(level), type(error).__name__)
