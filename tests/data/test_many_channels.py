"""One channel, and more than three: what stays as it is, what is scaled, and what is refused."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest
import tifffile
from made_pictures import ORIENTED, encoded, exif, photo, worst
from PIL import Image

from zoo.data.decode import decode_image, open_image
from zoo.data.decoding import Decoding
from zoo.errors import InputError

SKIP = "--on-error skip"


def bands(count, dtype=np.uint8, height=9, width=14, seed=0):
    top = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1
    drawn = np.random.default_rng(seed).random((height, width, count)) * top
    return drawn.astype(dtype)


def tiff_of(array, **options):
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, photometric=options.pop("photometric", "minisblack"), **options)
    return stream.getvalue()


def refused(data, channels, *words, fix=SKIP, **how):
    with pytest.raises(InputError) as caught:
        decode_image(data, name="some.tif", how=Decoding(channels=channels, **how))
    error = caught.value
    assert error.where == "some.tif"
    for word in words:
        assert word in error.what
    assert fix in error.fix
    return error


LAYOUTS = {
    "interleaved": lambda array: tiff_of(array, planarconfig="contig"),
    "planar": lambda array: tiff_of(array.transpose(2, 0, 1), planarconfig="separate"),
    "a page each": lambda array: tiff_of(array.transpose(2, 0, 1)),
    "deflate": lambda array: tiff_of(array, planarconfig="contig", compression="zlib"),
    "tiles": lambda array: tiff_of(array.transpose(2, 0, 1), planarconfig="separate", tile=(16, 16)),
    "with a description": lambda array: tiff_of(array.transpose(2, 0, 1), ome=True, metadata={"axes": "CYX"}),
    "large files' form": lambda array: tiff_of(array, planarconfig="contig", bigtiff=True),
    "big-endian": lambda array: tiff_of(array, planarconfig="contig", byteorder=">"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [2, 5, 13])
def test_bands_of_8_bits_stay_as_they_are(layout, count):
    array = bands(count)
    out = decode_image(LAYOUTS[layout](array), how=Decoding(channels=count))
    assert out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    assert np.array_equal(out, array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bands_of_16_bits_are_scaled(layout):
    array = bands(5, np.uint16)
    array[0, :5, 0] = [0, 128, 129, 65406, 65535]
    out = decode_image(LAYOUTS[layout](array), how=Decoding(channels=5))
    assert out.dtype == np.uint8
    assert np.array_equal(out, (array.astype(int) + 128) // 257)
    assert out[0, :5, 0].tolist() == [0, 0, 1, 254, 255]


def test_colours_and_alpha_of_a_tiff_stay_as_they_are():
    array = bands(4)
    data = tiff_of(array, photometric="rgb", extrasamples=["unassalpha"])
    assert np.array_equal(decode_image(data, how=Decoding(channels=4)), array)


@pytest.mark.parametrize(
    ("mode", "count", "kind"), [("RGBA", 4, "PNG"), ("LA", 2, "PNG"), ("RGBA", 4, "WEBP")]
)
def test_alpha_is_a_channel_where_it_is_asked_for(mode, count, kind):
    array = bands(4)
    picture = Image.fromarray(array).convert(mode)
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    out = decode_image(encoded(picture, kind, **lossless), how=Decoding(channels=count))
    assert out.flags.writeable and out.flags.c_contiguous
    assert np.array_equal(out, np.asarray(picture))


def test_the_inks_of_a_cmyk_file():
    inks = Image.fromarray(photo()).convert("CMYK")
    out = decode_image(encoded(inks, "JPEG", quality=95, subsampling=0), how=Decoding(channels=4))
    assert out.shape == (24, 33, 4)
    assert np.abs(out.astype(int) - np.asarray(inks)).mean() < 4


@pytest.mark.parametrize("turn", ORIENTED)
def test_orientation(turn):
    array = bands(5)
    stored = np.ascontiguousarray(ORIENTED[turn](array))
    tag = [(274, "H", 1, turn, True)]
    data = tiff_of(stored, planarconfig="contig", extratags=tag)
    picture = open_image(data, how=Decoding(channels=5))
    assert (picture.height, picture.width) == array.shape[:2]
    assert np.array_equal(picture.pixels(), array)
    assert np.array_equal(decode_image(data, how=Decoding(channels=5, orientation="stored")), stored)
    rgba = encoded(Image.fromarray(np.ascontiguousarray(stored[..., :4])), exif=exif(turn))
    assert np.array_equal(decode_image(rgba, how=Decoding(channels=4)), array[..., :4])


# --- one channel ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_gray_of_colours_is_pillows_within_a_level(kind):
    data = encoded(photo(40, 50), kind)
    out = decode_image(data, how=Decoding(channels=1))
    assert out.shape == (40, 50, 1) and out.dtype == np.uint8
    assert worst(out[..., 0], np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"))) <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_gray_files_stay_as_they_are(kind):
    data = encoded(Image.fromarray(photo(40, 50)).convert("L"), kind)
    out = decode_image(data, how=Decoding(channels=1))
    assert np.array_equal(out[..., 0], np.asarray(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode_image(data), np.repeat(out, 3, axis=2))


# --- what is refused ---


def test_another_number_of_bands_names_both():
    error = refused(tiff_of(bands(5), planarconfig="contig"), 4, "The picture has 5 channels, not 4.")
    assert "--channels" in error.fix and "data.channels=N" in error.fix
    refused(tiff_of(bands(1)[..., 0]), 5, "1 channel, not 5")
    refused(encoded(photo()), 4, "3 channels, not 4")
    refused(encoded(photo(), "JPEG"), 2, "3 channels, not 2")
    refused(encoded(Image.fromarray(photo()).convert("P")), 4, "1 channel, not 4")


def test_the_limit_is_checked_before_the_bands_are_decoded():
    # The pixels are missing: whoever wanted them would find the file damaged.
    data = tiff_of(bands(5, height=300, width=400), planarconfig="contig")[:2000]
    refused(
        data,
        5,
        "TIFF picture has 400 x 300 pixels",
        "limit of 119999",
        fix="--max-pixels",
        max_pixels=119_999,
    )
    refused(data, 5, "damaged", max_pixels=120_000)


def test_the_number_of_bands_is_checked_before_they_are_decoded():
    data = tiff_of(bands(200, height=30, width=40), planarconfig="contig")[:5000]
    refused(data, 5, "200 channels, not 5")


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint32])
def test_samples_without_an_agreed_range_are_refused(dtype):
    data = tiff_of(bands(5, dtype), planarconfig="contig")
    refused(data, 5, np.dtype(dtype).name, fix="8 or 16 bits")


def test_damage_is_named():
    whole = tiff_of(bands(5), planarconfig="contig")
    for data in (whole[:60], whole[:8] + b"\xff" * 40 + whole[48:], b"II*\0", b"II*\0\0\0\0\0"):
        refused(data, 5, "TIFF file is damaged or can't be read with 5 channels")
    refused(b"no picture", 5, "This is a text file, not a picture")


def test_a_compression_that_needs_a_package_names_it():
    array = bands(4)
    data = encoded(Image.fromarray(array), "TIFF", compression="tiff_lzw")
    if importlib.util.find_spec("imagecodecs"):
        assert np.array_equal(decode_image(data, how=Decoding(channels=4)), array)
    else:
        refused(data, 4, "compressed in a way that needs another package", fix="imagecodecs")
