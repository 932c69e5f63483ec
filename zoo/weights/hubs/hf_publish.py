"""Publishing a folder to the Hugging Face hub: all of it in one commit, or nothing. No torch here.

The order is what keeps both sides whole: permission first, then the contents of large files (which nobody
sees), then one commit on the head that was looked at, then the hub's hashes against ours, then the tag. An
answer that was lost is never guessed: the head is read again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ...addresses import forbidden
from ...errors import InputError, RunError
from ...files import disk_errors, sha256_of
from .hf_client import Client, check_repo_name
from .hf_download import git_hash
from .hf_refused import Refused
from .local import LATEST
from .transport import PATIENT, Patience

__all__ = ["OnHub", "Plan", "Publisher"]

_MAIN = "main"
_TAG = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OURS = ("SHA256SUMS", "zoo.json", "config.json", "README.md")
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Local:
    """A file that is to be published."""

    path: Path
    sha256: str

    @cached_property
    def git(self) -> str:
        """The name that git gives to its content."""
        return git_hash(self.path.read_bytes())

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class Plan:
    """What publishing would do.

    Args:
        name: ``org/name``.
        exists: whether the repository does.
        head: its newest commit, if it has one.
        send: files that are new or changed.
        drop: files of an earlier model that have no place in this one.
        kept: files that are there and are nobody's business here.
        unchanged: files that are there already.
        size: bytes of ``send``.
    """

    name: str
    exists: bool
    head: str | None
    send: list[str]
    drop: list[str]
    kept: list[str]
    unchanged: list[str]
    size: int


@dataclass(frozen=True)
class OnHub:
    """What publishing did.

    Args:
        name: ``org/name``.
        commit: that holds the model now.
        url: its page.
        new: whether a commit was made.
        tag: that names it.
        plan: what there was to do.
    """

    name: str
    commit: str
    url: str
    new: bool
    tag: str | None
    plan: Plan


def _refuse_readers(who: dict[str, Any]) -> None:
    """Of a token made for reading the hub says so; of the others only trying tells what they may."""
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise Refused("forbidden", "it is one for reading only")


@dataclass
class _Head:
    """The newest commit and its files: path -> (size, SHA-256 or git's hash)."""

    commit: str | None
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    private: bool = False


class Publisher:
    """One folder on its way to one repository: ``take`` it, then ``plan`` or ``publish``.

    Args:
        name: ``org/name``.
        tag: a fixed name for the commit.
        private: make the repository private, if it has to be made.
        force: replace a model of others, or move a tag.
        patience: how long to wait for the hub.
        progress: show the client's bars on a terminal.

    Raises:
        InputError: a name or a tag that can't be one, no token, or no network allowed.
    """

    def __init__(
        self,
        name: str,
        *,
        tag: str | None = None,
        private: bool = False,
        force: bool = False,
        patience: Patience = PATIENT,
        progress: bool = True,
    ) -> None:
        self.name = check_repo_name(name)
        self.where = f"hf:{name}"
        if tag is not None and (tag in (_MAIN, LATEST) or not _TAG.fullmatch(tag) or _COMMIT.fullmatch(tag)):
            raise InputError(
                "A tag is a short word other than `main` and `latest`, of letters, digits, '.', '_' and '-'.",
                where=tag,
            )
        self.tag, self.private, self.force = tag, private, force
        self.client = client = Client(patience, progress)
        self.local: dict[str, Local] = {}
        if (variable := forbidden()) is not None:
            raise InputError(
                f"Publishing needs the network, and {variable} forbids it.",
                where=self.where,
                fix=f"unset {variable}",
            )
        if not client.token:
            lacks = "yours is not sent over plain http" if client.withheld else "there is none"
            raise InputError(
                f"Publishing needs a token, and {lacks}.", where=client.host, fix=client.how_to_log_in
            )

    def take(self, folder: Path, sums: dict[str, str] | None = None) -> None:
        """Take the files of a folder.

        Args:
            folder: what the repository shall hold.
            sums: SHA-256 of files in it that are known already.
        """
        known = sums or {}
        with disk_errors("Reading the model", folder):
            files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
            self.local = {
                name: Local(path, known.get(name) or sha256_of(path))
                for name, path in files.items()
                if path.is_file()
            }

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            raise self.client.explain(refused, self.where, "Publishing") from None

    # --- looking ---

    def plan(self) -> Plan:
        """Check everything that can be checked without changing anything.

        Raises:
            InputError: a wrong token, no permission, a tag that is taken, another's model, or a public
                repository where a private one is asked for.
            RunError: the hub can't be reached.
        """
        client = self.client
        with self._explained():
            _refuse_readers(client.call(client.api.whoami))
            try:
                head = self._look()
            except Refused as refused:
                if refused.kind != "missing":
                    raise
                return self._compared(None)
            self._may_write()
            if self.private and not head.private:
                raise InputError(
                    "The repository exists and is public; --private makes new ones private only.",
                    where=self.where,
                    fix=f"make it private first ({client.endpoint}/{self.name}/settings), or leave --private away",
                )
            self._check_owner(head)
            self._check_tag(head)
            return self._compared(head)

    def _look(self) -> _Head:
        client = self.client
        info = client.call(client.api.model_info, self.name, timeout=client.patience.timeout)
        if info.sha is None:
            return _Head(None, {}, bool(info.private))
        return _Head(info.sha, self._tree(info.sha), bool(info.private))

    def _tree(self, commit: str) -> dict[str, tuple[int, str]]:
        def listed() -> dict[str, tuple[int, str]]:
            entries = self.client.api.list_repo_tree(self.name, revision=commit, recursive=True)
            files = [entry for entry in entries if hasattr(entry, "blob_id")]
            return {file.path: (file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files}

        return self.client.call(listed)

    def _may_write(self) -> None:
        """A question that only those get answered who may write; nothing is stored by it."""
        from huggingface_hub import CommitOperationAdd

        probe = CommitOperationAdd("README.md", b"may this be written?")
        self.client.call(self.client.api.preupload_lfs_files, self.name, [probe])

    def _check_owner(self, head: _Head) -> None:
        others = [name for name in head.files if name.endswith(_WEIGHTS)]
        if others and "zoo.json" not in head.files and not self.force:
            raise InputError(
                f"The repository holds a model that wasn't published by this toolkit, e.g. {others[0]}.",
                where=self.where,
                fix="choose another name, or replace it with --force",
            )

    def _refs(self) -> dict[str, str]:
        refs = self.client.call(self.client.api.list_repo_refs, self.name)
        return {ref.name: ref.target_commit for ref in refs.tags}

    def _check_tag(self, head: _Head) -> None:
        if self.tag is None or self.force:
            return
        target = self._refs().get(self.tag)
        if target is not None and self._differing(self._tree(target)):
            raise InputError(
                f"The tag {self.tag} names another model already ({target[:12]}), and tags don't move.",
                where=f"{self.where}@{self.tag}",
                fix="choose another tag, or move it with --force",
            )

    def _differing(self, remote: dict[str, tuple[int, str]]) -> list[str]:
        """Local files that the hub hasn't got with this content."""
        return [
            name
            for name, file in self.local.items()
            if name not in remote
            or remote[name][0] != file.size
            or remote[name][1] != (file.git if len(remote[name][1]) == 40 else file.sha256)
        ]

    def _is_stale(self, name: str) -> bool:
        path = PurePosixPath(name)
        ours = name in _OURS or path.parts[0] == "transformers"
        return name not in self.local and (ours or (len(path.parts) == 1 and name.endswith(_WEIGHTS)))

    def _compared(self, head: _Head | None) -> Plan:
        remote = head.files if head else {}
        send = self._differing(remote)
        drop = [name for name in remote if self._is_stale(name)]
        return Plan(
            name=self.name,
            exists=head is not None,
            head=head.commit if head else None,
            send=send,
            drop=drop,
            kept=[name for name in remote if name not in self.local and name not in drop],
            unchanged=[name for name in self.local if name not in send],
            size=sum(self.local[name].size for name in send),
        )

    # --- doing ---

    def publish(self) -> OnHub:
        """Publish; what an earlier attempt left on the hub is used.

        Raises:
            InputError: as ``plan``, or no permission to make the repository.
            RunError: the hub can't be reached, somebody else published meanwhile, or what it holds is not
                what was sent.
        """
        plan = self.plan()
        with self._explained():
            if not plan.exists:
                self._create()
                head = self._look()
                self._check_owner(head)  # somebody else may have made it meanwhile
                plan = self._compared(head)
            commit, new = plan.head, False
            if plan.send or plan.drop or commit is None:
                commit, new = self._commit(plan), True
            self._verify(commit)
        url = f"{self.client.endpoint}/{self.name}"
        if self.tag is not None:
            self._tag(commit, self.tag)
        return OnHub(self.name, commit, url, new, self.tag, plan)

    def _create(self) -> None:
        """Make the repository; one that can be written to although it couldn't be made is as good."""
        client = self.client
        try:
            client.call(client.api.create_repo, self.name, private=self.private)
        except Refused as refused:
            if refused.kind not in ("forbidden", "conflict", "token", "other"):
                raise
            try:
                self._may_write()
            except Refused:
                raise refused from None
        else:
            self._may_write()

    def _commit(self, plan: Plan) -> str:
        attempts = self.client.patience.attempts
        for attempt in range(attempts):
            try:
                return self._attempt(plan)
            except Refused as refused:
                if not (refused.passing or refused.kind in ("stale", "conflict", "storage", "page")):
                    raise
                head = self._look()
                if head.commit != plan.head and head.commit is not None:
                    if not self._compared(head).send and not self._compared(head).drop:
                        return head.commit  # it arrived; only the answer was lost
                    raise Refused("stale", "") from None
                if attempt + 1 == attempts or refused.kind == "page":
                    raise
                self.client.rest(attempt, refused)
        raise AssertionError("unreachable")

    def _attempt(self, plan: Plan) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationAdd(name, str(self.local[name].path)) for name in plan.send]
        changes += [CommitOperationDelete(name, is_folder=False) for name in plan.drop]
        done = self.client.call(
            self.client.api.create_commit,
            self.name,
            changes,
            commit_message=f"Publish {self.tag or self.name}",
            parent_commit=plan.head,
            again=False,
        )
        return str(done.oid)

    def _verify(self, commit: str) -> None:
        bad = self._differing(self._tree(commit))
        if bad:
            raise RunError(
                f"The hub doesn't hold what was sent: {', '.join(bad)}.",
                where=f"{self.where}@{commit}",
                fix="publish again; until then don't use that commit",
            )

    def _tag(self, commit: str, tag: str) -> None:
        """Name the commit; a tag that names the same files elsewhere stays where it is."""
        client = self.client
        try:
            for attempt in range(client.patience.attempts):
                target = self._refs().get(tag)
                if target == commit:
                    return
                if target is not None and not self.force:
                    if not self._differing(self._tree(target)):
                        return
                    raise InputError(
                        f"It is published, but {tag} names another model already ({target[:12]}).",
                        where=f"{self.where}@{commit}",
                        fix="choose another tag, or move it with --force",
                    )
                try:
                    if target is not None:
                        client.call(client.api.delete_tag, self.name, tag=tag)
                    client.call(client.api.create_tag, self.name, tag=tag, revision=commit, again=False)
                    return
                except Refused as refused:
                    if not (refused.passing or refused.kind == "conflict"):
                        raise
                    if attempt + 1 == client.patience.attempts:
                        raise
                    client.rest(attempt, refused)  # then the tags are read again: it may have arrived
        except Refused as refused:
            told = client.explain(refused, f"{self.where}@{commit}", "Tagging")
            told.what = f"The model is published, but has no tag {tag} yet. {told.what}"
            told.fix = "publish it again with the tag: nothing is sent twice"
            raise told from None
