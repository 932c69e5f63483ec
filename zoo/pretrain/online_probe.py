"""The online probe: how good the features are while they are trained, by labelled images.

The trunk runs in eval mode, without gradients, and nothing is drawn from the run's generators: it is the same
bit for bit without the probe. The classifiers start anew each time, so nothing of them is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..data.class_index import relabel
from ..data.open import open_parts, open_source
from ..data.source import ImageSource
from ..engine.loop import Loop, StepRecord
from ..engine.trackers import Guarded
from ..errors import InputError
from ..probe.features import source_features
from ..probe.knn import knn_accuracy
from ..probe.linear import linear_accuracy
from .config import ProbeConfig, Recipe

__all__ = ["OnlineProbe", "ProbeImages", "open_probe", "probe_of"]

PREFIX = "probe/"
log = logging.getLogger("zoo")


@dataclass(frozen=True)
class ProbeImages:
    """Labelled images: the classifiers learn from ``train`` and are judged by ``val``.

    ``numbers``: of each of val's classes, its number among train's.
    """

    train: ImageSource
    val: ImageSource
    numbers: list[int]


def open_probe(recipe: Recipe) -> ProbeImages | None:
    """The images that ``probe.data`` names, none if it doesn't.

    Raises:
        InputError: no such images, no labels, a class in val that train doesn't have, or the same images twice.
    """
    names = recipe.probe.data
    if not names:
        return None
    how = recipe.data.decoding()
    if len(names) == 1:
        train, val = open_parts(names[0], how, where=f"probe.data: {names[0]}")
    else:
        train, val = (open_source(name, how=how) for name in names)
    for part in (train, val):
        if not part.classes:
            raise InputError(
                "The probe's images carry no labels.",
                where=f"probe.data: {part.name}",
                fix="put each class into a folder of its own",
            )
    if train.fingerprint() == val.fingerprint():
        raise InputError(
            "The probe's training and test images are the same.", where=f"probe.data: {', '.join(names)}"
        )
    return ProbeImages(train, val, relabel(val.classes, train.classes, val.name))


class OnlineProbe(Guarded):
    """kNN and linear accuracy of the trunk's features, 0..1, at the end of epochs and of the run.

    They are figures of the step that they come after: ``probe/knn``, ``probe/linear``. For the first process;
    the others wait. If an image can't be read, the probe warns and stays off.

    Args:
        config: the recipe's ``probe`` section.
        images: what is judged by.
        how: the test transform, see ``source_features``.
        seed: of the linear classifier.
    """

    def __init__(self, config: ProbeConfig, images: ProbeImages, how: Mapping[str, Any], seed: int) -> None:
        super().__init__("The online probe")
        self._config = config
        self._images = images
        self._how = how
        self._seed = seed

    def figures(self, record: StepRecord, loop: Loop) -> Mapping[str, float]:
        done = record.step + 1
        epochs, rest = divmod(done, loop.steps_per_epoch)
        found: dict[str, float] = {}
        if done == loop.total_steps or (rest == 0 and epochs % self._config.every_epochs == 0):
            self.guard("judging the features", self._judge, loop, found)
        return found

    def _judge(self, loop: Loop, found: dict[str, float]) -> None:
        learner: Any = loop.learner
        bank, queries = self._images.train, self._images.val
        known = _labelled(*source_features(learner.trunk, bank, self._how))
        asked, labels = _labelled(*source_features(learner.trunk, queries, self._how))
        parts = (asked, torch.tensor(self._images.numbers)[labels], *known)
        if self._config.knn:
            found[PREFIX + "knn"] = knn_accuracy(*parts)
        if self._config.linear:
            found[PREFIX + "linear"] = linear_accuracy(*parts, seed=self._seed)
        accuracies = [f"{name.removeprefix(PREFIX)} {100 * value:.1f} %" for name, value in found.items()]
        log.info("probe: %s", ", ".join(accuracies))


def _labelled(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features[labels >= 0], labels[labels >= 0]


def probe_of(recipe: Recipe) -> OnlineProbe | None:
    """The probe that a recipe asks for.

    Raises:
        InputError: see ``open_probe``.
    """
    images, test = open_probe(recipe), recipe.evaluation
    if images is None:
        return None
    views = recipe.views
    how = {"mean": views.mean, "std": views.std, "resize": test.resize, "crop": test.crop}
    how["interpolation"] = test.interpolation
    return OnlineProbe(recipe.probe, images, how, recipe.seed)
