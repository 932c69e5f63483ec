"""Features in the making: part by part in a hidden folder, so that a call which was killed can go on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import InputError, RunError
from .files import disk_errors, read_json, whole_file, write_json
from .tensors import read_safetensors, write_safetensors

__all__ = ["Parts", "in_dtype", "part_length", "working_folder"]

_PARTS, _LONGEST = 32, 1024  # parts of a small set, images in a part of a large one
# What the keys of a plan are to people; the rest is named as it is.
_WORDS = {
    "weights_sha256": "weights",
    "network_sha256": "network",
    "code_sha256": "the network's own code",
    "files": "images (or files that were touched)",
    "batch_size": "batch size",
    "threads": "number of threads (or of processes)",
}


def part_length(count: int, batch_size: int) -> int:
    """Images in a part: whole batches, whichever processes share them out."""
    wanted = min(_LONGEST, -(-count // _PARTS))
    return max(1, -(-wanted // batch_size)) * batch_size


def in_dtype(features: torch.Tensor, dtype: str, where: object) -> torch.Tensor:
    """Features as they are written.

    Raises:
        RunError: numbers that float16 doesn't reach.
    """
    if dtype == "float32":
        return features
    half = features.half()
    if not torch.isfinite(half).all():
        raise RunError(
            "The features are too large for float16 (above 65,504).", where=where, fix="write float32"
        )
    return half


@dataclass(frozen=True)
class Parts:
    """The parts of one file. Each says what it was made with and what its bytes should be.

    Args:
        folder: where they lie.
        key: digest of all that the features depend on.
        count: images.
        length: images in a part.
    """

    folder: Path
    key: str
    count: int
    length: int

    def __len__(self) -> int:
        return -(-self.count // self.length)

    def rows(self, part: int) -> range:
        return range(part * self.length, min((part + 1) * self.length, self.count))

    def write(self, part: int, features: torch.Tensor) -> None:
        path = self._path(part)
        with disk_errors("Keeping a part of the features", path), whole_file(path) as temporary:
            marks = {"key": _bytes(self.key), "sha256": _bytes(_sha256(features))}
            write_safetensors(temporary, {"features": features.contiguous(), **marks})

    def read(self, part: int) -> torch.Tensor | None:
        """A part's features; nothing if it isn't there, is damaged or was made with something else."""
        try:
            held = read_safetensors(self._path(part))
            features = held["features"]
            right = torch.equal(held["key"], _bytes(self.key)) and len(features) == len(self.rows(part))
            return features if right and torch.equal(held["sha256"], _bytes(_sha256(features))) else None
        except (InputError, KeyError, RuntimeError):
            return None

    def missing(self) -> list[int]:
        return [part for part in range(len(self)) if self.read(part) is None]

    def gathered(self) -> torch.Tensor:
        """All features in order.

        Raises:
            RunError: a part vanished or was damaged since it was written.
        """
        out = None
        for part in range(len(self)):
            features = self.read(part)
            if features is None:
                raise RunError(
                    "A part of the features was lost.",
                    where=self._path(part),
                    fix="call again: it is made anew",
                )
            if out is None:
                out = torch.empty((self.count, *features.shape[1:]), dtype=features.dtype)
            rows = self.rows(part)
            out[rows.start : rows.stop] = features
        assert out is not None
        return out

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.safetensors"


@contextlib.contextmanager
def working_folder(out: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """The hidden folder beside ``out`` for as long as it is worked on; it goes when there is nothing in it.

    Args:
        out: the file that will be written.
        plan: all that its features depend on.

    Raises:
        InputError: another call works there, or an earlier one did with another plan.
        RunError: what the disk said.
    """
    folder = out.with_name(f".{out.name}.parts")
    with disk_errors("Making a folder for parts of the features", folder):
        handle = _locked(folder, out)
    try:
        with disk_errors("Making a folder for parts of the features", folder):
            _agree(folder, plan)
        yield folder
    finally:
        if not any(folder.glob("part-*")):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _locked(folder: Path, out: Path) -> int:
    while True:
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a call that has just ended took the folder away
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                "Another call is writing these features.",
                where=out,
                fix="wait for it, or write to another file",
            ) from None
        except OSError:  # a disk without locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder / "lock")):
                return handle
        os.close(handle)


def _agree(folder: Path, plan: Mapping[str, Any]) -> None:
    path = folder / "plan.json"
    try:
        begun = read_json(path)
        differing = [key for key in {**begun, **plan} if begun.get(key) != plan.get(key)]
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        write_json(path, plan)  # whatever parts there are say what they were made with
        return
    if not differing:
        return
    if not any(folder.glob("part-*")):
        write_json(path, plan)
        return
    words = list(dict.fromkeys(_WORDS.get(key, key) for key in differing))
    raise InputError(
        f"These features were begun with something else: {', '.join(words)}.",
        where=folder,
        fix="delete that folder to begin anew, or write to another file",
    )


def _sha256(features: torch.Tensor) -> str:
    about = json.dumps([str(features.dtype), list(features.shape)]).encode()
    return hashlib.sha256(about + features.contiguous().numpy().tobytes()).hexdigest()


def _bytes(digest: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
