"""DETR's training views in keyed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zoo.keyed import keyed_seed

from ..annotations import BoxSet
from ..batches import Stream, to_tensor
from .protocol import DetrProtocol
from .views import Crops, draw_detr_view, make_view

__all__ = ["DetrStream", "detr_stream"]


@dataclass(frozen=True)
class DetrStream(Stream):
    """The stream of ``Stream`` with DETR's views; ``crops`` are made half of the time, if there are any."""

    crops: Crops | None = None

    def _view(self, epoch: int, sample: int) -> tuple[Any, ...]:
        picture = self.images.pictures[sample]
        view = draw_detr_view(self.seed, epoch, sample, self.sizes, self.crops)
        pixels, boxes, rows = make_view(
            self.images.read(sample), picture.objects.boxes, view, self.most, self.crops
        )
        labels = torch.from_numpy(picture.objects.labels[rows])
        key = keyed_seed(self.seed, "detect samples", epoch, sample)
        return to_tensor(pixels), torch.from_numpy(boxes).float(), labels, None, sample, key


def detr_stream(images: BoxSet, seed: int, protocol: DetrProtocol) -> DetrStream:
    """The stream of a protocol."""
    crops = Crops(protocol.crop_shorts, *protocol.crop_sides) if protocol.crop_shorts else None
    return DetrStream(images, seed, protocol.sizes, protocol.most, crops=crops)
