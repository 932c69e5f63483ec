"""One way from a picture file to uint8 pixels, and clear words about what is wrong with a file.

Profiles: embedded colour profiles (ICC) are ignored, as in the reference pipelines; a CMYK file is
converted by Pillow's plain formula. Alpha, also a palette's or a PNG's transparent colour, is laid on the
stated background. Samples of 16 bits are scaled to 8 bits, not clipped: gray ones by 255 / 65535, rounded;
of coloured ones Pillow keeps the high byte, which is within 1 level of that. Animations and multi-picture
files give their first frame.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import re
import stat
import warnings
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from ..errors import InputError, RunError
from . import jpeg
from .decoding import PLAIN, Decoding
from .identify import REPAIR, SKIP, identify, kind_of
from .many_channels import check_bands, is_tiff, read_tiff

__all__ = ["IMAGE_SUFFIXES", "ArrayPicture", "Picture", "decode_image", "open_image"]

_ENDINGS = "jpg jpeg jpe jfif png apng webp gif tif tiff bmp ppm pgm mpo avif"
IMAGE_SUFFIXES = frozenset(f".{ending}" for ending in _ENDINGS.split())
# Pillow knows more formats; some of them start other programs, and none is what people train on.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF")

# Pillow's remarks about odd files: what matters is raised, by name. (Set once: catch_warnings is not safe
# in the threads that read images.)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())  # else its notes would go to standard error

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
# EXIF's and TIFF's tags
_ORIENTATION, _WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _PLANES, _SAMPLES = 0x0112, 256, 257, 258, 262, 284, 339
_SIGNED = 2
_TEXTS = 64  # so many of the largest allowed text blocks may a PNG have, as with Pillow's own limits
# Where a PNG can hide an orientation.
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


class Picture(Protocol):
    """A picture whose size is known and whose pixels are decoded when they are wanted."""

    height: int
    width: int
    """In pixels, after the orientation was applied."""
    can_shrink: bool
    """Whether ``pixels(2)`` costs less than ``pixels()``."""

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """uint8, ceil(height / shrink) x ceil(width / shrink) x channels.

        Args:
            shrink: 1, 2, 4 or 8; more than 1 only if ``can_shrink``.

        Raises:
            InputError: names the file and what is wrong with it.
        """
        ...


class ArrayPicture:
    """Pixels that are there already."""

    can_shrink = False

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def pixels(self, shrink: int = 1) -> np.ndarray:
        return self._pixels


def decode_image(
    source: str | os.PathLike[str] | bytes, *, name: str | None = None, how: Decoding = PLAIN
) -> np.ndarray:
    """Read a picture as uint8, H x W x channels (RGB by default).

    Args:
        source: a path, or the file's bytes.
        name: what to call it in messages; the path by default.
        how: options and limits.

    Raises:
        InputError: names the file, what it is and what is wrong with it.
    """
    return open_image(source, name=name, how=how).pixels()


def open_image(
    source: str | os.PathLike[str] | bytes, *, name: str | None = None, how: Decoding = PLAIN
) -> Picture:
    """Read a picture's bytes and header, within the limits; see ``decode_image``."""
    label = name if name is not None else ("<bytes>" if isinstance(source, bytes) else os.fspath(source))
    data = source if isinstance(source, bytes) else _read(source, label, how)
    if how.channels in (1, 3):
        header = jpeg.read_header(data)
        if header is not None:
            _limit_pixels(header.width, header.height, "JPEG picture", label, how)
            return _JpegPicture(header, data, label, how)
    elif is_tiff(data):
        limit = functools.partial(_limit_pixels, what="TIFF picture", label=label, how=how)
        stored, turn = read_tiff(data, how.channels, label, limit)
        return ArrayPicture(_turned(stored, turn) if how.orientation == "exif" else stored)
    return _PillowPicture(data, label, how)


def _read(path: str | os.PathLike[str], label: str, how: Decoding) -> bytes:
    try:
        # A pipe under a picture's name would otherwise wait for ever for someone to write into it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb", buffering=0) as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise _no_file(label)
            if status.st_size > how.max_bytes:
                raise InputError(
                    f"The file has {status.st_size} bytes, more than the limit of {how.max_bytes}.",
                    where=label,
                    fix=_limit("max_bytes"),
                )
            content = file.readall()
            if content is None:  # one of the system's, in which there is nothing to read now
                raise _no_file(label)
            return content
    except FileNotFoundError:
        raise InputError(
            "The image file is not there (any more).", where=label, fix=f"put it back, or {SKIP}"
        ) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # not the picture's fault: nothing to skip
            raise RunError(
                "The process ran out of file handles.",
                where=label,
                fix="raise the limit (ulimit -n 65536) or use fewer workers (--workers)",
            ) from error
        raise InputError(
            f"The image file can't be read ({error.strerror}).",
            where=label,
            fix=f"check the file's permissions and the disk, or {SKIP}",
        ) from error


def _no_file(label: str) -> InputError:
    return InputError(
        "This is a pipe, a socket or a device, not a file.",
        where=label,
        fix="pass the name of a picture file",
    )


def _limit(name: str) -> str:
    flag = "--" + name.replace("_", "-")
    return f"raise the limit ({flag}, or --set data.{name}=N), or {SKIP}"


def _limit_pixels(width: int, height: int, what: str, label: str, how: Decoding) -> None:
    if width * height > how.max_pixels:
        raise InputError(
            f"This {what} has {width} x {height} pixels, more than the limit of {how.max_pixels}.",
            where=label,
            fix=_limit("max_pixels"),
        )


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo what EXIF says the camera did (values 1 to 8)."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


class _JpegPicture:
    can_shrink = True

    def __init__(self, header: jpeg.FastJpeg, data: bytes, label: str, how: Decoding) -> None:
        self._header, self._data, self._label, self._how = header, data, label, how
        self._turn = header.orientation if how.orientation == "exif" else 1
        sides = header.height, header.width
        self.height, self.width = sides[::-1] if self._turn > 4 else sides

    def pixels(self, shrink: int = 1) -> np.ndarray:
        pixels = self._header.decode(shrink, gray=self._how.channels == 1)
        if pixels is not None:
            return _turned(pixels, self._turn)
        pixels = _PillowPicture(self._data, self._label, self._how).pixels()
        return _shrunk(pixels, shrink) if shrink > 1 else pixels


def _shrunk(pixels: np.ndarray, shrink: int) -> np.ndarray:
    """Means of ``shrink`` x ``shrink`` pixels, of fewer at the right and the bottom."""
    gray = pixels.shape[2] == 1
    small = np.array(Image.fromarray(pixels[:, :, 0] if gray else pixels).reduce(shrink))
    return small[:, :, None] if gray else small


class _PillowPicture:
    can_shrink = False

    def __init__(self, data: bytes, label: str, how: Decoding) -> None:
        self._data, self._label, self._how = data, label, how
        self._what = ""
        # Larger limits than Pillow's own are what the user asked for.
        if Image.MAX_IMAGE_PIXELS is not None:
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, how.max_pixels)
        PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, how.max_text_bytes)
        PngImagePlugin.MAX_TEXT_MEMORY = max(PngImagePlugin.MAX_TEXT_MEMORY, _TEXTS * how.max_text_bytes)
        with self._explained():
            image = self._image = Image.open(io.BytesIO(data), formats=_formats())
            width, height = image.size
            self._tags = getattr(image, "tag_v2", {})
            if image.format == "TIFF":  # whether Pillow's size is the turned one depends on its version
                width, height = self._tags[_WIDTH], self._tags[_HEIGHT]
            _limit_pixels(width, height, f"{image.format} picture", label, how)
            self._what = f"This {image.format} picture ({width} x {height}, {image.mode})"
            if image.format == "PNG":
                _scale_transparent_colour(image, data[24])
            self._turn = self._orientation()
            upright = how.orientation == "exif" and self._turn > 4
            self.width, self.height = (height, width) if upright else (width, height)

    def _orientation(self) -> int:
        if self._image.format in ("JPEG", "MPO") and (known := jpeg.orientation(self._data)):
            return known
        if self._image.format == "PNG":
            if not any(mark in self._data for mark in _PNG_EXIF):
                return 1
            self._image.load()  # it can lie behind the pixels
        try:
            value = self._image.getexif().get(_ORIENTATION, 1)
        except Exception:  # a corrupt EXIF block says nothing about the pixels
            return 1
        return int(value) if value in range(1, 9) else 1

    def pixels(self, shrink: int = 1) -> np.ndarray:
        upright = self._how.orientation == "exif"
        with self._explained():
            if self._has_deep_planes():
                return _turned(self._plain(self._from_planes()), self._turn if upright else 1)
            self._image.load()
            self._limit_text()
            if self._image.format == "TIFF":  # Pillow has turned it
                turn = 1 if upright else {6: 8, 8: 6}.get(self._turn, self._turn)
            else:
                turn = self._turn if upright else 1
            return _turned(self._plain(self._image), turn)

    def _has_deep_planes(self) -> bool:
        """Whether a TIFF keeps its channels apart, each of more than 8 bits: Pillow mixes those up."""
        bits = self._tags.get(_BITS, (8,))
        return self._tags.get(_PLANES) == 2 and len(bits) > 1 and max(bits) > 8

    def _from_planes(self) -> Image.Image:
        mode = self._image.mode
        bands = len(self._image.getbands())
        pixels, _ = read_tiff(self._data, bands, self._label, lambda width, height: None)
        return Image.frombytes(mode, pixels.shape[1::-1], pixels.tobytes())

    def _limit_text(self) -> None:
        """Limits below Pillow's own, and texts that are stored unpacked."""
        if self._image.format == "PNG":
            texts = (value for value in self._image.info.values() if isinstance(value, str))
            if max(map(len, texts), default=0) > self._how.max_text_bytes:
                raise self._too_much_text()

    def _plain(self, image: Image.Image) -> np.ndarray:
        channels = self._how.channels
        if channels not in (1, 3):
            check_bands(len(image.getbands()), channels, self._label)
            return np.array(image, dtype=np.uint8)
        if image.mode in _SIXTEEN_BIT_MODES or (image.mode == "I" and image.format == "PPM"):
            image = self._eight_bits(image)
        elif image.mode in ("I", "F") or _SIGNED in self._tags.get(_SAMPLES, ()):
            samples = "floating-point" if image.mode == "F" else "32-bit or signed integer"
            raise InputError(
                f"{self._what} has {samples} samples, whose black and white nobody states.",
                where=self._label,
                fix=f"save it with 8 or 16 bits a sample, or {SKIP}",
            )
        if image.mode in _ALPHA_MODES or "transparency" in image.info:
            rgba = image.convert("RGBA")
            ground = Image.new("RGBA", rgba.size, (*self._how.background, 255))
            image = Image.alpha_composite(ground, rgba)
        wanted = "L" if channels == 1 else "RGB"
        plain = image if image.mode == wanted else image.convert("RGB").convert(wanted)
        pixels = np.array(plain, dtype=np.uint8)
        return pixels[:, :, None] if channels == 1 else pixels

    def _eight_bits(self, image: Image.Image) -> Image.Image:
        """Gray of more than 8 bits by 255 / white, rounded."""
        levels = np.asarray(image).astype(np.uint32)
        white = 2 ** self._tags.get(_BITS, (16,))[0] - 1
        clear = image.info.get("transparency")
        alpha = None if clear is None else Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8))
        if self._tags.get(_PHOTOMETRIC) == 0:  # white is zero; with 8 bits Pillow sees to it
            levels = white - levels
        gray = Image.fromarray(((levels * 255 + white // 2) // white).astype(np.uint8))
        return gray if alpha is None else Image.merge("LA", (gray, alpha))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns whatever Pillow's parsers stumble over into one error that says what the file is."""
        try:
            yield
        except (InputError, RunError):
            raise
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> InputError:
        text, fix = f"{type(error).__name__}: {error}".replace("\n", " ")[:200], REPAIR
        if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
            found = re.search(r"(\d+) pixels", text)
            size = f"{found[1]} pixels, more" if found else "more pixels"
            what = f"This {kind_of(self._data)} picture has {size} than the limit of {self._how.max_pixels}."
            fix = _limit("max_pixels")
        elif "MAX_TEXT" in text or "Decompressed Data Too Large" in text:
            return self._too_much_text("MAX_TEXT_MEMORY" in text)
        elif isinstance(error, MemoryError):
            what = f"{self._what or 'The picture'} needs more memory than there is."
            fix = f"use fewer workers (--workers), lower --max-pixels, or {SKIP}"
        elif isinstance(error, UnidentifiedImageError):
            what, fix = identify(self._data)
        elif not self._what:
            what, fix = identify(self._data)
            what = f"{what.removesuffix('.')} ({text})."
        else:
            what = f"{self._what} is damaged or unreadable ({text})."
        return InputError(what, where=self._label, fix=fix)

    def _too_much_text(self, together: bool = False) -> InputError:
        limit = self._how.max_text_bytes
        much = (
            f"text blocks of more than {_TEXTS} times"
            if together
            else "a text block or a colour profile beyond"
        )
        return InputError(
            f"{self._what or 'This PNG picture'} carries {much} the limit of {limit} bytes.",
            where=self._label,
            fix=_limit("max_text_bytes"),
        )


def _scale_transparent_colour(image: Image.Image, depth: int) -> None:
    """A PNG states it in samples of its own depth; Pillow compares it with pixels of 8 bits."""
    clear = image.info.get("transparency")
    if image.mode not in ("1", "L", "RGB") or clear is None:
        return
    whole = 2**depth - 1

    def scaled(level: int) -> int:
        return level >> 8 if depth == 16 else min(level, whole) * 255 // whole

    image.info["transparency"] = tuple(map(scaled, clear)) if isinstance(clear, tuple) else scaled(clear)


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
