"""A training step of DETR's small schedule with a ResNet-18, 240 x 320 pixels: as a run makes it, and plainly.

    python benchmarks/detr_step.py [--batch 4] [--pairs 7] [--threads N]

Ours is a step of ``zoo transfer detect --head detr --schedule small``: loop, detector, clipping and AdamW, from uint8
images, in the precision that a run takes by itself here. Plain is the published formulation written by us: float32 in
torch's default memory format, frozen norms as maps times and plus numbers, torch's own attention modules, a loss for
each layer of the decoder, torch's AdamW; from images that are normalised already. Each side lives in a process of its
own and steps when it is told to, in turn with the other. Both begin with the same weights, images and objects; each
draws its own dropout, so the first losses are only nearly the same.

Peak memory: see ``sides.py``. Linux only.
"""

from __future__ import annotations

import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from detr_loss import Objects, layer_by_layer
from sides import Step, arguments, compare, conclude, serve
from torch import nn
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from transfer.detect.annotations import BoxSet
from transfer.detect.batches import DetectionBatch
from transfer.detect.detr.detector import DetrDetector
from transfer.detect.detr.protocol import choose_detr
from transfer.detect.detr.stream import detr_stream
from transfer.detect.detr.transformer import sine_embedding
from transfer.detect.run import detector_for
from transfer.detect.training import Normalisation, Plan, make_loop
from zoo.engine.collectives import WorldOfOne
from zoo.engine.precision import choose_precision
from zoo.heap import keep_freed_memory
from zoo.models.factory import create_trunk
from zoo.tensors import seeded

HEIGHT, WIDTH, CLASSES, OBJECTS = 240, 320, 80, 7
WARMUP = 3
TARGETS = (1.5, 1.0)  # times as fast as the plain step, and the share of its memory, at most
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
PROTOCOL = choose_detr("own", "small")


def make_batch(batch: int) -> DetectionBatch:
    generator = torch.Generator().manual_seed(0)
    pictures = [
        torch.randint(256, (3, HEIGHT, WIDTH), generator=generator, dtype=torch.uint8) for _ in range(batch)
    ]
    boxes = []
    for _ in range(batch):
        corner, side = (torch.rand(OBJECTS, 2, generator=generator) for _ in range(2))
        edges = torch.cat((0.5 * corner, 0.5 * corner + 0.1 + 0.4 * side), 1)
        boxes.append(edges * torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT]))
    labels = [torch.randint(CLASSES, (OBJECTS,), generator=generator) for _ in range(batch)]
    return DetectionBatch(pictures, boxes, labels, [None] * batch, torch.arange(batch), [0] * batch)


def make_detector() -> DetrDetector:
    with seeded(0):
        found = detector_for(create_trunk("resnet18"), PROTOCOL, CLASSES, seed=0)
    assert isinstance(found, DetrDetector)
    return found


def our_step(batch: int, about: dict[str, Any], folder: Path) -> Step:
    """A function that trains on one batch as a run does and gives the loss; nothing is written."""
    keep_freed_memory()  # as a run on a CPU does
    precision = choose_precision("auto", torch.device("cpu"))
    about["precision"] = precision.name
    detector = make_detector().to(memory_format=precision.memory_format)
    plan = Plan(PROTOCOL, 1, folder, Normalisation(MEAN, STD))
    stream = detr_stream(BoxSet("table", "random", (), []), 0, PROTOCOL)
    loop = make_loop(detector, stream, plan, precision, WorldOfOne())
    loop.learner.train()
    made = make_batch(batch)
    return lambda: loop._one_step(made, epoch=0)[0]


class PlainLayer(nn.Module):
    """A layer of the encoder, or of the decoder, with torch's attention."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        width, hidden = PROTOCOL.width, PROTOCOL.hidden
        self.self_attn = nn.MultiheadAttention(width, PROTOCOL.heads, PROTOCOL.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if decoder:
            self.multihead_attn = nn.MultiheadAttention(width, PROTOCOL.heads, PROTOCOL.dropout)
            self.norm3 = nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(PROTOCOL.dropout)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear2(self.dropout(self.linear1(x).relu())))

    def encode(self, x: torch.Tensor, place: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q = x + place
        x = self.norm1(x + self.dropout(self.self_attn(q, q, x, key_padding_mask=padding)[0]))
        return self.norm2(x + self.mlp(x))

    def decode(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        place: torch.Tensor,
        query: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor:
        q = x + query
        x = self.norm1(x + self.dropout(self.self_attn(q, q, x)[0]))
        seen = self.multihead_attn(x + query, memory + place, memory, key_padding_mask=padding)[0]
        x = self.norm2(x + self.dropout(seen))
        return self.norm3(x + self.mlp(x))


class PlainStack(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainLayer(decoder) for _ in range(PROTOCOL.layers)])
        if decoder:
            self.norm = nn.LayerNorm(PROTOCOL.width)


class PlainDetr(nn.Module):
    """DETR in the simplest words; names are ours, so that it takes our weights."""

    def __init__(self) -> None:
        super().__init__()
        width = PROTOCOL.width
        self.trunk = resnet18(norm_layer=FrozenBatchNorm2d)
        self.trunk.fc = nn.Identity()
        for name, parameter in self.trunk.named_parameters():
            parameter.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
        self.transformer = nn.ModuleDict({"encoder": PlainStack(False), "decoder": PlainStack(True)})
        self.class_embed = nn.Linear(width, CLASSES + 1)
        self.bbox_embed = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.Linear(width, n) for n in (width, width, 4)])}
        )
        self.query_embed = nn.Embedding(PROTOCOL.queries, width)
        self.input_proj = nn.Conv2d(512, width, 1)

    def forward(self, pixels: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        trunk = self.trunk
        x = trunk.maxpool(trunk.relu(trunk.bn1(trunk.conv1(pixels))))
        x = self.input_proj(trunk.layer4(trunk.layer3(trunk.layer2(trunk.layer1(x)))))
        padding = torch.zeros(len(x), *x.shape[2:], dtype=torch.bool)
        place = sine_embedding(~padding, PROTOCOL.width).flatten(2).permute(2, 0, 1)
        padding = padding.flatten(1)
        memory = x.flatten(2).permute(2, 0, 1)
        for layer in self.transformer["encoder"].layers:
            memory = layer.encode(memory, place, padding)
        query = self.query_embed.weight[:, None].repeat(1, len(x), 1)
        y = torch.zeros_like(query)
        logits, boxes = [], []
        for layer in self.transformer["decoder"].layers:
            y = layer.decode(y, memory, place, query, padding)
            said = self.transformer["decoder"].norm(y).transpose(0, 1)
            logits.append(self.class_embed(said))
            first, second, third = self.bbox_embed["layers"]
            boxes.append(third(F.relu(second(F.relu(first(said))))).sigmoid())
        return logits, boxes


def plain_step(batch: int) -> Step:
    network = PlainDetr()
    network.load_state_dict(make_detector().state_dict())
    learning = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in learning if "trunk" not in name]},
            {"params": [p for name, p in learning if "trunk" in name], "lr": PROTOCOL.backbone_lr},
        ],
        lr=PROTOCOL.lr,
        weight_decay=PROTOCOL.weight_decay,
    )
    made = make_batch(batch)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    pixels = torch.stack([(picture - mean) / std for picture in made.pictures])
    objects: Objects = []
    for labels, boxes in zip(made.labels, made.boxes, strict=True):
        shares = boxes / torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
        objects.append(
            (labels, torch.cat(((shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]), 1))
        )
    network.train()

    def step() -> float:
        logits, boxes = network(pixels)
        layers = [layer_by_layer(*said, objects) for said in zip(logits, boxes, strict=True)]
        loss = torch.stack(layers).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in learning], PROTOCOL.clip)
        optimizer.step()
        return loss.item()

    return step


def _build(side: str, batch: int, folder: Path, about: dict[str, Any]) -> Step:
    torch.manual_seed(0)
    return plain_step(batch) if side == "plain" else our_step(batch, about, folder)


def main() -> int:
    options = arguments(__doc__, PROTOCOL.batch, pairs=7)
    if options.serve:
        with tempfile.TemporaryDirectory() as folder:
            serve(partial(_build, options.serve, options.batch, Path(folder)), WARMUP)
        return 0
    alike = partial(math.isclose, rel_tol=0.1)
    found, _ = compare(__file__, options.batch, options.threads, options.pairs, alike)
    settings = {"protocol": PROTOCOL.name, "batch": options.batch, "threads": options.threads}
    return conclude("detr_step", found, settings, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
