"""``zoo report`` from the command line."""

from __future__ import annotations

import json

import pytest

from tiny import image_folder, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.engine.precision.processors", lambda: 1)
        images = image_folder(tmp_path_factory.mktemp("images"), 8)
        return train(images, tmp_path_factory.mktemp("runs") / "run", epochs=1, health__every=0).path


def test_it_prints_where_the_page_is_and_what_is_missing(zoo, run, tmp_path):
    code, out, err = zoo("report", run, "-o", tmp_path / "page.html")
    assert (code, err) == (0, "")
    note, page = out.splitlines()
    assert "no figures of its health" in note and page == str(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text("utf-8")
    assert html.startswith("<!doctype html>") and "data:image/png;base64," in html


def test_json_and_several_runs(zoo, run, tmp_path):
    code, out, _ = zoo(
        "report", run, run.parent / "." / "run", "-o", tmp_path / "page.html", "--views", 0, "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["schema"] == 1 and found["report"] == str(tmp_path / "page.html")
    assert [row["run"] for row in found["runs"]] == [str(run)]


@pytest.mark.parametrize(
    "words", [["report", "nothing"], ["report", ".", "-o", "x.html"], ["report", "--views", "-1"]]
)
def test_bad_input_is_exit_code_2(zoo, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = zoo(*words)
    assert code == 2 and out == "" and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
