"""Pictures with another number of channels than 1 or 3: the bands as they are, 8 bits each."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import numpy as np

from ..errors import InputError

__all__ = ["check_bands", "is_tiff", "read_tiff"]

_FIX = (
    "pass the number that the files have (--channels, or --set data.channels=N), or leave others out: "
    "zoo pretrain --on-error skip"
)

# What tifffile notes about odd files: what matters is raised. (Who set up logging still sees it.)
logging.getLogger("tifffile").addHandler(logging.NullHandler())


def is_tiff(data: bytes) -> bool:
    """Whether a file's first bytes are a TIFF's, or those of its form for large files."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def check_bands(found: int, wanted: int, label: str) -> None:
    """Raises ``InputError`` if a picture has another number of bands than is wanted."""
    if found != wanted:
        plural = "" if found == 1 else "s"
        raise InputError(f"The picture has {found} channel{plural}, not {wanted}.", where=label, fix=_FIX)


def read_tiff(
    data: bytes, channels: int, label: str, limit: Callable[[int, int], None]
) -> tuple[np.ndarray, int]:
    """The bands of a TIFF file, of one page or one page each, and the orientation that it states (1 to 8).

    Args:
        data: the file.
        channels: how many bands are expected.
        label: the file's name for messages.
        limit: called with width and height before anything is decoded; raises if that is too much.

    Returns:
        uint8, H x W x channels as stored, and the orientation. Samples of 9 to 16 bits are scaled to 8.

    Raises:
        InputError: another number of channels, samples that are neither 8 nor 16 bits, or damage.
    """
    import tifffile

    try:
        # An OME description may send the reader to other files.
        with tifffile.TiffFile(io.BytesIO(data), is_ome=False) as file:
            first = file.series[0]
            shape, axes = first.shape, first.axes
            height, width = shape[axes.index("Y")], shape[axes.index("X")]
            limit(width, height)
            if min(height, width) < 1:
                raise ValueError("no pixels")
            check_bands(first.size // (height * width), channels, label)
            bits = first.keyframe.bitspersample
            if first.dtype not in (np.uint8, np.uint16) or bits < 8:
                raise InputError(
                    f"The picture has {first.dtype} samples of {bits} bits, whose black and white nobody states.",
                    where=label,
                    fix="save it with 8 or 16 bits a sample",
                )
            tag = first.keyframe.tags.get(274)
            orientation = tag.value if tag is not None and tag.value in range(1, 9) else 1
            pixels = first.asarray()
    except InputError:
        raise
    except Exception as error:  # parsers raise whatever they stumble over
        raise _damaged(error, channels, label) from error
    # Rows and columns first, whatever else there is (samples or pages) last.
    order = [axes.index("Y"), axes.index("X")]
    order += [axis for axis in range(len(axes)) if axis not in order]
    pixels = pixels.transpose(order).reshape(height, width, channels)
    if bits > 8:
        white = 2**bits - 1
        pixels = ((pixels.astype(np.uint32) * 255 + white // 2) // white).astype(np.uint8)
    return np.ascontiguousarray(pixels), orientation


def _damaged(error: Exception, channels: int, label: str) -> InputError:
    text = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    if "imagecodecs" in text:
        return InputError(
            f"The TIFF file is compressed in a way that needs another package ({text}).",
            where=label,
            fix="install imagecodecs, or save it uncompressed or with deflate",
        )
    return InputError(
        f"The TIFF file is damaged or can't be read with {channels} channels ({text}).",
        where=label,
        fix=_FIX,
    )
