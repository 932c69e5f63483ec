"""What scoring keeps of an image is what was found in it, and nothing else."""

from __future__ import annotations

import gc
import json
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from transfer.detect.annotations import BoxSet, Objects, Picture
from transfer.detect.coco_scores import encode_masks, read_results, result_file
from transfer.detect.judge import detect_all, judge_for
from transfer.detect.protocols import choose_protocol
from transfer.detect.run import detector_for
from transfer.detect.scores import Detections
from transfer.detect.training import Normalisation, Plan
from zoo.engine.collectives import WorldOfOne
from zoo.engine.precision import Precision
from zoo.errors import RunError
from zoo.models.factory import create_trunk


def nothing():
    none = np.zeros(0)
    return Objects(np.zeros((0, 4)), none.astype(np.int64), none.astype(bool), none.astype(bool), none)


def bytes_of_tensors():
    gc.collect()
    return sum(x.untyped_storage().nbytes() for x in gc.get_objects() if issubclass(type(x), torch.Tensor))


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_no_image_and_no_map_is_kept(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    pictures = [Picture(str(n), tmp_path / "one.png", None, nothing(), n) for n in range(6)]
    images = BoxSet("voc", "made", ("a", "b"), pictures)
    protocol = replace(choose_protocol("own", "own", "", "c4", "small", masks=False), test_size=120)
    torch.manual_seed(0)
    detector = detector_for(create_trunk("resnet18", base_planes=8), protocol, 2, 0)
    plan = Plan(protocol, 1, tmp_path, Normalisation((127.0,) * 3, (60.0,) * 3))

    def scored(rows):
        """Bytes of Python and numpy at the peak, bytes of torch that live on, detections."""
        before = bytes_of_tensors()
        tracemalloc.start()
        how = Precision("float32", torch.device("cpu"))
        parts = detect_all(detector, images.chosen(rows), plan, how, WorldOfOne())
        found = [one for _, part in parts for one in part]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, bytes_of_tensors() - before, sum(len(one.scores) for one in found)

    scored([0])  # what is loaded at first use is loaded now
    few, many = scored(range(1)), scored(range(6))
    assert many[2] == 6 * few[2] and few[2] > 10
    assert 0 <= few[1] <= 48 * few[2] and many[1] == 6 * few[1]  # a box, a score and a label
    # A picture alone has 230,000 bytes.
    assert many[0] - few[0] < 5 * 230_000 / 4


def test_a_file_of_detections_is_written_one_by_one_and_read_back(tmp_path):
    """A hundred images more cost nothing while they are written."""
    one = Detections(np.tile([[1.0, 2.0, 30.0, 40.5]], (50, 1)), np.linspace(0.9, 0.1, 50), np.arange(50) % 2)
    peaks = []
    for count in (10, 110):
        pictures = [Picture(str(n), tmp_path, None, nothing(), 7 * n) for n in range(count)]
        images = BoxSet("coco", "made", ("a", "b"), pictures, (3, 9))
        tracemalloc.start()
        with result_file(tmp_path / "found.json") as add:
            for row in range(count):
                add(images.chosen([row]), [one])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000
    rows = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) == 110 * 50 and rows[51]["image_id"] == 7 and rows[51]["category_id"] == 9
    back = read_results(tmp_path / "found.json", images)
    assert len(back) == 110 and np.array_equal(back[5].labels, one.labels)
    assert np.array_equal(back[5].boxes, one.boxes) and np.array_equal(back[5].scores, one.scores)
    with result_file(tmp_path / "none.json") as add:
        add(images.chosen([0]), [Detections(one.boxes[:0], one.scores[:0], one.labels[:0])])
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_a_result_file_that_was_not_finished_is_not_there(tmp_path):
    with pytest.raises(ZeroDivisionError), result_file(tmp_path / "found.json"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    for name in (".found.json.0a1b.tmp", ".other.json.0a1b.tmp"):  # what a killed process left
        (tmp_path / name).write_text("[")
    with result_file(tmp_path / "found.json"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.json.0a1b.tmp", "found.json"]
    with pytest.raises(RunError, match="Writing the detections"), result_file(tmp_path / "no" / "found.json"):
        pass


@pytest.mark.parametrize("kind", ["voc", "coco"])
def test_a_judge_keeps_little_of_an_image(kind, tmp_path):
    """Masks of noise have 40 kB of run lengths an image here: a hundred images more cost nothing of that."""
    noise = np.random.default_rng(0).integers(0, 2, (10, 100, 160), dtype=np.uint8)
    boxes = np.tile([[1.0, 2.0, 30.0, 40.5]], (10, 1))
    assert sum(len(mask["counts"]) for mask in encode_masks(noise)) > 40_000
    no = np.zeros(1, dtype=bool)
    outline = [[1.0, 2.0, 30.0, 2.0, 30.0, 40.0]]
    objects = Objects(boxes[:1], np.zeros(1, dtype=np.int64), no, no, np.array([600.0]), [outline])
    pictures = [Picture(str(n), tmp_path, (100, 160), objects, n) for n in range(220)]
    images = BoxSet(kind, "made", ("a", "b"), pictures)
    judge, sizes = judge_for(images, "area", rounding=True, masks=True), []
    for row in range(220):
        one = Detections(boxes, np.linspace(0.9, 0.1, 10), np.arange(10) % 2, encode_masks(noise))
        judge.add(images.chosen([row]), [one])
        if row in (19, 219):
            gc.collect()
            sizes.append(resident())
    assert sizes[1] - sizes[0] < 200 * 10_000
    assert judge.result()["metrics"]["AP"] >= 0.0
