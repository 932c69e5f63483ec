"""Checkpoints: one folder a saved step, whole or absent, verified on reading, free of pickle.

``step-00000042/``: ``manifest.json`` (schema, step, world size, SHA-256 of each file),
``global.safetensors`` + ``global.json`` (state shared by all processes) and ``rank-N.safetensors`` +
``rank-N.json`` (state of process N). ``CheckpointWriter`` (``checkpoint_writer.py``) writes them in the
background and from several processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import disk_errors, fsync_path, read_json, sha256_of, write_json
from ..tensors import read_safetensors, write_safetensors
from .collectives import Collectives
from .state import pack, unpack

__all__ = ["MANIFEST", "SAVING", "Checkpoint", "CheckpointFolder", "step_name", "step_of", "write_state"]

SCHEMA = 1
MANIFEST = "manifest.json"
SAVING = "Saving a checkpoint"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A saved step that was read back and verified.

    ``local`` is None for a process beyond the ``world_size`` that saved it: its state has to be made from
    that of the others (``CheckpointFolder.load_locals``).
    """

    path: Path
    step: int
    world_size: int
    shared: dict[str, Any]
    local: dict[str, Any] | None


class CheckpointFolder:
    """All checkpoints of a run.

    Args:
        folder: where they live; made when the first is saved.
        keep: how many of the newest stay, at least 1.
        keep_every: those whose step is a multiple of it stay as well (None: no others).
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int | None = None) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError("keep and keep_every must be at least 1")
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self._held: set[int] = set()
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Saved steps, ascending; nothing is verified."""
        if not self.folder.is_dir():
            return []
        found = (step_of(entry.name) for entry in self.folder.iterdir())
        return sorted(step for step in found if step is not None)

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    # Reading

    def load(self, step: int, rank: int = 0) -> Checkpoint:
        """Read the shared state and that of one process; what is read is checked against the manifest.

        The files of the other processes must be there, but their content is not looked at.

        Raises:
            InputError: a damaged, foreign or future checkpoint, by name.
        """
        manifest = self._manifest(step)
        world_size = manifest["world_size"]
        names = ["global", f"rank-{rank}"] if rank < world_size else ["global"]
        self._check(step, manifest, names)
        shared, *local = (self._read(step, name) for name in names)
        return Checkpoint(self.path(step), step, world_size, shared, local[0] if local else None)

    def load_locals(self, step: int) -> list[dict[str, Any]]:
        """The local states of all processes that saved the step, in rank order and verified.

        For going on with another number of processes.

        Raises:
            InputError: as ``load``.
        """
        manifest = self._manifest(step)
        names = [f"rank-{rank}" for rank in range(manifest["world_size"])]
        self._check(step, manifest, names)
        return [self._read(step, name) for name in names]

    def verify(self, step: int, ranks: Iterable[int] | None = None) -> None:
        """Check a checkpoint's files against its manifest: all of them, or those of some processes.

        Raises:
            InputError: as ``load``.
        """
        manifest = self._manifest(step)
        everyone = range(manifest["world_size"])
        names = [] if ranks is not None else ["global"]
        self._check(step, manifest, [*names, *(f"rank-{r}" for r in (everyone if ranks is None else ranks))])

    def is_whole(self, step: int) -> bool:
        """Whether every file of the step is there and undamaged."""
        try:
            self.verify(step)
        except InputError:
            return False
        return True

    def newest(self, rank: int = 0) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that ``load`` takes, and what was wrong with newer ones."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.load(step, rank), problems
            except InputError as error:
                problems.append(_in_short(error))
        return None, problems

    def newest_for(self, world: Collectives) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole for all processes, the same in each; all must call it.

        Each process verifies what it reads; the files that nobody reads (saved by more processes than
        there are now) are dealt out. A step counts if no process found anything wrong.

        Returns:
            The checkpoint with this process's local state, and what was wrong with newer ones.
        """
        problems: list[str] = []
        for step in reversed(world.gather_values(self.steps())[0]):  # what the first process sees counts
            found: Checkpoint | None = None
            problem: str | None = None
            try:
                found = self.load(step, world.rank)
                self.verify(step, range(world.rank + world.world_size, found.world_size, world.world_size))
            except InputError as error:
                problem = _in_short(error)
            said = [text for text in world.gather_values(problem) if text is not None]
            if not said:
                return found, problems
            problems.append(said[0])
        return None, problems

    def _manifest(self, step: int) -> dict[str, Any]:
        path = self.path(step)
        try:
            manifest = read_json(path / MANIFEST)
            if manifest["schema"] == SCHEMA:
                world_size = manifest["world_size"]
                if type(world_size) is not int or not 1 <= world_size < len(manifest["files"]):
                    raise ValueError(f"its world size is {world_size!r}")
                states = ["global", *(f"rank-{rank}" for rank in range(world_size))]
                needed = {f"{name}.{kind}" for name in states for kind in ("json", "safetensors")}
                if manifest["step"] != step or not needed <= manifest["files"].keys():
                    raise ValueError("it is incomplete, or that of another step")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"The checkpoint's manifest can't be read ({error}).", where=path) from None
        if manifest["schema"] != SCHEMA:
            raise InputError(
                f"The checkpoint has schema {manifest['schema']}, this version reads schema {SCHEMA}.",
                where=path,
                fix="use the version of the toolkit that wrote it",
            )
        return manifest  # type: ignore[no-any-return]

    def _check(self, step: int, manifest: dict[str, Any], names: list[str]) -> None:
        for name, digest in manifest["files"].items():
            file = self.path(step) / name
            whole = Path(name).name == name and file.is_file()
            with _readable(file):
                if not whole or (file.stem in names and sha256_of(file) != digest):
                    raise InputError("A file of the checkpoint is damaged or missing.", where=file)

    def _read(self, step: int, name: str) -> dict[str, Any]:
        path = self.path(step)
        with _readable(path / name):
            mapped = read_safetensors(path / f"{name}.safetensors")
            # Copies: what is loaded must not depend on a file that another machine may prune.
            tensors = {key: tensor.clone() for key, tensor in mapped.items()}
            return dict(unpack(read_json(path / f"{name}.json"), tensors))

    # Writing

    def save(self, step: int, shared: dict[str, Any], local: dict[str, Any]) -> Path:
        """Save a step at once (a world of one process) and prune old ones.

        Raises:
            RunError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        if self.path(step).exists() and self.is_whole(step):  # a stop right after a regular save
            return self.path(step)
        with disk_errors(SAVING, self.folder):
            temporary = self.make_temporary(step)
            try:
                files = write_state(temporary, "global", pack(shared))
                files |= write_state(temporary, "rank-0", pack(local))
                return self.complete(temporary, step, 1, files)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def make_temporary(self, step: int) -> Path:
        """An empty folder to write a step to; what a killed process left half-written is removed.

        Raises:
            OSError: also where the run's folder was moved or removed: half a run in its old place helps nobody.
        """
        self.folder.mkdir(exist_ok=True)
        for entry in self.folder.iterdir():
            if entry.name.startswith(".step-") and entry.name.endswith(".tmp"):
                shutil.rmtree(entry, ignore_errors=True)
        temporary = self.folder / f".{step_name(step)}.{uuid.uuid4().hex}.tmp"
        temporary.mkdir()
        return temporary

    def complete(self, temporary: Path, step: int, world_size: int, files: dict[str, str]) -> Path:
        """Turn a temporary folder into the checkpoint of a step, then prune.

        Args:
            temporary: holds all ``files``, flushed to disk, and nothing else.
            step: its step.
            world_size: how many processes wrote to it.
            files: name -> SHA-256.
        """
        ordered = dict(sorted(files.items()))
        manifest = {"schema": SCHEMA, "step": step, "world_size": world_size, "files": ordered}
        write_json(temporary / MANIFEST, manifest)
        fsync_path(temporary)
        target = self.path(step)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step
        os.rename(temporary, target)
        fsync_path(self.folder)
        with self._lock:
            for old in self.superfluous(self.steps(), step):
                if old not in self._held:
                    shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def superfluous(self, steps: Iterable[int], newest: int) -> list[int]:
        """Those of the saved steps that the rule lets go once ``newest`` is complete.

        What lies ahead of it goes too: it was found damaged, or the run would have gone on from there.
        """
        ahead = [step for step in steps if step > newest]
        old = sorted(step for step in steps if step <= newest)[: -self.keep]
        return [*ahead, *(step for step in old if not self.keep_every or step % self.keep_every)]

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[Path]:
        """The folder of a step, which is not pruned meanwhile (unless it was gone before)."""
        with self._lock:
            self._held.add(step)
        try:
            yield self.path(step)
        finally:
            with self._lock:
                self._held.discard(step)


def step_name(step: int) -> str:
    """The folder's name: ``step-00000042``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None if it isn't a checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_state(folder: Path, name: str, packed: tuple[Any, dict[str, Any]]) -> dict[str, str]:
    """Write what ``pack`` made as ``name.json`` and ``name.safetensors``, flushed to disk.

    Returns:
        File name -> SHA-256.

    Raises:
        OSError: what the disk said.
    """
    plain, tensors = packed
    files = [folder / f"{name}.json", folder / f"{name}.safetensors"]
    write_json(files[0], plain)
    write_safetensors(files[1], tensors)
    fsync_path(files[1])
    return {file.name: sha256_of(file) for file in files}


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    # Also when another process prunes the checkpoint while this one reads it.
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"A file of the checkpoint can't be read ({error}).", where=file) from None


def _in_short(error: InputError) -> str:
    return f"{error.what} {error.where or ''}".strip()
