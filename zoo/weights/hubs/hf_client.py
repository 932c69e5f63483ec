"""The Hugging Face hub's own client: which hub, whose token, and what each of its failures means. No torch here.

Written for huggingface_hub 1 and 2. Whatever goes wrong becomes one ``Refused``, which holds no secrets; the
token is sent to the hub's own address only, and over plain http only to this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...addresses import forbidden, shown_urls
from ...errors import InputError, RunError, ZooError
from .hf_refused import Refused, classified, hub_utils
from .transport import PATIENT, Patience

__all__ = ["CONSENT", "Client", "check_repo_name"]

CONSENT = "ZOO_TOKEN_OVER_HTTP"
"""The variable that allows a token to be sent over plain http to another machine."""

_PUBLIC = "https://huggingface.co"
_LONG = 15.0  # seconds
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
T = TypeVar("T")


def check_repo_name(name: str) -> str:
    """``org/name`` by the hub's rules.

    Raises:
        InputError: a path of this machine, or a name that the hub would refuse; the rule is named.
    """
    if re.match(r"[./~\\]|[A-Za-z]:", name) or name.count("/") > 1:
        raise InputError(
            "This is a path, and hf: wants a repository of the Hugging Face hub, org/name.",
            where=f"hf:{name}",
            fix="leave hf: away for a path of this machine",
        )
    parts = name.split("/")
    broken = None
    if len(parts) != 2 or not all(parts):
        broken = "its form is org/name"
    elif not all(map(_NAME.fullmatch, parts)):
        broken = "letters, digits, '-', '_' and '.', none of '-' and '.' at an end"
    elif "--" in name or ".." in name:
        broken = "'--' and '..' are not allowed"
    elif name.endswith(".git"):
        broken = "it doesn't end in .git"
    elif len(name) > 96:
        broken = "at most 96 characters"
    if broken:
        raise InputError(
            f"The Hugging Face hub takes no such name ({broken}).",
            where=f"hf:{name}",
            fix="e.g. hf:me/swav-tiny",
        )
    return name


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Client:
    """A hub, the user's token for it, and calls that end in an answer or in ``Refused``.

    ``HF_ENDPOINT`` names another hub than the public one. The token is found as the hub's client finds it.

    Args:
        patience: how long to wait, and how often to try what may pass.
        progress: show the client's own bars on a terminal.

    Raises:
        InputError: ``HF_ENDPOINT`` is no address.
    """

    def __init__(self, patience: Patience = PATIENT, progress: bool = True) -> None:
        if find_spec("huggingface_hub") is None:
            raise InputError(
                "The Hugging Face hub's client is not installed.",
                where="hf:",
                fix="pip install huggingface_hub",
            )
        self.endpoint = (os.environ.get("HF_ENDPOINT") or _PUBLIC).rstrip("/")
        self.patience = patience
        self.progress = progress
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise InputError(
                "This is not the address of a hub.",
                where=f"HF_ENDPOINT={shown_urls(self.endpoint)}",
                fix="https://HOST, or unset it for the public hub",
            )
        self.host = parts.netloc
        self._plain = parts.scheme == "http" and not _is_loopback(parts.hostname)

    @cached_property
    def _found(self) -> str | None:
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return None
        with classified(""):
            token = get_token()
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InputError(
                "Your token holds signs that no token has.",
                where="HF_TOKEN, or what hf auth login stored",
                fix="copy it again, whole and without more",
            )
        return token

    @property
    def withheld(self) -> bool:
        """Whether there is a token that is not sent, for anybody on the way could read it."""
        return self._plain and os.environ.get(CONSENT) != "1" and self._found is not None

    @property
    def how_to_log_in(self) -> str:
        """What to do for a token."""
        if self.withheld:
            return (
                f"use https for {self.host}, or allow your token to be sent to it as it is with {CONSENT}=1"
            )
        from huggingface_hub import constants

        if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return "unset HF_HUB_DISABLE_IMPLICIT_TOKEN, which keeps your token unsent"
        return "log in (hf auth login) or set HF_TOKEN"

    @cached_property
    def token(self) -> str | bool:
        """The token, or False for none: that keeps the hub's client from looking for one itself."""
        return False if self.withheld else self._found or False

    @cached_property
    def api(self) -> Any:
        """huggingface_hub's ``HfApi``."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)

    def call(self, function: Callable[..., T], *args: Any, again: bool = True, **kwargs: Any) -> T:
        """Call a function of huggingface_hub; what may pass is tried again.

        Args:
            function: which.
            again: False for what must not be done twice, or tries by itself.

        Raises:
            Refused: it can't be had.
        """
        attempts = self.patience.attempts if again else 1
        began = time.monotonic()
        for attempt in range(attempts):
            try:
                with _at_work(self), classified(self._found):
                    return function(*args, **kwargs)
            except Refused as refused:
                # For downloads the hub's client tries to connect for half a minute by itself.
                tried = refused.kind == "unreachable" and time.monotonic() - began > _LONG
                if not refused.passing or tried or attempt + 1 == attempts:
                    raise
                self.rest(attempt, refused)
        raise AssertionError("unreachable")

    def rest(self, attempt: int, refused: Refused) -> None:
        """Wait before the next attempt: as long as the hub asks for (a minute at most), else longer each time."""
        time.sleep(max(min(60.0, refused.wait), min(30.0, self.patience.pause * 2**attempt)))

    @property
    def origin(self) -> str:
        """Scheme, host and port of the hub."""
        return _origin(self.endpoint)

    def explain(self, refused: Refused, where: str, doing: str) -> ZooError:
        """What to tell of a refusal.

        Args:
            refused: what happened.
            where: the repository, ``hf:org/name``.
            doing: a noun for what was tried, e.g. ``Publishing``.
        """
        kind, said = "network" if refused.kind == "unreachable" else refused.kind, refused.said
        name = where.removeprefix("hf:").partition("@")[0]
        log_in = self.how_to_log_in
        a_path = f"leave hf: away for {name} of this machine; else " if Path(name).exists() else ""
        known: dict[str, tuple[type[ZooError], str, str | None]] = {
            "gated": (
                InputError,
                "The repository is gated: its terms must be accepted first.",
                f"accept them at {self.endpoint}/{name} and {log_in}",
            ),
            "missing": (
                InputError,
                "There is no such repository, or it is private and you may not see it.",
                f"{a_path}check the name; for a private one {log_in}",
            ),
            "revision": (InputError, "The repository has no such revision.", None),
            "entry": (InputError, f"The repository lacks a file ({said}).", None),
            "token": (
                InputError,
                "The hub doesn't accept your token: it is wrong, or has expired.",
                "make a new one (hf auth login); HF_TOKEN, if set, goes first",
            ),
            "forbidden": (
                InputError,
                f"Your token doesn't allow that{f' ({said})' if said else ''}.",
                f"use a token with write access to {name} ({self.endpoint}/settings/tokens)",
            ),
            "conflict": (RunError, f"The hub is doing something else with it ({said}).", "try again"),
            "stale": (
                RunError,
                "Somebody else published meanwhile; nothing of theirs was touched.",
                "look at it, then publish again",
            ),
            "busy": (
                RunError,
                f"The hub asks to wait{f' {refused.wait:.0f} s' if refused.wait else ''}: too many requests.",
                "try again later",
            ),
            "server": (RunError, f"{doing} failed: the hub has a problem ({said}).", "try again later"),
            "network": (
                RunError,
                f"{doing} failed: {self.host} can't be reached ({said}).",
                "check the connection, then try again: what arrived is not sent again",
            ),
            "certificate": (
                RunError,
                f"{doing} failed: {self.host} can't be trusted ({said}).",
                "set the clock; if there is a proxy that decrypts, let the hub pass",
            ),
            "page": (
                RunError,
                f"{self.host} doesn't answer as a hub does ({said}).",
                "is HF_ENDPOINT right? is there a proxy with a log-in page?",
            ),
            "storage": (
                RunError,
                f"{doing} failed: the hub's storage refused a file ({said}).",
                "try again, what arrived is not sent again; if it stays so: is this machine's clock right?",
            ),
            "xet": (
                RunError,
                "This hub doesn't speak Xet, by which the client wanted to send.",
                "set HF_HUB_DISABLE_XET=1",
            ),
            "card": (InputError, f"The hub doesn't accept the card ({said}).", None),
            "disk": (
                RunError,
                f"{doing} failed: {said}.",
                "free some space, or set HF_HOME and ZOO_CACHE to folders on another disk",
            ),
            "offline": (
                InputError,
                "The network is forbidden.",
                f"unset {forbidden() or 'HF_HUB_OFFLINE'}",
            ),
        }
        what = known.get(kind, (RunError, f"{doing} failed ({said}).", None))
        return what[0](what[1], where=where, fix=what[2])


# --- huggingface_hub while we use it ---

_LOCK = threading.Lock()
_WORKING: list[Client] = []
_BEFORE: dict[str, bool] = {}
_MAKERS: list[Callable[[], Any]] = []  # of sessions, ours


@contextlib.contextmanager
def _at_work(client: Client) -> Iterator[None]:
    """huggingface_hub with a deadline for each answer, tokens for their own hub only, and Xet for the public one.

    It is one for the whole process, and other threads may be in it: the first of us changes it, the last
    one leaves it as it was.
    """
    from huggingface_hub import constants

    utils = hub_utils()
    with _LOCK:
        _watch_sessions(utils, bool(client.token))
        if not _WORKING:
            _BEFORE["xet off"] = constants.HF_HUB_DISABLE_XET
            _BEFORE["bars off"] = utils.are_progress_bars_disabled()
        _WORKING.append(client)
        constants.HF_HUB_DISABLE_XET = _BEFORE["xet off"] or client.endpoint != _PUBLIC
        if not (client.progress and sys.stderr.isatty()) and not _BEFORE["bars off"]:
            utils.disable_progress_bars()
    try:
        yield
    finally:
        with _LOCK:
            _WORKING.remove(client)
            if not _WORKING:
                constants.HF_HUB_DISABLE_XET = _BEFORE["xet off"]
                if not _BEFORE["bars off"]:
                    utils.enable_progress_bars()


def _watch_sessions(utils: Any, with_token: bool) -> None:
    """Have ``_guard`` look at the requests of the client's session, and of those that it will make.

    It makes a new one in the middle of a call, after a connection that failed. ``set_client_factory``, which is
    public, doesn't serve: it closes the session that others are using, and nothing public tells which factory
    the program had set, to make sessions with its proxy or certificates.

    Raises:
        InputError: there is a token, and this version of the client makes its sessions in another way, unseen.
    """
    try:
        http: Any = importlib.import_module("huggingface_hub.utils._http")
        usual = http._GLOBAL_CLIENT_FACTORY
    except (ImportError, AttributeError):
        if with_token:
            raise _unwatched() from None
    else:
        if usual not in _MAKERS:

            def make() -> Any:
                return _watched(usual())

            _MAKERS.append(make)
            http._GLOBAL_CLIENT_FACTORY = make
    _watched(utils.get_session())


def _unwatched() -> InputError:
    import huggingface_hub

    return InputError(
        "This version of the Hugging Face hub's client makes its connections unseen: your token could go to another "
        "host than the hub, so nothing was sent.",
        where=f"huggingface_hub {huggingface_hub.__version__}",
        fix="pip install 'huggingface_hub>=1,<3'; or, for what is public, go without a token: "
        "HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
    )


def _watched(session: Any) -> Any:
    hooks = session.event_hooks
    if _guard not in hooks.get("request", []):
        session.event_hooks = {**hooks, "request": [*hooks.get("request", []), _guard]}
    return session


def _guard(request: Any) -> None:
    """Looks at each request that is about to be sent, those of huggingface_hub's own threads among them."""
    working = list(_WORKING)
    held = request.headers.get("authorization", "")
    owners = [client for client in working if client.token and str(client.token) in held]
    if owners and _origin(str(request.url)) not in [client.origin for client in owners]:
        del request.headers["authorization"]  # whatever the hub's answer named
    limits = request.extensions.get("timeout") or {}
    if working and not any(limits.values()):
        seconds = max(client.patience.timeout for client in working)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def _origin(address: str) -> str:
    parts = urlsplit(address)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}"
