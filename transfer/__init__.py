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
        "semisup", "semisup.config:SemisupConfig", "semisup.run:run", "fine-tuning on a part of the labels"
    ),
    Entry(
        "finetune",
        "finetune.config:FinetuneConfig",
        "finetune.run:run",
        "fine-tuning the whole network on all labels",
    ),
    Entry("svm", "svm.config:SvmConfig", "svm.run:run", "a linear SVM for each class (VOC07)"),
    Entry(
        "lowshot",
        "lowshot.config:LowshotConfig",
        "lowshot.run:run",
        "linear SVMs on 1 to 96 images a class (VOC07)",
    ),
    Entry(
        "detect",
        "detect.config:DetectConfig",
        "detect.run:run",
        "Faster or Mask R-CNN or DETR on VOC, COCO or boxes of your own",
    ),
)
