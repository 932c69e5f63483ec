"""Saving off the training thread: a snapshot now, the disk in the background, by all processes together.

Every process copies its state to host memory and goes on training, while a thread of its own writes the
copy into one temporary folder. A process says that its part is on disk by a small file beside it
(``rank-N.done.json``); the first process waits for all of these, writes the manifest and renames the
folder. The threads never use the collectives: those belong to training.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RunError, ZooError
from ..files import disk_errors, read_json, write_json
from .checkpoint import MANIFEST, SAVING, CheckpointFolder, write_state
from .checkpoint_copy import CheckpointCopy
from .collectives import Collectives
from .state import pack

__all__ = ["CheckpointWriter"]

log = logging.getLogger("zoo")

_PATIENCE_S = 600.0
_PATIENCE_AT_THE_END_S = 60.0  # longer than a network file system hides what another machine wrote
_SHARED_WITHIN_S = 60.0

_NOT_SHARED = (
    "check that all processes are alive and that the run's folder is on a file system that all machines share"
)


class CheckpointWriter:
    """Writes a run's checkpoints in the background, one at a time.

    A snapshot costs one copy of the state in host memory until it is on disk (in the first process of the
    shared and its own state, in the others of their own). safetensors before 0.8 needs a second copy and
    Python's lock while it writes, for which training then waits.

    A process that is killed leaves at most a temporary folder, which the next ``begin`` removes. A normal
    end of the interpreter waits for what is under way.

    Args:
        folder: where to; with several machines on a file system that they share.
        world: all processes of the run; each has a writer and makes the same calls of ``begin`` and ``wait``.
        copy_to: an fsspec address (``s3://bucket/run``, ``file:///mnt/backup``, a path) that the first
            process keeps a copy of the checkpoints at; a copy that fails is a warning.
        patience: seconds that the first process waits for the others' files while none of them grows.

    Raises:
        InputError: ``copy_to`` needs a package that isn't there, or is no address.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        world: Collectives,
        copy_to: str | None = None,
        patience: float = _PATIENCE_S,
    ) -> None:
        self.folder = folder
        self._world = world
        self._patience = patience
        self._copy = None if copy_to is None else CheckpointCopy(folder, copy_to)
        self._thread: threading.Thread | None = None
        self._temporary = Path()
        self._step: int | None = None  # under way
        self._saved: int | None = None
        self._finished: list[int] = []  # saved and not yet told
        self._error: ZooError | None = None
        self._leaving = False

    def begin(self, step: int, shared: dict[str, Any], local: dict[str, Any]) -> None:
        """Take a snapshot of a step and start to write it; all processes must call it.

        Waits for the write before it. A step that is saved and whole already is not written again. When
        this returns, the tensors may change.

        Args:
            step: the step.
            shared: the state that all processes have in common; that of the first one is saved.
            local: this process's own state.

        Raises:
            RunError: this or the write before it failed in one of the processes (the same error in all);
                earlier checkpoints are untouched, and the next ``begin`` may try again.
        """
        self._join()
        name: str | None = None
        if self._world.rank == 0 and self._error is None:
            try:
                name = self._make_temporary(step)
            except ZooError as error:
                self._error = error
        name = self._agree(name)
        if name is None:
            self._note(step)
            return
        parts = {f"rank-{self._world.rank}": pack(local)}
        if self._world.rank == 0:
            parts = {"global": pack(shared), **parts}
        self._step = step
        self._temporary = self.folder.folder / name
        self._thread = threading.Thread(target=self._write, args=(step, parts), name=f"checkpoint {step}")
        self._thread.start()

    def finished(self) -> list[int]:
        """The steps that are completely saved and were not told before; never waits.

        Raises:
            RunError: this process's part failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            if self._error is not None:
                error = self._error
                self._forget()
                raise error
            # The first process completes it, which the others see from the folder's new name.
            if self._step is not None and self._has(self._step) and not self._temporary.exists():
                self._note(self._step)
                self._forget()
        told, self._finished = self._finished, []
        return told

    def wait(self) -> None:
        """Wait until what is under way is completely saved; all processes must call it.

        The copy to another address is not waited for (``close`` does).

        Raises:
            RunError: as ``begin``.
        """
        self._join()
        self._agree(None)

    def close(self) -> None:
        """Let this process's write and the copy end; needs no other process and raises nothing.

        For the end of a run, also after an error: there may be nobody left to agree with, so that the first
        process waits for the others' files for a minute at most while none of them grows.
        """
        self._leaving = True
        try:
            self._join()
            if self._copy is not None:
                self._copy.join()
        finally:
            self._leaving = False
        if self._error is not None:
            log.warning("the checkpoint of step %s was not saved: %s", self._step, self._error.what)
            self._forget()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _forget(self) -> None:
        self._step = self._thread = self._error = None

    def _note(self, step: int) -> None:
        if step != self._saved:
            self._saved = step
            self._finished.append(step)

    def _has(self, step: int) -> bool:
        return (self.folder.path(step) / MANIFEST).is_file()

    def _make_temporary(self, step: int) -> str | None:
        """The name of a new temporary folder; None if the step is saved already."""
        just_written = step in (self._step, self._saved) and self._has(step)
        if just_written or (self.folder.path(step).exists() and self.folder.is_whole(step)):
            return None
        with disk_errors(SAVING, self.folder.folder):
            return self.folder.make_temporary(step).name

    def _agree(self, name: str | None) -> str | None:
        """Raise in all processes what went wrong in one; else all get the first one's value."""
        error = self._error
        problem = None if error is None else [error.what, error.where, error.fix]
        said = self._world.gather_values([problem, name, self._step])
        failed = [rank for rank, (other, *_) in enumerate(said) if other is not None]
        if failed and name is not None:
            shutil.rmtree(self.folder.folder / name, ignore_errors=True)
        if not failed and self._step is not None and self._step == said[0][2]:
            self._note(self._step)
        self._forget()
        if not failed:
            return said[0][1]  # type: ignore[no-any-return]
        # The first process knows what failed elsewhere; what it gave up may have failed others in turn.
        if error is not None and failed[0] == self._world.rank:
            raise error
        raise _of_process(failed[0], *said[failed[0]][0])

    # In the background

    def _write(self, step: int, parts: dict[str, tuple[Any, Any]]) -> None:
        try:
            with _run_errors(self.folder.folder):
                if self._world.rank:
                    self._write_part(parts)
                else:
                    self._write_whole(step, parts)
        except ZooError as error:
            self._error = error
        else:
            if self._copy is not None and self._world.rank == 0:
                self._copy.start()

    def _write_whole(self, step: int, parts: dict[str, tuple[Any, Any]]) -> None:
        try:
            files = self._write_states(parts)
            files |= self._files_of_others()
            self.folder.complete(self._temporary, step, self._world.world_size, files)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _write_part(self, parts: dict[str, tuple[Any, Any]]) -> None:
        end = time.monotonic() + min(self._patience, _SHARED_WITHIN_S)
        while not _is_listed(self._temporary):
            if time.monotonic() > end:
                raise RunError(
                    f"Process {self._world.rank} doesn't see the folder that process 0 made for the checkpoint.",
                    where=self._temporary,
                    fix=_NOT_SHARED,
                )
            time.sleep(0.05)
        mark = self._temporary / _mark(self._world.rank)
        try:
            with _run_errors(self.folder.folder):
                write_json(mark, {"files": self._write_states(parts)})
        except RunError as error:
            with contextlib.suppress(OSError):  # the first process gives up later then, or has already
                for file in self._temporary.glob(f"rank-{self._world.rank}.*"):
                    file.unlink()  # room for the mark on a full disk
                write_json(mark, {"error": [error.what, error.where, error.fix]})
            raise

    def _write_states(self, parts: dict[str, tuple[Any, Any]]) -> dict[str, str]:
        files: dict[str, str] = {}
        for name in list(parts):
            files |= write_state(self._temporary, name, parts.pop(name))  # its memory is free again
        return files

    def _files_of_others(self) -> dict[str, str]:
        """Wait until all other processes say what they wrote; takes their marks away."""
        files: dict[str, str] = {}
        missing, size, pause, since = set(range(1, self._world.world_size)), -1, 0.01, time.monotonic()
        while missing:
            sizes = _sizes(self._temporary)
            for rank in sorted(rank for rank in missing if _mark(rank) in sizes):
                said = read_json(self._temporary / _mark(rank))
                if "error" in said:
                    raise _of_process(rank, *said["error"])
                files |= said["files"]
                missing.discard(rank)
                (self._temporary / _mark(rank)).unlink()
            now, grown = time.monotonic(), sum(sizes.values())
            if grown != size:
                size, since = grown, now
            if missing and now - since > self._patience_now():
                raise RunError(
                    f"{SAVING} failed: the files of process {', '.join(map(str, sorted(missing)))} (of "
                    f"{self._world.world_size}, counted from 0) are missing, and for {now - since:.0f} s "
                    "nothing more was written.",
                    where=self._temporary,
                    fix=_NOT_SHARED,
                )
            if missing:
                time.sleep(pause)
                pause = min(1.0, 1.5 * pause)
        return files

    def _patience_now(self) -> float:
        at_the_end = self._leaving or not threading.main_thread().is_alive()
        return min(self._patience, _PATIENCE_AT_THE_END_S) if at_the_end else self._patience


@contextlib.contextmanager
def _run_errors(folder: Path) -> Iterator[None]:
    try:
        with disk_errors(SAVING, folder):
            yield
    except ZooError:
        raise
    except Exception as error:
        raise RunError(f"{SAVING} failed: {type(error).__name__}: {error}", where=folder) from error


def _mark(rank: int) -> str:
    return f"rank-{rank}.done.json"


def _is_listed(path: Path) -> bool:
    # Network file systems forget that a name was absent when its folder is listed.
    try:
        return any(entry.name == path.name for entry in path.parent.iterdir())
    except FileNotFoundError:
        return False


def _sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a temporary name that is gone again
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _of_process(rank: int, what: str, where: str | None, fix: str | None) -> RunError:
    """The error of another process; one that names a process already stays as it is."""
    return RunError(what if what.startswith("Process ") else f"Process {rank}: {what}", where=where, fix=fix)
