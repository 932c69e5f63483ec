"""Files that fix the number of each class: three forms, and what can be wrong with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tiny import save_image
from zoo.data.class_index import read_class_index, relabel
from zoo.errors import InputError

NAMES = ("Müll", "cat", "a dog, or two")


@pytest.fixture
def written(tmp_path):
    def write(content, name="classes.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path):
    with pytest.raises(InputError) as caught:
        read_class_index(path)
    assert caught.value.where == str(path)
    return caught.value.what


@pytest.mark.parametrize(
    "content",
    [
        '{"cat": 1, "a dog, or two": 2, "Müll": 0}',
        json.dumps(NAMES),
        ' \n["Müll", "cat", "a dog, or two"]\n',
        "Müll\ncat\na dog, or two\n",
        "Müll\r\n cat \r\na dog, or two\r\n\r\n",
        "\ufeffMüll\rcat\ra dog, or two",
    ],
)
def test_each_form_gives_the_names_in_order(written, content):
    assert read_class_index(written(content)) == NAMES


def test_numbers_must_be_each_once_and_without_gaps(written):
    what = refusal(written('{"a": 0, "b": 0, "c": 2, "d": 2, "e": 7}'))
    assert "5 classes must be numbered 0 to 4" in what
    assert "0 is given to a, b" in what
    assert "2 is given to c, d" in what
    assert "7 (e) is too high or too low" in what
    assert "1, 3, 4 are missing" in what
    assert "-1 (a) is too high or too low; 1 is missing" in refusal(written('{"a": -1, "b": 0}'))


def test_numbers_that_start_from_one(written):
    what = refusal(written('{"a": 1, "b": 2}'))
    assert "2 (b) is too high or too low; 0 is missing" in what


@pytest.mark.parametrize("number", ["true", "1.0", '"1"', "null", '["n01440764", "tench"]'])
def test_a_number_must_be_whole(written, number):
    assert "no whole number: b" in refusal(written('{"a": 0, "b": %s}' % number))  # noqa: UP031


@pytest.mark.parametrize(
    "content", ['["cat", "dog", "cat"]', "cat\ndog\ncat\n", '{"cat": 0, "dog": 1, "cat": 2}']
)
def test_a_name_given_twice_is_named(written, content):
    assert refusal(written(content)).endswith("more than once: cat.")


@pytest.mark.parametrize("content", ["", " \n\n", "[]", "{}"])
def test_an_empty_file(written, content):
    assert "empty" in refusal(written(content))


def test_a_blank_line_would_shift_the_classes(written):
    assert "Line 2 " in refusal(written("cat\n\ndog\n"))


def test_other_json_and_broken_json(written):
    assert "neither a list of names nor an object" in refusal(written('["cat", 1]'))
    assert "neither a list of names nor an object" in refusal(written('"cat"', "classes.json"))
    assert "line 1 column 8" in refusal(written('["cat",'))
    assert "no JSON" in refusal(written("cat\ndog\n", "classes.json"))
    assert "no JSON" in refusal(written("[" * 100_000))
    assert "an empty name" in refusal(written('["cat", " "]'))
    assert "no text" in refusal(written('["cat", "\\ud800"]'))


def test_a_file_that_is_not_utf8_or_not_there(written, tmp_path):
    assert "not UTF-8 (line 2)" in refusal(written(b"cat\nM\xfcll\n"))
    assert "No such file" in refusal(tmp_path / "gone.txt")
    assert "directory" in refusal(tmp_path)


def test_relabel_follows_the_wanted_order():
    assert relabel(("b", "d"), ("d", "c", "b")) == [2, 0]
    assert relabel((), ("a",)) == []


def test_relabel_names_what_it_does_not_know():
    with pytest.raises(InputError) as caught:
        relabel(("cat", "tigr", "cow", "dog"), ("cat", "dog", "tiger"), "a folder")
    assert "2 classes that training (or the class index) doesn't know: tigr, cow." in caught.value.what
    assert caught.value.where == "a folder"
    assert caught.value.fix == "did you mean tiger? known classes: cat, dog, tiger"


def test_accented_classes_compare_in_the_c_locale(tmp_path):
    save_image(tmp_path / "set" / "données" / "Müll.jpg", 1)
    (tmp_path / "classes.json").write_text('["x", "données"]', "utf-8")
    code = (
        "import sys; from pathlib import Path; from zoo.data.folder import open_folder;"
        "from zoo.data.class_index import read_class_index;"
        "names = read_class_index(Path(sys.argv[2]));"
        "s = open_folder(Path(sys.argv[1]), class_names=names);"
        "assert s.read(0).shape == (20, 20, 3);"
        "print(s.where(0)); print(s.classes[s.label(0)], s.label(0))"
    )
    where = [str(tmp_path / "set"), str(tmp_path / "classes.json")]
    for extra in ({}, {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}):
        env = {**os.environ, "LC_ALL": "C", **extra}
        env.pop("PYTHONIOENCODING", None)
        done = subprocess.run(
            [sys.executable, "-c", code, *where], env=env, capture_output=True, timeout=60, check=True
        )
        assert done.stdout.decode() == f"{tmp_path / 'set' / 'données' / 'Müll.jpg'}\ndonnées 1\n"
