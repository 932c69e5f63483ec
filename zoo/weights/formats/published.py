"""Training checkpoints of DINO, Barlow Twins, VICReg and SimSiam.

Their published backbone files are bare ResNets. Source of the layouts: ``main_dino.py``,
``main.py`` of Barlow Twins, ``main_vicreg.py``, ``main_simsiam.py`` and ``simsiam/builder.py``.
"""

from __future__ import annotations

import re

from .common import Format
from .layout import Layout
from .tables import split_branch

__all__ = ["DINO", "BarlowTwins", "SimSiam", "VICReg"]


class DINO(Format):
    """``student`` and ``teacher``, each a ``backbone`` and a ``head``; the teacher is what counts."""

    name = "dino"
    what = "DINO pretraining checkpoint (the teacher)"
    method = "dino"

    def detect(self, layout: Layout) -> bool:
        """Two entries of these names."""
        return bool(layout.backbones) and {"student", "teacher"} <= layout.keys


class BarlowTwins(Format):
    """``model``: ``backbone``, ``projector`` and ``bn``, the norm of the embeddings."""

    name = "barlow_twins"
    what = "Barlow Twins pretraining checkpoint"
    method = "barlow_twins"

    def detect(self, layout: Layout) -> bool:
        """A projector and a norm without weights."""
        return (
            bool(layout.backbones)
            and layout.heads == {"projector", "bn"}
            and "weight" not in layout.names("bn")
        )


class VICReg(Format):
    """``model``: ``backbone`` and ``projector`` and nothing else."""

    name = "vicreg"
    what = "VICReg pretraining checkpoint"
    method = "vicreg"

    def detect(self, layout: Layout) -> bool:
        """A projector of three layers, the last without bias."""
        tails = set(layout.names("projector"))
        matches = (re.fullmatch(r"(\d+)\.weight", tail) for tail in tails)
        layers = sorted(int(match[1]) for match in matches if match)
        return (
            bool(layout.backbones)
            and layout.heads == {"projector"}
            and "model" in layout.keys
            and bool(layers)
            and f"{layers[-1]}.bias" not in tails
        )


class SimSiam(Format):
    """``encoder`` with a three-layer MLP in ``fc``, and a ``predictor``."""

    name = "simsiam"
    what = "SimSiam pretraining checkpoint"
    method = "simsiam"

    def detect(self, layout: Layout) -> bool:
        """No second encoder, and both heads."""
        copies = any(split_branch(part)[0] for part in layout.components)
        return (
            bool(layout.backbones)
            and not copies
            and layout.heads == {"fc", "predictor"}
            and "0.weight" in layout.names("fc")
        )
