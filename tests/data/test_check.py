"""``zoo data check``: everything is read once, and whatever can't be used is listed with what helps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cli.main import command_line
from tiny import ZOO, half_jpeg, image_folder, save_image
from zoo.data.check import check_images
from zoo.data.decoding import Decoding
from zoo.data.open import open_source
from zoo.errors import InputError, RunError


@pytest.fixture()
def mixed(tmp_path):
    """Two classes: three good pictures in each, of which one has no colour; and three bad files."""
    folder = image_folder(tmp_path / "images", 6)
    Image.new("L", (30, 10), 99).save(folder / "class0" / "gray.png")
    half_jpeg(folder / "class0" / "half.jpg")
    (folder / "class1" / "empty.png").write_bytes(b"")
    (folder / "class1" / "page.jpg").write_bytes(b"<html><body>Not Found</body></html>")
    (folder / "class1" / "notes.txt").write_text("x")
    return folder


BAD = ["class0/half.jpg", "class1/empty.png", "class1/page.jpg"]


@pytest.fixture()
def zoo(zoo):
    """The command with all that surrounds it: (exit code, standard output, standard error)."""
    return lambda *words: zoo("data", "check", *words)


def command(*words):
    return CliRunner().invoke(command_line(["data"]), ["data", "check", *map(str, words)])


def lines(report):
    return [json.loads(line) for line in report.read_text("utf-8").splitlines()]


class Many:
    """Images without files; reading one of them does what the test wants."""

    name = "many"
    classes = ()

    def __init__(self, count, deed=None, at=0):
        self.count, self.deed, self.at = count, deed, at

    def __len__(self):
        return self.count

    def read(self, index):
        if index == self.at and self.deed is not None:
            self.deed()
        return np.full((2 + index, 3, 3), index, np.uint8)

    def label(self, index):
        return -1

    def where(self, index):
        return f"image {index}"

    def fingerprint(self):
        return {}


def end_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


# --- the function ---


def test_what_is_found(mixed, tmp_path):
    report = tmp_path / "bad.jsonl"
    found = check_images(open_source(str(mixed)), report=report, workers=0)
    assert found.images == 10
    assert [bad["file"] for bad in found.bad] == [str(mixed / name) for name in BAD]
    assert found.smallest == (10, 30) and found.largest == (20, 20)
    assert found.median_side == 20
    assert found.gray == 1
    assert found.classes == {"class0": 5, "class1": 5}
    assert lines(report) == found.bad
    for line in lines(report):
        assert set(line) == {"schema", "file", "problem", "fix", "sample"}
        assert line["schema"] == 1 and line["fix"]
    assert [line["sample"] for line in lines(report)] == [4, 8, 9]
    problems = [line["problem"] for line in lines(report)]
    assert "Truncated" in problems[0] and "empty file" in problems[1] and "HTML" in problems[2]


def test_the_number_of_processes_changes_nothing(mixed, tmp_path):
    source = open_source(str(mixed))
    found = {}
    for workers in (0, 1, 2):
        report = tmp_path / f"{workers}.jsonl"
        found[workers] = (check_images(source, report=report, workers=workers), report.read_bytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_progress_counts_every_image_in_order(workers):
    seen = []
    found = check_images(Many(200), workers=workers, progress=lambda *now: seen.append(now))
    assert seen == [(done, 0) for done in range(1, 201)]
    assert found.smallest == (2, 3) and found.largest == (201, 3)


def test_the_limits_are_the_sources(mixed):
    found = check_images(open_source(str(mixed), how=Decoding(max_pixels=350)), workers=0)
    assert len(found.bad) == 9  # all but the gray one of 300 pixels
    assert "--max-pixels" in found.bad[0]["fix"]


def test_no_bad_image_leaves_an_empty_report(tmp_path):
    report = tmp_path / "new" / "bad.jsonl"
    found = check_images(open_source(str(image_folder(tmp_path / "images", 3))), report=report, workers=0)
    assert not found.bad
    assert report.read_bytes() == b""


def test_an_old_report_stays_until_the_new_one_is_whole(tmp_path):
    report = tmp_path / "bad.jsonl"
    report.write_text("old\n")

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_images(Many(5, stop, at=3), report=report, workers=0)
    assert report.read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize("place", ["folder", "file/bad.jsonl"])
def test_a_report_that_cannot_be_written_is_said_before_anything_is_read(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")

    def read_too_early():
        pytest.fail("an image was read")

    with pytest.raises(RunError, match="Writing the report failed") as caught:
        check_images(Many(5, read_too_early), report=tmp_path / place, workers=0)
    assert caught.value.where == str(tmp_path / place)


def test_a_killed_process_is_explained_and_the_images_named():
    with pytest.raises(RunError, match="was killed") as caught:
        check_images(Many(500, end_this_process, at=70), workers=2)
    assert "--workers" in caught.value.fix
    first, last = (int(part.removeprefix("image ")) for part in caught.value.where.split(" to "))
    assert first <= 70 <= last


# --- the command ---


def test_good_and_bad_images(mixed, tmp_path):
    report = tmp_path / "bad.jsonl"
    done = command(mixed, "--report", report, "--workers", 0)
    assert done.exit_code == 1
    assert "3 of 10 images can't be used:" in done.stdout
    for name in BAD:
        assert str(mixed / name) in done.stdout
    assert "What helps:" in done.stdout and "--on-error skip" in done.stdout
    assert str(report) in done.stdout
    assert "left out 1 file with other endings (.txt 1)" in done.stdout
    assert "2, of 5 images" in done.stdout
    assert done.stderr == ""
    assert len(lines(report)) == 3


def test_good_images_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(image_folder(tmp_path / "images", 4), "--workers", 2)
    assert done.exit_code == 0
    assert "All 4 images can be used (bad_files.jsonl is empty)." in done.stdout
    assert "What helps" not in done.stdout
    assert (tmp_path / "bad_files.jsonl").read_bytes() == b""


def test_more_than_ten_problems_are_counted(tmp_path):
    folder = image_folder(tmp_path / "images", 2)
    for number in range(13):
        (folder / "class0" / f"bad{number:02}.png").write_bytes(b"")
    done = command(folder, "--report", tmp_path / "bad.jsonl", "--workers", 0)
    assert "bad09.png" in done.stdout and "bad10.png" not in done.stdout
    assert "... and 3 more" in done.stdout
    assert len(lines(tmp_path / "bad.jsonl")) == 13


def test_json(mixed, tmp_path):
    report = tmp_path / "bad.jsonl"
    done = command(mixed, "--report", report, "--workers", 0, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found.pop("bad") == lines(report)
    assert found == {
        "schema": 1,
        "images": 10,
        "classes": {"class0": 5, "class1": 5},
        "smallest": [10, 30],
        "largest": [20, 20],
        "median_side": 20,
        "gray": 1,
        "source": str(mixed),
        "report": str(report),
        "notes": ["left out 1 file with other endings (.txt 1)"],
    }


def test_the_options_are_the_limits(mixed, tmp_path):
    words = [mixed, "--report", tmp_path / "bad.jsonl", "--workers", 0, "--json"]
    for option, value, problem in (
        ("--max-pixels", 350, "more than the limit of 350"),
        ("--max-bytes", 60, "more than the limit of 60"),
        ("--channels", 4, "3 channels, not 4"),
    ):
        found = json.loads(command(*words, option, value).stdout)
        assert any(problem in bad["problem"] for bad in found["bad"]), option
    assert len(json.loads(command(*words, "--channels", 1).stdout)["bad"]) == 3


def test_the_odd_images_pass_through(shared, tmp_path):
    report = tmp_path / "bad.jsonl"
    done = command(shared / "data" / "odd_images", "--report", report)
    assert done.exit_code == 1
    assert "6 of 25 images can't be used" in done.stdout
    assert [Path(line["file"]).name for line in lines(report)] == [
        "65536-uint32-limit.png",
        "broken_data_stream.png",
        "corrupt-header.jpg",
        "giant-image.jpg",
        "truncated.jpg",
        "truncated_jpeg.jpg",
    ]


@pytest.mark.parametrize("environment", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "utf-8:strict"}])
def test_names_beyond_ascii(tmp_path, environment):
    folder = tmp_path / "données"
    save_image(folder / "图片.png", 1)
    half_jpeg(folder / "Müll.jpg")
    os.rename(half_jpeg(folder / "x.jpg"), os.fsencode(folder) + b"/\xff.jpg")  # no text in any encoding
    report = tmp_path / "böse.jsonl"
    words = [ZOO, "data", "check", folder, "--report", report, "--workers", "0", "--json"]
    done = subprocess.run(words, capture_output=True, timeout=120, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (1, b"")
    found = json.loads(done.stdout.decode("utf-8"))
    assert found["source"] == str(folder) and found["report"] == str(report)
    names = [str(folder / "Müll.jpg"), str(folder / "\udcff.jpg")]
    assert [bad["file"] for bad in found["bad"]] == names
    assert [line["file"] for line in lines(report)] == names


def test_a_name_does_not_write_on_the_terminal(zoo, tmp_path):
    odd = tmp_path / "images" / "new\nline\x1b[31m.jpg"
    half_jpeg(odd)
    shown = "new\\nline\\x1b[31m.jpg"
    _, out, _ = zoo(tmp_path / "images", "--report", tmp_path / "bad.jsonl", "--workers", 0)
    assert shown in out and "\x1b" not in out
    assert lines(tmp_path / "bad.jsonl")[0]["file"] == str(odd)
    assert shown in str(InputError("what", where=odd))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "No pictures were found"),
        ("gone", "neither a folder"),
        ("x" * 300, "neither a folder"),  # longer than a name can be
        ("file.txt", "The list of images is empty"),
    ],
)
def test_nothing_to_check_is_bad_input(zoo, tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    code, out, err = zoo(tmp_path / name, "--report", tmp_path / "bad.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err and name in err
    assert "Traceback" not in err
    assert not (tmp_path / "bad.jsonl").exists()


def test_fewer_processes_than_none_are_bad_input(mixed, tmp_path):
    done = command(mixed, "--report", tmp_path / "bad.jsonl", "--workers", -1)
    assert done.exit_code == 2 and "--workers" in done.output
    assert not (tmp_path / "bad.jsonl").exists()


def test_an_unwritable_report_is_a_failure(zoo, tmp_path):
    folder = image_folder(tmp_path / "images", 2)
    code, out, err = zoo(folder, "--report", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: Writing the report failed") and str(tmp_path) in err
