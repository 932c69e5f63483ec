"""Checkpoints: one folder a saved step, whole or absent, verified on reading, free of pickle.

``step-00000042/``: ``manifest.json`` (schema, step, world size, SHA-256 of each file),
``global.safetensors`` + ``global.json`` (state shared by all processes) and ``rank-N.safetensors`` +
``rank-N.json`` (state of process N).
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import disk_errors, read_json, sha256_of, whole_folder, write_json
from ..tensors import read_safetensors, write_safetensors
from .state import pack, unpack

__all__ = ["Checkpoint", "CheckpointFolder"]

SCHEMA = 1
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A saved step that was read back and verified."""

    path: Path
    step: int
    world_size: int
    shared: dict[str, Any]
    local: dict[str, Any]


class CheckpointFolder:
    """All checkpoints of a run.

    Args:
        folder: where they live; made when the first is saved.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Saved steps, ascending; nothing is verified."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, shared: dict[str, Any], local: dict[str, Any]) -> Path:
        """Save a step (a world of one process) and prune old ones.

        Raises:
            RunError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        target = self.path(step)
        if target.exists() and self._is_whole(step):  # a stop right after a regular save
            return target
        with disk_errors("Saving a checkpoint", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step
            with whole_folder(target) as temporary:
                for name, state in (("global", shared), ("rank-0", local)):
                    plain, tensors = pack(state)
                    write_json(temporary / f"{name}.json", plain)
                    write_safetensors(temporary / f"{name}.safetensors", tensors)
                files = {f.name: sha256_of(f) for f in sorted(temporary.iterdir())}
                manifest = {"schema": SCHEMA, "step": step, "world_size": 1, "files": files}
                write_json(temporary / "manifest.json", manifest)
            saved = self.steps()
            # What lies ahead of this step was found damaged, or the run would have gone on from it.
            ahead = [other for other in saved if other > step]
            for other in [*ahead, *[other for other in saved if other <= step][: -self.keep]]:
                shutil.rmtree(self.path(other), ignore_errors=True)
        return target

    def _is_whole(self, step: int) -> bool:
        try:
            self.load(step)
        except InputError:
            return False
        return True

    def _sweep(self) -> None:
        """Remove what a killed process left half-written."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(".step-") and entry.name.endswith(".tmp"):
                shutil.rmtree(entry, ignore_errors=True)

    def load(self, step: int, rank: int = 0) -> Checkpoint:
        """Read one checkpoint, every file checked against the manifest.

        Raises:
            InputError: a damaged, foreign or future checkpoint, by name.
        """
        path = self.path(step)
        try:
            manifest = read_json(path / "manifest.json")
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"The checkpoint's manifest can't be read ({error}).", where=path) from None
        if manifest.get("schema") != SCHEMA:
            raise InputError(
                f"The checkpoint has schema {manifest.get('schema')}, this version reads schema {SCHEMA}.",
                where=path,
                fix="use the version of the toolkit that wrote it",
            )
        for name, digest in manifest["files"].items():
            file = path / name
            if Path(name).name != name or not file.is_file() or sha256_of(file) != digest:
                raise InputError("A file of the checkpoint is damaged or missing.", where=file)
        shared, local = (
            unpack(read_json(path / f"{name}.json"), read_safetensors(path / f"{name}.safetensors"))
            for name in ("global", f"rank-{rank}")
        )
        return Checkpoint(path, manifest["step"], manifest["world_size"], shared, local)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and what was wrong with newer ones."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.load(step), problems
            except InputError as error:
                problems.append(f"{error.what} {error.where or ''}".strip())
        return None, problems
