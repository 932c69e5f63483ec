"""DETR around a ResNet of torchvision's names: queries in, boxes out, no suppression.

Parameters bear the reference's names, the trunk's ``trunk.`` instead of ``backbone.0.body.``. Classes are
numbered without gaps: the reference has outputs for all numbers up to COCO's last, also for the 11 without a class.
Source: Carion et al. 2020; DETR ``models/detr.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.engine.collectives import Collectives
from zoo.models.resnet import stage_features
from zoo.pretrain.losses.sinkhorn import promote

from ..models.images import Found, Images, Target, mean_counts
from .frozen import freeze_trunk
from .loss import WEIGHTS, set_loss
from .matching import wanted_of
from .protocol import DetrShape
from .transformer import Transformer, TransformerSettings, sine_embedding
from .views import detr_size, in_shares

__all__ = ["DetrDetector", "DetrSettings", "detr_groups", "post_process", "valid_places"]


@dataclass(frozen=True)
class DetrSettings(DetrShape):
    """What a detector is made of; ``classes`` without the one that says that there is nothing."""

    classes: int


class _Perceptron(nn.Module):
    """Three layers from a query to a box."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, n) for n in (width, width, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


class DetrDetector(nn.Module):
    """The detector; its new layers are drawn from torch's global generator, as the reference draws them.

    Args:
        trunk: a ResNet; its norms are frozen, and only its last three stages learn.
        settings: what it is made of.
    """

    divisor = 1
    """Height and width of a batch are multiples of it."""
    view_size = staticmethod(detr_size)
    """The size of a test image's view."""
    class_layers = ("class_embed.",)
    """Where the parameters lie whose shapes follow from the number of classes."""

    def __init__(self, trunk: Any, settings: DetrSettings) -> None:
        super().__init__()
        freeze_trunk(trunk)
        self.settings = settings
        self.trunk = trunk
        width = settings.width
        self.transformer = Transformer(
            TransformerSettings(
                width, settings.heads, settings.hidden, settings.layers, settings.layers, settings.dropout
            )
        )
        self.class_embed = nn.Linear(width, settings.classes + 1)
        self.bbox_embed = _Perceptron(width)
        self.query_embed = nn.Embedding(settings.queries, width)
        self.input_proj = nn.Conv2d(trunk.num_features, width, kernel_size=1)
        self.figures: dict[str, float] = {}
        """What the last losses were computed of: how well boxes fit, how many queries say that there is nothing."""

    def outputs(self, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """What each layer of the decoder says: logits (L, N, Q, C + 1), boxes (L, N, Q, 4) in shares of the image."""
        features = self.input_proj(stage_features(self.trunk, images.pixels)["layer4"])
        height, width = images.pixels.shape[2:]
        keep = valid_places(images.sizes, (height, width), features.shape[2:]).to(features.device)
        place = sine_embedding(keep, self.settings.width).to(promote(features[:0]).dtype)
        padded = any(size != (height, width) for size in images.sizes)
        said, _ = self.transformer(features, place, self.query_embed.weight, keep if padded else None)
        with torch.autocast(said.device.type, enabled=False):  # a box in half precision is off by pixels
            said = promote(said)
            return self.class_embed(said), self.bbox_embed(said).sigmoid()

    def losses(
        self, images: Images, targets: Sequence[Target], world: Collectives | None = None
    ) -> dict[str, torch.Tensor]:
        """The weighted loss terms in training mode, whose sum is trained; those of all but the last layer in one.

        Args:
            images: a batch.
            targets: what is in each image.
            world: the processes whose batches make one: box terms are divided by the mean count of objects.
        """
        logits, boxes = self.outputs(images)
        wanted = wanted_of(
            [target.labels for target in targets],
            [
                in_shares(target.boxes, size).to(boxes.dtype)
                for target, size in zip(targets, images.sizes, strict=True)
            ],
        )
        (share,) = mean_counts([float(sum(wanted.counts))], world, boxes.device)
        found = set_loss(logits, boxes, wanted, max(1.0, share))
        figures = {
            "matched_iou": found.matched_iou,
            "no_object_share": found.no_object_share,
            "class_error": found.class_error,
            "cardinality_error": found.cardinality_error[-1],
        }
        self.figures = dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))
        weighted = {name: weight * found.terms[name] for name, weight in WEIGHTS.items()}
        last = {name: values[-1] for name, values in weighted.items()}
        return {**last, "loss_aux": torch.stack(list(weighted.values()))[:, :-1].sum()}

    def detect(self, images: Images, wanted: Sequence[tuple[int, int]] | None = None) -> list[Found]:
        """The detections in evaluation mode, one of each query, at the ``wanted`` (height, width) of each image."""
        logits, boxes = self.outputs(images)
        return post_process(logits[-1], boxes[-1], wanted or images.sizes)


def post_process(logits: torch.Tensor, boxes: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[Found]:
    """Each query's best class, also where it would rather say that there is nothing, and its box in pixels.

    Args:
        logits: (N, Q, C + 1).
        boxes: (N, Q, 4): center, width and height in shares of the image; they are not clipped.
        sizes: (height, width) of each image.
    """
    scores, labels = logits.softmax(2)[..., :-1].max(2)
    center, half = boxes[..., :2], 0.5 * boxes[..., 2:]
    edges = torch.cat((center - half, center + half), dim=2)
    found = []
    for row, (height, width) in enumerate(sizes):
        order = scores[row].argsort(descending=True, stable=True)
        pixels = edges[row, order] * edges.new_tensor([width, height, width, height])
        found.append(Found(pixels, scores[row, order], labels[row, order], order))
    return found


def valid_places(
    sizes: Sequence[tuple[int, int]], padded: tuple[int, int], places: Sequence[int]
) -> torch.Tensor:
    """Which places of a map show an image, bool (N, h, w): the nearest pixel of each place is asked.

    Args:
        sizes: (height, width) of the images.
        padded: (height, width) of the batch.
        places: (h, w) of the map.
    """
    sides = []
    for axis in (0, 1):
        inside = torch.arange(padded[axis]) < torch.tensor([size[axis] for size in sizes])[:, None]
        sides.append(F.interpolate(inside[:, None].float(), size=places[axis])[:, 0] > 0)
    return sides[0][:, :, None] & sides[1][:, None, :]


def detr_groups(detector: nn.Module, lr: float, backbone_lr: float) -> list[dict[str, Any]]:
    """Two groups of what learns: all but the trunk, and the trunk with its own rate (``Loop``'s ``lr_scale``)."""
    learning = [(name, p) for name, p in detector.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in learning if not name.startswith("trunk.")]},
        {"params": [p for name, p in learning if name.startswith("trunk.")], "lr_scale": backbone_lr / lr},
    ]
