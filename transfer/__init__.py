"""How good a backbone is: transfer recipes, each a folder with a torch-free config and its code."""

from __future__ import annotations

from zoo.registry import Entry, Registry

__all__ = ["RECIPES"]

RECIPES = Registry(
    "transfer recipe",
    __name__,
    Entry("knn", "knn.config:KnnConfig", "knn.run:run", "weighted nearest neighbours on frozen features"),
    Entry("linear", "linear.config:LinearConfig", "linear.run:run", "a linear classifier on frozen features"),
    Entry(
        "semisup", "semisup.config:SemisupConfig", "semisup.run:run", "fine-tuning on a tenth of the labels"
    ),
    Entry(
        "detect",
        "detect.config:DetectConfig",
        "detect.run:run",
        "Faster R-CNN with FPN on a VOC-layout folder",
    ),
)
