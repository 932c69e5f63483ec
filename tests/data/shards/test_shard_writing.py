"""``zoo data shard``: the files' bytes as they are, in shards that are whole or not there, go-on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
from made_shards import png

from tiny import ZOO, image_folder, save_image
from zoo.data.folder import open_folder, open_list
from zoo.data.open import open_source
from zoo.data.shards import write as write_module
from zoo.data.shards.index import INDEX, ShardIndex
from zoo.data.shards.scan import scan_shard
from zoo.data.shards.write import write_shards
from zoo.errors import InputError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture()
def folder(tmp_path):
    """23 pictures in three classes, with names that don't suit shards."""
    folder = image_folder(tmp_path / "images", 20, 3)
    save_image(folder / "class1" / "a.b c\u00e9.png", 77)
    save_image(folder / "class0" / "deep" / "x.JPG", 78)
    save_image(folder / "class2" / ("long" * 40 + ".png"), 79)
    return folder


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_written_is_what_was_there(folder, tmp_path):
    made = write_shards(open_folder(folder), tmp_path / "shards", count=5)
    assert (made.images, made.shards, made.kept) == (23, 5, 0)
    original = open_folder(folder)
    source = open_source(str(tmp_path / "shards"))
    assert source.classes == original.classes == ("class0", "class1", "class2")
    assert source.stretches.tolist() == [5, 5, 5, 5, 3]
    numbers = []  # of the images in the folder
    for shard in sorted((tmp_path / "shards").glob("*.tar")):
        with tarfile.open(shard) as file:
            numbers += [int(name[:9]) for name in file.getnames() if not name.endswith(".cls")]
    assert sorted(numbers) == list(range(23))
    for index, number in enumerate(numbers):
        assert np.array_equal(source.read(index), original.read(number))
        assert source.label(index) == original.label(number)


def test_the_bytes_are_kept_and_names_are_plain(folder, tmp_path):
    write_shards(open_folder(folder), tmp_path / "shards", size=10**9)
    original = open_folder(folder)
    with tarfile.open(tmp_path / "shards" / "000000.tar") as file:
        names = file.getnames()
        assert names != sorted(names)  # shuffled
        for member in file.getmembers():
            assert (member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "")
            assert member.name.isascii()
            assert member.name.count(".") == 1
            number = int(member.name[:9])
            if not member.name.endswith(".cls"):
                with open(original.where(number), "rb") as picture:
                    assert file.extractfile(member).read() == picture.read()
    assert "000000022-class2_" not in names
    assert any(name.endswith("-class1_a_b_c_.png") for name in names)
    assert any(name.endswith("-class0_deep_x.jpg") for name in names)


def test_the_index_is_what_a_scan_finds(folder, tmp_path):
    out = tmp_path / "shards"
    write_shards(open_folder(folder), out, count=7)
    index = ShardIndex.load(out / INDEX)
    for shard, name in enumerate(index.names):
        entry, scan = index.entry(shard), scan_shard(out / name)
        assert np.array_equal(entry.starts, scan.starts)
        assert np.array_equal(entry.labels, scan.labels)
        assert entry.size == (out / name).stat().st_size
        assert (scan.damage, scan.unlabelled) == ("", 0)
    summary = json.loads((out / "index.json").read_text())
    assert summary["images"] == 23
    assert summary["classes"] == ["class0", "class1", "class2"]
    assert [shard["images"] for shard in summary["shards"]] == [7, 7, 7, 2]
    assert sum(shard["bytes"] for shard in summary["shards"]) == int(index.columns["sizes"].sum())


def test_the_same_folder_gives_the_same_bytes(folder, tmp_path):
    for name in ("a", "b"):
        write_shards(open_folder(folder), tmp_path / name, count=6)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_shards_hold_as_many_as_fit(folder, tmp_path):
    write_shards(open_folder(folder), tmp_path / "shards", size=12_000)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "shards").glob("*.tar"))]
    assert len(sizes) > 3
    assert all(8_000 < size <= 12_000 for size in sizes[:-1])
    write_shards(open_folder(folder), tmp_path / "tiny", size=1)  # one image each, then
    assert len(list((tmp_path / "tiny").glob("*.tar"))) == 23


def test_the_folders_order_can_be_kept(folder, tmp_path):
    write_shards(open_folder(folder), tmp_path / "shards", count=4, shuffle=False)
    source = open_source(str(tmp_path / "shards"))
    labels = [source.label(i) for i in range(23)]
    assert labels == sorted(labels)


def test_without_classes_there_are_no_labels(tmp_path):
    write_shards(open_folder(image_folder(tmp_path / "images", 4, 0)), tmp_path / "shards")
    assert open_source(str(tmp_path / "shards")).classes == ()
    with tarfile.open(tmp_path / "shards" / "000000.tar") as file:
        assert len(file.getnames()) == 4


def test_a_list_of_paths(tmp_path):
    image_folder(tmp_path / "images", 3)
    (tmp_path / "list.txt").write_text("images/class1/001.png\nimages/class0/000.png\n")
    write_shards(open_list(tmp_path / "list.txt"), tmp_path / "shards")
    assert len(open_source(str(tmp_path / "shards"))) == 2
    (tmp_path / "odd").write_bytes(png(1))
    (tmp_path / "list.txt").write_text("odd\n")
    with pytest.raises(InputError, match="no picture's ending"):
        write_shards(open_list(tmp_path / "list.txt"), tmp_path / "others")
    assert list((tmp_path / "others").glob("*.tar")) == []


def test_finished_shards_are_kept_and_the_rest_is_made(folder, tmp_path, monkeypatch):
    out = tmp_path / "shards"
    write_shards(open_folder(folder), out, count=4)
    whole = content(out)
    (out / "000003.tar").unlink()
    (out / INDEX).unlink()
    (out / f".000003.tar.{'0' * 32}.tmp").write_bytes(b"half")
    written = []
    real = write_module._write_shard
    monkeypatch.setattr(
        write_module,
        "_write_shard",
        lambda s, path, planned: (written.append(path.name), real(s, path, planned)),
    )
    assert write_shards(open_folder(folder), out, count=4).kept == 5
    assert len(written) == 1
    assert content(out) == whole


@pytest.mark.parametrize("harm", ["cut", "older"])
def test_a_shard_that_is_damaged_or_older_than_its_images_is_made_again(folder, tmp_path, harm):
    out = tmp_path / "shards"
    write_shards(open_folder(folder), out, count=4)
    whole = content(out)
    shard = out / "000002.tar"
    if harm == "cut":
        shard.write_bytes(whole["000002.tar"][:-3000])
    else:
        os.utime(shard, (1, 1))
    assert write_shards(open_folder(folder), out, count=4).kept == 5
    assert content(out) == whole


def test_shards_of_other_images_are_not_touched(folder, tmp_path):
    out = tmp_path / "shards"
    write_shards(open_folder(folder), out, count=4)
    before = content(out)
    with pytest.raises(InputError, match="other images"):
        write_shards(open_folder(folder), out, count=5)
    save_image(folder / "class0" / "another.png", 99)
    with pytest.raises(InputError, match="other images"):
        write_shards(open_folder(folder), out, count=4)
    assert content(out) == before
    out2 = tmp_path / "more"
    write_shards(open_folder(folder), out2, count=4)
    (out2 / "000006.tar").write_bytes(b"x")
    with pytest.raises(InputError, match=r"other images.*000006\.tar"):
        write_shards(open_folder(folder), out2, count=4)


def test_a_file_that_vanishes_is_named_and_half_a_shard_is_not_left(folder, tmp_path):
    source = open_folder(folder)
    os.unlink(source.where(5))
    out = tmp_path / "shards"
    with pytest.raises(InputError) as caught:
        write_shards(source, out)
    assert caught.value.where == source.where(5)
    assert list(out.glob("*.tar")) + list(out.glob(".*.tmp")) == []


def test_a_source_without_files(tmp_path):
    with pytest.raises(InputError, match="Only picture files"):
        write_shards(open_source("builtin:photos"), tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


SLOWLY = """
import sys, time
from pathlib import Path
from zoo.data.folder import open_folder
from zoo.data.shards import write

real = write._content
def slowly(path, size):
    time.sleep(0.05)
    return real(path, size)
write._content = slowly
write.write_shards(open_folder(Path(sys.argv[1])), Path(sys.argv[2]), count=4)
"""


def test_after_a_kill_it_goes_on(folder, tmp_path):
    out = tmp_path / "shards"
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(folder), str(out)])
    until = time.monotonic() + 60
    while not (out / "000001.tar").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = len(list(out.glob("*.tar")))
    assert 2 <= there < 6
    assert not (out / INDEX).exists()
    assert write_shards(open_folder(folder), out, count=4).kept == there
    write_shards(open_folder(folder), tmp_path / "undisturbed", count=4)
    assert content(out) == content(tmp_path / "undisturbed")


def test_webdataset_reads_them_and_we_read_its(folder, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    out = tmp_path / "shards"
    write_shards(open_folder(folder), out, count=8)
    original = open_folder(folder)
    seen = {}
    for shard in sorted(out.glob("*.tar")):
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False):
            number = int(sample["__key__"][:9])
            picture = sample.get("png") or sample["jpg"]
            with open(original.where(number), "rb") as file:
                assert picture == file.read()
            seen[number] = int(sample["cls"])
    assert seen == {number: original.label(number) for number in range(23)}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with webdataset.ShardWriter(str(theirs / "%04d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(10):
            writer.write(
                {"__key__": f"k/{number}", "png": png(number), "cls": number % 3, "json": {"n": number}}
            )
    source = open_source(f"{theirs}/{{0000..0002}}.tar")
    assert [source.label(i) for i in range(10)] == [n % 3 for n in range(10)]
    assert source.stretches.tolist() == [4, 4, 2]


def test_the_command(folder, tmp_path):
    command = [str(ZOO), "data", "shard", str(folder), "-o", str(tmp_path / "s"), "--count", "10", "--json"]
    first = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert first == {
        "schema": 1,
        "images": 23,
        "shards": 3,
        "kept": 0,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "s").glob("*.tar")),
        "classes": ["class0", "class1", "class2"],
        "source": str(folder),
        "out": str(tmp_path / "s"),
    }
    done = subprocess.run([*command[:-1], "--size", "x"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "'x' is no size" in done.stderr
