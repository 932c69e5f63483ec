"""Files made to do harm: whatever they hold, a picture or one clear error comes out, and soon."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import tifffile
from made_pictures import encoded, exif, photo, png, segment, text_chunk, tiff, with_segments, xmp
from PIL import Image

from zoo.data.decode import open_image
from zoo.data.decoding import Decoding
from zoo.errors import InputError


def bands(**options):
    stream = io.BytesIO()
    array = np.random.default_rng(0).integers(0, 60_000, (5, 17, 19), dtype=np.uint16)
    tifffile.imwrite(stream, array, photometric="minisblack", planarconfig="separate", **options)
    return stream.getvalue()


def files():
    """Small files of every format, several ways of coding each."""
    picture = photo(23, 37)
    image = Image.fromarray(picture)
    two = {"save_all": True, "append_images": [image.rotate(30)]}
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (9, 11), dtype=np.uint16))
    adobe = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(8))
    return {
        "JPEG": [
            encoded(picture, "JPEG", exif=exif(6)),
            with_segments(encoded(picture, "JPEG", progressive=True), adobe),
            encoded(image.convert("L"), "JPEG", restart_marker_blocks=1),
            encoded(image.convert("CMYK"), "JPEG"),
            encoded(picture, "MPO", **two),
        ],
        "PNG": [
            encoded(picture, exif=exif(6)),
            encoded(image.convert("P"), transparency=3),
            encoded(deep, transparency=1000),
            encoded(image.convert("1"), transparency=1),
            encoded(picture, icc_profile=b"x" * 200, **two),
            png(2, 1, [b"\1\2"], text_chunk(b"zTXt", b"a" * 500), text_chunk(b"iTXt", b"a" * 500)),
        ],
        "WEBP": [
            encoded(picture, "WEBP", exif=exif(6)),
            encoded(image.convert("RGBA"), "WEBP", lossless=True),
            encoded(picture, "WEBP", **two),
        ],
        "GIF": [
            encoded(picture, "GIF", transparency=2, disposal=2, **two),
            encoded(image.convert("L"), "GIF", interlace=1),
        ],
        "TIFF": [
            *(
                encoded(picture, "TIFF", compression=kind, tiffinfo={274: 6})
                for kind in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
            ),
            encoded(deep, "TIFF"),
            encoded(image.convert("1"), "TIFF", compression="group4"),
            encoded(image.convert("CMYK"), "TIFF"),
            bands(),
            bands(tile=(16, 16), compression="zlib"),
        ],
        "other": [
            encoded(picture, "BMP"),
            encoded(image.convert("P"), "BMP"),
            encoded(picture, "PPM"),
            b"P5 4 3 1000\n" + bytes(24),
            *([encoded(picture, "AVIF", exif=exif(6))] if "AVIF" in Image.SAVE else []),
        ],
    }


def spoilt(data, rng):
    """A file with a few bytes changed, lost or repeated, most of them near the beginning; or cut off."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(out) if rng.random() < 0.5 else min(len(out), 220)))
        kind = rng.integers(0, 6)
        if kind == 0:
            out[at] = rng.integers(0, 256)
        elif kind == 1:
            out[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 3:
            out[at : at + 4] = rng.bytes(4)
        elif kind == 4:
            del out[at : at + int(rng.integers(1, 20))]
        else:
            out[at:at] = out[at : at + int(rng.integers(1, 30))]
    return bytes(out[: int(rng.integers(0, len(out)))] if rng.random() < 0.15 else out)


def mended(data):
    """A PNG whose checksums fit again, so that what was spoilt is read."""
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = struct.pack(">I", zlib.crc32(out[at + 4 : end]))
        at = end + 4
    return bytes(out)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "other"])
def test_spoilt_files_give_a_picture_or_one_clear_error(kind):
    rng = np.random.default_rng(7)
    whole = files()[kind]
    read = refused = 0
    for turn in range(300):
        data = spoilt(whole[turn % len(whole)], rng)
        data = mended(data) if kind == "PNG" else data
        channels = int(rng.choice([3, 3, 3, 1, 4, 5]))
        orientation = str(rng.choice(["exif", "stored"]))
        how = Decoding(channels=channels, orientation=orientation, max_pixels=10**6)
        try:
            picture = open_image(data, name="spoilt", how=how)
            shrink = int(rng.choice([1, 2, 4, 8])) if picture.can_shrink else 1
            out = picture.pixels(shrink)
        except InputError as error:
            assert error.where == "spoilt" and error.fix and len(error.what.splitlines()) == 1
            refused += 1
        else:
            assert out.dtype == np.uint8 and out.flags.writeable and out.flags.c_contiguous
            assert out.shape == (-(-picture.height // shrink), -(-picture.width // shrink), channels)
            read += 1
    assert read > 10 and refused > 10


# --- decompression bombs ---


def claim(data, at, layout, *sides):
    """A file whose header has other sides written into it."""
    return data[:at] + struct.pack(layout, *sides) + data[at + struct.calcsize(layout) :]


def bombs():
    picture = photo(16, 16)
    side = 65_536
    jpeg = encoded(picture, "JPEG")
    inks = encoded(Image.fromarray(picture).convert("CMYK"), "JPEG")
    gif = encoded(picture, "GIF")
    bitmap = encoded(picture, "BMP")
    webp = encoded(picture, "WEBP", save_all=True, append_images=[Image.fromarray(picture[::-1])])
    return {
        "PNG": png(side, side, colour=2),
        "JPEG": claim(jpeg, jpeg.index(b"\xff\xc0") + 5, ">HH", 65_500, 65_500),
        "JPEG, CMYK": claim(inks, inks.index(b"\xff\xc0") + 5, ">HH", 65_500, 65_500),
        "GIF": claim(gif, 6, "<HH", 65_535, 65_535),
        "GIF, frame": claim(gif, gif.index(b"\x2c\0\0\0\0") + 5, "<HH", 65_535, 65_535),
        "BMP": claim(bitmap, 18, "<II", side, side),
        "PPM": b"P6 65536 65536 255\n" + bytes(10),
        "TIFF": tiff(side, side, bytes(16)),
        "WebP": claim(webp, webp.index(b"VP8X") + 12, "<HBHB", 16_383, 0, 16_383, 0),
        "zTXt": png(2, 1, [b"\1\2"], text_chunk(b"zTXt", bytes(50_000_000))),
        "iTXt": png(2, 1, [b"\1\2"], text_chunk(b"iTXt", bytes(50_000_000))),
        "TIFF of many bands": tiff(side, side, bytes(16)),
    }


# In a process of its own: the memory that other tests have taken would hide what is taken here.
DEFUSE = """
import json, resource, sys
from pathlib import Path
from zoo.data.decode import decode_image
from zoo.data.decoding import Decoding
from zoo.errors import InputError

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = {}
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        decode_image(file, how=Decoding(channels=5 if "bands" in file.name else 3))
    except InputError as error:
        said[file.name] = f"{error.what} {error.fix}"
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps({"said": said, "grown in MB": grown}))
"""


def test_bombs_are_refused_before_memory_is_taken(tmp_path):
    made = bombs()
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    words = [sys.executable, "-c", DEFUSE, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["said"]) == set(made)
    for name, said in found["said"].items():
        text = "TXt" in name
        assert ("a text block" if text else "more than the limit") in said, (name, said)
        assert ("--max-text-bytes" if text else "--max-pixels") in said
    assert found["grown in MB"] < 200  # the smallest of these pictures would take 800
