"""Limits of decoding, and what is said about files that give no picture."""

from __future__ import annotations

import os
import pickle
import resource
import zlib

import numpy as np
import pytest
from made_pictures import (
    chunk,
    encoded,
    no_hanging,
    photo,
    png,
    refused,
    text_chunk,
)
from PIL import Image

from tiny import image_folder
from zoo.data.decode import decode_image
from zoo.data.decoding import Decoding
from zoo.errors import InputError, RunError

GRAY = Decoding(channels=1)
STORED = Decoding(orientation="stored")
SKIP = "--on-error skip"

# --- limits ---


def test_too_many_pixels_are_refused_by_the_header():
    """A PNG header that claims 5000 x 4000 pixels, with no pixel data behind it."""
    error = refused(
        png(5000, 4000, colour=2),
        "This PNG picture has 5000 x 4000 pixels, more than the limit of 1000000",
        how=Decoding(max_pixels=1_000_000),
    )
    assert "--max-pixels" in error.fix and "data.max_pixels=N" in error.fix


@pytest.mark.parametrize(
    "words",
    [
        [
            "pretrain",
            "swav_tiny",
            "--epochs",
            1,
            "--batch-size",
            4,
            "--device",
            "cpu",
            "--workers",
            0,
            "--data",
            ".",
        ],
        ["views", "."],
        ["extract", "random:resnet18", ".", "--out", "features.npz"],
        ["neighbours", "random:resnet18", ".", "--query", "000.png"],
        ["data", "check", ".", "--workers", 0, "--json"],
    ],
    ids=lambda words: words[0],
)
def test_the_option_that_helps_is_one_of_the_command(zoo, tmp_path, monkeypatch, words):
    image_folder(tmp_path / "images", 4, 0)
    monkeypatch.chdir(tmp_path / "images")
    for variable in ("ZOO_HOME", "ZOO_CACHE", "ZOO_RUNS"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    code, out, err = zoo(*words, "--max-pixels", 399)
    assert code in (1, 2)
    assert "20 x 20 pixels, more than the limit of 399" in out + err
    assert "raise the limit (--max-pixels" in out + err


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_the_limit_of_pixels_is_the_last_that_is_allowed(kind):
    data = encoded(photo(20, 30), kind)
    assert decode_image(data, how=Decoding(max_pixels=600)).shape == (20, 30, 3)
    refused(data, "30 x 20 pixels, more than the limit of 599", how=Decoding(max_pixels=599))


def test_a_limit_above_pillows_own(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = encoded(photo(20, 30))
    assert decode_image(data, how=Decoding(max_pixels=600)).shape == (20, 30, 3)


def test_large_files_are_refused(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(photo()))
    size = file.stat().st_size
    assert decode_image(file, how=Decoding(max_bytes=size)).shape == (24, 33, 3)
    error = refused(
        file, f"{size} bytes, more than the limit of {size - 1}", how=Decoding(max_bytes=size - 1)
    )
    assert "--max-bytes" in error.fix


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"iCCP"])
def test_large_text_blocks_are_refused(kind):
    large, small = (png(2, 1, [b"\1\2"], text_chunk(kind, b"a" * size)) for size in (2_000_000, 1_000_000))
    error = refused(large, "PNG picture", "a text block or a colour profile", "1048576 bytes")
    assert "--max-text-bytes" in error.fix
    assert decode_image(small).shape == (1, 2, 3)


def test_a_low_limit_of_text_holds_too_and_a_high_one_is_allowed():
    data = png(2, 1, [b"\1\2"], text_chunk(b"zTXt", b"a" * 3000))
    assert decode_image(data, how=Decoding(max_text_bytes=3000)).shape == (1, 2, 3)
    refused(data, "limit of 2999 bytes", how=Decoding(max_text_bytes=2999))


def test_many_text_blocks_are_refused_together():
    block = zlib.compress(b"a" * 1_000_000)
    blocks = (chunk(b"zTXt", b"k%d\0\0" % i + block) for i in range(70))
    refused(png(2, 1, [b"\1\2"], *blocks), "text blocks of more than 64 times the limit")


# --- what is no picture ---

NO_PICTURES = {
    "an empty file": b"",
    "a file of zeros": bytes(5000),
    "a text file": b"hello\nworld\n",
    "a file of an unknown kind": b"\x01\x02\x03\x04" * 10,
    "an HTML page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "an HTML page ": b"\n\n  <HTML>\n<head>",
    "an XML document": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "an SVG drawing": b"<svg xmlns='http://www.w3.org/2000/svg'></svg>",
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3",
    "a PostScript document": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "a ZIP archive": b"PK\x03\x04\x14\0\0\0",
    "a gzip file": b"\x1f\x8b\x08\0\0\0\0\0",
    "a video": b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41",
    "a NumPy array": b"\x93NUMPY\x01\0",
}


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_what_is_no_picture_is_named(kind):
    refused(NO_PICTURES[kind], f"This is {kind.strip()}", "not a picture")


def test_a_pointer_of_git_lfs_is_named():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    refused(pointer, "Git LFS pointer", fix="git lfs pull")


@pytest.mark.parametrize(
    ("start", "name"),
    [(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"), (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000")],
)
def test_formats_that_are_not_read_are_named(start, name):
    error = refused(start + bytes(20), "a picture", name, "not read here")
    assert "convert" in error.fix


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"GIF89a", "GIF"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "WebP"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"BM\0\0", "BMP"),
    ],
)
def test_a_damaged_header_is_named(start, name):
    refused(start, f"This {name} picture has a damaged header")


def test_a_tiff_of_many_channels_says_which_option_helps():
    import io

    import tifffile

    stream = io.BytesIO()
    tifffile.imwrite(stream, np.zeros((5, 6, 9), np.uint8), photometric="minisblack", planarconfig="contig")
    refused(stream.getvalue(), "TIFF picture", "unusual layout", fix="--channels")


def test_a_jpeg_of_12_bits_says_so():
    data = encoded(photo(), "JPEG")
    frame = data.index(b"\xff\xc0")
    deep = data[: frame + 1] + b"\xc1" + data[frame + 2 : frame + 4] + b"\x0c" + data[frame + 5 :]
    refused(deep, "JPEG picture has 12 bits a sample, and only those with 8", fix="convert it")


# --- files that can't be read ---


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path / "gone.png", "not there")


def test_a_file_deleted_after_it_was_listed_is_named(tmp_path):
    from zoo.data.folder import open_folder

    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded(photo()))
    images = open_folder(tmp_path)
    (tmp_path / "b.png").unlink()
    assert images.read(0).shape == (24, 33, 3)
    with pytest.raises(InputError, match="not there") as caught:
        images.read(1)
    assert caught.value.where == str(tmp_path / "b.png")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "a.png").mkdir()
    refused(tmp_path / "a.png", "can't be read", "Is a directory")


def test_a_file_without_permission_is_named(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(photo()))
    file.chmod(0)
    me = os.geteuid()
    if me == 0:  # who may read everything
        os.seteuid(65534)
    try:
        error = refused(file, "can't be read", "Permission denied")
    finally:
        os.seteuid(me)
    assert "permissions" in error.fix


def test_a_lack_of_file_handles_is_not_blamed_on_the_picture(tmp_path):
    """Skipping what can't be read would otherwise skip every picture from here on."""
    file = tmp_path / "a.png"
    file.write_bytes(encoded(photo()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(RunError, match="file handles") as caught:
            decode_image(file)
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit" in caught.value.fix


def test_a_pipe_is_refused_instead_of_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with no_hanging():
        refused(tmp_path / "a.png", "a pipe", fix="picture file")
        refused("/dev/zero", "a device", fix="picture file")


def test_the_error_travels_between_processes():
    error = InputError("what", where="file", fix="do")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (InputError, str(error))
