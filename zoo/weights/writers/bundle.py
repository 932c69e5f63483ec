"""The zoo's own published form; it takes every network, heads and classifiers."""

from __future__ import annotations

from pathlib import Path

from ..bundle import CLASSIFIER, HEADS, SUMS, WEIGHTS, write_bundle
from ..card import model_card
from .base import Source, Writer

__all__ = ["BundleFolder"]


class BundleFolder(Writer):
    """``model.safetensors``, ``heads.safetensors``, ``zoo.json`` ...: see ``zoo.weights.bundle``."""

    name = "bundle"
    files = (WEIGHTS, HEADS, CLASSIFIER, "config.json", "zoo.json", "README.md", SUMS)
    keeps_heads = True
    keeps_classifier = True
    keeps_preprocessing = True

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """All files of a bundle."""
        model, card = source.model, model_card(source.title, source.what)
        bundle = write_bundle(place, source.what, model.trunk, model.heads, card, model.classifier)
        return (f"the weights are {bundle.weights_sha256} (SHA-256)",)
