"""Our images in detectron2's catalogue and in the form its models take.

The training views are those of our own engine (``Stream``): the same seed shows both engines the same pixels. The
catalogue is for whoever goes on in detectron2: its loaders and evaluators find the sets under the names that the
YAML gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...results import short_name
from ..annotations import BoxSet
from ..batches import DetectionBatch, Stream
from ..rle import polygons_to_bitmap
from .draws import KEY

__all__ = ["Loader", "inputs_of", "register"]


def register(images: BoxSet, dataset: str, part: str) -> str:
    """Put a set into detectron2's catalogue, anew if it is there.

    Args:
        images: whose sizes are known.
        dataset: what it is called here.
        part: ``train`` or ``test``.

    Returns:
        Its name there: ``zoo_``, the data set's and the part's.
    """
    from detectron2.data import DatasetCatalog, MetadataCatalog

    name = "_".join(("zoo", re.sub(r"\W+", "_", short_name(dataset)), part))
    if name in DatasetCatalog:
        DatasetCatalog.remove(name)
    if name in MetadataCatalog:
        MetadataCatalog.remove(name)
    DatasetCatalog.register(name, lambda: list(_records(images)))
    about = MetadataCatalog.get(name)
    about.set(thing_classes=list(images.classes))
    if images.numbers:
        about.set(
            thing_dataset_id_to_contiguous_id={number: row for row, number in enumerate(images.numbers)}
        )
    homes = {picture.path.parent.parent for picture in images.pictures}
    if images.kind == "voc" and len(homes) == 1:  # of two years its evaluator would read and score one
        (home,) = homes
        year = re.search(r"20(07|12)", home.name)
        about.set(
            dirname=str(home),
            split=images.name.split()[-1],
            year=int(year[0]) if year else 2012,
            evaluator_type="pascal_voc",
        )
    return name


def _records(images: BoxSet) -> Iterator[dict[str, Any]]:
    from detectron2.structures import BoxMode

    for picture in images.pictures:
        objects = picture.objects
        masks = objects.masks or [None] * len(objects)
        height, width = picture.size or (0, 0)
        yield {
            "file_name": str(picture.path),
            "image_id": picture.number if images.kind == "coco" else picture.name,
            "height": height,
            "width": width,
            "annotations": [
                {
                    "bbox": box,
                    "bbox_mode": BoxMode.XYXY_ABS,
                    "category_id": label,
                    "iscrowd": int(crowd),
                    **({} if mask is None else {"segmentation": mask}),
                }
                for box, label, crowd, mask in zip(
                    objects.boxes.tolist(),
                    objects.labels.tolist(),
                    objects.crowd.tolist(),
                    masks,
                    strict=True,
                )
            ],
        }


@dataclass(frozen=True)
class Loader:
    """This process's share of the training batches, as detectron2's models take them; each pass begins at ``first``.

    Args:
        stream: the views.
        first: the first step.
        last: the step after the last.
        batch: images of all processes.
        workers: data processes.
        rank: of this process.
        world_size: of how many.
    """

    stream: Stream
    first: int
    last: int
    batch: int
    workers: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        batches = self.stream.batches(
            self.first, self.last, self.batch, self.workers, self.rank, self.world_size
        )
        return map(inputs_of, batches)


def inputs_of(batch: DetectionBatch) -> list[dict[str, Any]]:
    """A batch as the list of dicts that detectron2's models take; images are RGB."""
    from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks

    found = []
    for pixels, boxes, labels, masks, key in zip(
        batch.pictures, batch.boxes, batch.labels, batch.masks, batch.keys, strict=True
    ):
        size = int(pixels.shape[1]), int(pixels.shape[2])
        instances = Instances(size, gt_boxes=Boxes(boxes), gt_classes=labels)
        if masks is not None and all(isinstance(mask, list) for mask in masks):
            instances.gt_masks = PolygonMasks([[np.asarray(p, np.float64) for p in mask] for mask in masks])
        elif masks is not None:
            instances.gt_masks = BitMasks(torch.stack([_bitmap(mask, *size) for mask in masks]))
        about = {"height": size[0], "width": size[1], KEY: key}
        found.append({"image": pixels, "instances": instances, **about})
    return found


def _bitmap(mask: Any, height: int, width: int) -> torch.Tensor:
    """A mask of a view, polygons or a bitmap, as bool (height, width)."""
    if isinstance(mask, list):
        return torch.from_numpy(polygons_to_bitmap(mask, height, width))
    return torch.from_numpy(np.asarray(mask, dtype=bool))
