"""``result.json``: a transfer result with its evidence. No torch here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.errors import InputError
from zoo.files import disk_errors, fresh_path, read_json, write_json

__all__ = [
    "SCHEMA",
    "alone_in",
    "list_results",
    "new_result_path",
    "refuse_another_task",
    "results_of",
    "results_root",
    "short_name",
    "write_result",
]

SCHEMA = 1


def results_root() -> Path:
    """Where results go when no folder is named: ``$ZOO_RESULTS``, else ``results`` here."""
    return Path(os.environ.get("ZOO_RESULTS") or "results").expanduser()


def new_result_path(recipe: str, dataset: str) -> Path:
    """A fresh folder name below ``results_root()``."""
    label = "".join(c if c.isalnum() or c in "-_." else "-" for c in f"{recipe}-{Path(dataset).name}")
    return fresh_path(results_root(), label)


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write ``result.json`` into a folder, which is made if need be."""
    with disk_errors("Writing the result", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", {"schema": SCHEMA, **result})
    return folder / "result.json"


def refuse_another_task(folder: Path, recipe: str, dataset: str, weights_sha256: str) -> None:
    """A folder holds one task's result: what is measured again may replace it, nothing else.

    Raises:
        InputError: the folder holds the result of another recipe, data set or model.
    """
    try:
        old = read_json(folder / "result.json")
    except (OSError, ValueError):
        return
    if not isinstance(old, dict):
        return
    mine = {"recipe": recipe, "dataset": short_name(dataset), "weights_sha256": weights_sha256}
    for key, value in mine.items():
        if old.get(key) != value:
            raise InputError(
                f"This folder holds the result of another task ({key} {old.get(key)}, now {value}).",
                where=folder / "result.json",
                fix="choose another folder with --out",
            )


def short_name(dataset: str) -> str:
    """What results call a data set: a folder by its last part."""
    return Path(dataset).name if "/" in dataset else dataset


def list_results(root: Path | None = None) -> list[dict[str, Any]]:
    """All results below a folder, oldest first; files that are none are passed over."""
    found = []
    folder = root or results_root()
    for file in (*folder.glob("*/result.json"), *folder.glob("*/*/result.json")):  # a suite's lie together
        try:
            result = read_json(file)
        except (OSError, ValueError):
            continue
        if isinstance(result, dict) and result.get("schema") == SCHEMA:
            found.append({**result, "path": str(file)})
    return sorted(found, key=lambda result: (str(result.get("created")), result["path"]))


def results_of(weights_sha256: str, root: Path | None = None) -> list[dict[str, Any]]:
    """The results that say how good these weights are, without paths of this machine.

    Left out: what diverged (a finding about its settings, not about the weights), what was scored on
    training images, what was measured on a part of the data only, and what says itself that it flatters.
    """
    mine = [
        {key: value for key, value in result.items() if key != "path"}
        for result in list_results(root)
        if result.get("weights_sha256") == weights_sha256 and _is_fair(result)
    ]
    return [{**result, "model": _public_name(result["model"])} for result in mine]


def _is_fair(result: dict[str, Any]) -> bool:
    protocol, details = result.get("protocol", {}), result.get("details", {})
    unfair = ("test_on_train", "allow_overlap", "limit")
    doubted = details.get("diverged") or details.get("flatters")
    return not doubted and not any(protocol.get(name) for name in unfair)


def _public_name(reference: str) -> str:
    kind, colon, name = reference.partition(":")
    return f"{kind}:{Path(name).name}" if colon and kind in ("path", "run") else reference


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two trainings in one folder would each cut off what the other writes.

    Raises:
        RunError: another process is at work there.
    """
    from zoo.pretrain.rundir import RunLock  # results are listed without it

    with RunLock(folder):
        try:
            yield
        finally:
            (folder / RunLock.NAME).unlink(missing_ok=True)  # nothing of it stays in a result
