"""One function that turns any picture file into uint8 H x W x 3, and says what is wrong with it."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import InputError

__all__ = ["IMAGE_SUFFIXES", "MAX_PIXELS", "decode_image"]

IMAGE_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".tif",
        ".tiff",
        ".bmp",
        ".ppm",
        ".pgm",
        ".mpo",
        ".avif",
    ]
)
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs

# Pillow's remarks about odd files: what matters is raised, by name. (Set once: catch_warnings is not safe
# in the threads that read images.)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


def decode_image(
    source: str | os.PathLike[str] | bytes,
    *,
    name: str | None = None,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Read a picture as uint8, H x W x 3, RGB.

    EXIF orientation is applied; alpha (also a palette's transparent colour) is laid on
    ``background``; 16-bit gray is divided by 257, not clipped; animations give their first frame;
    embedded colour profiles are ignored, as in the reference pipelines (a CMYK file is converted
    by Pillow's plain formula).

    Args:
        source: a path, or the file's bytes.
        name: what to call it in messages; the path by default.
        background: the colour, 0..255 each, under transparent pixels.
        max_pixels: more pixels than this, by the header, are refused before anything is decoded.

    Raises:
        InputError: names the file and what is wrong with it.
    """
    label = name if name is not None else ("<bytes>" if isinstance(source, bytes) else os.fspath(source))
    stream = io.BytesIO(source) if isinstance(source, bytes) else Path(source)
    try:
        with Image.open(stream) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise InputError(
                    f"The picture has {width} x {height} pixels, more than the limit of {max_pixels}.",
                    where=label,
                    fix="remove it, or leave it out with --on-error skip",
                )
            return _to_rgb(image, background)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("The image file is not there (any more).", where=label) from None
    except UnidentifiedImageError:
        raise _unreadable("This is not a picture that can be read", label) from None
    except Image.DecompressionBombError as error:
        raise _unreadable(f"The picture is too large to be decoded safely ({error})", label) from None
    # Pillow's plugins raise whatever their parsers stumble over, so the net is wide on purpose.
    except Exception as error:
        raise _unreadable(f"The picture is damaged or unreadable ({_one_line(error)})", label) from error


def _unreadable(what: str, label: str) -> InputError:
    return InputError(
        f"{what}.", where=label, fix="repair or remove the file, or leave such files out with --on-error skip"
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    image.seek(0)
    image.load()
    upright = _upright(image)
    if upright.mode in _SIXTEEN_BIT_MODES or upright.mode == "I":
        gray = np.asarray(upright, dtype=np.int64)
        eight = np.clip((gray + 128) // 257, 0, 255).astype(np.uint8)
        return np.repeat(eight[:, :, None], 3, axis=2)
    if upright.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in upright.info:
        rgba = upright.convert("RGBA")
        ground = Image.new("RGBA", rgba.size, (*background, 255))
        upright = Image.alpha_composite(ground, rgba)
    rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
    return np.array(rgb, dtype=np.uint8)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a corrupt EXIF block says nothing about the pixels: keep them as stored
        return image
