"""What a file is that can't be read as a picture, and what helps."""

from __future__ import annotations

from PIL import Image

from . import jpeg
from .many_channels import is_tiff

__all__ = ["REPAIR", "SKIP", "identify", "kind_of"]

SKIP = "leave such files out: zoo pretrain --on-error skip"
REPAIR = f"repair or remove the file, or {SKIP}"
_CONVERT = f"convert it to JPEG or PNG, or {SKIP}"

_MAGIC = (
    (b"\xff\xd8", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"P5", "PGM"),
    (b"P6", "PPM"),
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document"),
    (b"<", "an HTML page or another text document"),
    (b"version https://git-lfs", "a Git LFS pointer (the real file was not fetched)"),
)
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
_FIXES = {
    "HEIC": _CONVERT,
    "JPEG 2000": _CONVERT,
    "AVIF": f"install Pillow 11.3 or newer, or {_CONVERT}",
    "TIFF": f"if it has many channels, say how many (--channels, or --set data.channels=N); else {_CONVERT}",
    "a Git LFS pointer (the real file was not fetched)": "fetch it: git lfs pull",
}


def kind_of(data: bytes) -> str:
    """By the first bytes: a picture format's name, or ``a PDF document`` and the like."""
    if not data:
        return "an empty file"
    if not any(data[:4096]):
        return "a file of zeros"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "a video")
    if data[4:8] == b"jP  ":
        return "JPEG 2000"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if is_tiff(data):
        return "TIFF"
    start = data[:64].lstrip().lower() if data[:1].isspace() or data[:1] == b"<" else data[:64]
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    text = not any(byte < 9 or 13 < byte < 32 for byte in data[:4096])
    return "a text file" if text else "a file of an unknown kind"


def identify(data: bytes) -> tuple[str, str]:
    """What to say of a file that Pillow takes for no picture, and what helps."""
    kind = kind_of(data)
    if kind.startswith(("a ", "an ")):
        return f"This is {kind}, not a picture.", _FIXES.get(kind, REPAIR)
    if kind in ("HEIC", "JPEG 2000") or (kind == "AVIF" and "AVIF" not in Image.OPEN):
        return f"This is a picture in the format {kind}, which is not read here.", _FIXES[kind]
    if kind == "TIFF":
        return "This TIFF picture has a damaged header or an unusual layout.", _FIXES[kind]
    if kind == "JPEG" and (bits := jpeg.bits(data)) not in (None, 8):
        return f"This JPEG picture has {bits} bits a sample, and only those with 8 are read here.", _CONVERT
    return f"This {kind} picture has a damaged header.", REPAIR
