"""Memory of scoring detections: it is flat in the number of images, but for the detections themselves.

    python benchmarks/detect_memory.py [--images 200 2000]

Mask R-CNN around a narrow ResNet-18 looks at images of 96 x 128, finds 100 objects in each, and its boxes and masks
are judged by COCO's rules and written to a file, as after a training. Each number of images has a process of its
own, whose peak is counted from after the first image. Of an image more there is kept how its 100 boxes and 100 masks
matched (37 bytes each), not the masks, whose run lengths (of noise here) are 300 kB; as bitmaps the masks of one
image of 480 x 640 would be 31,000 kB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runner import load_average, write_result
from sides import resident

HEIGHT, WIDTH = 96, 128


def alone(count: int) -> dict[str, Any]:
    """Score so many images in this process."""
    from PIL import Image

    from transfer.detect.annotations import BoxSet, Objects, Picture
    from transfer.detect.coco_scores import result_file
    from transfer.detect.judge import detect_all, judge_for
    from transfer.detect.protocols import choose_protocol
    from transfer.detect.run import detector_for
    from transfer.detect.training import Normalisation, Plan
    from zoo.engine.collectives import WorldOfOne
    from zoo.engine.precision import Precision
    from zoo.models.factory import create_trunk

    torch.manual_seed(0)
    protocol = choose_protocol("own", "own", "", "mask-fpn", "small", masks=True)
    detector = detector_for(create_trunk("resnet18", base_planes=8), protocol, 3, seed=0)
    with tempfile.TemporaryDirectory() as place:
        pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        file = Path(place) / "noise.png"
        Image.fromarray(pixels).save(file)
        outline = [10.0, 10.0, 60.0, 10.0, 60.0, 50.0, 10.0, 50.0]
        no = np.zeros(1, dtype=bool)
        objects = Objects(
            np.array([[10.0, 10, 60, 50]]),
            np.zeros(1, dtype=np.int64),
            no,
            no,
            np.array([2000.0]),
            [[outline]],
        )
        pictures = [Picture(str(n), file, (HEIGHT, WIDTH), objects, n) for n in range(1, count + 1)]
        images = BoxSet("coco", "made", ("a", "b", "c"), pictures, (1, 2, 3), ap="coco")
        plan = Plan(protocol, 1, Path(place), Normalisation((127.0,) * 3, (60.0,) * 3))
        how, world = Precision("float32", torch.device("cpu")), WorldOfOne()

        def score(some: BoxSet) -> int:
            judge, detections = judge_for(some, "coco", rounding=True, masks=True), 0
            with result_file(Path(place) / "detections.json") as keep:
                for part, found in detect_all(detector, some, plan, how, world):
                    judge.add(part, found)
                    keep(part, found)
                    detections += sum(len(one.scores) for one in found)
            judge.result()
            return detections

        score(images.chosen([0]))
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        before = resident("VmRSS")
        detections = score(images)
        grown = resident("VmHWM") - before
    return {"images": count, "detections": detections, "grown_bytes": grown}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, nargs=2, default=(200, 2000), help="fewer and more")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone)))
        return 0
    load = load_average()
    rows = []
    for count in options.images:
        command = [sys.executable, __file__, "--alone", str(count)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        one = rows[-1]
        print(
            f"{count} images, {one['detections']} detections: {one['grown_bytes'] / 1e6:.1f} MB more at the peak"
        )
    few, many = rows
    each = (many["grown_bytes"] - few["grown_bytes"]) / (many["images"] - few["images"]) / 1e3
    print(f"{each:.1f} kB for each image more")
    write_result("detect_memory", {"load_before": load, "rows": rows, "kb_an_image": each})
    return 0


if __name__ == "__main__":
    sys.exit(main())
