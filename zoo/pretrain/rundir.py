"""A run's folder: what is in it, who may write to it, and which run is the newest. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, RunError
from ..files import disk_errors, read_json, whole_folder, write_json, write_text

__all__ = ["SCHEMA", "RunFolder", "RunLock", "list_runs", "runs_root"]

SCHEMA = 1
_MARK = "run.json"


def runs_root() -> Path:
    """Where runs go when no folder is named: ``$ZOO_RUNS``, else ``runs`` here."""
    return Path(os.environ.get("ZOO_RUNS") or "runs").expanduser()


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    ``run.json`` (what it is, sources of the recipe's values), ``recipe.yaml`` (resolved, usable again),
    ``environment.json``, ``data.json`` (fingerprint), ``metrics.jsonl`` (a line a step),
    ``bad_files.jsonl`` (only if there were any), ``efficiency.json`` (where the last session's time
    went), ``events.jsonl`` (what the doctor warned of), ``nonfinite.json`` (the step whose loss was not
    finite), ``checkpoints/``, and what trackers keep (``trackers.json``, ``tensorboard/``, ``wandb/``).
    """

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def bad_files(self) -> Path:
        return self.path / "bad_files.jsonl"

    def bad_files_of(self, rank: int) -> Path:
        """Where a process lists its unreadable images."""
        return self.bad_files if rank == 0 else self.path / f"bad_files.rank-{rank}.jsonl"

    @property
    def efficiency(self) -> Path:
        return self.path / "efficiency.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def nonfinite(self) -> Path:
        return self.path / "nonfinite.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def read(self) -> dict[str, Any]:
        """The content of ``run.json``.

        Raises:
            InputError: not a run, or one of a future schema.
        """
        mark = self.path / _MARK
        if not mark.is_file():
            if not self.path.exists():
                raise InputError("There is no such run.", where=self.path, fix="`zoo runs` lists the runs")
            raise InputError(
                "This is not a run of this toolkit (it has no run.json).",
                where=self.path,
                fix="pass the run's own folder (`zoo runs` lists them); a new run starts from weights by --init-from",
            )
        try:
            info = read_json(mark)
        except (OSError, ValueError) as error:
            raise InputError(f"The run's description can't be read ({error}).", where=mark) from None
        if not isinstance(info, dict) or info.get("schema") != SCHEMA:
            raise InputError("The run's description has a schema this version can't read.", where=mark)
        return info

    def data(self) -> dict[str, Any]:
        """The fingerprint of the data that the run was started on.

        Raises:
            InputError: the file is missing or damaged.
        """
        file = self.path / "data.json"
        try:
            return dict(read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"The run's fingerprint of its data can't be read ({error}).", where=file
            ) from None

    def create(self, info: dict[str, Any], recipe: str, data: dict[str, Any]) -> None:
        """Make the folder, whole or not at all.

        Raises:
            InputError: the folder has something in it.
            RunError: it can't be written.
        """
        with disk_errors("Making the run's folder", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise InputError(
                    "The run's folder would be where a file is.", where=self.path, fix="choose another --out"
                )
            if self.path.exists() and any(self.path.iterdir()):
                raise InputError(
                    "The run's folder exists and is not empty.",
                    where=self.path,
                    fix="choose another --out, or go on with a stopped run: --resume",
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(self.path) as temporary:
                made = RunFolder(temporary)
                write_text(made.recipe, recipe)
                write_json(temporary / "data.json", data)
                made.write_info(info)

    def write_info(self, info: dict[str, Any]) -> None:
        with disk_errors("Writing the run's description", self.path):
            write_json(self.path / _MARK, {"schema": SCHEMA, **info})

    def rewrite_recipe(self, recipe: str) -> None:
        with disk_errors("Writing the recipe", self.path):
            write_text(self.recipe, recipe)

    def environment(self) -> dict[str, Any]:
        """What the run was last trained with; empty if that isn't known."""
        try:
            return dict(read_json(self.path / "environment.json"))
        except (OSError, ValueError):
            return {}

    def write_environment(self, environment: dict[str, Any]) -> None:
        with disk_errors("Writing the environment", self.path):
            write_json(self.path / "environment.json", environment)

    def summary(self) -> dict[str, Any]:
        """What `zoo runs` shows: name, state, steps, last loss."""
        try:
            info = self.read()
        except InputError:  # one such run must not hide the others
            info = {}
        last = _last_line(self.metrics)
        names = (entry.name.removeprefix("step-") for entry in self.checkpoints.glob("step-*"))
        saved = max((int(name) for name in names if name.isdecimal()), default=0)
        total = info.get("total_steps")
        if total is None:
            state = "unreadable"
        else:
            state = "finished" if saved >= total else "running" if RunLock.is_held(self.path) else "stopped"
        return {
            "run": str(self.path),
            "recipe": info.get("recipe_name"),
            "state": state,
            "step": (last["step"] + 1) if last else 0,
            "saved_step": saved,
            "total_steps": total,
            "loss": last["loss"] if last else None,
            "created": info.get("created"),
        }


def _last_line(file: Path) -> dict[str, Any] | None:
    try:
        with open(file, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - 65536))
            lines = handle.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError):  # half-written, or no step's
            value = dict(json.loads(line))
            if {"step", "loss"} <= value.keys():
                return value
    return None


def list_runs(root: Path) -> list[RunFolder]:
    """All runs directly below a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [RunFolder(entry) for entry in root.iterdir() if (entry / _MARK).is_file()]
    return sorted(found, key=lambda run: (run.path / _MARK).stat().st_mtime)


# Locks that this process holds. A forked data worker closes its copies at once: otherwise it would keep
# the run locked for the seconds that it outlives a killed trainer.
_HELD: set[int] = set()


def _let_go_in_child() -> None:
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


class RunLock:
    """Keeps two processes from training one run; the system lets go when a process dies."""

    NAME = "run.lock"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._handle: int | None = None

    def __enter__(self) -> RunLock:
        import fcntl

        with disk_errors("Locking the run", self._path):
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise RunError(
                f"Another process (pid {owner or 'unknown'}) is training this run.",
                where=self._path.parent,
                fix="wait for it, or stop it first",
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._handle = handle
        _HELD.add(handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle in _HELD:
            _HELD.discard(self._handle)
            os.close(self._handle)
        self._handle = None

    @staticmethod
    def is_held(folder: Path) -> bool:
        """Whether a living process trains the run."""
        import fcntl

        try:
            handle = os.open(folder / RunLock.NAME, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False
