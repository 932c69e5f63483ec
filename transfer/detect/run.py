"""The detection recipe: torchvision's stock Faster R-CNN with FPN on a trunk of the zoo."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import FrozenBatchNorm2d

from zoo.engine.precision import choose_device
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation, keyed_seed, keyed_uniforms
from zoo.loading import load
from zoo.models.factory import is_resnet
from zoo.tensors import seeded
from zoo.weights.bundle import weights_digest

from .config import DetectConfig
from .data import VocBoxes, VocImages, open_voc
from .evaluate import Detections, mean_average_precision
from .photos import photos_voc

__all__ = ["build_detector", "run"]

log = logging.getLogger("zoo")


def run(
    reference: str, dataset: str, data: str | None, config: DetectConfig, device: str = "auto"
) -> dict[str, Any]:
    """Train on the training set, score on the test set (or, on request, on the training set)."""
    train, test = _open(dataset, data, config)
    model, info, digest = _load_frozen(reference)
    detector = build_detector(model, len(train.classes), info["preprocessing"], config)
    detector.to(choose_device(device))
    loss = _train(detector, train, config)
    scored = train if config.test_on_train else test
    found = [_detect(detector, scored, index) for index in range(len(scored))]
    truth = [scored.boxes(index) for index in range(len(scored))]
    metrics = mean_average_precision(truth, found, len(train.classes))
    return {
        "metrics": {**metrics, "train_loss": loss if math.isfinite(loss) else None},
        "average_precision": "area under the precision-recall curve",
        "scored_on": scored.split,
        "model": {**info, "weights_sha256": digest},
        "data": {"classes": len(train.classes), "train": train.fingerprint(), "test": test.fingerprint()},
        "diverged": not math.isfinite(loss),
    }


def _open(dataset: str, data: str | None, config: DetectConfig) -> tuple[VocImages, VocImages]:
    if data is None and dataset in ("builtin:photos-voc", "builtin:photos"):
        folder = photos_voc()
    else:
        folder = Path(data or dataset).expanduser()
        if not folder.is_dir():
            raise InputError(
                "There is no such data set or folder.",
                where=data or dataset,
                fix="pass a folder in VOC's layout, or builtin:photos-voc",
            )
    return open_voc(folder, config.train_split, config.test_split, config.limit, config.allow_overlap)


def _load_frozen(reference: str) -> tuple[Any, dict[str, Any], str]:
    plain = load(reference, progress=False)
    if not is_resnet(plain.zoo_info["arch"]):
        raise InputError(
            f"A detector stands on the stages of a ResNet; this is {plain.zoo_info['arch']}.",
            where=reference,
            fix="judge it by knn, linear or semisup",
        )
    digest = plain.zoo_info.get("weights_sha256") or weights_digest(plain.state_dict())
    # A detector's batches are too small for batch statistics: scale and shift stay as pretrained.
    frozen = load(reference, norm_layer=FrozenBatchNorm2d, progress=log.isEnabledFor(logging.INFO))
    return frozen, frozen.zoo_info, digest


def build_detector(trunk: Any, classes: int, how: dict[str, Any], config: DetectConfig) -> FasterRCNN:
    """Faster R-CNN over a feature pyramid of layer1..layer4; the background is class 0."""
    layers = OrderedDict((f"layer{i}", str(i - 1)) for i in range(1, 5))
    widths = [trunk.num_features // 2**i for i in (3, 2, 1, 0)]
    with seeded(keyed_seed(config.seed, "detector")):
        backbone = BackboneWithFPN(trunk, dict(layers), widths, 256)
        return FasterRCNN(
            backbone,
            num_classes=classes + 1,
            min_size=config.min_size,
            max_size=config.max_size,
            image_mean=list(how["mean"]),
            image_std=list(how["std"]),
        )


def _train(detector: nn.Module, train: VocImages, config: DetectConfig) -> float:
    """SGD over shuffled epochs, random flips; returns the mean loss of the last tenth of the steps."""
    parameters = [p for p in detector.parameters() if p.requires_grad]
    device = parameters[0].device
    optimizer = torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    detector.train()
    losses: list[float] = []
    order: list[int] = []
    epoch = 0
    with seeded(keyed_seed(config.seed, "detect")):  # torchvision samples proposals from the CPU's generator
        for step in range(config.steps):
            while len(order) < config.batch_size:
                order += keyed_permutation(keyed_key(config.seed, "detect order", epoch), len(train)).tolist()
                epoch += 1
            rows, order = order[: config.batch_size], order[config.batch_size :]
            flips = keyed_uniforms(keyed_key(config.seed, "detect flip", step), len(rows)) < 0.5
            pairs = [_sample(train, row, bool(flip)) for row, flip in zip(rows, flips, strict=True)]
            images = [image.to(device) for image, _ in pairs]
            targets = [{key: value.to(device) for key, value in target.items()} for _, target in pairs]
            for group in optimizer.param_groups:
                group["lr"] = config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
            loss = sum(detector(images, targets).values())
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                return losses[-1]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    tail = losses[-max(1, config.steps // 10) :]
    return sum(tail) / len(tail)


def _sample(train: VocImages, index: int, flip: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    pixels = train.image(index)
    objects: VocBoxes = train.boxes(index)
    # VOC counts pixels from 1 and includes the last one; torchvision's boxes are edges from 0.
    boxes = objects.boxes - np.array([1.0, 1.0, 0.0, 0.0])
    if flip:
        pixels = pixels[:, ::-1]
        boxes[:, [0, 2]] = pixels.shape[1] - boxes[:, [2, 0]]
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float() / 255.0
    target = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(objects.labels + 1)}
    return image, target


@torch.no_grad()
def _detect(detector: nn.Module, images: VocImages, index: int) -> Detections:
    detector.eval()
    image = torch.from_numpy(images.image(index)).permute(2, 0, 1).float() / 255.0
    found = detector([image.to(next(detector.parameters()).device)])[0]
    found = {key: value.cpu() for key, value in found.items()}
    boxes = found["boxes"].double().numpy() + np.array([1.0, 1.0, 0.0, 0.0])
    return Detections(boxes, found["scores"].double().numpy(), found["labels"].numpy() - 1)
