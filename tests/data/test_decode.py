"""Decoding: every odd file gives the right picture or an error that names it and says what helps."""

from __future__ import annotations

import io
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile
from made_pictures import (
    ORIENTED,
    by_pillow,
    chunk,
    encoded,
    exif,
    photo,
    png,
    refused,
    tiff,
    worst,
    xmp,
)
from PIL import Image, features

from zoo.data.decode import decode_image, open_image
from zoo.data.decoding import PLAIN, Decoding
from zoo.errors import InputError

GRAY = Decoding(channels=1)
STORED = Decoding(orientation="stored")

# file -> (height, width) with the orientation applied
GOOD = {
    "16-bit-grey-alpha.png": (96, 109),
    "Channel_digital_image_CMYK_color.jpg": (333, 500),
    "Channel_digital_image_CMYK_color_no_profile.jpg": (333, 500),
    "Flag_of_the_Netherlands-16bit.png": (600, 900),
    "Landscape_6.jpg": (450, 600),
    "animated-loop-3.webp": (285, 370),
    "chessboard_GRAY_U16.tif": (200, 200),
    "full-transparent.png": (300, 300),
    "hopper_bad_exif.jpg": (500, 500),
    "iss634.apng": (245, 245),
    "iss634.gif": (245, 245),
    "junk_jpeg_header.jpg": (768, 1024),
    "n01871265_tusker.JPEG": (56, 75),
    "n02096051_Airedale.JPEG": (330, 500),
    "n02951585_can_opener.JPEG": (392, 294),
    "p_trns_single.png": (64, 64),
    "sugarshack.mpo": (480, 640),
    "swiss.png": (68, 68),
    "transparent.webp": (150, 200),
}
# file -> what the message says it is, what is wrong, the option or deed that helps
REFUSED = {
    "65536-uint32-limit.png": ("PNG picture", "4294967296 pixels, more than the limit", "--max-pixels"),
    "broken_data_stream.png": ("PNG picture (128 x 128, RGB)", "damaged", "repair or remove"),
    "corrupt-header.jpg": ("JPEG picture", "damaged header", "repair or remove"),
    "giant-image.jpg": ("JPEG picture", "20000 x 14000 pixels, more than the limit", "--max-pixels"),
    "truncated.jpg": ("JPEG picture (2725 x 2225, RGB)", "truncated", "repair or remove"),
    "truncated_jpeg.jpg": ("JPEG picture (100 x 100, RGB)", "truncated", "repair or remove"),
}


# --- the odd files ---


def test_the_tables_cover_the_folder(shared):
    folder = shared / "data" / "odd_images"
    assert {file.name for file in folder.iterdir()} - {"README.md"} == {*GOOD, *REFUSED}


@pytest.mark.parametrize("name", GOOD)
def test_odd_file(shared, name):
    path = shared / "data" / "odd_images" / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode_image(path)
        gray = decode_image(path, how=GRAY)
    assert image.shape == (*GOOD[name], 3)
    assert gray.shape == (*GOOD[name], 1)
    for array in (image, gray):
        assert array.dtype == np.uint8
        assert array.flags.writeable and array.flags.c_contiguous
    data = path.read_bytes()
    if name == "chessboard_GRAY_U16.tif":  # the only one whose samples Pillow keeps at 16 bits
        deep = np.asarray(Image.open(path)).astype(int)
        assert np.array_equal(image[..., 1], (deep + 128) // 257)
        return
    layers = by_pillow(data, "RGBA").astype(float)
    on_white = layers[..., :3] * (layers[..., 3:] / 255) + 255 - layers[..., 3:]
    assert worst(image, np.rint(on_white)) <= (1 if (layers[..., 3] < 255).any() else 0)
    assert worst(gray[..., 0], np.asarray(Image.fromarray(image).convert("L"))) <= 1


@pytest.mark.parametrize("name", REFUSED)
def test_odd_file_is_refused(shared, name):
    what, wrong, fix = REFUSED[name]
    error = refused(shared / "data" / "odd_images" / name, what, wrong)
    assert fix in error.fix


def test_one_function_in_many_threads(shared):
    folder = shared / "data" / "odd_images"

    def read(name):
        try:
            return decode_image(folder / name)
        except InputError as error:
            return np.frombuffer(error.what.encode(), np.uint8)

    names = [name for name in (*GOOD, *REFUSED) if "giant" not in name]
    alone = [read(name) for name in names]
    start = threading.Barrier(4)

    def all_of_them(shift):
        start.wait()
        order = [*range(shift, len(names)), *range(shift)]
        return [np.array_equal(read(names[i]), alone[i]) for i in order]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(same) for same in pool.map(all_of_them, (0, 5, 10, 15)))


# --- modes ---


def test_transparent_pixels_show_the_ground(shared):
    folder = shared / "data" / "odd_images"
    assert (decode_image(folder / "full-transparent.png") == 255).all()
    red = decode_image(folder / "full-transparent.png", how=Decoding(background=(255, 0, 0)))
    assert (red == [255, 0, 0]).all()
    # The four corners of this picture are transparent.
    webp = decode_image(folder / "transparent.webp")
    alpha = np.asarray(Image.open(folder / "transparent.webp"))[..., 3]
    assert (webp[alpha == 0] == 255).all()
    assert (alpha == 0).any()


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "TIFF"), ("RGBA", "WEBP")]
)
def test_alpha_is_mixed_with_the_background(mode, kind):
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[..., 3] = [[0, 255], [128, 255]]
    rgba[1, 1, :3] = 200
    data = encoded(
        Image.fromarray(rgba).convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {})
    )
    out = decode_image(data)
    assert np.abs(out[..., 0].astype(int) - [[255, 0], [127, 200]]).max() <= 1
    assert (out == out[..., :1]).all()
    dark = decode_image(data, how=Decoding(channels=1, background=(40, 40, 40)))
    assert np.abs(dark[..., 0].astype(int) - [[40, 0], [20, 200]]).max() <= 1


def test_a_transparent_colour_counts_as_alpha():
    gray = Image.fromarray(np.array([[0, 90], [180, 90]], np.uint8))
    assert decode_image(encoded(gray, transparency=90))[..., 1].tolist() == [[0, 255], [180, 255]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decode_image(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    half = decode_image(encoded(palette, transparency=bytes([128, 255])))
    assert worst(half, np.array([[[132, 137, 142], [40, 50, 60]]])) <= 1
    colour = Image.fromarray(np.array([[[1, 2, 3], [1, 2, 4]]], np.uint8))
    assert decode_image(encoded(colour, transparency=(1, 2, 3))).tolist() == [[[255] * 3, [1, 2, 4]]]


@pytest.mark.parametrize(
    ("depth", "colour", "row", "clear", "wanted"),
    [
        (1, 0, b"\x40", b"\0\1", [0, 77, 0]),
        (1, 0, b"\x40", b"\0\0", [77, 255, 77]),
        (2, 0, b"\x6c", b"\0\2", [85, 77, 255]),  # levels 1, 2, 3
        (4, 0, b"\x5a\xf0", b"\0\5", [77, 170, 255]),
        (16, 0, struct.pack(">3H", 1000, 1001, 65535), struct.pack(">H", 1000), [77, 4, 255]),
        (
            16,
            2,
            struct.pack(">9H", *[5140] * 3, *[9000] * 3, 0, 0, 0),
            struct.pack(">3H", *[9000] * 3),
            [20, 77, 0],
        ),
    ],
)
def test_a_transparent_colour_is_in_the_pngs_own_depth(depth, colour, row, clear, wanted):
    data = png(3, 1, [row], chunk(b"tRNS", clear), depth=depth, colour=colour)
    picture = open_image(data, how=Decoding(background=(77, 77, 77)))
    for _ in range(2):
        out = picture.pixels()
        assert out[0, :, 0].tolist() == wanted
        assert (out == out[..., :1]).all()
    assert decode_image(data, how=Decoding(channels=1, background=(77, 77, 77)))[0, :, 0].tolist() == wanted


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    deep = np.array([[0, 128, 129, 257, 300], [385, 386, 32768, 65278, 65535]], np.uint16)
    raw = b"P5 5 2 65535\n" + deep.astype(">u2").tobytes()
    data = raw if kind == "PPM" else encoded(Image.fromarray(deep), kind)
    out = decode_image(data)
    assert out[..., 0].tolist() == [[0, 0, 1, 1, 1], [1, 2, 128, 254, 255]]
    assert np.array_equal(out[..., 0], (deep.astype(int) + 128) // 257)
    assert (out == out[..., :1]).all()
    assert np.array_equal(decode_image(data, how=GRAY), out[..., :1])


def test_other_depths_of_tiff():
    twelve = np.array([0, 100, 2048, 4095])
    packed = bytes([0, 0, 100, 0x80, 0x0F, 0xFF])  # two levels in three bytes
    out = decode_image(tiff(4, 1, packed, bits=12))
    assert out[0, :, 0].tolist() == np.rint(twelve / 4095 * 255).tolist()
    # Where white is zero, black is 65535.
    inverted = tiff(3, 1, struct.pack("<3H", 0, 257, 65535), bits=16, photometric=0)
    assert decode_image(inverted)[0, :, 0].tolist() == [255, 254, 0]
    assert decode_image(tiff(2, 1, b"\0\x05", photometric=0))[0, :, 0].tolist() == [255, 250]


def test_colours_of_16_bits_are_within_a_level():
    deep = np.random.default_rng(0).integers(0, 65536, (5, 7, 3)).astype(np.uint16)
    data = png(7, 5, [row.astype(">u2").tobytes() for row in deep], depth=16, colour=2)
    assert worst(decode_image(data), np.rint(deep / 257)) <= 1


@pytest.mark.parametrize("bands", [3, 4])
@pytest.mark.parametrize("turn", [1, 2, 6])
def test_a_tiff_of_16_bits_whose_channels_lie_apart(bands, turn):
    upright = np.dstack([photo(), np.full((24, 33), 255, np.uint8)])[..., :bands]
    stored = ORIENTED[turn](upright).transpose(2, 0, 1).astype(np.uint16) * 257
    stream = io.BytesIO()
    options = {"extrasamples": ["unassalpha"]} if bands == 4 else {}
    tag = (274, 3, 1, turn, True)
    tifffile.imwrite(stream, stored, photometric="rgb", planarconfig="separate", extratags=[tag], **options)
    picture = open_image(stream.getvalue())
    assert (picture.height, picture.width) == (24, 33)
    assert np.array_equal(picture.pixels(), photo())
    assert np.array_equal(decode_image(stream.getvalue(), how=STORED), ORIENTED[turn](photo()))


def test_a_tiff_of_signed_bytes_is_refused():
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.array([[-100, 100]], np.int8), photometric="minisblack")
    refused(stream.getvalue(), "signed integer samples")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[0.0, 0.5]], np.float32), "floating-point"),
        (np.array([[0, 70000]], np.int32), "32-bit"),
        (np.array([[0, 200]], np.int32), "32-bit"),  # also where the levels would fit into 16 bits
    ],
)
def test_samples_without_an_agreed_range_are_refused(array, words):
    error = refused(encoded(Image.fromarray(array), "TIFF"), "TIFF picture (2 x 1", words)
    assert "8 or 16 bits" in error.fix


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "PA", "RGBX"])
def test_every_mode_becomes_three_channels(mode):
    image = Image.new("RGB", (5, 4), (200, 200, 200))
    image = image.convert("P").convert(mode) if mode == "PA" else image.convert(mode)
    kind = "TIFF" if mode in ("CMYK", "YCbCr", "PA", "RGBX") else "PNG"
    # Pillow 10.3 does not read the uncompressed YCbCr that it writes.
    out = decode_image(encoded(image, kind, **({"compression": "jpeg"} if mode == "YCbCr" else {})))
    assert out.shape == (4, 5, 3)
    assert out.dtype == np.uint8
    if mode == "1":  # dithered
        assert set(out.flat) <= {0, 255}
    else:
        assert worst(out, np.full((4, 5, 3), 200)) <= 5


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "MPO", "TIFF"])
def test_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert worst(decode_image(data), np.full((16, 16, 3), [250, 0, 0])) <= 3


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif():
    picture = photo()
    out = decode_image(encoded(picture, "AVIF", quality=95))
    assert np.abs(out.astype(int) - picture).mean() < 4


# --- orientation ---

CARRIERS = {
    "JPEG, EXIF": lambda image, turn: encoded(image, "JPEG", quality=95, subsampling=0, exif=exif(turn)),
    "PNG, EXIF": lambda image, turn: encoded(image, exif=exif(turn)),
    "PNG, XMP": lambda image, turn: png(
        *image.shape[1::-1],
        [row.tobytes() for row in image],
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(turn)),
        colour=2,
    ),
    "WebP, EXIF": lambda image, turn: encoded(image, "WEBP", lossless=True, exif=exif(turn)),
    "TIFF": lambda image, turn: encoded(image, "TIFF", tiffinfo={274: turn}),
    "TIFF, LZW": lambda image, turn: encoded(image, "TIFF", tiffinfo={274: turn}, compression="tiff_lzw"),
}
if features.check_module("webp") and "AVIF" in Image.registered_extensions().values():
    CARRIERS["AVIF"] = lambda image, turn: encoded(image, "AVIF", quality=100, exif=exif(turn))


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("turn", ORIENTED)
def test_orientation(carrier, turn):
    upright = photo(24, 33)
    stored = np.ascontiguousarray(ORIENTED[turn](upright))
    data = CARRIERS[carrier](stored, turn)
    tolerance = 40 if carrier in ("JPEG, EXIF", "AVIF") else 0
    for how, wanted in ((PLAIN, upright), (STORED, stored)):
        picture = open_image(data, how=how)
        assert (picture.height, picture.width) == wanted.shape[:2]
        assert worst(picture.pixels(), wanted) <= tolerance
        assert worst(picture.pixels(), wanted) <= tolerance  # a second time too


@pytest.mark.parametrize("turn", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(turn):
    picture = photo()
    assert np.array_equal(decode_image(encoded(picture, exif=exif(turn))), picture)
    jpeg = encoded(picture, "JPEG", exif=exif(turn))
    assert np.array_equal(decode_image(jpeg), by_pillow(encoded(picture, "JPEG")))


def test_an_orientation_behind_the_pixels_counts():
    block = exif(6).removeprefix(b"Exif\0\0")
    data = png(2, 1, [b"\x01\x02"]).replace(chunk(b"IEND", b""), chunk(b"eXIf", block) + chunk(b"IEND", b""))
    assert decode_image(data)[..., 0].tolist() == [[1], [2]]
