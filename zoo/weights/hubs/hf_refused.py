"""What the Hugging Face hub's client raises, and what each of it means. No torch here."""

from __future__ import annotations

import contextlib
import importlib
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from ...addresses import shown_urls

__all__ = ["Refused", "classified", "hub_httpx", "hub_utils"]

_PASSING = ("busy", "server", "network", "unreachable")


class Refused(Exception):
    """The hub did not do what it was asked for.

    Args:
        kind: ``gated``, ``missing`` (a repository), ``revision``, ``entry`` (a file), ``token``, ``forbidden``,
            ``conflict``, ``stale`` (a parent), ``busy``, ``server``, ``network`` (it failed on the way),
            ``unreachable`` (no connection was made), ``certificate``, ``page`` (no hub answers like this),
            ``storage``, ``xet``, ``card``, ``disk`` (of this machine), ``offline`` or ``other``.
        said: what it said, for people, without secrets.
        wait: seconds that it asks to wait.
    """

    def __init__(self, kind: str, said: str, wait: float = 0.0) -> None:
        super().__init__(f"{kind}: {said}")
        self.kind = kind
        self.said = said
        self.wait = wait

    @property
    def passing(self) -> bool:
        """Whether another attempt may help."""
        return self.kind in _PASSING


def hub_utils() -> Any:
    """``huggingface_hub.utils``, whose names are found only when they are asked for."""
    return importlib.import_module("huggingface_hub.utils")


def hub_httpx() -> Any:
    """The HTTP library below it: httpx2 in version 2, httpx in version 1, whose first releases don't name it."""
    try:
        return hub_utils().httpx
    except AttributeError:
        return importlib.import_module("httpx")


@contextlib.contextmanager
def classified(token: str | None) -> Iterator[None]:
    """Everything that the client raises becomes ``Refused``; what is no failure of its kind passes.

    Args:
        token: what must not be in any message.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        kind, said, wait = _meaning(error)
        raise Refused(kind, _public(said, token), wait) from None
    except Exception as error:
        httpx = hub_httpx()
        if not isinstance(error, (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)):
            raise
        kind, said = _transport(error)
        raise Refused(kind, _public(said, token)) from None


def _public(said: str, token: str | None) -> str:
    said = " ".join(shown_urls(said).split())
    if token:
        said = said.replace(token, "***")
    return said[:300].rstrip(" .")


def _meaning(error: BaseException) -> tuple[str, str, float]:
    """Kind, words and the seconds to wait of an exception of the client."""
    from huggingface_hub import errors

    httpx = hub_httpx()

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError):  # the client looked into its cache after a failure
        return ("network", "no answer", 0.0) if cause is None else _meaning(cause)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline", "", 0.0
    if isinstance(error, httpx.HTTPError) and not isinstance(error, errors.HfHubHTTPError):
        return *_transport(error), 0.0
    if isinstance(error, errors.FileMetadataError):
        return "page", "its answer lacks what a hub says of a file", 0.0
    for kind, found in (
        ("gated", errors.GatedRepoError),
        ("missing", errors.RepositoryNotFoundError),
        ("revision", errors.RevisionNotFoundError),
        ("entry", errors.EntryNotFoundError),
    ):
        if isinstance(error, found):
            return kind, _last_part(error), 0.0
    if isinstance(error, errors.HfHubHTTPError):
        return _status(error)
    if isinstance(error, RuntimeError) and isinstance(cause, Exception):  # an upload, with its reason
        kind, said, wait = _meaning(cause)
        return ("storage" if kind in ("forbidden", "other", "missing") else kind), said, wait
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "token", "", 0.0
    if isinstance(error, ConnectionError) and "xet" in str(error):
        return "xet", "", 0.0
    if _is_of_a_disk(error):
        return "disk", str(error.strerror), 0.0
    if isinstance(error, OSError):
        return "network", error.strerror or str(error).partition(".")[0], 0.0
    if isinstance(error, ValueError) and "Invalid metadata" in str(error):
        return "card", str(error).partition("\n")[2], 0.0
    return "page", type(error).__name__, 0.0


def _status(error: Any) -> tuple[str, str, float]:
    status = error.response.status_code
    said = error.server_message or f"it answers {status}"
    wait = error.response.headers.get("Retry-After", "")
    seconds = float(wait) if re.fullmatch(r"\d{1,6}", wait) else 0.0
    kinds = {401: "token", 403: "forbidden", 404: "page", 409: "conflict", 412: "stale"}
    if status in (408, 425, 429):
        return "busy", said, seconds
    if status >= 500:
        return "server", f"it answers {status}", seconds
    return kinds.get(status, "other"), said, 0.0


def _last_part(error: BaseException) -> str:
    """The file that an answer about a file is about."""
    response = getattr(error, "response", None)
    return "" if response is None else urlsplit(str(response.url)).path.rpartition("/")[2]


def _is_of_a_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether this machine's files are the matter: full, read-only, not a folder, too many open ..."""
    networks = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, networks)


def _transport(error: BaseException) -> tuple[str, str]:
    """Kind and words of what a network did; a client's own words may hold addresses and are of no use."""
    name = type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "certificate", "its certificate is not valid: is this machine's clock right?"
    unreachable = {"ConnectError": "no connection", "ConnectTimeout": "no connection in time"}
    if name in unreachable:
        return "unreachable", unreachable[name]
    words = {
        "ReadTimeout": "nothing came for too long",
        "WriteTimeout": "nothing went out for too long",
        "RemoteProtocolError": "the connection was cut",
        "ReadError": "the connection was cut",
        "WriteError": "the connection was cut",
    }
    return "network", words.get(name, name)
