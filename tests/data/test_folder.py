"""Folders and lists of images as people have them: nested, linked, hidden, accented, broken."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tiny import half_jpeg, image_folder, pixels, save_image
from zoo.data import folder as folder_module
from zoo.data.folder import open_folder, open_list
from zoo.data.open import open_source, open_sources
from zoo.data.source import UNLABELLED, ImageSource
from zoo.errors import InputError


def relative(source, root):
    return [os.path.relpath(source.where(i), root) for i in range(len(source))]


def test_nested_is_sorted_and_labelled_by_the_first_folder(tmp_path):
    names = ["b/2.png", "b/10.png", "a/deep/er/1.png", "a/9.png", "c/x.PNG"]
    for seed, name in enumerate(names):
        save_image(tmp_path / name, seed)
    source = open_folder(tmp_path)
    assert isinstance(source, ImageSource)
    assert relative(source, tmp_path) == ["a/9.png", "a/deep/er/1.png", "b/10.png", "b/2.png", "c/x.PNG"]
    assert source.classes == ("a", "b", "c")
    assert [source.label(i) for i in range(5)] == [0, 0, 1, 1, 2]
    assert np.array_equal(source.read(3), pixels(0))


def test_three_loose_jpegs_are_three_unlabelled_samples(tmp_path):
    for i in range(3):
        save_image(tmp_path / f"{i}.jpg", i)
    source = open_folder(tmp_path)
    assert len(source) == 3
    assert source.classes == ()
    assert {source.label(i) for i in range(3)} == {UNLABELLED}


def test_a_loose_picture_beside_class_folders_takes_the_labels_away(tmp_path):
    image_folder(tmp_path, 4)
    save_image(tmp_path / "loose.png", 9)
    source = open_folder(tmp_path)
    assert len(source) == 5
    assert source.classes == ()
    assert source.label(0) == UNLABELLED


def test_hidden_folders_and_files_are_skipped_and_said(tmp_path):
    save_image(tmp_path / "a" / "1.png", 1)
    save_image(tmp_path / "b" / "1.png", 2)
    save_image(tmp_path / ".ipynb_checkpoints" / "1-checkpoint.png", 3)
    save_image(tmp_path / "a" / ".ipynb_checkpoints" / "1-checkpoint.png", 3)
    save_image(tmp_path / "a" / "._1.png", 4)
    source = open_folder(tmp_path)
    assert source.classes == ("a", "b")
    assert relative(source, tmp_path) == ["a/1.png", "b/1.png"]
    assert len(source.notes) == 1
    assert "3 hidden entries" in source.notes[0]
    assert ".ipynb_checkpoints" in source.notes[0]


def test_other_files_are_left_out_and_said(tmp_path):
    save_image(tmp_path / "a" / "1.png", 1)
    for name in ("a/labels.csv", "b/more.CSV", "a/README", "photo.HEIC"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".hidden.csv").write_text("x")
    source = open_folder(tmp_path)
    assert len(source) == 1
    assert source.classes == ("a",)
    assert source.notes == (
        "skipped 1 hidden entry (.hidden.csv)",
        "left out 4 files with other endings (.csv 2, .heic 1, none 1)",
        ".heic pictures must be converted first, to JPEG or PNG",
    )


def test_numbered_endings_are_not_all_remembered(tmp_path):
    save_image(tmp_path / "1.png", 1)
    for i in range(1100):
        (tmp_path / f"frame.{i:06d}").touch()
    (tmp_path / "z.000001").touch()
    (note,) = open_folder(tmp_path).notes
    assert note.startswith("left out 1101 files with other endings (more 1")
    assert len(note) < 150


def test_parts_of_a_set_are_no_classes(tmp_path):
    for name in ("train/cat/1.jpg", "val/cat/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (note,) = open_folder(tmp_path).notes
    assert "train and val are taken" in note and "pass train" in note
    assert open_folder(tmp_path / "train").notes == ()


def test_links_are_followed_and_labelled_by_where_they_stand(tmp_path):
    elsewhere = image_folder(tmp_path / "elsewhere", 4, classes=0)
    root = tmp_path / "set"
    save_image(root / "cats" / "0.png", 0)
    (root / "dogs").symlink_to(elsewhere)
    (root / "cats" / "linked.png").symlink_to(elsewhere / "001.png")
    source = open_folder(root)
    assert source.classes == ("cats", "dogs")
    assert relative(source, root) == ["cats/0.png", "cats/linked.png"] + [f"dogs/00{i}.png" for i in range(4)]
    assert [source.label(i) for i in range(6)] == [0, 0, 1, 1, 1, 1]
    assert np.array_equal(source.read(1), pixels(1))


def test_the_same_folder_linked_twice_counts_twice(tmp_path):
    elsewhere = image_folder(tmp_path / "elsewhere", 2, classes=0)
    for name in ("a", "b"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / name).symlink_to(elsewhere)
    assert len(open_folder(tmp_path / "set")) == 4


def test_link_loops_are_survived(tmp_path):
    root = tmp_path / "set"
    save_image(root / "a" / "1.png", 1)
    save_image(root / "b" / "1.png", 1)
    (root / "a" / "up").symlink_to(root)
    (root / "b" / "self").symlink_to(root / "b")
    (root / "b" / "me.png").symlink_to(root / "b" / "me.png")
    assert relative(open_folder(root), root) == ["a/1.png", "b/1.png", "b/me.png"]


def test_links_that_cross_end_where_they_come_back(tmp_path):
    save_image(tmp_path / "a" / "1.png", 1)
    save_image(tmp_path / "b" / "1.png", 1)
    (tmp_path / "a" / "to_b").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "to_a").symlink_to(tmp_path / "a")
    assert relative(open_folder(tmp_path), tmp_path) == ["a/1.png", "a/to_b/1.png", "b/1.png", "b/to_a/1.png"]


def test_a_broken_link_is_named_when_it_is_read(tmp_path):
    save_image(tmp_path / "a" / "1.png", 1)
    (tmp_path / "a" / "2.png").symlink_to(tmp_path / "gone.png")
    source = open_folder(tmp_path)
    assert len(source) == 2
    with pytest.raises(InputError) as caught:
        source.read(1)
    assert caught.value.where.endswith("a/2.png")


def test_a_pipe_with_an_image_name_does_not_hang(tmp_path):
    save_image(tmp_path / "1.png", 1)
    os.mkfifo(tmp_path / "2.png")
    (tmp_path / "3.png").symlink_to(tmp_path / "2.png")
    assert relative(open_folder(tmp_path), tmp_path) == ["1.png"]


def test_an_empty_folder_says_what_was_looked_for(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("notes.txt", "deep/more.txt", "deep/1.heic", "2.heif", ".3.png"):
        (tmp_path / name).touch()
    with pytest.raises(InputError) as caught:
        open_folder(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert "4 files with other endings (.txt 2, .heic 1, .heif 1)" in caught.value.what
    assert ".heic and .heif pictures must be converted" in caught.value.what
    assert "1 hidden entry (.3.png)" in caught.value.what
    assert ".jpg" in caught.value.fix
    assert caught.value.exit_code == 2


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        open_folder(tmp_path / "nothing")


def test_an_unlistable_folder_is_named(tmp_path, monkeypatch):
    image_folder(tmp_path, 4)
    listing = os.scandir

    def refusing(path):
        if os.fsencode(path).endswith(b"class1"):
            raise PermissionError(13, "Permission denied", path)
        return listing(path)

    monkeypatch.setattr(folder_module.os, "scandir", refusing)
    with pytest.raises(InputError, match="Permission denied") as caught:
        open_folder(tmp_path)
    assert caught.value.where.endswith("class1")


ACCENTED = "données/Müll 狗.jpg"


def test_accented_names_also_in_the_c_locale(tmp_path):
    save_image(tmp_path / ACCENTED, 1)
    source = open_folder(tmp_path)
    assert source.classes == ("données",)
    code = (
        "import sys; from zoo.data.open import open_source; s = open_source(sys.argv[1]);"
        "assert s.read(0).shape == (20, 20, 3); "
        "print(s.where(0)); print(s.classes[0])"
    )
    for extra in ({}, {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}):
        env = {**os.environ, "LC_ALL": "C", **extra}
        env.pop("PYTHONIOENCODING", None)
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, timeout=60, check=True
        )
        assert done.stdout.decode() == f"{tmp_path / ACCENTED}\ndonnées\n"


def test_a_name_that_is_no_utf8_is_read(tmp_path):
    name = os.fsencode(tmp_path) + b"/M\xfcll.png"
    try:
        os.rename(save_image(tmp_path / "x.png", 3), name)
    except OSError:
        pytest.skip("this file system wants UTF-8")
    source = open_folder(tmp_path)
    assert np.array_equal(source.read(0), pixels(3))


def test_a_class_index_decides_the_numbers(tmp_path):
    image_folder(tmp_path, 4)
    source = open_folder(tmp_path, class_names=("other", "class1", "class0"))
    assert source.classes == ("other", "class1", "class0")
    assert [source.label(i) for i in range(4)] == [2, 2, 1, 1]
    with pytest.raises(InputError, match=r"a class that training .* doesn't know: class0") as caught:
        open_folder(tmp_path, class_names=("clas0", "class1"))
    assert caught.value.where == str(tmp_path)
    assert "did you mean clas0?" in caught.value.fix
    save_image(tmp_path / "loose.png", 1)
    with pytest.raises(InputError, match="outside the class folders"):
        open_folder(tmp_path, class_names=("class0", "class1"))


def test_a_list_keeps_its_order_and_starts_from_its_own_folder(tmp_path):
    image_folder(tmp_path / "set", 3, classes=0)
    far = save_image(tmp_path / "far" / "é.png", 7)
    listed = tmp_path / "list.txt"
    listed.write_text(f"set/002.png\r\n\n  set/000.png\n{far}\n", "utf-8")
    source = open_list(listed)
    assert [np.array_equal(source.read(i), pixels(seed)) for i, seed in enumerate((2, 0, 7))] == [True] * 3
    assert source.label(0) == UNLABELLED


def test_a_list_saved_with_a_byte_order_mark(tmp_path):
    save_image(tmp_path / "1.png", 1)
    (tmp_path / "list.txt").write_text("1.png\n", "utf-8-sig")
    assert len(open_list(tmp_path / "list.txt")) == 1


def test_a_list_in_another_encoding_names_the_bytes_it_has(tmp_path):
    name = os.fsencode(tmp_path) + b"/M\xfcll.png"
    try:
        os.rename(save_image(tmp_path / "x.png", 3), name)
    except OSError:
        pytest.skip("this file system wants UTF-8")
    save_image(tmp_path / "b.png", 1)
    (tmp_path / "list.txt").write_bytes(b"M\xfcll.png\rb.png")  # line ends of an old Macintosh
    source = open_list(tmp_path / "list.txt")
    assert [os.fsencode(source.where(i)) for i in range(2)] == [name, os.fsencode(tmp_path / "b.png")]


def test_missing_lines_of_a_list_are_named(tmp_path):
    save_image(tmp_path / "1.png", 1)
    listed = tmp_path / "list.txt"
    listed.write_text("1.png\n\nnot-there.png\nneither.png\n")
    with pytest.raises(InputError) as caught:
        open_list(listed)
    text = str(caught.value)
    assert "2 of 3" in text
    assert "line 3: not-there.png" in text
    assert "line 4: neither.png" in text
    assert str(tmp_path) in text


def test_a_file_that_is_no_list_fills_no_screen(tmp_path):
    file = tmp_path / "annotations.json"
    file.write_text("{" + "0, " * 100_000 + "}")
    with pytest.raises(InputError, match=r"1 of 1 listed images don't exist \(line 1: \{0, 0, ") as caught:
        open_list(file)
    assert len(caught.value.what) < 300


def test_an_empty_list_and_a_picture_given_as_a_list(tmp_path):
    (tmp_path / "list.txt").write_text("\n \n")
    with pytest.raises(InputError, match="empty"):
        open_list(tmp_path / "list.txt")
    with pytest.raises(InputError, match="not a text file"):
        open_list(save_image(tmp_path / "1.png", 1))


def test_open_source_prefers_what_is_there_and_names_what_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "cifar10", 2)
    assert len(open_source("cifar10")) == 2
    with pytest.raises(InputError, match="did you mean cifar100") as caught:
        open_source("cifr100")
    assert caught.value.where == "cifr100"
    with pytest.raises(InputError, match="No data was named"):
        open_sources([])


def test_several_sources_follow_one_another(tmp_path):
    specs = [str(image_folder(tmp_path / "a", 3)), str(image_folder(tmp_path / "b", 4))]
    source = open_sources(specs)
    assert len(source) == 7
    assert source.classes == ("class0", "class1")
    assert source.where(3).startswith(specs[1])
    # 3 images of `a` sorted by folder: 000, 002 | 001
    assert [source.label(i) for i in range(7)] == [0, 0, 1, 0, 0, 1, 1]
    assert source.fingerprint() != open_sources(specs[::-1]).fingerprint()
    flat = str(image_folder(tmp_path / "c", 2, classes=0))
    assert open_sources([specs[0], flat]).classes == ()


def test_a_half_file_is_named_by_the_source(tmp_path):
    bad = half_jpeg(tmp_path / "bad.jpg")
    with pytest.raises(InputError) as caught:
        open_folder(tmp_path).read(0)
    assert caught.value.where == str(bad)
