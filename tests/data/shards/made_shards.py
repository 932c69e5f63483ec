"""Small shards as other programs write them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def png(seed: int, side: int = 8) -> bytes:
    """A picture of noise, encoded."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar file of plain members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def pairs(first: int, count: int, classes: int = 3) -> list[tuple[str, bytes]]:
    """``0007.png`` and ``0007.cls`` for each number."""
    found = []
    for number in range(first, first + count):
        found += [(f"{number:04d}.png", png(number)), (f"{number:04d}.cls", str(number % classes).encode())]
    return found


def shard_folder(folder: Path, shards: int = 3, each: int = 5) -> Path:
    """``00.tar``, ``01.tar``, ... of labelled pictures, without an index."""
    for shard in range(shards):
        write_tar(folder / f"{shard:02d}.tar", pairs(shard * each, each))
    return folder


def zero(path: Path, offset: int, length: int = 512, value: bytes = b"\0") -> None:
    """Overwrite a part of a file."""
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = (value * length)[:length]
    path.write_bytes(bytes(data))
