"""What all layouts share: what is written, and what a layout says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...models.factory import is_resnet
from ...tensors import standalone
from ..bundle import Description
from ..formats.base import ForeignModel
from ..formats.resnets import Plan, fit

__all__ = ["NOT_STANDARD_STEM", "NO_RESNET", "Source", "Writer"]

NO_RESNET = "it takes ResNets only"
NOT_STANDARD_STEM = "its ResNets have the ImageNet stem only: 7x7, stride 2, and max pooling"


@dataclass(frozen=True)
class Source:
    """A model on its way into a layout.

    Args:
        title: what to call it in texts for people.
        model: its tensors.
        what: its description.
        trunk: the network around these tensors, in evaluation mode.
    """

    title: str
    model: ForeignModel
    what: Description
    trunk: Any

    @cached_property
    def plan(self) -> Plan | None:
        """The ResNet that the trunk is, if it is one."""
        return fit(self.model.trunk).plan if is_resnet(self.what.arch) else None

    @property
    def channels(self) -> int:
        """Of the images."""
        return len(self.what.preprocessing["mean"])

    def network_tensors(self) -> dict[str, torch.Tensor]:
        """The trunk and, if there is one, the classifier as ``fc``, ready to be saved."""
        classifier = {f"fc.{name}": tensor for name, tensor in self.model.classifier.items()}
        return {name: standalone(tensor) for name, tensor in {**self.model.trunk, **classifier}.items()}


class Writer:
    """A layout.

    Subclasses say ``name`` (a key of ``WRITERS``), and either ``files``, the names in the folder that they
    write, or ``suffix``, if it is a single file. ``needs_suffix``: its readers go by it, and a file
    that isn't named gets the model's name with it. ``keeps_heads`` and ``keeps_classifier`` tell what beside the
    trunk has a place in it; ``keeps_preprocessing`` whether its readers find mean and std there. ``has_legacy``:
    ``legacy`` can be set, and asks for the container that torch wrote before version 1.6. ``has_yaml``: its readers
    take settings from a YAML, which it can write beside the file.
    """

    name = ""
    files: tuple[str, ...] = ()
    suffix = ""
    needs_suffix = False
    keeps_heads = False
    keeps_classifier = False
    keeps_preprocessing = False
    has_legacy = False
    legacy = False
    has_yaml = False

    def ready(self) -> None:
        """Check that what the layout needs is installed.

        Raises:
            InputError: it isn't.
        """

    def keeps_head(self, head: str) -> bool:
        """Whether a head has a place in it, by the first part of its tensors' names."""
        return self.keeps_heads

    def refusal(self, source: Source) -> str | None:
        """Why the layout has no place for this network; None if it has."""
        return None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """Write the model.

        Args:
            place: the file to write, or an empty folder to fill.
            source: what.

        Returns:
            What its reader should know, a sentence each.

        Raises:
            OSError: what the disk said.
            RunError: what was made is not the same network.
        """
        raise NotImplementedError

    def write_yaml(self, place: Path, source: Source, target: Path) -> None:
        """Write the settings that go with a file.

        Args:
            place: the file to write.
            source: what was written.
            target: where the weights will be.
        """
        raise NotImplementedError

    def usage(self, target: Path, yaml: Path | None) -> tuple[str, ...]:
        """Lines of Python that load what was written, if its readers need more than its name."""
        return ()
