"""The view of a run: who gets which, and plain lines where nobody can see a bar."""

from __future__ import annotations

import io
import json

import pytest

from tiny import TINY, image_folder
from zoo.engine.progress import JsonProgress, LineProgress, RichProgress, choose_progress
from zoo.errors import InputError
from zoo.pretrain.run import start


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "view"),
    [
        (Terminal(), "xterm-256color", RichProgress),
        (Terminal(), "dumb", LineProgress),  # a terminal that can't redraw
        (io.StringIO(), "xterm-256color", LineProgress),  # a pipe or a file
    ],
)
def test_auto_looks_at_the_terminal(monkeypatch, stream, term, view):
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", term)
    (chosen,) = choose_progress("auto")
    assert isinstance(chosen, view)


def test_views_by_name():
    assert isinstance(choose_progress("lines")[0], LineProgress)
    assert isinstance(choose_progress("json")[0], JsonProgress)
    assert choose_progress("quiet") == []
    with pytest.raises(InputError, match="no progress view") as caught:
        choose_progress("line")
    assert "did you mean lines? " in str(caught.value)


def run(tmp_path, progress: str) -> None:
    data = image_folder(tmp_path / "images", count=8)
    start("swav_tiny", data=str(data), out=tmp_path / "run", overrides=TINY, progress=progress)


def test_into_a_pipe_go_plain_lines(tmp_path, capfd):
    run(tmp_path, "auto")
    out, err = capfd.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("step ")]
    assert lines[-1].startswith("step 2/2  epoch 2  loss ")
    assert "\x1b" not in err and "\r" not in err


def test_json_is_alone_on_standard_output(tmp_path, capfd):
    run(tmp_path, "json")
    steps = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
