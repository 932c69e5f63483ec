"""``zoo report``: one page that holds all that it shows, of any run in any state."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from tiny import StopAfter, image_folder, train
from zoo.errors import InputError, RunError
from zoo.pretrain.charts import Curve, Mark, line_chart
from zoo.pretrain.report import write_report
from zoo.pretrain.rundir import RunLock

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


class Page(HTMLParser):
    """What a browser would fetch, the page's text, and whether every element is closed."""

    VOID = ("meta", "img", "br")

    def __init__(self, path):
        super().__init__()
        self.fetched, self.text, self.open, self.images = [], [], [], 0
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []
        self.words = " ".join(self.text)
        self.charts = [ElementTree.fromstring(svg) for svg in SVG.findall(self.html)]
        self.titles = [chart.get("aria-label") for chart in self.charts]

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
                if value.startswith("data:image/png;base64,"):
                    self.images += 1
                else:
                    self.fetched.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def chart(self, title):
        return self.charts[self.titles.index(title)]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    image_folder(folder / "train", 8)
    image_folder(folder / "val", 12)
    return folder


@pytest.fixture(scope="module")
def sick(images, labelled, tmp_path_factory):
    """A run with all figures, and an event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.engine.precision.processors", lambda: 1)
        return train(
            images,
            tmp_path_factory.mktemp("runs") / "sick",
            epochs=3,
            health__every=2,
            probe__data=str(labelled),
            method__epsilon=5.0,
            method__queue_length=16,
            method__queue_start_epoch=1,
        ).path


def shapes(chart, kind):
    return [element for element in chart.iter() if element.get("class", "").split()[:1] == [kind]]


def test_the_page_of_a_run(sick, tmp_path):
    made = write_report([sick], tmp_path / "report.html")
    assert made["runs"] == [{"run": str(sick), "step": 9, "notes": []}]
    page = Page(tmp_path / "report.html")
    assert page.fetched == [] and page.images == 1
    assert "http" not in page.html.replace("http-equiv", "")
    loss = page.chart("Loss")
    assert "ln 8 = 2.079" in [text.text for text in loss.iter("text")]
    assert len(shapes(loss, "level")) == 2  # the line and its text
    assert len(shapes(loss, "curve")) == 1
    assert shapes(loss, "curve")[0].get("points").count(",") == 9
    (mark,) = shapes(loss, "mark")
    assert "uniform-codes at step 4" in mark[0].text
    for title in (
        "Learning rate",
        "Images a second",
        "Waiting for data, % of a step",
        "kNN accuracy of the probe, %",
    ):
        assert title in page.titles
    for part in (
        "Effective rank",
        "Spread",
        "Prototypes in use",
        "Entropy of a code",
        "Gradient norm",
        "Age of the",
    ):
        assert any(title.startswith(part) for title in page.titles)
    assert "uniform-codes" in page.words and "a smaller method.epsilon (now 5)" in page.words
    assert "epsilon: 5.0  # --set" in page.words
    assert '"torch"' in page.words and "images_per_second" in page.words


def test_several_runs_are_overlaid(sick, finished, tmp_path):
    other = tmp_path / "elsewhere" / "sick"
    shutil.copytree(finished.path, other)
    made = write_report([sick, finished.path, other, sick], tmp_path / "report.html", views=0)
    assert len(made["runs"]) == 3
    page = Page(tmp_path / "report.html")
    assert page.images == 0
    curves = shapes(page.chart("Loss"), "curve")
    assert [curve.get("class") for curve in curves] == ["curve c0", "curve c1", "curve c2"]
    assert str(other) in page.words and str(sick) in page.words  # two folders of one name
    assert len(shapes(page.chart("kNN accuracy of the probe, %"), "curve")) == 1


def test_a_run_of_an_older_version(finished, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(finished.path, old)
    kept = [json.loads(line) for line in (old / "metrics.jsonl").read_text("utf-8").splitlines()]
    for line in kept:
        for key in [key for key in line if "/" in key]:
            del line[key]
    (old / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    recipe = (old / "recipe.yaml").read_text("utf-8")
    (old / "recipe.yaml").write_text(recipe[: recipe.index("health:")])
    (old / "efficiency.json").unlink()
    (old / "environment.json").unlink()
    made = write_report([old], tmp_path / "report.html")
    assert ["no figures of its health" in note for note in made["runs"][0]["notes"]] == [True]
    page = Page(tmp_path / "report.html")
    assert page.titles == ["Loss", "Learning rate", "Images a second", "Waiting for data, % of a step"]
    assert shapes(page.chart("Loss"), "level") == []
    assert page.images == 1


def test_a_damaged_log_a_running_run_and_data_that_is_gone(images, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(images, data)
    run = train(data, tmp_path / "run", callbacks=(StopAfter(4),)).path
    shutil.rmtree(data)
    whole = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = [b"\xff\xfe\n", b"[]\n", b'{"step": true, "loss": 1}\n', b'{"step": "3"}\n', whole[3][:40]]
    sick = b'{"step": 2, "loss": NaN, "lr": Infinity, "nested": {"a": 1}, "word": "x", "mine": 1e400}\n'
    (run / "metrics.jsonl").write_bytes(b"".join([whole[0], *bad[:4], whole[1], sick, bad[4]]))
    (run / "events.jsonl").write_bytes(b'{"name": "x"}\nnothing\n')
    (run / "nonfinite.json").write_text("{}")
    with RunLock(run):
        made = write_report([run], tmp_path / "report.html")
    notes = made["runs"][0]["notes"]
    assert (
        "5 damaged line(s) of metrics.jsonl were skipped" in notes and "nonfinite.json can't be read" in notes
    )
    page = Page(tmp_path / "report.html")
    assert "running" in page.words and "can't be drawn any more" in page.words
    assert page.images == 0 and "nothing to warn of" in page.words
    assert shapes(page.chart("Loss"), "curve")[0].get("points").count(",") == 2


def test_a_run_without_a_step(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    (run / "metrics.jsonl").unlink()
    (run / "recipe.yaml").unlink()
    made = write_report([run], tmp_path / "report.html")
    assert len(made["runs"][0]["notes"]) == 2 and made["runs"][0]["step"] == 0
    assert Page(tmp_path / "report.html").charts == []


def test_a_loss_that_was_not_finite_is_an_event(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    images = [{"sample": 3, "file": "/data/a.png", "not_finite": True}, {"sample": 4, "file": "/data/b.png"}]
    none = {"count": 0, "first": []}
    report = {
        "schema": 1,
        "step": 4,
        "epoch": 1,
        "lr": 0.1,
        "parameters": {"count": 62, "values": none, "gradients": {"count": 2, "first": ["trunk.fc", "x"]}},
        "processes": [{"rank": 0, "loss": "nan", "images": images}],
    }
    (run / "nonfinite.json").write_text(json.dumps(report))
    write_report([run], tmp_path / "report.html", views=0)
    page = Page(tmp_path / "report.html")
    for part in (
        "non-finite-loss",
        "at step 4",
        "2 of 62 parameters had gradients",
        "trunk.fc",
        "/data/a.png",
    ):
        assert part in page.words
    assert len(shapes(page.chart("Loss"), "mark")) == 1


def test_what_a_run_says_of_itself_can_not_become_markup(finished, tmp_path):
    evil = '<script>alert("$BODY $TITLE")</script>'
    run = tmp_path / "<b>&run"
    shutil.copytree(finished.path, run)
    info = json.loads((run / "run.json").read_text("utf-8"))
    info["recipe_name"] = evil
    (run / "run.json").write_text(json.dumps(info))
    event = {"schema": 1, "name": evil, "step": 1, "seen": evil, "advice": evil}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    line = json.dumps({"step": 6, "loss": 1.0, evil: 2.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with (run / "recipe.yaml").open("a") as file:
        file.write(f"# {evil} sftp://me:secret@host/x?token=abc\n")
    write_report([run], tmp_path / "report.html", views=0)
    page = Page(tmp_path / "report.html")
    assert "<script" not in page.html and "<b>&run" not in page.html
    assert page.words.count(evil) >= 4 and "<b>&run" in page.words
    assert evil in page.titles
    assert "secret" not in page.html and "abc" not in page.html


def test_bad_input(finished, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such run"):
        write_report([tmp_path / "nothing"], tmp_path / "report.html")
    with pytest.raises(InputError, match="not a run"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(InputError, match="a folder is"):
        write_report([finished.path], tmp_path)
    with pytest.raises(RunError, match="Writing the report"):
        write_report([finished.path], tmp_path / "absent" / "report.html", views=0)
    monkeypatch.setenv("ZOO_RUNS", str(tmp_path / "no-runs"))
    with pytest.raises(InputError, match="There is no run"):
        write_report([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_it_is_the_newest_run(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_RUNS", str(finished.path.parent))
    assert write_report([], tmp_path / "report.html", views=0)["runs"][0]["run"] == str(finished.path)


# --- charts ---


def drawn(*values, log=False, level=None, marks=()):
    curve = Curve("run", 0, level=level)
    for step, value in enumerate(values):
        curve.add(step, value)
    svg = SVG.search(line_chart("a <title>", [curve], marks, log))
    return ElementTree.fromstring(svg[0])


def places(element):
    return [tuple(map(float, place.split(","))) for place in element.get("points").split()]


def test_a_curve_goes_where_its_values_are():
    (curve,) = shapes(drawn(0, 1, 0.5), "curve")
    (x0, y0), (x1, y1), (x2, y2) = places(curve)
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 > y2 > y1  # upwards is smaller
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)


def test_a_logarithmic_axis():
    (curve,) = shapes(drawn(1, 10, 100, log=True), "curve")
    heights = [y for _, y in places(curve)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.1)
    (curve,) = shapes(drawn(0, 1, 10, log=True), "curve")  # zero has no logarithm
    assert all(math.isfinite(y) for _, y in places(curve))


def test_many_steps_are_drawn_as_means_with_their_range():
    values = [math.sin(step / 500) + (5 if step == 7777 else 0) for step in range(20_000)]
    chart = drawn(*values)
    (curve,), (band,) = shapes(chart, "curve"), shapes(chart, "band")
    assert len(places(curve)) <= 300
    assert min(y for _, y in places(band)) < min(y for _, y in places(curve)) - 50  # the peak is in the range


@pytest.mark.parametrize(
    "values", [(1.0,), (2.0, 2.0), (0.0, 0.0), (-1.0, 1e-9), (1e300, -1e300), (3.0, math.nan)]
)
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_are_drawn_inside_the_picture(values, log):
    chart = drawn(*values, log=log, level=2.0, marks=[Mark(0, "here", 0), Mark(10**6, "far", 0)])
    assert len(shapes(chart, "mark")) <= 1
    for element in chart.iter():
        for name in ("cx", "cy", "x", "y", "x1", "x2", "y1", "y2"):
            number = float(element.get(name, 0))
            assert math.isfinite(number) and -1 <= number <= 521
