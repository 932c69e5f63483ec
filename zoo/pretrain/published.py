"""What is known of published runs, to hold a plan against. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Recipe
from .resolve import differences, is_packaged, resolve

__all__ = ["PAPERS", "PaperRun", "is_published", "published_images"]


@dataclass(frozen=True)
class PaperRun:
    """A run as a paper tells of it.

    Args:
        devices: V100s.
        epochs: that took ``hours``.
        hours: see there.
        memory: GB of each device; None where nothing is said.
        source: where it stands.
        calibrates: whether the speed that is assumed of a V100 comes from it.
    """

    devices: int
    epochs: int
    hours: float
    memory: float | None
    source: str
    calibrates: bool = False


_TABLE_4 = "SwAV's table 4: V100 of 16 GB, mixed precision"
_MINUTES_52 = PaperRun(4, 1, 52 / 60, None, "SwAV's released code: V100")

PAPERS = {
    **dict.fromkeys(
        (f"swav_rn50_{epochs}ep" for epochs in (100, 200, 400, 800)),
        PaperRun(64, 100, 6.25, 12.8, _TABLE_4, calibrates=True),
    ),
    "swav_rn50_400ep_2x224": PaperRun(64, 100, 4 + 9 / 60, 8.6, _TABLE_4),
    "swav_rn50_400ep_2x160_4x96": PaperRun(64, 100, 4 + 50 / 60, 8.5, _TABLE_4),
    "simclr_rn50_400ep_2x224": PaperRun(64, 100, 4.0, 8.6, _TABLE_4),
    "swav_rn50_bs256": _MINUTES_52,
    "swav_rn50_bs256_400ep": _MINUTES_52,
    "swav_rn50_bs256_2x160_4x96": PaperRun(4, 200, 102.0, None, "SwAV's section 4.3: V100"),
    "moco_v2_rn50_200ep": PaperRun(8, 200, 53.0, None, "MoCo v2's table 3: V100, float32", calibrates=True),
}
"""By packaged recipe."""

# What they were trained on, by what their names end in: name, images, classes; nothing: on whatever one has.
_TRAINED_ON: dict[str, tuple[str, int, int] | None] = {
    "_64px": None,
    "_1b": ("a billion images", 1_000_000_000, 0),
    "_places205": ("Places205", 2_448_873, 205),
    "": ("ImageNet", 1_281_167, 1000),
}
# What may differ without making it another training.
_HARMLESS = (
    *("epochs", "samples", "seed", "device", "precision", "engine.compile"),
    *("data.", "checkpoint.", "evaluation.", "health.", "probe."),
)


def is_published(recipe: Recipe) -> bool:
    """Whether it is a packaged recipe in all that decides how it is trained, but for the length."""
    if not is_packaged(recipe.name):
        return False
    changed = differences(resolve(recipe.name).recipe, recipe)
    return all(key.startswith(_HARMLESS) for key in changed)


def published_images(name: str) -> tuple[str, int, int] | None:
    """What a packaged recipe's images are called, how many there are, and their classes; None: nobody says."""
    return next(found for ending, found in _TRAINED_ON.items() if name.endswith(ending))
