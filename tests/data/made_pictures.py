"""Picture files made byte by byte or with an encoder: what the tests of decoding read."""

from __future__ import annotations

import io
import signal
import struct
import zlib
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tiny import pixels
from zoo.data.decode import decode_image
from zoo.data.decoding import PLAIN
from zoo.errors import InputError

SKIP = "--on-error skip"
ORIENTED = {
    # EXIF value -> what a camera held that way stores of an upright picture
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def photo(height: int = 24, width: int = 33, seed: int = 0) -> np.ndarray:
    """A smooth, coloured picture: uint8, H x W x 3."""
    return np.ascontiguousarray(pixels(seed, max(height, width))[:height, :width])


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """A file's bytes as Pillow writes them."""
    stream = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.ascontiguousarray(image))
    picture.save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    """The same file by Pillow alone, upright."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(ImageOps.exif_transpose(image).convert(mode))


def worst(left: np.ndarray, right: np.ndarray) -> int:
    """The largest difference in grey levels."""
    assert left.shape == right.shape
    return int(np.abs(left.astype(int) - right.astype(int)).max())


# --- JPEG ---


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    """A JPEG file with more segments after its first two bytes."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def with_noise(jpeg: bytes) -> bytes:
    """Bytes that belong nowhere, between the last pixels and the end: libjpeg warns of them."""
    return jpeg[:-2] + b"abcdefgh" + jpeg[-2:]


# --- PNG ---


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, rows: Iterable[bytes] = (), *chunks: bytes, depth: int = 8, colour: int = 0
) -> bytes:
    """A PNG file with any chunks before its pixels; ``colour`` 0 is gray, 2 RGB, 3 a palette."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body + chunk(b"IEND", b"")


def text_chunk(kind: bytes, text: bytes) -> bytes:
    """A text block (or, as ``iCCP``, a colour profile) with this content; all but ``tEXt`` packed."""
    if kind == b"tEXt":
        return chunk(kind, b"key\0" + text)
    between = b"\0\1\0\0\0" if kind == b"iTXt" else b"\0\0"
    return chunk(kind, b"key" + between + zlib.compress(text))


# --- TIFF ---


def tiff(width: int, height: int, strip: bytes, bits: int = 8, photometric: int = 1) -> bytes:
    """A gray TIFF file of one uncompressed strip."""
    tags = {
        256: width,
        257: height,
        258: bits,
        259: 1,
        262: photometric,
        277: 1,
        278: height,
        279: len(strip),
    }
    tags[273] = 8 + 2 + 12 * (len(tags) + 1) + 4  # the strip follows the only directory
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + strip


def refused(source, *words, how=PLAIN, fix=SKIP):
    """Decode what can't be decoded; the message is one line, names the file and holds the words."""
    with pytest.raises(InputError) as caught:
        decode_image(source, name="some.file" if isinstance(source, bytes) else None, how=how)
    error = caught.value
    assert error.where == ("some.file" if isinstance(source, bytes) else str(source))
    assert len(error.what.splitlines()) == 1
    for word in words:
        assert word in error.what
    assert fix in error.fix
    return error


@contextmanager
def no_hanging(seconds=30):
    """A test that would wait for ever is ended (by the alarm's default: with the whole process)."""
    signal.alarm(seconds)
    yield
    signal.alarm(0)
