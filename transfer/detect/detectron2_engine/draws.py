"""Which anchors and regions detectron2 trains on, drawn as our own engine draws them: by each image's own key.

The rule is detectron2's; only the generator is another, so both engines sample the same and it doesn't matter how many
processes share a batch. Source: detectron2 ``modeling/sampling.py`` and who calls it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ..models.boxes import sample_labels

__all__ = ["KEY", "keyed_samples"]

KEY = "sample_key"
"""Where an image's seed is among the inputs of detectron2's model."""
_CALLERS = ("detectron2.modeling.proposal_generator.rpn", "detectron2.modeling.roi_heads.roi_heads")
_NAME = "subsample_labels"


class _Draws:
    """The generators of a batch's images; each caller asks image after image."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.asked = 0

    def begin(self, model: Any, inputs: tuple[Any, ...]) -> None:
        self.generators = [torch.Generator().manual_seed(one[KEY]) for one in inputs[0] if KEY in one]
        self.asked = 0

    def __call__(
        self, labels: torch.Tensor, num_samples: int, positive_fraction: float, bg_label: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of sampled objects and of sampled background; -1 is neither."""
        generator = self.generators[self.asked % len(self.generators)]
        self.asked += 1
        background = torch.nonzero(labels == bg_label).flatten()
        objects = torch.nonzero((labels != -1) & (labels != bg_label)).flatten()
        return sample_labels(objects, background, num_samples, positive_fraction, generator)


@contextlib.contextmanager
def keyed_samples(model: Any) -> Iterator[None]:
    """While active, the model's samples follow from its inputs' keys."""
    draws = _Draws()
    callers = [importlib.import_module(name) for name in _CALLERS]
    before = [getattr(caller, _NAME) for caller in callers]
    handle = model.register_forward_pre_hook(draws.begin)
    try:
        for caller in callers:
            setattr(caller, _NAME, draws)
        yield
    finally:
        handle.remove()
        for caller, theirs in zip(callers, before, strict=True):
            setattr(caller, _NAME, theirs)
