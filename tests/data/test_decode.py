"""Decoding: every odd file gives the right picture or an error that names it."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from zoo.data.decode import decode_image
from zoo.errors import InputError

# file -> (height, width) with the orientation applied, or None: refused
ODD = {
    "16-bit-grey-alpha.png": (96, 109),
    "65536-uint32-limit.png": None,
    "Channel_digital_image_CMYK_color.jpg": (333, 500),
    "Channel_digital_image_CMYK_color_no_profile.jpg": (333, 500),
    "Flag_of_the_Netherlands-16bit.png": (600, 900),
    "Landscape_6.jpg": (450, 600),
    "animated-loop-3.webp": (285, 370),
    "broken_data_stream.png": None,
    "chessboard_GRAY_U16.tif": (200, 200),
    "corrupt-header.jpg": None,
    "full-transparent.png": (300, 300),
    "giant-image.jpg": None,
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
    "truncated.jpg": None,
    "truncated_jpeg.jpg": None,
}


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def test_the_table_covers_the_folder(shared):
    folder = shared / "data" / "odd_images"
    assert {file.name for file in folder.iterdir()} - {"README.md"} == set(ODD)


@pytest.mark.parametrize("name", ODD)
def test_odd_file(shared, name):
    path = shared / "data" / "odd_images" / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if ODD[name] is None:
            with pytest.raises(InputError) as caught:
                decode_image(path)
            assert caught.value.where == str(path)
            assert "--on-error skip" in caught.value.fix
            assert len(caught.value.what.splitlines()) == 1
        else:
            image = decode_image(path)
            assert image.shape == (*ODD[name], 3)
            assert image.dtype == np.uint8
            assert image.flags.writeable and image.flags.c_contiguous


def test_transparent_pixels_show_the_ground(shared):
    folder = shared / "data" / "odd_images"
    assert (decode_image(folder / "full-transparent.png") == 255).all()
    red = decode_image(folder / "full-transparent.png", background=(255, 0, 0))
    assert (red == [255, 0, 0]).all()
    # The four corners of this picture are transparent.
    webp = decode_image(folder / "transparent.webp")
    alpha = np.asarray(Image.open(folder / "transparent.webp"))[..., 3]
    assert (webp[alpha == 0] == 255).all()
    assert (alpha == 0).any()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_mixed_with_white(mode):
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[..., 3] = [[0, 255], [128, 255]]
    rgba[1, 1, :3] = 200
    out = decode_image(encoded(Image.fromarray(rgba).convert(mode)))
    assert np.abs(out[..., 0].astype(int) - [[255, 0], [127, 200]]).max() <= 1
    assert (out == out[..., :1]).all()


def test_a_transparent_colour_counts_as_alpha():
    gray = Image.fromarray(np.array([[0, 90], [180, 90]], np.uint8))
    assert decode_image(encoded(gray, transparency=90))[..., 1].tolist() == [[0, 255], [180, 255]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decode_image(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    deep = np.array([[0, 257, 300], [32768, 65278, 65535]], np.uint16)
    out = decode_image(encoded(Image.fromarray(deep), kind))
    assert out[..., 0].tolist() == [[0, 1, 1], [128, 254, 255]]
    assert (out == out[..., :1]).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_every_mode_becomes_three_channels(mode):
    image = Image.new("RGB", (5, 4), (200, 200, 200)).convert(mode)
    out = decode_image(encoded(image, {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")))
    assert out.shape == (4, 5, 3)
    assert out.dtype == np.uint8
    assert np.abs(out.astype(int) - (255 if mode == "1" else 200)).max() <= (255 if mode == "1" else 5)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = [255, 0, 0]  # red top left, blue top right
    upright[:8, 16:] = [0, 0, 255]
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo[orientation](upright)))
    assert np.array_equal(decode_image(encoded(stored, exif=exif)), upright)


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(data) == [255, 0, 0]).all()


def test_too_many_pixels_are_refused_by_the_header():
    # A PNG header that claims 5000 x 4000 pixels, with no pixel data behind it.
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 5000, 4000, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(InputError, match="5000 x 4000 pixels, more than the limit of 1000000") as caught:
        decode_image(data, name="big.png", max_pixels=1_000_000)
    assert caught.value.where == "big.png"


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\xff\xd8\xff\xe0", b"GIF89a"])
def test_rubbish_is_named(data):
    with pytest.raises(InputError) as caught:
        decode_image(data, name="rubbish.jpg")
    assert caught.value.where == "rubbish.jpg"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="not there") as caught:
        decode_image(tmp_path / "gone.png")
    assert caught.value.where == str(tmp_path / "gone.png")


def test_the_error_travels_between_processes():
    error = InputError("what", where="file", fix="do")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (InputError, str(error))
