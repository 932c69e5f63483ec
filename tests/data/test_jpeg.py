"""The fast path for JPEG gives the pixels of the careful path: 0 grey levels apart, 1 in gray of colours."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import simplejpeg
from made_pictures import (
    ORIENTED,
    by_pillow,
    encoded,
    exif,
    photo,
    segment,
    with_noise,
    with_segments,
    worst,
    xmp,
)
from PIL import Image

from zoo.data import jpeg
from zoo.data.decode import decode_image, open_image
from zoo.data.decoding import Decoding
from zoo.errors import InputError

GRAY = Decoding(channels=1)
STORED = Decoding(orientation="stored")
XMP = b"http://ns.adobe.com/xap/1.0/\0"

# 13 x 10 pixels in arithmetic code, which no encoder at hand writes (made with jpegtran).
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdB"
    "RkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09P"
    "T09PT09PT09PT09PT0//yQARCAAKAA0DASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDSMCBLeqWLwp82w4QN"
    "KtR9IC9zcwb7FyjztaFeFp/CQXlxP5f0alcbOpwFrYcwC2YZVT6GFkzN4P/Z"
)


def assert_same(data, shape=None):
    """The fast path takes the file and agrees with Pillow alone."""
    header = jpeg.read_header(data)
    assert header is not None and header.decode() is not None
    out = decode_image(data)
    assert out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    assert shape is None or out.shape == (*shape, 3)
    assert worst(out, by_pillow(data)) == 0
    assert worst(decode_image(data, how=GRAY)[..., 0], by_pillow(data, "L")) <= (0 if header.gray else 1)
    return out


@pytest.mark.parametrize(
    "place",
    ["imagenet_like/clothing10", "imagenet_like/imagen40", "cifar_like/cifar10", "cifar_like/tinyimagenet10"],
)
def test_real_files(shared, place):
    files = [
        file
        for file in sorted((shared / "data" / place).rglob("*"))
        if file.suffix.lower() in (".jpg", ".jpeg")
    ]
    assert files
    for file in files[:: max(1, len(files) // 12)]:
        assert_same(file.read_bytes())


@pytest.mark.parametrize("name", ["Landscape_6.jpg", "n02951585_can_opener.JPEG", "sugarshack.mpo"])
def test_odd_files_that_are_fast(shared, name):
    assert_same((shared / "data" / "odd_images" / name).read_bytes())


@pytest.mark.parametrize("quality", [1, 25, 75, 95, 100])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_every_subsampling_and_quality(subsampling, quality):
    picture = photo(61, 83)
    assert_same(simplejpeg.encode_jpeg(picture, quality, "RGB", subsampling), (61, 83))


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 17), (17, 1), (2, 3), (7, 9), (8, 8), (15, 16), (16, 17), (33, 65)]
)
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440"])
def test_odd_sizes(size, subsampling):
    picture = photo(*size)
    assert_same(simplejpeg.encode_jpeg(picture, 80, "RGB", subsampling), size)


@pytest.mark.parametrize(
    "options",
    [
        {"progressive": True},
        {"progressive": True, "subsampling": 0, "quality": 100},
        {"optimize": True},
        {"restart_marker_blocks": 1},
        {"restart_marker_rows": 1},
        {"keep_rgb": True},  # coded as RGB: Adobe's transform 0
        {"icc_profile": b"any profile" * 20, "comment": b"a comment", "dpi": (300, 300)},
    ],
    ids=lambda options: "+".join(options),
)
def test_every_way_of_coding(options):
    assert_same(encoded(photo(61, 83), "JPEG", **options), (61, 83))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 3}])
def test_gray_files(options):
    data = encoded(Image.fromarray(photo(61, 83)).convert("L"), "JPEG", **options)
    out = assert_same(data, (61, 83))
    assert (out == out[..., :1]).all()


def test_arithmetic_code():
    assert_same(ARITHMETIC, (10, 13))


def test_segments_before_the_pixels():
    plain = encoded(photo(), "JPEG")
    icc = segment(0xE2, b"ICC_PROFILE\0\1\1" + b"x" * 50_000)
    more = with_segments(
        plain, segment(0xFE, b"comment"), icc, b"\xff\xff\xff" + segment(0xED, b"Photoshop 3.0\0")[1:]
    )
    assert np.array_equal(assert_same(more), decode_image(plain))


# --- orientation ---


@pytest.mark.parametrize("turn", ORIENTED)
@pytest.mark.parametrize("subsampling", [0, 2])
def test_orientations(turn, subsampling):
    stored = np.ascontiguousarray(ORIENTED[turn](photo(61, 83)))
    data = encoded(stored, "JPEG", exif=exif(turn), subsampling=subsampling)
    assert_same(data, (61, 83))
    for how, wanted in ((Decoding(), (61, 83)), (STORED, stored.shape[:2])):
        picture = open_image(data, how=how)
        assert picture.can_shrink
        assert (picture.height, picture.width) == wanted == picture.pixels().shape[:2]
    assert np.array_equal(decode_image(data, how=STORED), np.array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("turn", ORIENTED)
@pytest.mark.parametrize("form", ["attribute", "element"])
def test_xmp_counts_where_exif_says_nothing(turn, form):
    """Pillow itself reads XMP of a JPEG only from version 11 on; here it does not depend on that."""
    text = xmp(turn) if form == "attribute" else b"<tiff:Orientation>%d</tiff:Orientation>" % turn
    stored = encoded(np.ascontiguousarray(ORIENTED[turn](photo())), "JPEG", subsampling=0)
    out = decode_image(with_segments(stored, segment(0xE1, XMP + text)))
    assert np.array_equal(out, decode_image(with_segments(stored, segment(0xE1, exif(turn)))))
    assert worst(out, photo()) < 40


@pytest.mark.parametrize("first", ["exif", "xmp"])
def test_exif_wins_over_xmp(first):
    blocks = [segment(0xE1, exif(6)), segment(0xE1, XMP + xmp(3))]
    data = with_segments(encoded(photo(24, 33), "JPEG"), *(blocks if first == "exif" else blocks[::-1]))
    assert_same(data, (33, 24))


def test_an_exif_block_in_two_segments_is_left_to_the_careful_path():
    whole = exif(6)
    blocks = segment(0xE1, whole[:-3]), segment(0xE1, b"Exif\0\0" + whole[-3:])
    data = with_segments(encoded(photo(24, 33), "JPEG"), *blocks)
    assert jpeg.read_header(data) is None
    assert np.array_equal(decode_image(data), by_pillow(data))
    assert decode_image(data).shape == (33, 24, 3)


# --- smaller ---


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("turn", [1, 3, 6, 7])
def test_scaled_decoding(shrink, turn):
    """About 1 level from means of all pixels on average (photographs: 0.9 at a half, 0.5 at an eighth)."""
    stored = np.ascontiguousarray(ORIENTED[turn](photo(121, 163)))
    data = encoded(stored, "JPEG", exif=exif(turn), quality=90)
    for how, channels in ((Decoding(), 3), (GRAY, 1)):
        picture = open_image(data, how=how)
        small = picture.pixels(shrink)
        assert small.shape == (-(-121 // shrink), -(-163 // shrink), channels)
        assert small.flags.c_contiguous and small.dtype == np.uint8
        whole = picture.pixels()
        # Means of whole squares that start in the corner where the stored picture starts.
        means = np.asarray(Image.fromarray(ORIENTED[turn](whole)[..., 0]).reduce(shrink)).astype(float)
        assert np.abs(ORIENTED[turn](small)[..., 0] - means).mean() < 2


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 8), (9, 15), (16, 17), (100, 3)])
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440"])
def test_sizes_of_scaled_decoding_are_rounded_up(size, shrink, subsampling):
    data = simplejpeg.encode_jpeg(photo(*size), 90, "RGB", subsampling)
    header = jpeg.read_header(data)
    assert header is not None and header.decode(shrink) is not None
    assert open_image(data).pixels(shrink).shape == (-(-size[0] // shrink), -(-size[1] // shrink), 3)


@pytest.mark.parametrize("shrink", [2, 8])
def test_scaled_decoding_of_real_files(shared, shrink):
    files = sorted((shared / "data" / "imagenet_like" / "imagen40").rglob("*.[jJ]*"))
    differences = []
    for file in files[:: len(files) // 6]:
        picture = open_image(file)
        means = np.asarray(Image.fromarray(picture.pixels()).reduce(shrink))
        small = picture.pixels(shrink)
        assert small.shape == means.shape
        differences.append(np.abs(small.astype(int) - means).mean())
    assert np.mean(differences) < 2


# --- damage ---


@pytest.mark.parametrize("shrink", [1, 4])
@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_half_a_file_is_refused_at_every_scale(shrink, options):
    data = encoded(photo(200, 300), "JPEG", quality=95, **options)
    picture = open_image(data[: len(data) // 2], name="half.jpg")
    assert (picture.height, picture.width) == (200, 300)
    with pytest.raises(InputError, match=r"JPEG picture \(300 x 200, RGB\) is damaged.*truncated") as caught:
        picture.pixels(shrink)
    assert caught.value.where == "half.jpg"
    assert "--on-error skip" in caught.value.fix


@pytest.mark.parametrize("turn", [1, 6])
def test_what_libjpeg_only_warns_of_takes_the_careful_path(turn):
    stored = np.ascontiguousarray(ORIENTED[turn](photo(61, 83)))
    whole = encoded(stored, "JPEG", exif=exif(turn))
    data = with_noise(whole)
    header = jpeg.read_header(data)
    assert header is not None and header.decode() is None
    picture = open_image(data)
    assert np.array_equal(picture.pixels(), by_pillow(whole))
    gray = open_image(data, how=GRAY)
    for shrink in (2, 4, 8):
        means = Image.fromarray(by_pillow(whole)).reduce(shrink)
        assert np.array_equal(picture.pixels(shrink), np.asarray(means))
        small = gray.pixels(shrink)
        assert small.shape == (*means.size[::-1], 1)
        assert worst(small[..., 0], np.asarray(means.convert("L"))) <= 1


def test_what_is_not_plain_takes_the_careful_path():
    data = encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG")
    assert jpeg.read_header(data) is None
    assert not open_image(data).can_shrink
    assert np.array_equal(decode_image(data), by_pillow(data))


def test_junk_between_segments_takes_the_careful_path():
    plain = encoded(photo(), "JPEG")
    data = plain[:20] + b"hello" + plain[20:]  # behind the first segment
    assert jpeg.read_header(data) is None
    assert np.array_equal(decode_image(data), by_pillow(data))


def test_a_corrupt_exif_block_says_nothing_about_the_pixels():
    plain = encoded(photo(), "JPEG")
    for block in (b"Exif\0\0", b"Exif\0\0rubbish", exif(6)[:14] + b"\xff" * 20, exif(6)[:-8]):
        data = with_segments(plain, segment(0xE1, block))
        assert np.array_equal(decode_image(data), decode_image(plain))
