"""Faster R-CNN C4 around a ResNet-50, small schedule: a training step and inference, ours and written plainly.

    python benchmarks/detect_step.py [--pairs 5] [--threads N] [--what train|detect]

Training: 2 images of 240 x 320 with 3 objects each, 64 regions of each. Ours is the step that ``zoo transfer detect``
makes: loop, learner and optimizer, from uint8 images, in the precision that a run takes by itself here. Plain is the
same network in float32 and torch's default memory format: torchvision's RoIAlign, the whole fourth stage on each
region, SGD, from images that are normalised already. Both draw the same samples from the same weights, so their first
losses are those of the same step.

Inference: 20 images, one after the other, to boxes in the image's pixels. Ours is what scores a test set and what
``zoo predict`` does. Plain is the network in evaluation mode, as it is.

Each side lives in a process of its own and does its work when it is told to, in turn with the other. Peak memory: see
``sides.py``. Linux only.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runner import write_result
from sides import Step, compare, serve, show
from torchvision.ops import roi_align

from transfer.detect.annotations import BoxSet
from transfer.detect.batches import DetectionBatch, Stream
from transfer.detect.judge import detect_one, for_detection
from transfer.detect.models.detectors import C4Detector
from transfer.detect.optimizer import parameter_groups
from transfer.detect.protocols import Protocol, choose_protocol
from transfer.detect.run import detector_for
from transfer.detect.training import Normalisation, Plan, make_images, make_loop
from zoo.engine.collectives import WorldOfOne
from zoo.engine.precision import Precision, choose_precision, processors
from zoo.heap import keep_freed_memory
from zoo.keyed import keyed_seed
from zoo.models.factory import create_trunk
from zoo.tensors import seeded

CLASSES = 20
SIZE = (240, 320)
IMAGES = {"train": 2, "detect": 20}
WARMUP = {"train": 2, "detect": 1}
TARGETS = {"train": 1.5, "detect": 2.0}
COLOURS = Normalisation((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


class PlainC4(C4Detector):
    """The detector in the simplest words: each region is pooled, and goes through the whole stage."""

    def region_features(self, maps: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        pooled = roi_align(maps[0], list(boxes), 14, 1.0 / self.stride, 0, aligned=True)
        return self.norm(self.trunk.layer4(pooled)).mean(dim=(2, 3))  # type: ignore[no-any-return]


def make_batch(count: int) -> DetectionBatch:
    """Noise with three boxes in each image."""
    generator = torch.Generator().manual_seed(0)
    pictures = [
        torch.randint(0, 256, (3, *SIZE), dtype=torch.uint8, generator=generator) for _ in range(count)
    ]
    boxes, labels = [], []
    for _ in range(count):
        corner = torch.rand(3, 2, generator=generator) * torch.tensor([180.0, 120.0])
        side = 40 + torch.rand(3, 2, generator=generator) * 80
        boxes.append(torch.cat((corner, corner + side), dim=1))
        labels.append(torch.randint(0, CLASSES, (3,), generator=generator))
    keys = [keyed_seed(0, "detect samples", row) for row in range(count)]
    return DetectionBatch(pictures, boxes, labels, [None] * count, torch.arange(count), keys)


def make_detector(protocol: Protocol) -> C4Detector:
    """With class scores that differ, so that there is something to suppress."""
    with seeded(keyed_seed(0, "init")):
        trunk = create_trunk("resnet50")
        detector = detector_for(trunk, protocol, CLASSES, seed=0)
        torch.nn.init.normal_(detector.predictor.cls_score.weight, std=0.1)
    return detector  # type: ignore[return-value]


def our_training(detector: C4Detector, batch: DetectionBatch, protocol: Protocol, how: Precision) -> Step:
    plan = Plan(protocol, protocol.steps, Path("unused"), COLOURS)
    images = BoxSet("own", "made", (), [None] * batch.size)  # type: ignore[list-item]
    stream = Stream(images, 0, protocol.sizes, protocol.most)
    loop = make_loop(detector, stream, plan, how, WorldOfOne())
    loop.learner.train()

    def step() -> float:
        return loop._one_step(batch, epoch=0)[0]

    return step


def plain_training(detector: C4Detector, batch: DetectionBatch, protocol: Protocol) -> Step:
    groups = parameter_groups(detector, protocol.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=protocol.lr * protocol.warmup_factor, momentum=protocol.momentum)
    images = make_images(detector, batch.pictures, COLOURS, Precision("float32", torch.device("cpu")))
    pixels = images.pixels.contiguous()
    detector.train()

    def step() -> float:
        losses = detector.losses(type(images)(pixels, images.sizes), batch.targets(torch.device("cpu")))
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total.item()

    return step


def our_detection(detector: C4Detector, batch: DetectionBatch, how: Precision) -> Step:
    network = for_detection(detector, how)

    def step() -> float:
        found = [detect_one(network, view, SIZE, COLOURS, how) for view in batch.pictures]
        return sum(float(one.scores.sum()) for one in found)

    return step


def plain_detection(detector: C4Detector, batch: DetectionBatch) -> Step:
    how = Precision("float32", torch.device("cpu"))
    detector.eval()

    @torch.inference_mode()
    def step() -> float:
        total = 0.0
        for view in batch.pictures:
            images = make_images(detector, [view], COLOURS, how)
            found = detector.detect(type(images)(images.pixels.contiguous(), images.sizes), [SIZE])[0]
            total += float(found.scores.sum())
        return total

    return step


def _build(side: str, what: str, about: dict[str, Any]) -> Step:
    protocol = choose_protocol("own", "own", "", "c4", "small", masks=False)
    detector, batch = make_detector(protocol), make_batch(IMAGES[what])
    if side == "plain":
        detector.__class__ = PlainC4
        return (
            plain_training(detector, batch, protocol) if what == "train" else plain_detection(detector, batch)
        )
    keep_freed_memory()  # as a run on a CPU does
    how = choose_precision("auto", torch.device("cpu"))
    about["precision"] = how.name
    detector.to(memory_format=how.memory_format)
    if what == "train":
        return our_training(detector, batch, protocol, how)
    return our_detection(detector, batch, how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs")
    parser.add_argument("--threads", type=int, default=processors(), help="of torch")
    parser.add_argument("--what", choices=tuple(IMAGES), help="only this one (default: both)")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve(partial(_build, options.serve, options.what), WARMUP[options.what])
        return 0
    good, figures = True, {}
    for what in (options.what,) if options.what else IMAGES:
        print(f"{what}:")
        alike = partial(math.isclose, rel_tol=0.05)
        found, _ = compare(
            __file__, IMAGES[what], options.threads, options.pairs, alike, more=("--what", what)
        )
        # On a processor that is no faster in bfloat16 a run computes in float32, and nothing was promised.
        good &= show(found, options.threads, TARGETS[what], None, found["precision"] == "bfloat16")
        figures[what] = {**found, "targets": {"speedup": TARGETS[what]}}
    settings = {"size": SIZE, "images": IMAGES, "threads": options.threads}
    write_result("detect_step", {**settings, "figures": figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
