"""COCO's evaluation of many detections against pycocotools and faster-coco-eval, in turn, and the memory of each.

python benchmarks/coco_eval.py [--images 5000 --detections 500000]

Each library evaluates the same synthetic detections in a process of its own: its time is that of loading the
results, matching, accumulating and reducing (ours makes its columns of arrays meanwhile, the others' lists of dicts
are made before); its memory the peak of the process. The twelve numbers must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from runner import load_average, write_result

TARGET = 30.0
LIBRARIES = ("hotcoco", "pycocotools", "faster-coco-eval")
_CLASSES, _OBJECTS = 80, 7


def make(images: int, detections: int) -> tuple[Any, list[Any]]:
    """Objects of COCO's density, and detections of which a third lie near one."""
    from transfer.detect.annotations import BoxSet, Objects, Picture
    from transfer.detect.scores import Detections

    rng = np.random.default_rng(0)
    pictures, found = [], []
    per_image = detections // images
    for number in range(1, images + 1):
        count = int(rng.poisson(_OBJECTS)) + 1
        corner = rng.uniform(0, 400, (count, 2))
        boxes = np.concatenate((corner, corner + rng.uniform(8, 200, (count, 2))), axis=1)
        labels = rng.integers(0, _CLASSES, count)
        crowd = rng.random(count) < 0.01
        areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) * 0.7
        objects = Objects(boxes, labels, np.zeros(count, dtype=bool), crowd, areas)
        pictures.append(Picture(str(number), None, (480, 640), objects, number))  # type: ignore[arg-type]
        near = rng.integers(0, count, per_image)
        moved = boxes[near] + rng.normal(0, 12, (per_image, 4))
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
        right = rng.random(per_image) < 1 / 3
        names = np.where(right, labels[near], rng.integers(0, _CLASSES, per_image))
        found.append(Detections(moved, rng.random(per_image).round(6), names))
    return BoxSet("coco", "made", tuple(f"class {i}" for i in range(_CLASSES)), pictures), found


def alone(library: str, images: int, detections: int) -> dict[str, Any]:
    """Evaluate by one library in this process."""
    from transfer.detect.coco_scores import coco_results, coco_scores, dataset_of, twelve_numbers

    truth, found = make(images, detections)
    if library == "hotcoco":
        began = time.perf_counter()
        scores = coco_scores(truth, found)
    else:
        if library == "pycocotools":
            from pycocotools.coco import COCO
            from pycocotools.cocoeval import COCOeval
        else:
            from faster_coco_eval import COCO
            from faster_coco_eval import COCOeval_faster as COCOeval
        numbers = tuple(range(1, len(truth.classes) + 1))
        content, said = dataset_of(truth), list(coco_results(truth, found))
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            annotations = COCO()
            annotations.dataset = content
            annotations.createIndex()
            results = annotations.loadRes(said)
            scores = twelve_numbers(COCOeval(annotations, results, "bbox"), truth.classes, numbers)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": seconds, "peak_gb": peak, "scores": scores}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--detections", type=int, default=500_000)
    parser.add_argument("--alone", choices=LIBRARIES, help="evaluate by this one here, and print JSON")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(alone(arguments.alone, arguments.images, arguments.detections)))
        return 0
    load = load_average()
    figures = {}
    for library in LIBRARIES:
        if importlib.util.find_spec(library.replace("-", "_")) is None:
            print(f"{library} is not installed: no figure of it (pip install {library})")
            continue
        words = ["--images", str(arguments.images), "--detections", str(arguments.detections)]
        command = [sys.executable, __file__, *words, "--alone", library]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        figures[library] = json.loads(answer.stdout)
        one = figures[library]
        print(
            f"{library:17} {one['seconds']:8.2f} s, peak {one['peak_gb']:.2f} GB, AP {one['scores']['AP']:.6f}"
        )
    ours, theirs = figures["hotcoco"], figures["pycocotools"]
    equal = ours["scores"] == theirs["scores"]
    times = theirs["seconds"] / ours["seconds"]
    print(f"equal numbers: {equal}; {times:.1f} times as fast as pycocotools (target {TARGET:g})")
    for one in figures.values():
        del one["scores"]["per_class"], one["scores"]["curves"]
    met = equal and times >= TARGET
    what = {"images": arguments.images, "detections": arguments.detections}
    write_result("coco_eval", {"load_before": load, **what, "figures": figures, "equal": equal, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
