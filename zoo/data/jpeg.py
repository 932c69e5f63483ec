"""The fast path for JPEG files: libjpeg-turbo without a detour through Pillow.

It takes only what it surely decodes to the same pixels as Pillow (both run libjpeg-turbo's accurate
inverse transform and smooth chroma upsampling: the difference is 0 grey levels). Anything else (CMYK,
junk between the header's segments, damage) is left to the careful path, which decides what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import cv2
import numpy as np
import simplejpeg
from PIL import Image

__all__ = ["FastJpeg", "bits", "orientation", "read_header"]

_ORIENTATION = 0x0112
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_START_OF_SCAN, _END = 0xDA, 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PLAIN = ("Gray", "YCbCr", "RGB")


class FastJpeg:
    """A JPEG whose header promises a plain picture.

    Attributes:
        height: as stored, in pixels.
        width: as stored, in pixels.
        gray: one component instead of three.
        orientation: 1 to 8, the EXIF value; 1 is upright.
    """

    def __init__(self, data: bytes, height: int, width: int, gray: bool, orientation: int) -> None:
        self._data = data
        self.height = height
        self.width = width
        self.gray = gray
        self.orientation = orientation

    def decode(self, shrink: int = 1, gray: bool = False) -> np.ndarray | None:
        """Pixels as stored: uint8, ceil(H / shrink) x ceil(W / shrink) x 3, or x 1 for ``gray``.

        ``shrink`` 2, 4 or 8 averages inside the inverse transform, for less work. None when the stream
        is damaged (also where libjpeg would only warn).
        """
        height, width = -(-self.height // shrink), -(-self.width // shrink)
        bounds = {"min_height": height, "min_width": width} if shrink > 1 else {}
        try:
            colorspace = "GRAY" if gray and self.gray else "RGB"
            pixels = simplejpeg.decode_jpeg(self._data, colorspace=colorspace, **bounds)
        except (ValueError, RuntimeError, MemoryError):
            return None
        if pixels.shape[:2] != (height, width):
            return None
        if gray and not self.gray:
            return cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)[:, :, None]
        return pixels


def read_header(data: bytes) -> FastJpeg | None:
    """What the header says, or None if the careful path should look at this file."""
    if data[:2] != b"\xff\xd8":
        return None
    turn = orientation(data)
    if turn is None:
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, RuntimeError):
        return None
    if colorspace not in _PLAIN or min(height, width) < 1:
        return None
    return FastJpeg(data, height, width, colorspace == "Gray", turn)


def orientation(data: bytes) -> int | None:
    """The EXIF orientation, 1 to 8, or XMP's where EXIF states none; None where Pillow should look.

    Pillow takes XMP's in JPEG files from version 11 on only: here all versions agree.
    """
    exif = xmp = b""
    try:
        for marker, start, end in _segments(data):
            if marker != 0xE1:
                continue
            if data.startswith(_EXIF, start):
                if exif:  # one block over several segments
                    return None
                exif = data[start:end]
            elif data.startswith(_XMP, start):
                xmp = data[start:end]
        if not exif and not xmp:
            return 1
        tags = Image.Exif()
        tags.load(exif)
        value = tags.get(_ORIENTATION, 0)
        stated = _ORIENTATION in tags
    except Exception:  # whatever a parser stumbles over: the careful path knows corrupt EXIF blocks
        return None
    if not stated and (found := _XMP_ORIENTATION.search(xmp)):
        value = int(found[1])
    return int(value) if value in range(1, 9) else 1


def bits(data: bytes) -> int | None:
    """Of each sample, as the frame's header states it; None if there is none that can be read."""
    try:
        return next((data[start] for marker, start, _ in _segments(data) if marker in _FRAMES), None)
    except (ValueError, IndexError):
        return None


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each header segment's payload, up to the first scan."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ValueError("junk between segments")
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in (_START_OF_SCAN, _END):
            return
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, at + 4, end
        at = end
