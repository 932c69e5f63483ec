"""How picture files become pixels: options and limits. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_PIXELS", "PLAIN", "Decoding"]

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs


@dataclass(frozen=True)
class Decoding:
    """How files become pixels, and what is refused before it can do harm.

    Args:
        channels: 3 (RGB), 1 (gray), or what a many-channel file must have.
        orientation: ``exif`` turns pictures upright, ``stored`` keeps them as they lie in the file.
        background: the colour, 0..255 each, under transparent pixels.
        max_pixels: more pixels than this, by the header, are refused.
        max_bytes: larger files are refused.
        max_text_bytes: larger text blocks in a PNG (unpacked) are refused.
    """

    channels: int = 3
    orientation: str = "exif"
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS
    max_bytes: int = 2**29
    max_text_bytes: int = 2**20


PLAIN = Decoding()
"""RGB, upright, on white, with the default limits."""
