"""Addresses as they may be shown, and whether the network may be used."""

from __future__ import annotations

import os
import re

__all__ = ["forbidden", "shown_urls", "without_credentials"]

_URL = re.compile(r"""[a-z0-9+.\-]+://[^\s'"<>]+""", re.IGNORECASE)


def without_credentials(address: str) -> str:
    """The address with ``user:password@`` and the query string blotted out; rather too much than too little.

    >>> without_credentials("sftp://me:secret@host/folder?token=abc")
    'sftp://***@host/folder?***'
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    user, at, place = rest.rpartition("@")
    if at and "?" in user:  # a password with a ?, or a query with an @
        return f"{scheme}://***"
    if at and re.search("[@:]", rest.partition("/")[0]):
        rest = f"***@{place}"
    path, question, _ = rest.partition("?")
    return f"{scheme}://{path}{'?***' if question else ''}"


def shown_urls(text: str) -> str:
    """A text in which no address shows its credentials."""
    return _URL.sub(lambda match: without_credentials(match[0]), text)


def forbidden() -> str | None:
    """The variable that forbids the network, if one does."""
    for variable in ("ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        if os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on"):
            return variable
    return None
