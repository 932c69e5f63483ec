"""From tar files of any origin to samples: pairs, labels, the index that is kept, and what is refused."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import signal
import tarfile

import numpy as np
import pytest
from made_shards import pairs, png, shard_folder, write_tar, zero
from PIL import Image

from zoo.data.open import absolute_source, image_name, open_source, open_sources
from zoo.data.shards import opening
from zoo.data.shards.index import INDEX, ShardIndex
from zoo.data.shards.pattern import expand, parse_size
from zoo.data.shards.scan import scan_shard
from zoo.data.shards.tar import members
from zoo.data.source import UNLABELLED, ImageSource
from zoo.errors import InputError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture()
def scans(monkeypatch):
    """The shards whose headers are read."""
    seen = []

    def scan(path, shard=None):
        seen.append(os.path.basename(path))
        return scan_shard(path, shard)

    monkeypatch.setattr(opening, "scan_shard", scan)
    return seen


def labels(source):
    return [source.label(i) for i in range(len(source))]


def assert_reads(source, seeds):
    assert len(source) == len(seeds)
    for index, seed in enumerate(seeds):
        assert np.array_equal(source.read(index), np.asarray(Image.open(io.BytesIO(png(seed)))))


# --- what is in them ---


def test_samples_are_the_pictures_in_their_order_with_labels(tmp_path):
    source = open_source(str(shard_folder(tmp_path)))
    assert isinstance(source, ImageSource)
    assert_reads(source, range(15))
    assert labels(source) == [n % 3 for n in range(15)]
    assert source.classes == ("0", "1", "2")
    assert source.stretches.tolist() == [5, 5, 5]
    assert image_name(source, 3) == f"{tmp_path}[3]"


def test_patterns_select_and_order_the_shards(tmp_path):
    shard_folder(tmp_path)
    assert_reads(open_source(f"{tmp_path}/{{01..02}}.tar"), range(5, 15))
    assert_reads(open_source(f"{tmp_path}/{{02,00}}.tar"), [*range(10, 15), *range(5)])
    assert_reads(open_source(f"{tmp_path}/0*.tar"), range(15))
    assert_reads(open_source(f"{tmp_path}/01.tar"), range(5, 10))
    assert_reads(open_source(f"file://{tmp_path}/01.tar"), range(5, 10))


def test_shards_of_several_folders_are_one_set(tmp_path):
    write_tar(tmp_path / "a" / "0.tar", pairs(0, 2))
    write_tar(tmp_path / "b" / "0.tar", pairs(2, 4))
    source = open_source(f"{tmp_path}/{{b,a}}/0.tar")
    assert_reads(source, [2, 3, 4, 5, 0, 1])
    assert labels(source) == [2, 0, 1, 2, 0, 1]
    assert (tmp_path / "a" / INDEX).is_file()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("a", "b"):
        shutil.copytree(tmp_path / name, moved / name)
    assert open_source(f"{moved}/{{b,a}}/0.tar").fingerprint() == source.fingerprint()
    assert open_source(f"{moved}/{{a,b}}/0.tar").fingerprint() != source.fingerprint()


def test_names_in_folders_other_members_and_hidden_ones(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zoo")
    content = [
        ("x/1.json", b"{}"),
        ("x/1.png", png(0)),
        ("x/1.seg.png", png(9)),
        ("x/1.cls", b" 1\n"),
        ("y/1.PNG", png(1)),  # another folder, another key
        ("y/1.cls", b"0"),
        ("y/._1.png", b"what a Mac leaves"),
        ("notes.txt", b"text"),
    ]
    write_tar(tmp_path / "a.tar", content)
    source = open_source(str(tmp_path))
    assert_reads(source, [0, 1])
    assert labels(source) == [1, 0]
    assert "left out 3 members" in caplog.text
    assert ".seg.png 1" in caplog.text


def test_a_label_may_come_before_its_picture(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.cls", b"2"), ("2.cls", b"1"), ("2.png", png(2)), ("1.png", png(1))])
    source = open_source(str(tmp_path))
    assert_reads(source, [2, 1])
    assert labels(source) == [1, 2]


@pytest.mark.parametrize("content", [b"cat", b"-1", b"", b"9" * 40, b"1000001", b"1.5"])
def test_what_is_no_class_number_takes_the_labels_away(tmp_path, content):
    write_tar(tmp_path / "a.tar", [*pairs(0, 2), ("9.png", png(9)), ("9.cls", content)])
    source = open_source(str(tmp_path))
    assert source.classes == ()
    assert labels(source) == [UNLABELLED] * 3
    assert "1 of 3 samples have no label" in source.notes[0]


def test_without_any_labels_there_is_nothing_to_say(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.png", png(1)), ("2.png", png(2))])
    source = open_source(str(tmp_path))
    assert source.classes == ()
    assert source.notes == ()
    assert labels(source) == [UNLABELLED] * 2
    assert ShardIndex.load(tmp_path / INDEX).labels is None  # 4 bytes a sample less


def test_classes_are_those_of_all_shards_whichever_are_asked_for(tmp_path):
    write_tar(tmp_path / "0.tar", [("1.png", png(1)), ("1.cls", b"4")])
    write_tar(tmp_path / "1.tar", [("1.png", png(2)), ("1.cls", b"1")])
    assert open_source(str(tmp_path)).classes == tuple("01234")
    assert open_source(f"{tmp_path}/1.tar").classes == tuple("01234")


def test_a_class_index_names_the_numbers(tmp_path):
    shard_folder(tmp_path)
    source = open_source(str(tmp_path), class_names=("cat", "dog", "eel", "fox"))
    assert source.classes == ("cat", "dog", "eel", "fox")
    assert labels(source)[:4] == [0, 1, 2, 0]
    with pytest.raises(InputError, match="labels go up to 2, and there are 2 classes"):
        open_source(str(tmp_path), class_names=("cat", "dog"))


# --- what is refused ---


def refused(place, **options):
    with pytest.raises(InputError) as caught:
        open_source(str(place), **options)
    return caught.value


def test_two_samples_with_one_key_are_named_with_both_places(tmp_path):
    path = write_tar(tmp_path / "a.tar", [*pairs(0, 2), ("0001.jpg", png(5))])
    with tarfile.open(path) as file:
        places = [member.offset for member in file.getmembers() if member.name in ("0001.png", "0001.jpg")]
    error = refused(tmp_path)
    assert "one key, 0001" in error.what
    assert f"at byte {places[0]} and at byte {places[1]}" in error.what
    assert error.where == f"{path}: 0001.jpg (at byte {places[1]})"
    shutil.copy(write_tar(tmp_path / "b" / "a.tar", [*pairs(0, 1), ("0000.cls", b"1")]), path)
    assert "one key" in refused(path).what


def test_an_image_without_a_key(tmp_path):
    write_tar(tmp_path / "a.tar", [("sub/.png", png(1))])
    error = refused(tmp_path)
    assert "no key" in error.what
    assert "sub/.png" in error.where
    assert "KEY.jpg" in error.fix


def test_shards_without_images(tmp_path):
    write_tar(tmp_path / "a.tar", [("1", png(1)), ("2.npy", b"x")])
    error = refused(tmp_path)
    assert "no images" in error.what
    assert "KEY.jpg" in error.fix


def test_a_link_in_a_shard_names_the_shard(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        member = tarfile.TarInfo("x.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(member)
    for skip in (False, True):
        error = refused(tmp_path, skip_bad=skip)
        assert "symbolic link" in error.what
        assert error.where == f"{tmp_path}/a.tar: x.png (at byte 0)"


def test_a_pipe_under_a_shards_name_is_refused_instead_of_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    signal.alarm(30)  # its default ends the process that would wait
    assert "a pipe" in refused(f"{tmp_path}/*.tar").what
    signal.alarm(0)


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_compressed_shards_are_told_by_content_and_by_name(tmp_path, mode):
    with tarfile.open(tmp_path / "a.tar", f"w:{mode}") as file:
        file.addfile(tarfile.TarInfo("1.png"))
    assert "compressed" in refused(tmp_path).what
    assert "compressed" in refused(f"{tmp_path}/{{0..3}}.tar.{mode}").what


def test_a_pattern_that_matches_nothing_says_what_was_looked_for(tmp_path):
    error = refused(f"{tmp_path}/x-{{000..999}}.tar")
    assert "matches no shard" in error.what
    assert "x-000.tar, " in error.where
    assert "x-999.tar: 1000 names" in error.where
    assert "matches no shard" in refused(f"{tmp_path}/*.tar").what


def test_missing_shards_stop_or_are_left_out(tmp_path, caplog):
    shard_folder(tmp_path)
    error = refused(f"{tmp_path}/{{00..04}}.tar")
    assert "2 of 5 shards are not there" in error.what
    assert "03.tar" in error.where
    assert_reads(open_source(f"{tmp_path}/{{00..04}}.tar", skip_bad=True), range(15))
    assert "2 of 5 shards are not there" in caplog.text


@pytest.mark.parametrize(
    "pattern", ["{}", "{a}", "{3..1}", "{0..9999999}", "{a..c}", "{0..{1..2}}", "{0..2", "0}"]
)
def test_braces_that_mean_nothing(pattern):
    with pytest.raises(InputError):
        expand(f"/data/{pattern}.tar")


def test_braces():
    assert expand("x{08..11}.tar") == ["x08.tar", "x09.tar", "x10.tar", "x11.tar"]
    assert expand("x{8..10}") == ["x8", "x9", "x10"]
    assert expand("{a,b}{0..1}") == ["a0", "a1", "b0", "b1"]
    assert expand("s3://b/x.tar") == ["s3://b/x.tar"]


def test_sizes():
    assert parse_size("256MB", "") == 256_000_000
    assert parse_size(" 1.5 gb ", "") == 1_500_000_000
    assert parse_size("100", "") == 100
    for text in ("", "MB", "-1", "0", "1PB", "one"):
        with pytest.raises(InputError, match="no size"):
            parse_size(text, "--size")


def test_a_folder_of_pictures_with_a_tar_in_it_stays_one(tmp_path):
    (tmp_path / "1.png").write_bytes(png(1))
    write_tar(tmp_path / "backup.tar", pairs(0, 3))
    assert len(open_source(str(tmp_path))) == 1


def test_a_folder_with_an_index_is_one_of_shards_whatever_else_is_in_it(tmp_path):
    shard_folder(tmp_path)
    open_source(str(tmp_path))
    (tmp_path / "preview.png").write_bytes(png(1))
    (tmp_path / "logs").mkdir()
    assert len(open_source(str(tmp_path))) == 15


def test_local_names_are_made_absolute_for_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert absolute_source("a/{0..9}.tar") == f"{here}/a/{{0..9}}.tar"
    assert absolute_source("parquet:x") == f"parquet:{here}/x"
    assert absolute_source("*.parquet") == f"{here}/*.parquet"
    for name in ("s3://b/{0..9}.tar", "cifar10", "builtin:photos", "hf-dataset:a/b"):
        assert absolute_source(name) == name


# --- the index ---


def test_headers_are_read_once(tmp_path, scans):
    shard_folder(tmp_path)
    first = open_source(str(tmp_path))
    assert scans == ["00.tar", "01.tar", "02.tar"]
    again = open_source(str(tmp_path))
    open_source(f"{tmp_path}/{{01..02}}.tar")
    assert len(scans) == 3
    assert again.fingerprint() == first.fingerprint()
    assert isinstance(again._index.starts.base.base, np.memmap)  # mapped, not read


def test_only_shards_that_changed_or_are_new_are_read_again(tmp_path, scans):
    shard_folder(tmp_path)
    before = open_source(str(tmp_path)).fingerprint()
    write_tar(tmp_path / "01.tar", pairs(50, 7))
    write_tar(tmp_path / "03.tar", pairs(60, 1))
    scans.clear()
    source = open_source(str(tmp_path))
    assert scans == ["01.tar", "03.tar"]
    assert_reads(source, [*range(5), *range(50, 57), *range(10, 15), 60])
    assert source.fingerprint() != before
    # The same size, another time.
    os.utime(tmp_path / "00.tar", ns=(1, 1))
    scans.clear()
    open_source(str(tmp_path))
    assert scans == ["00.tar"]


def test_the_index_goes_to_the_cache_where_it_cannot_be_written(tmp_path, scans):
    shard_folder(tmp_path)
    (tmp_path / INDEX).mkdir()  # even root can't replace a folder by a file
    for _ in range(2):
        assert_reads(open_source(f"{tmp_path}/{{00..02}}.tar"), range(15))
    assert len(scans) == 3
    assert list((tmp_path / INDEX).iterdir()) == []
    write_tar(tmp_path / "01.tar", pairs(50, 7))
    assert len(open_source(f"{tmp_path}/{{00..02}}.tar")) == 17
    assert len(scans) == 4


@pytest.mark.parametrize("harm", ["cut", "text", "empty", "schema"])
def test_an_index_that_is_damaged_is_made_again(tmp_path, scans, caplog, harm):
    shard_folder(tmp_path)
    open_source(str(tmp_path))
    index = tmp_path / INDEX
    data = index.read_bytes()
    harmed = {
        "cut": data[:-9],
        "text": b"hello, this is no index",
        "empty": b"",
        "schema": data.replace(b'\\"schema\\": 1', b'\\"schema\\": 7'),
    }
    assert harmed[harm] != data
    index.write_bytes(harmed[harm])
    scans.clear()
    assert_reads(open_source(str(tmp_path)), range(15))
    assert len(scans) == 3
    assert "is not one" in caplog.text
    assert index.read_bytes() == data


def test_a_copy_for_another_process_maps_the_same_file(tmp_path):
    source = open_source(str(shard_folder(tmp_path)))
    source.read(0)
    source = open_source(str(tmp_path))
    text = pickle.dumps(source)
    assert len(text) < 3000
    copy = pickle.loads(text)
    assert_reads(copy, range(15))
    assert labels(copy) == labels(source)
    part = pickle.loads(pickle.dumps(open_source(f"{tmp_path}/{{01..02}}.tar")))
    assert_reads(part, range(5, 15))


# --- damage ---


def test_a_damaged_shard_stops_or_gives_what_is_left(tmp_path, caplog):
    shard_folder(tmp_path)
    with tarfile.open(tmp_path / "01.tar") as file:
        place = file.getmembers()[4].offset  # of the third sample
    zero(tmp_path / "01.tar", place)
    error = refused(tmp_path)
    assert error.where == str(tmp_path / "01.tar")
    assert f"at byte {place}" in error.what
    assert "--on-error skip" in error.fix
    source = open_source(str(tmp_path), skip_bad=True)
    assert_reads(source, [*range(7), *range(8, 15)])  # one sample is lost, not the rest of the shard
    assert "01.tar is damaged and gives 4 images" in caplog.text
    assert "damaged" in refused(tmp_path).what  # also when the index knows it


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_a_shard_that_is_cut_off(tmp_path, keep):
    shard_folder(tmp_path)
    data = (tmp_path / "02.tar").read_bytes()
    end = max(member.end for member in _members(tmp_path / "02.tar"))
    (tmp_path / "02.tar").write_bytes(data[: int(end * keep)])
    assert "cut off" in refused(tmp_path).what
    source = open_source(str(tmp_path), skip_bad=True)
    assert 10 < len(source) < 15
    assert_reads(source, range(len(source)))


def _members(path):
    data = path.read_bytes()
    return list(members(lambda offset, length: data[offset : offset + length], len(data)))


def test_damage_after_the_index_was_made_is_met_when_the_sample_is_read(tmp_path):
    shard_folder(tmp_path)
    source = open_source(str(tmp_path))
    path = tmp_path / "00.tar"
    second = _members(path)[2]
    status = path.stat()
    zero(path, second.start, 512, b"j")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    source = open_source(str(tmp_path))  # same size and time
    with pytest.raises(InputError, match="damaged") as caught:
        source.read(1)
    assert caught.value.where == f"{path}: (at byte {second.start})"
    assert_reads_one(source, 2)
    zero(path, second.start, 512)
    with pytest.raises(InputError, match="no image where the index has one"):
        source.read(1)
    path.write_bytes(path.read_bytes()[: second.data + 10])
    with pytest.raises(InputError, match="damaged"):
        source.read(4)
    (tmp_path / "01.tar").unlink()
    with pytest.raises(InputError, match="not there") as caught:
        source.read(5)
    assert "01.tar" in caught.value.where
    assert "--on-error skip" in caught.value.fix


def assert_reads_one(source, index):
    assert np.array_equal(source.read(index), np.asarray(Image.open(io.BytesIO(png(index)))))


def test_a_damaged_picture_is_named_by_shard_key_and_place(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("fine.png", png(1)), ("bad.png", png(2)[:100])])
    source = open_source(str(tmp_path))
    with pytest.raises(InputError) as caught:
        source.read(1)
    assert caught.value.where == f"{path}: bad.png (at byte 1024)"
    assert source.where(1) == f"{path}: (at byte 1024)"


def test_a_picture_beyond_the_limit_is_not_read(tmp_path):
    from zoo.data.decoding import Decoding

    write_tar(tmp_path / "a.tar", [("1.png", png(1))])
    with pytest.raises(InputError, match="more than the limit of 50"):
        open_source(str(tmp_path), how=Decoding(max_bytes=50)).read(0)


def test_several_sources(tmp_path):
    shard_folder(tmp_path / "a", 2)
    write_tar(tmp_path / "b" / "0.tar", pairs(20, 3))
    both = open_sources([str(tmp_path / "a"), str(tmp_path / "b")])
    assert_reads(both, [*range(10), 20, 21, 22])
    assert both.stretches.tolist() == [5, 5, 3]
    assert both.classes == ("0", "1", "2")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.png").write_bytes(png(3))
    assert open_sources([str(tmp_path / "a"), str(tmp_path / "c")]).stretches is None
