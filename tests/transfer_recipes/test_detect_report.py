"""``zoo report`` for results of detection: one page that holds all that it shows."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from transfer.detect.annotations import Objects
from transfer.detect.report import chosen_images, write_report
from transfer.detect.scores import Detections, image_precision
from transfer.run import transfer
from weights.published import assert_clear, bundle_at, isolate
from zoo.errors import InputError
from zoo.pretrain.charts import bar_chart

STEPS = {"steps": 2, "min_size": 64, "max_size": 96, "limit": 7, "precise_batches": 1, "precision": "float32"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of two detectors on the built-in set; treat them as read-only."""
    home = tmp_path_factory.mktemp("detected")
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, home)
        patch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 7})
        model = str(bundle_at(home / "model").path)
        for name, seed in (("first", 0), ("second", 1)):
            transfer(
                "detect",
                model=model,
                dataset="builtin:photos-voc",
                settings={**STEPS, "seed": seed},
                out=home / name,
            )
    return home


@pytest.fixture
def first(trained, tmp_path):
    """A copy of one of them, and of the images."""
    place = trained / "cache"
    shutil.copytree(place, tmp_path / "cache", dirs_exist_ok=True)  # as the test's own home has it
    return shutil.copytree(trained / "first", tmp_path / "first")


class Page:
    def __init__(self, file):
        self.html = file.read_text("utf-8")
        self.charts = {
            chart.get("aria-label"): chart
            for chart in map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", self.html, re.DOTALL))
        }
        self.images = re.findall(r'src="data:image/jpeg;base64,([^"]*)"', self.html)
        assert not re.findall(r'(?:src|href)="(?!data:)', self.html) and "<script" not in self.html
        for tag in ("section", "figure", "details", "table", "div"):
            assert self.html.count(f"<{tag}") == self.html.count(f"</{tag}>"), tag


def test_the_page_shows_scores_curves_and_pictures(command, first, tmp_path):
    code, out, err = command("report", first, "-o", tmp_path / "page.html", "--views", 2)
    assert (code, err) == (0, "") and out.splitlines() == [str(tmp_path / "page.html")]
    page = Page(tmp_path / "page.html")
    metrics = json.loads((first / "result.json").read_text())["metrics"]
    assert f"{100 * metrics['AP50']:.1f} %" in page.html and "trained for 2 of" in page.html
    curve = page.charts["Precision by recall at an IoU of 0.5, mean of the classes, %"]
    assert len(curve.findall(".//*[@class='curve c0']")) == 1
    assert {"loss", "loss_cls", "proposal_recall", "lr"} <= page.charts.keys()
    classes = json.loads((first / "result.json").read_text())["details"]["per_class"]
    bars = page.charts["AP of each class, %"]
    assert len(bars.findall(".//{*}rect")) == sum(row["AP"] is not None for row in classes)
    assert sum(title.endswith(": precision by recall, %") for title in page.charts) == len(
        [row for row in classes if row["AP"] is not None]
    )
    assert len(page.images) == 2 * (2 + 2 + 2)  # truth and prediction
    for kind in ("Best", "Typical", "Worst"):
        assert f"<h2>{kind} images" in page.html
    shown = Image.open(io.BytesIO(base64.b64decode(page.images[0])))
    assert shown.size == (256, 192)
    assert "Protocol" in page.html and "&quot;lr&quot;" in page.html


def test_results_beside_one_another_and_as_json(command, trained, tmp_path):
    words = ("report", trained / "first", trained / "second", "-o", tmp_path / "page.html", "--views", 0)
    code, out, err = command(*words, "--json")
    assert code == 0, err
    assert [row["run"] for row in json.loads(out)["runs"]] == [str(trained / n) for n in ("first", "second")]
    page = Page(tmp_path / "page.html")
    assert page.images == [] and "Best images" not in page.html
    curves = page.charts["Precision by recall at an IoU of 0.5, mean of the classes, %"]
    assert len(curves.findall(".//*[@class='curve c1']")) == 1


def test_what_is_not_there_any_more_is_said(first, tmp_path):
    place = json.loads((first / "run-0" / "scored.json").read_text())
    (first / "run-0" / "scored.json").write_text(json.dumps({**place, "dataset": "/gone"}))
    (first / "run-0" / "scores.json").unlink()
    (first / "run-0" / "metrics.jsonl").unlink()
    made = write_report([first], tmp_path / "page.html")
    notes = " ".join(made["runs"][0]["notes"])
    assert "can't be drawn any more" in notes and "each class" in notes and "training" in notes
    page = Page(tmp_path / "page.html")
    assert page.images == [] and "can&#x27;t be drawn any more" in page.html
    assert list(page.charts) == ["AP of each class, %"]  # of what the result itself says
    shutil.rmtree(first / "run-0")
    assert len(write_report([first], tmp_path / "page.html")["runs"][0]["notes"]) == 3


def test_names_from_outside_are_text(first, tmp_path):
    result = json.loads((first / "result.json").read_text())
    result["model"] = "<script>alert(1)</script>"
    result["details"]["notes"] = ["<b>$TITLE</b>"]
    (first / "result.json").write_text(json.dumps(result))
    write_report([first], tmp_path / "page.html", views=0)
    page = Page(tmp_path / "page.html")
    assert "&lt;script&gt;" in page.html and "<b>$TITLE" not in page.html


def test_what_is_no_result_of_detection_is_refused(command, trained, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "result.json").write_text('{"recipe": "knn", "metrics": {}, "details": {}, "data": {}}')
    with pytest.raises(InputError, match="no result of detection"):
        write_report([other], tmp_path / "page.html")
    mixed = command("report", trained / "first", tmp_path / "nothing", "-o", tmp_path / "page.html")
    assert_clear(mixed, "not about both", tmp_path / "nothing")
    assert_clear(command("report", trained / "first", "-o", tmp_path), "where a folder is")
    assert not (tmp_path / "page.html").exists()


# --- which images ---


def test_best_typical_and_worst_images():
    scores = [0.5, math.nan, 1.0, 0.0, 1.0, 0.6, 0.0, 0.4]
    objects = [1, 0, 1, 2, 5, 1, 3, 1]
    assert chosen_images(scores, objects, 1) == {"best": [4], "typical": [0], "worst": [6]}
    assert chosen_images(scores, objects, 2) == {"best": [4, 2], "typical": [0, 5], "worst": [6, 3]}
    every = chosen_images(scores, objects, 9)
    assert sorted(every["best"]) == [0, 2, 3, 4, 5, 6, 7] and every["worst"] == every["typical"] == []
    assert chosen_images([math.nan], [0], 3) == {"best": [], "typical": [], "worst": []}


def test_an_image_is_judged_by_its_own_detections():
    def truth(*difficult):
        boxes = np.array([[0.0, 0, 10, 10], [20, 20, 40, 40]])[: len(difficult)]
        none = np.zeros(len(difficult), dtype=bool)
        labels = np.arange(len(difficult))
        return Objects(boxes, labels, np.array(difficult, dtype=bool), none, none.astype(float))

    def said(*rows):
        rows = np.array(rows, dtype=float).reshape(-1, 6)
        return Detections(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))

    both = truth(False, False)
    hits = ([0, 0, 10, 10, 0.9, 0], [20, 20, 40, 40, 0.8, 1])
    assert image_precision(both, said(*hits)) == 1.0
    assert image_precision(both, said(hits[0])) == 0.5
    assert image_precision(both, said()) == 0.0
    # A wrong one of any class that is surer than both.
    assert image_precision(both, said([50, 50, 60, 60, 1.0, 3], *hits)) == pytest.approx(2 / 3)
    assert image_precision(truth(False, True), said(hits[0])) == 1.0
    assert math.isnan(image_precision(truth(True), said(hits[0]))) and math.isnan(
        image_precision(truth(), said())
    )


# --- bars ---


def test_bars_are_as_long_as_their_values():
    svg = bar_chart(
        "AP <%>",
        ["a", "a name that is <long> beyond all measure"],
        [(0, [50.0, None]), (1, [0.0, 100.0])],
        100,
    )
    chart = ElementTree.fromstring(svg)
    assert chart.find("figcaption").text == "AP <%>"
    bars = chart.findall(".//rect")
    widths = [float(bar.get("width")) for bar in bars]
    assert [bar.get("class") for bar in bars] == ["c0", "c1", "c1"]
    assert widths[1] == 1 and widths[2] == pytest.approx(2 * widths[0])
    assert any((text.text or "").endswith("…") for text in chart.findall(".//text"))
