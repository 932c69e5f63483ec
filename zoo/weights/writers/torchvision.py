"""A state dict by torchvision's names, as ``torch.save`` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch

from .base import NO_RESNET, Source, Writer

__all__ = ["Torchvision"]


class Torchvision(Writer):
    """A plain dict of tensors, with ``fc.weight`` and ``fc.bias`` if the model has a classifier."""

    name = "torchvision"
    suffix = ".pth"
    keeps_classifier = True

    def refusal(self, source: Source) -> str | None:
        """torchvision has names for the parts of a ResNet."""
        return NO_RESNET if source.plan is None else None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """The file; the same tensors give the same bytes."""
        # By a name torch would put that name into the file, and the one for now is a temporary one.
        with open(place, "wb") as file:
            _save(source.network_tensors(), file)
        what, plan = source.what, source.plan
        assert plan is not None
        own = [f"a stem of {plan.base} channels"] if plan.base != 64 else []
        own += [f"the stem {what.stem!r}"] if what.stem != "imagenet" else []
        own += [f"images of {plan.channels} channels"] if plan.channels != 3 else []
        notes = []
        if own:
            notes.append(
                f"the network has {' and '.join(own)}, which torchvision's functions don't build: use "
                "zoo.models.resnet.resnet, whose result is of torchvision's class"
            )
        if what.stem == "medium":
            notes.append("the stem 'small' has the same tensors: nothing in the file tells the two apart")
        if not source.model.classifier:
            notes.append(
                "there is no classifier: load_state_dict(state, strict=False) misses fc and nothing else"
            )
        return tuple(notes)


def _save(tensors: dict[str, torch.Tensor], file: BinaryIO) -> None:
    try:
        torch.save(tensors, file)
    except RuntimeError as error:
        # What the disk said, torch hides behind a complaint about the file's length.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
