"""What a detector said of the images that it was scored on, and where these lie: for whoever looks at them later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.data.decoding import MAX_PIXELS, Decoding
from zoo.errors import InputError
from zoo.files import read_json, write_json

from .annotations import BoxSet
from .coco_scores import read_results
from .config import DetectConfig
from .datasets import NAMES, read_sets
from .scores import Detections

__all__ = ["DETECTIONS", "read_scored", "write_scored"]

DETECTIONS = "detections.json"
_PLACE = "scored.json"


def write_scored(folder: Path, images: BoxSet, dataset: str, data: str | None, config: DetectConfig) -> None:
    """Write what the images were read from, beside ``DETECTIONS`` (their detections by the annotations' own ids)."""
    place: dict[str, Any] = {
        "dataset": dataset if dataset in NAMES else _absolute(dataset),
        "data": data and _absolute(data),
    }
    numbers = [picture.number for picture in images.pictures]
    place |= {"settings": config.model_dump(mode="json"), "max_pixels": images.decoding.max_pixels}
    write_json(folder / _PLACE, {**place, "images": numbers})


def read_scored(folder: Path) -> tuple[BoxSet, list[Detections]]:
    """The images of a run's test, as their annotations are now, and its detections on them.

    Raises:
        InputError: the run left none, or the images and their annotations are not where they were.
    """
    try:
        place = read_json(folder / _PLACE)
        config = DetectConfig.model_validate(place["settings"])
        dataset, data, numbers = place["dataset"], place["data"], place["images"]
        how = Decoding(max_pixels=place.get("max_pixels", MAX_PIXELS))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"It isn't known what was scored ({type(error).__name__}).", where=folder) from None
    sets = read_sets(dataset, data, config, how)
    every = sets.train if config.test_on_train else sets.test
    row_of = {picture.number: row for row, picture in enumerate(every.pictures)}
    if gone := [number for number in numbers if number not in row_of]:
        raise InputError(
            f"{len(gone)} of the {len(numbers)} images are not there any more.", where=data or dataset
        )
    images = every.chosen([row_of[number] for number in numbers])
    return images, read_results(folder / DETECTIONS, images)


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
