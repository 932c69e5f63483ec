"""DETR's matching and set loss, forward and backward, against the plain formulation.

    python benchmarks/detr_loss.py [--threads N] [--pairs 7]

16 images, 100 queries, 6 layers, 80 classes, 1 to 14 objects an image. Plain goes image by image, layer by layer:
a softmax, a table of costs, an assignment by scipy, the terms of the image's boxes. Also shown, as the published code
goes: layer by layer, with a table of all queries against all objects of the batch, of which each image's columns are
used, and the terms of all images at once. All get the same float32 logits and boxes and give the same loss and
gradients (checked first).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from runner import Case, measure
from scipy.optimize import linear_sum_assignment
from torchvision.ops import box_convert, generalized_box_iou

from transfer.detect.detr.loss import NO_OBJECT, WEIGHTS, set_loss
from transfer.detect.detr.matching import wanted_of
from zoo.engine.precision import processors
from zoo.heap import keep_freed_memory

LAYERS, IMAGES, QUERIES, CLASSES = 6, 16, 100, 80
TARGET = 2.0
TIMES = 5  # passes in a timed call

Objects = list[tuple[torch.Tensor, torch.Tensor]]
Loss = Callable[[torch.Tensor, torch.Tensor, Objects], torch.Tensor]


def our_loss(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> torch.Tensor:
    """As the detector computes it."""
    wanted = wanted_of([labels for labels, _ in objects], [meant for _, meant in objects])
    found = set_loss(logits, boxes, wanted, max(1.0, sum(wanted.counts)))
    return torch.stack([WEIGHTS[name] * values for name, values in found.terms.items()]).sum()


def _edges(boxes: torch.Tensor) -> torch.Tensor:
    return box_convert(boxes, "cxcywh", "xyxy")


def costs_of(
    logits: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor, meant: torch.Tensor
) -> torch.Tensor:
    """(queries, objects): section 3.1 of the paper."""
    chance = logits.softmax(-1)[:, labels]
    return 5 * torch.cdist(boxes, meant, p=1) - chance - 2 * generalized_box_iou(_edges(boxes), _edges(meant))


@torch.no_grad()
def match_images(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> list[torch.Tensor]:
    """The pairs of each image of a layer, (2, n)."""
    tables = [costs_of(logits[row], boxes[row], *one).cpu() for row, one in enumerate(objects)]
    return [torch.from_numpy(np.stack(linear_sum_assignment(table))) for table in tables]


@torch.no_grad()
def match_layer(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> list[torch.Tensor]:
    """The same from one table of the whole layer, which has every image's objects for every image."""
    labels, meant = (torch.cat(parts) for parts in zip(*objects, strict=True))
    table = costs_of(logits.flatten(0, 1), boxes.flatten(0, 1), labels, meant)
    parts = table.view(*boxes.shape[:2], -1).cpu().split([len(labels) for labels, _ in objects], 2)
    return [torch.from_numpy(np.stack(linear_sum_assignment(part[row]))) for row, part in enumerate(parts)]


def box_terms(found: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    """5 times the distances and 2 times the lacking overlaps of pairs of boxes."""
    distance = F.l1_loss(found, meant, reduction="sum")
    return 5 * distance + 2 * (1 - generalized_box_iou(_edges(found), _edges(meant)).diag()).sum()


def class_term(logits: torch.Tensor, objects: Objects, pairs: list[torch.Tensor]) -> torch.Tensor:
    answers = torch.full(logits.shape[:2], CLASSES)
    for row, ((labels, _), (query, target)) in enumerate(zip(objects, pairs, strict=True)):
        answers[row, query] = labels[target]
    weights = torch.ones(CLASSES + 1)
    weights[-1] = NO_OBJECT
    return F.cross_entropy(logits.transpose(1, 2), answers, weights)


def image_by_image(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> torch.Tensor:
    """A layer's loss."""
    pairs = match_images(logits, boxes, objects)
    rows = enumerate(zip(objects, pairs, strict=True))
    terms = [box_terms(boxes[row, query], meant[target]) for row, ((_, meant), (query, target)) in rows]
    return class_term(logits, objects, pairs) + torch.stack(terms).sum() / _count(objects)


def layer_by_layer(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> torch.Tensor:
    """A layer's loss, the pairs of all images side by side."""
    pairs = match_layer(logits, boxes, objects)
    found = torch.cat([boxes[row, query] for row, (query, _) in enumerate(pairs)])
    meant = torch.cat([its[target] for (_, its), (_, target) in zip(objects, pairs, strict=True)])
    return class_term(logits, objects, pairs) + box_terms(found, meant) / _count(objects)


def _count(objects: Objects) -> int:
    return max(1, sum(len(labels) for labels, _ in objects))


def of_layers(layer_loss: Loss) -> Loss:
    """The sum over the decoder's layers."""

    def compute(logits: torch.Tensor, boxes: torch.Tensor, objects: Objects) -> torch.Tensor:
        layers = [layer_loss(one, its, objects) for one, its in zip(logits, boxes, strict=True)]
        return torch.stack(layers).sum()

    return compute


def make_outputs() -> tuple[torch.Tensor, torch.Tensor, Objects]:
    """What a decoder might say of images with objects somewhere."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    counts = torch.randint(1, 15, (IMAGES,), generator=generator).tolist()
    objects = [(torch.randint(CLASSES, (n,), generator=generator), 0.1 + 0.5 * draw(n, 4)) for n in counts]
    logits = 6 * draw(LAYERS, IMAGES, QUERIES, CLASSES + 1) - 3
    boxes = 0.1 + 0.5 * draw(LAYERS, IMAGES, QUERIES, 4)
    return logits.requires_grad_(), boxes.requires_grad_(), objects


def forward_backward(
    loss: Loss, logits: torch.Tensor, boxes: torch.Tensor, objects: Objects, times: int = 1
) -> float:
    """The loss; the gradients are with the inputs."""
    for _ in range(times):
        logits.grad = boxes.grad = None
        value = loss(logits, boxes, objects)
        value.backward()
    return value.item()


def _check(other: Loss) -> None:
    logits, boxes, objects = make_outputs()
    ours = forward_backward(our_loss, logits, boxes, objects)
    gradients = logits.grad, boxes.grad
    theirs = forward_backward(other, logits, boxes, objects)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients, (logits.grad, boxes.grad), rtol=1e-3, atol=1e-6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=processors(), help="of torch")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs a case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a training process does
    peers = {
        "image by image": (of_layers(image_by_image), TARGET),
        "layer by layer": (of_layers(layer_by_layer), None),
    }
    logits, boxes, objects = make_outputs()
    cases = []
    for name, (other, target) in peers.items():
        _check(other)
        cases.append(
            Case(
                f"matching + loss, {IMAGES}x{QUERIES}x{LAYERS}, ours / {name}",
                ours=lambda: forward_backward(our_loss, logits, boxes, objects, TIMES),
                peer=lambda other=other: forward_backward(other, logits, boxes, objects, TIMES),
                target=target,
                pairs=options.pairs,
                amount=TIMES * IMAGES,
                unit="img/s",
            )
        )
    return 0 if measure("detr_loss", cases, {"threads": options.threads}) else 1


if __name__ == "__main__":
    sys.exit(main())
