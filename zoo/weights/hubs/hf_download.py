"""Published models of the Hugging Face hub on this machine: in its client's cache, every byte checked. No torch here.

The cache is the one that timm, transformers and ``hf download`` share (``HF_HUB_CACHE``). A tag or branch
is resolved to a commit; offline, by what it was when it was last fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path

from ...addresses import forbidden
from ...errors import InputError, RunError, did_you_mean
from ...files import sha256_of
from ..bundle import SUMS, Bundle, read_bundle, read_sums
from .hf_client import Client, check_repo_name
from .hf_refused import Refused
from .transport import PATIENT, Patience

__all__ = ["cache_folder", "fetch_model", "git_hash", "revision_refused"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,254}")
MAIN = "main"


def cache_folder(name: str) -> Path:
    """Where the hub's client keeps a repository: ``refs/``, ``snapshots/<commit>/`` and ``blobs/``."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(os.path.expanduser(cache))) / f"models--{name.replace('/', '--')}"


def fetch_model(
    name: str,
    revision: str | None = None,
    *,
    progress: bool = True,
    verify: bool = False,
    patience: Patience = PATIENT,
) -> Bundle:
    """A published model of the hub, whole and verified against its ``SHA256SUMS``.

    A commit that is in the cache costs no network; a tag or a branch costs one question, and without an
    answer means what it meant last.

    Args:
        name: ``org/name``.
        revision: a tag, a branch or a whole commit; ``main`` by default.
        progress: say on standard error what is downloaded; on a terminal with the client's bars.
        verify: read and hash every byte even if an earlier check left a receipt.
        patience: how long to wait for the hub.

    Returns:
        The bundle; its folder is named by the commit. Treat it as read-only.

    Raises:
        InputError: no such repository or revision (the tags are named), a gated one, one that holds no
            model of the zoo, files that are not what was published, or an incomplete copy without network.
        RunError: the hub can't be reached, or the disk is full.
    """
    check_repo_name(name)
    wanted = revision or MAIN
    if not _REVISION.fullmatch(wanted) or ".." in wanted:
        raise InputError(
            "A revision is a tag, a branch or a commit.", where=f"hf:{name}@{wanted}", fix="e.g. @v1 or @main"
        )
    fetched = _Repository(name, wanted, patience, progress)
    folder = fetched.snapshot()
    if verify:
        with contextlib.suppress(InputError):
            _opened(folder).verify(full=True)  # a damaged file is seen below, and fetched again
    return fetched.whole(folder)


def _opened(folder: Path) -> Bundle:
    # Files of a snapshot are links into the repository's own store of contents.
    return read_bundle(folder, links_into=folder.parent.parent / "blobs")


def git_hash(content: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Repository:
    """One revision of one repository, on its way into the cache."""

    def __init__(self, name: str, revision: str, patience: Patience, progress: bool) -> None:
        self.name = name
        self.revision = revision
        self.cache = cache_folder(name)
        self.where = f"hf:{name}@{revision}"
        self.offline = forbidden()
        self.client = None if self.offline else Client(patience, progress)
        self.progress = progress
        self._told = False

    def snapshot(self) -> Path:
        """The folder of the revision's commit, with its list of hashes in it."""
        known = self.revision if _COMMIT.fullmatch(self.revision) else None
        if known is not None and (self.cache / "snapshots" / known / SUMS).is_file():
            return self.cache / "snapshots" / known
        if self.client is None:
            return self._offline_snapshot(known)
        return self._download(SUMS, self.revision).parent

    def _offline_snapshot(self, known: str | None) -> Path:
        commit = known
        with contextlib.suppress(OSError, UnicodeError):
            commit = known or (self.cache / "refs" / self.revision).read_text("utf-8").strip()
        folder = self.cache / "snapshots" / (commit or "none")
        if commit is None or not _COMMIT.fullmatch(commit) or not folder.is_dir():
            raise InputError(
                f"This model is not in the cache, and {self.offline} forbids the network.",
                where=self.where,
                fix=f"unset {self.offline} once; in the cache: {', '.join(self._cached()) or 'nothing of it'}",
            )
        if not (folder / SUMS).is_file():
            raise self._incomplete([SUMS])
        return folder

    def _cached(self) -> list[str]:
        refs = self.cache / "refs"
        return sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())

    def _incomplete(self, missing: list[str]) -> InputError:
        return InputError(
            f"The copy in the cache is incomplete: it lacks {', '.join(missing)}.",
            where=self.where,
            fix=f"unset {self.offline} once, and it is completed" if self.offline else "try again",
        )

    def whole(self, folder: Path) -> Bundle:
        """The bundle in a snapshot's folder: what is missing is fetched, what is damaged once more."""
        commit = folder.name
        if not self._is_as_sent(folder / SUMS):
            self._again(folder, [SUMS], commit)
            if not self._is_as_sent(folder / SUMS):
                raise self._not_published(folder, [SUMS])
        sums = read_sums(folder / SUMS)
        missing = [file for file in sums if not (folder / file).is_file()]
        if missing and self.client is None:
            raise self._incomplete(missing)
        for file in missing:
            self._download(file, commit)
        try:
            bundle = _opened(folder)
            bundle.verify()
            return bundle
        except InputError:
            damaged = [file for file, digest in sums.items() if sha256_of(folder / file) != digest]
            if not damaged:
                raise  # whole, but nothing that this version reads
        self._again(folder, damaged, commit)
        bad = [file for file in damaged if sha256_of(folder / file) != sums[file]]
        if bad:
            raise self._not_published(folder, bad)
        bundle = _opened(folder)
        bundle.verify()
        return bundle

    @staticmethod
    def _is_as_sent(sums: Path) -> bool:
        """Hold the list of hashes against the name of its content in the cache, which is git's own hash of it."""
        blob = sums.resolve()
        return not _COMMIT.fullmatch(blob.name) or git_hash(blob.read_bytes()) == blob.name

    def _again(self, folder: Path, files: list[str], commit: str) -> None:
        if self.client is None:
            raise InputError(
                f"Files in the cache are damaged: {', '.join(files)}.",
                where=folder,
                fix=f"unset {self.offline} once, and they are fetched again",
            )
        for file in files:
            self._download(file, commit, force=True)

    def _not_published(self, folder: Path, bad: list[str]) -> InputError:
        first = (folder / bad[0]).read_bytes()[:512].lstrip().lower() if bad else b""
        for file in bad:  # the next attempt starts afresh
            (folder / file).resolve().unlink(missing_ok=True)
            (folder / file).unlink(missing_ok=True)
        page = ": it is a web page" if first.startswith((b"<!doctype", b"<html")) else ""
        return InputError(
            f"What came is not what was published (its hash differs): {', '.join(bad)}{page}.",
            where=self.where,
            fix="try again; if it stays so, tell the publisher",
        )

    def _download(self, file: str, revision: str, force: bool = False) -> Path:
        from huggingface_hub import hf_hub_download

        client = self.client
        assert client is not None
        if self.progress and file != SUMS and not sys.stderr.isatty() and not self._told:
            print(f"fetching {self.where} from {client.host}", file=sys.stderr)
            self._told = True
        try:
            path = client.call(
                hf_hub_download,
                self.name,
                file,
                revision=revision,
                cache_dir=self.cache.parent,
                etag_timeout=client.patience.timeout,
                token=client.token,
                endpoint=client.endpoint,
                force_download=force,
            )
        except Refused as refused:
            raise self._explained(refused, file) from None
        return Path(path)

    def _explained(self, refused: Refused, file: str) -> InputError | RunError:
        client = self.client
        assert client is not None
        if refused.kind == "revision":
            return revision_refused(client, self.name, self.revision)
        if refused.kind == "entry" and file == SUMS:
            return InputError(
                f"The repository is no published model of the zoo: it has no {SUMS}.",
                where=self.where,
                fix=f"load its file of weights: url:{client.endpoint}/{self.name}/resolve/main/FILE",
            )
        return client.explain(refused, self.where, "Fetching the model")  # type: ignore[return-value]


def revision_refused(client: Client, name: str, revision: str) -> InputError:
    """What to tell of a revision that isn't there: which ones are."""
    tags: list[str] = []
    with contextlib.suppress(Refused):
        refs = client.call(client.api.list_repo_refs, name)
        tags = [ref.name for ref in (*refs.tags, *refs.branches)]
    return InputError(
        "The repository has no such revision.",
        where=f"hf:{name}@{revision}",
        fix=did_you_mean(revision, tags) + f"there are: {', '.join(tags) or 'none that can be listed'}",
    )
