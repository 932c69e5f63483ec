"""What a user may call a model: ``[local:|path:|run:|random:|supervised:]name[@revision]``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, did_you_mean
from .bundle import SUMS, WEIGHTS
from .hubs.local import LocalHub

__all__ = ["KINDS", "Reference", "parse_reference"]

KINDS = ("local", "path", "run", "random", "supervised")


@dataclass(frozen=True)
class Reference:
    """A parsed reference: its kind, the name (or path) and the revision or tag, if one was given."""

    kind: str
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f"@{self.revision}" if self.revision else "")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # e.g. a name that is too long for the disk
        return False


def parse_reference(text: str) -> Reference:
    """Read a reference. A path that exists is a path; ``org/name`` is in the local hub.

    Raises:
        InputError: an unknown kind, or neither a path nor a model (with the nearest names).
    """
    kind, colon, rest = text.partition(":")
    if colon and kind in KINDS:
        if not rest:
            raise InputError("The reference names no model.", where=text)
        if kind in ("path", "run"):
            return Reference(kind, rest)
        name, _, revision = rest.partition("@")
        return Reference(kind, name, revision or None)
    path = Path(text).expanduser()
    if _exists(path):
        if any((path / name).is_file() for name in (SUMS, "zoo.json", WEIGHTS)):
            return Reference("path", str(path))
        if (path / "run.json").is_file():
            return Reference("run", str(path))
        raise InputError(
            "This path is neither a published model (SHA256SUMS, zoo.json) nor a run (run.json).",
            where=path,
            fix="publish a run (zoo publish); weights in a single file can start one: zoo pretrain --init-from",
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
    raise InputError(
        "This is neither a path that exists nor a model in the local hub.",
        where=text,
        fix=did_you_mean(name, known, count=3, likeness=0.4) + "`zoo list` shows what there is; "
        "random:resnet50 and supervised:resnet50 are models too",
    )
