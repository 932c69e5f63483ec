"""What a user may call a model: ``[local:|path:|run:|random:|supervised:]name[@revision]``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from .bundle import SUMS
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
    if path.exists():
        return Reference("path" if (path / SUMS).is_file() else "run", str(path))
    name, _, revision = text.partition("@")
    if colon and "/" not in kind:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise InputError(
            f"There is no kind of model called {kind!r}.",
            where=text,
            fix=(f"did you mean {near[0]}:? " if near else "")
            + "Known: "
            + ", ".join(f"{k}:" for k in KINDS),
        )
    known = LocalHub().names()
    if name in known:
        return Reference("local", name, revision or None)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise InputError(
        "This is neither a path that exists nor a model in the local hub.",
        where=text,
        fix=(f"did you mean {' or '.join(near)}? " if near else "") + "`zoo list` shows what there is; "
        "random:resnet50 and supervised:resnet50 are models too",
    )
