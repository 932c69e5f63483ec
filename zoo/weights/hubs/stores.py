"""Places that files lie in, behind one small interface: whatever fsspec reaches, and a web server's folder. No torch here."""

from __future__ import annotations

import contextlib
import importlib
import posixpath
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from ...addresses import shown_urls, without_credentials
from ...errors import InputError, RunError, ZooError
from ...files import disk_errors
from .partial import Partial
from .transport import PATIENT, Patience, Unreachable, check_address, get

__all__ = ["FsspecStore", "Store", "WebStore", "open_store"]

_LIMIT = 16 << 20  # of what is read into memory: lists and descriptions


class Store(Protocol):
    """Files by their paths below an address.

    ``read`` gives a small file's content, or None if there is none; ``get`` copies a file here; ``put`` and
    ``write`` make one there, which appears whole or not at all where the place can do that; ``size`` is None if
    there is none. ``check_writable`` refuses what can only be read.
    """

    address: str

    def check_writable(self) -> None: ...

    def read(self, path: str) -> bytes | None: ...

    def get(self, path: str, target: Path) -> None: ...

    def size(self, path: str) -> int | None: ...

    def put(self, source: Path, path: str) -> None: ...

    def write(self, path: str, content: bytes) -> None: ...


def open_store(address: str, patience: Patience = PATIENT) -> Store:
    """The store of an address: ``http`` and ``https`` can only be read.

    Raises:
        InputError: no address, or one that needs a package which isn't installed.
    """
    if urlsplit(address).scheme in ("http", "https"):
        return WebStore(address, patience)
    return FsspecStore(address)


class WebStore:
    """A folder that a web server shows; read only.

    Args:
        address: of the folder; a query, e.g. a signature, is added to each file's address.
        patience: how long to wait.
    """

    def __init__(self, address: str, patience: Patience = PATIENT) -> None:
        self.address = check_address(address)
        self.patience = patience

    def read(self, path: str) -> bytes | None:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "file"
            try:
                self.get(path, target)
            except FileNotFoundError:
                return None
            return target.read_bytes()

    def get(self, path: str, target: Path) -> None:
        parts = urlsplit(self.address)
        address = parts._replace(path=f"{parts.path.rstrip('/')}/{quote(path)}").geturl()
        part = Partial(target)
        try:
            get(address, part, patience=self.patience, watch=lambda done, total: None)
        except Unreachable as error:
            part.discard()
            if re.search(r"answers (404|410)", str(error)):
                raise FileNotFoundError(path) from None
            raise RunError(
                f"A file can't be fetched: {error}.",
                where=f"{without_credentials(self.address)}/{path}",
                fix="check the address and the connection, then try again",
            ) from None
        target.with_name(f"{target.name}.json").unlink(missing_ok=True)

    def size(self, path: str) -> int | None:
        self.check_writable()
        return None

    def put(self, source: Path, path: str) -> None:
        self.check_writable()

    def write(self, path: str, content: bytes) -> None:
        self.check_writable()

    def check_writable(self) -> None:
        raise InputError(
            "A web server's folder can only be read.",
            where=without_credentials(self.address),
            fix="publish to a folder or to s3://..., and let the server show that",
        )


class FsspecStore:
    """Any address of fsspec's: ``s3://``, ``gs://``, ``file://``, ``memory://``, ``sftp://`` ...

    Args:
        address: of the folder.

    Raises:
        InputError: nothing is known of such addresses, or the package for them isn't installed.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.address = address
        self._shown = without_credentials(address)
        protocol = urlsplit(address).scheme
        try:
            with self._told("Opening"):
                self._files, self._root = url_to_fs(address)
        except (ValueError, ImportError) as error:
            known = importlib.import_module("fsspec.registry").known_implementations
            package = known[protocol]["class"].partition(".")[0] if protocol in known else None
            raise InputError(
                f"Addresses of the kind {protocol}:// can't be used "
                f"({'their package is not installed' if package else 'nobody knows them'}).",
                where=self._shown,
                fix=f"pip install {package}" if package else "e.g. s3://bucket/folder or file:///folder",
            ) from error
        self._on_disk = protocol in ("file", "local")
        self._made: set[str] = set()

    def check_writable(self) -> None:
        """Nobody knows before it is tried."""

    @contextlib.contextmanager
    def _told(self, doing: str, path: str = "", sending: bool = False) -> Iterator[None]:
        """What a store says, without the secrets of its address; a file that is missing there passes."""
        try:
            yield
        except (ZooError, ValueError, ImportError):
            raise
        except Exception as error:  # each kind of store has exceptions of its own
            if isinstance(error, FileNotFoundError) and not sending:
                raise
            said = shown_urls(" ".join(str(error).split()))[:200] or type(error).__name__
            for secret in (urlsplit(self.address).username, urlsplit(self.address).password):
                said = said.replace(secret, "***") if secret else said
            raise RunError(
                f"{doing} failed: {said}.",
                where=f"{self._shown}/{path}".rstrip("/"),
                fix="check the address, the connection and your permissions, then try again",
            ) from None

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def read(self, path: str) -> bytes | None:
        with self._told("Reading", path):
            try:
                self._files.invalidate_cache()
                if self._files.info(self._at(path))["size"] > _LIMIT:
                    raise RunError(
                        "The file is too large for what it should be.", where=f"{self._shown}/{path}"
                    )
                return bytes(self._files.cat_file(self._at(path)))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def get(self, path: str, target: Path) -> None:
        with self._told("Fetching", path):
            source = self._files.open(self._at(path), "rb")
        with source, disk_errors("Writing a download", target), open(target, "wb") as file:
            while block := self._block(source, path):
                file.write(block)

    def _block(self, source: Any, path: str) -> bytes:
        with self._told("Fetching", path):
            return bytes(source.read(1 << 20))

    def size(self, path: str) -> int | None:
        with self._told("Looking", path):
            try:
                self._files.invalidate_cache()
                return int(self._files.info(self._at(path))["size"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, source: Path, path: str) -> None:
        with self._told("Sending", path, sending=True):
            self._folder_of(path)
            if self._on_disk:
                self._whole(path, lambda place: shutil.copyfile(source, place))
            else:
                self._files.put_file(str(source), self._at(path))

    def write(self, path: str, content: bytes) -> None:
        with self._told("Writing", path, sending=True):
            self._folder_of(path)
            if self._on_disk:
                self._whole(path, lambda place: Path(place).write_bytes(content))
            else:
                self._files.pipe_file(self._at(path), content)

    def _whole(self, path: str, make: Any) -> None:
        """On a disk a file grows; so it grows under another name. Elsewhere an object appears when it is whole."""
        target = self._at(path)
        temporary = f"{posixpath.dirname(target)}/.{posixpath.basename(target)}.{uuid.uuid4().hex}.tmp"
        try:
            make(temporary)
            Path(temporary).replace(target)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _folder_of(self, path: str) -> None:
        """Folders where there are such things; never a bucket, which a mistyped address would make."""
        folder = posixpath.dirname(self._at(path))
        if folder in self._made:
            return
        self._made.add(folder)
        if self._on_disk:
            self._files.makedirs(folder, exist_ok=True)
            return
        parts = folder.strip("/").split("/")
        for count in range(2, len(parts) + 1):
            with contextlib.suppress(
                Exception
            ):  # it is there, or the writing that follows says what is wrong
                level = "/".join(parts[:count])
                self._files.mkdir(f"/{level}" if folder.startswith("/") else level, create_parents=False)
