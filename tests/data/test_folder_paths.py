"""The paths of a folder: their order, their packing, and the fingerprint of them all."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import sys
from pathlib import Path

import pytest

from tiny import image_folder
from zoo.data import folder as folder_module
from zoo.data.folder import FileImages, PackedPaths, open_folder


def relative(source, root):
    return [os.path.relpath(source.where(i), root) for i in range(len(source))]


# '-' and '.' sort before '/', digits and letters after it; folders and files of one stem meet.
ORDER = [
    "a/1.png",
    "a/b.png",
    "a/b/1.png",
    "a/b-c/1.png",
    "a/b.c/1.png",
    "a-b/1.png",
    "a.b/1.png",
    "a.png",
    "a.png.d/1.png",
    "a-.png",
    "a0.png",
    "ab/1.png",
    "ab.png",
    "a b/1.png",
    "A/1.png",
    "1/1.png",
    "10/1.png",
    "2/10.png",
    "2/2.png",
    "2/1/1.png",
    "é/1.png",
    "e\u0301/1.png",
    "z/1.png",
    "狗.png",
    "\U0001f415/1.png",
    "\uffff/1.png",
]


def touch(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("run", [1 << 20, 3, 1])
def test_the_order_is_that_of_the_sorted_bytes(tmp_path, monkeypatch, run):
    monkeypatch.setattr(folder_module, "_RUN", run)  # large folders are sorted in several runs
    touch(tmp_path, ORDER)
    found = [os.fsencode(name) for name in relative(open_folder(tmp_path), tmp_path)]
    assert found == sorted(name.encode() for name in ORDER)


@pytest.mark.parametrize("seed", range(5))
def test_any_tree_is_sorted_and_labelled_by_the_first_folder(tmp_path, seed):
    draw = random.Random(seed)
    names = {
        "/".join("".join(draw.choices("ab-.0é", k=2)).lstrip(".") or "a" for _ in range(draw.randint(2, 4)))
        + ".png"
        for _ in range(60)
    }
    touch(tmp_path, names)
    source = open_folder(tmp_path)
    found = relative(source, tmp_path)
    assert found == [os.fsdecode(name) for name in sorted(name.encode() for name in names)]
    assert source.classes == tuple(sorted({name.split("/")[0] for name in names}))
    assert [source.classes[source.label(i)] for i in range(len(source))] == [n.split("/")[0] for n in found]


def test_a_very_deep_folder(tmp_path):
    deep = [str(tmp_path)]
    limit = sys.getrecursionlimit()
    try:
        for _ in range(400):
            deep.append(deep[-1] + "/d")
            os.mkdir(deep[-1])
        Path(deep[-1] + "/1.png").touch()
        sys.setrecursionlimit(350)
        source = open_folder(tmp_path)
        assert [source.where(i) for i in range(len(source))] == [deep[-1] + "/1.png"]
    finally:
        sys.setrecursionlimit(limit)
        (Path(deep[-1]) / "1.png").unlink(missing_ok=True)
        for folder in deep[:0:-1]:
            if os.path.isdir(folder):
                os.rmdir(folder)


def test_the_fingerprint_tells_names_and_sizes_apart(tmp_path):
    one = open_folder(image_folder(tmp_path / "one", 4)).fingerprint()
    same = open_folder(image_folder(tmp_path / "two", 4)).fingerprint()
    assert one == same
    assert one["count"] == 4
    (tmp_path / "two" / "class0" / "000.png").rename(tmp_path / "two" / "class0" / "001.png")
    assert open_folder(tmp_path / "two").fingerprint() != one
    with open(tmp_path / "one" / "class1" / "001.png", "ab") as file:
        file.write(b"x")
    assert open_folder(tmp_path / "one").fingerprint() != one


def test_the_fingerprint_of_named_files_is_the_same_for_ever(tmp_path):
    touch(tmp_path, ["a/1.png", "b/2.png"])
    (tmp_path / "b" / "2.png").write_bytes(b"four")
    lines = b"a/1.png\0000\nb/2.png\0004\n"
    assert open_folder(tmp_path).fingerprint() == {
        "kind": "files",
        "count": 2,
        "bytes": 4,
        "sha256": hashlib.sha256(lines).hexdigest(),
    }


def numbered(count, last=b"last.png"):
    return PackedPaths(b"%06d.png" % i if i < count - 1 else last for i in range(count))


def test_up_to_200000_sizes_are_all_read(tmp_path):
    paths = numbered(200_000)
    lines = hashlib.sha256(b"".join(path + b"\0-1\n" for path in paths)).hexdigest()
    print_ = FileImages("x", tmp_path / "none", paths).fingerprint()
    assert print_ == {"kind": "files", "count": 200_000, "bytes": 0, "sha256": lines}
    assert FileImages("x", tmp_path / "none", numbered(200_001)).fingerprint()["sizes"] == "sampled"


def test_the_sizes_of_a_large_set_are_sampled_and_all_names_count(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_SIZES_READ", 10)
    source = FileImages("x", tmp_path, numbered(11))  # the last size is not read
    before = source.fingerprint()
    assert before["sizes"] == "sampled"
    assert before["count"] == 11
    (tmp_path / "last.png").write_bytes(b"unseen")
    assert source.fingerprint() == before
    (tmp_path / "000009.png").write_bytes(b"seen")
    after = source.fingerprint()
    assert after["bytes"] == 4
    renamed = FileImages("x", tmp_path, numbered(11, b"lost.png")).fingerprint()
    assert len({before["sha256"], after["sha256"], renamed["sha256"]}) == 3


def test_packed_paths_are_a_sequence_of_bytes():
    paths = [b"a/1.png", b"", b"\xff", "é".encode()]
    packed = PackedPaths(paths)
    assert len(packed) == 4
    assert [packed[i] for i in range(4)] == list(packed) == paths
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            packed[outside]
    # the bounds between the paths belong to the digest
    assert PackedPaths([b"ab", b"c"]).digest() != PackedPaths([b"a", b"bc"]).digest()


def test_a_source_travels_to_a_spawned_worker(tmp_path):
    source = open_folder(image_folder(tmp_path, 4))
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.where(i) for i in range(4)] == [source.where(i) for i in range(4)]
    assert [copy.label(i) for i in range(4)] == [0, 0, 1, 1]
    assert copy.fingerprint() == source.fingerprint()
