"""What the tests of the hub share: one server, small models, an impatient client, and a planted token."""

from __future__ import annotations

import shutil
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

from zoo.publishing import publish_to
from zoo.weights.bundle import SUMS, read_bundle
from zoo.weights.hubs.hf_download import cache_folder, fetch_model
from zoo.weights.hubs.transport import Patience

from .hub_state import TOKEN, Hub
from .published import bundle_at, describe

QUICK = Patience(timeout=10.0, attempts=3, pause=0.0)
ONCE = Patience(timeout=10.0, attempts=1, pause=0.0)
NAME = "me/small"
HF = f"hf:{NAME}"
FILES = {
    ".gitattributes", "README.md", SUMS, "config.json", "model.safetensors", "zoo.json",
    "transformers/config.json", "transformers/model.safetensors", "transformers/preprocessor_config.json",
}  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="hub-models-")
_MADE: dict[tuple[int, str], str] = {}
_CURRENT: list[str] = []


def settle(monkeypatch: pytest.MonkeyPatch, hub: Hub, folder: Path) -> Hub:
    """An empty hub, a token for it, a cache of our own; the client waits for nothing."""
    hub.reset()
    for variable in (
        "ZOO_OFFLINE",
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN_PATH",
    ):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "hf" / "token"))
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    nap = types.SimpleNamespace(sleep=lambda seconds: None)  # the client's own pauses between attempts
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", nap)
    return hub


def model(seed: int = 0, licence: str = "mit") -> str:
    """The folder of a small model, made once for all tests, which is now the one to publish."""
    key = (seed, licence)
    if key not in _MADE:
        folder = Path(_FOLDER.name) / f"{seed}-{licence}"
        _MADE[key] = str(bundle_at(folder, describe(licence=licence), seed).path)
    _CURRENT[:] = [_MADE[key]]
    return _MADE[key]


def weights() -> str:
    """The SHA-256 of the weights of the model to publish."""
    return read_bundle(Path(_CURRENT[0])).weights_sha256


def send(reference: str | None = None, to: str = HF, **how: Any) -> Any:
    """Publish with little patience."""
    return publish_to(reference or _CURRENT[0], to, **{"patience": QUICK, "progress": False, **how})


def forget(name: str = NAME) -> None:
    """Empty the client's cache of a repository."""
    shutil.rmtree(cache_folder(name), ignore_errors=True)


def assert_published(hub: Hub, sha256: str | None = None) -> None:
    """What a stranger gets is what was to be published."""
    forget()
    bundle = fetch_model(NAME, progress=False)
    bundle.verify(full=True)
    assert bundle.weights_sha256 == (sha256 or weights())
    assert set(hub.repos[NAME].files) == FILES
