"""A state dict by torchvision's names, as ``torch.save`` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .base import NO_RESNET, Source, Writer

__all__ = ["Torchvision", "save_file"]


class Torchvision(Writer):
    """A plain dict of tensors, with ``fc.weight`` and ``fc.bias`` if the model has a classifier."""

    name = "torchvision"
    suffix = ".pth"
    keeps_classifier = True
    has_legacy = True

    def refusal(self, source: Source) -> str | None:
        """torchvision has names for the parts of a ResNet."""
        return NO_RESNET if source.plan is None else None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """The file; in the newer container the same tensors give the same bytes."""
        save_file(source.network_tensors(), place, self.legacy)
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


def save_file(value: Any, place: Path, legacy: bool) -> None:
    """Write what torch.load reads, in today's container (a zip) or that of torch before 1.6.

    Raises:
        OSError: what the disk said.
    """
    # By a name torch would put that name into the file, and the one for now is a temporary one.
    with open(place, "wb") as file:
        try:
            torch.save(value, file, _use_new_zipfile_serialization=not legacy)
        except RuntimeError as error:
            # What the disk said, torch hides behind a complaint about the file's length.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
