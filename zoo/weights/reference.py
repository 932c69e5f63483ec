"""What a user may call a model: ``[KIND:]name[@revision]``, where the kind can mostly be seen.

``local:`` org/name of the local hub; ``hf:`` org/name of the Hugging Face hub; ``hub:`` org/name
below an address of any store; ``catalog:`` a released one (``swav_resnet50.800ep``); ``path:`` a published
folder or a file of weights; ``run:``; ``url:``; ``timm:``; ``random:`` and ``supervised:`` with an architecture.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..addresses import without_credentials
from ..errors import InputError, did_you_mean
from .bundle import SUMS, WEIGHTS
from .catalog import CATALOG
from .hubs.folder import split_address
from .hubs.hf_client import check_repo_name
from .hubs.local import LocalHub
from .hubs.transport import shown

__all__ = ["KINDS", "Reference", "parse_reference"]

KINDS = ("local", "hf", "hub", "catalog", "path", "file", "run", "url", "timm", "random", "supervised")


@dataclass(frozen=True)
class Reference:
    """A parsed reference: its kind, the name (or path) and the revision or tag, if one was given."""

    kind: str
    name: str
    revision: str | None = None

    @property
    def where(self) -> str:
        """What to name in a message: the path, where it is one."""
        return self.name if self.kind in ("path", "file", "run") else str(self)

    def __str__(self) -> str:
        if self.kind == "url":
            return f"url:{shown(self.name)}"  # without user, password and query
        if self.kind == "hub":
            return f"hub:{without_credentials(self.name)}" + (f"@{self.revision}" if self.revision else "")
        return f"{self.kind}:{self.name}" + (f"@{self.revision}" if self.revision else "")


def _is_address_of_a_hub(kind: str, rest: str) -> bool:
    """Any address but those of the web: ``s3://``, ``gs://``, ``memory://``; of ``file://`` those in a hub.

    A name that is not there is one of a hub where that folder holds other models.
    """
    if not rest.startswith("//"):
        return False
    if kind == "file":
        folder, _, last = rest[2:].rpartition("/")
        path = Path(folder, last.partition("@")[0])
        if _exists(path) or _exists(Path(rest[2:])):
            return _exists(path / "refs.json")
        return _is_hub(path)
    return kind not in ("http", "https", *KINDS) and re.fullmatch(r"[A-Za-z0-9+.-]+", kind) is not None


def _is_hub(model: Path) -> bool:
    """Whether others lie where this model would."""
    try:
        return any(model.parent.parent.glob("*/*/refs.json"))
    except (OSError, ValueError):
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # e.g. a name that is too long for the disk
        return False


def parse_reference(text: str | os.PathLike[str]) -> Reference:
    """Read a reference. A path that exists is a path; ``org/name`` is in the local hub.

    Raises:
        InputError: an unknown kind, or neither a path nor a model (with the nearest names).
    """
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            "A model is named by a text or a path.", where=repr(text), fix="`zoo list` shows what there is"
        )
    kind, colon, rest = text.partition(":")
    if kind == "hub" or _is_address_of_a_hub(kind, rest):
        root, name, revision = split_address(text.removeprefix("hub:"))
        return Reference("hub", f"{root}/{name}", revision)
    if colon and kind in KINDS:
        if not rest:
            raise InputError("The reference names no model.", where=text)
        if kind in ("path", "file", "run", "url", "timm"):
            return Reference(kind, rest)
        name, _, revision = rest.partition("@")
        if kind == "hf":
            check_repo_name(name)
        return Reference(kind, name, revision or None)
    if kind in ("https", "http") and rest.startswith("//"):
        return Reference("url", text)
    path = Path(text).expanduser()
    if _exists(path):
        if path.is_file():
            return Reference("file", str(path))
        if any((path / name).is_file() for name in (SUMS, "zoo.json")):
            return Reference("path", str(path))
        if (path / "run.json").is_file():
            return Reference("run", str(path))
        if (path / WEIGHTS).is_file():  # another library's folder
            return Reference("file", str(path / WEIGHTS))
        raise InputError(
            "This path is neither a published model (SHA256SUMS, zoo.json) nor a run (run.json).",
            where=path,
            fix="name the file of weights in it, or publish a run (zoo publish)",
        )
    name, _, revision = text.partition("@")
    if colon and "/" not in kind:
        raise InputError(
            f"There is no kind of model called {kind!r}.",
            where=text,
            fix=did_you_mean(kind, KINDS) + "Known: " + ", ".join(f"{k}:" for k in KINDS),
        )
    known = LocalHub().names()
    if name in known:
        return Reference("local", name, revision or None)
    if text in CATALOG:
        return Reference("catalog", text)
    tags = [card for card in CATALOG if card.startswith(f"{text}.")]
    near = f"say which: {', '.join(tags)}. " if tags else ""
    elsewhere = f"on the Hugging Face hub it is hf:{text}; " if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
    raise InputError(
        "This is neither a path that exists, nor a model in the local hub, nor one of the catalog.",
        where=text,
        fix=(near or did_you_mean(name, [*known, *CATALOG], count=3, likeness=0.4))
        + elsewhere
        + "`zoo list` shows what there is; "
        "random:resnet50 and supervised:resnet50 are models too",
    )
