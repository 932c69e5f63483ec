"""Faster R-CNN C4, Faster R-CNN FPN and Mask R-CNN FPN around a ResNet of torchvision's names.

Losses, gradients, proposals and detections are detectron2's. The trunk's last stage is the head of the C4
detector; its stride stays in the 3x3 convolution. Source: detectron2 ``modeling/meta_arch/rcnn.py``,
``modeling/roi_heads/roi_heads.py``; MoCo ``detection/train_net.py`` for the extra norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from zoo.engine.collectives import Collectives
from zoo.models.resnet import stage_features

from ..views import output_size
from .images import Found, Images, Target, mean_counts
from .masks import MaskHead, mask_loss, mask_targets, paste_masks
from .roi import (
    BoxPredictor,
    RoiSettings,
    Sampled,
    detect,
    pool,
    pool_levels,
    proposal_recall,
    rescale,
    sample_regions,
)
from .rpn import ProposalNetwork, RpnSettings

__all__ = ["C4Detector", "DetectorSettings", "FpnDetector", "build_detector"]

_SIZES = (32.0, 64.0, 128.0, 256.0, 512.0)
_HIDDEN = 1024


@dataclass(frozen=True)
class DetectorSettings:
    """What a detector is made of.

    Args:
        head: ``c4``, ``fpn`` or ``mask-fpn``.
        classes: without the background.
        rpn: of the proposal network.
        roi: of the regions.
        extra_norm: a BatchNorm after the last stage of a C4 detector.
        fpn_norm: BatchNorms in the pyramid.
    """

    head: str
    classes: int
    rpn: RpnSettings = field(default_factory=RpnSettings)
    roi: RoiSettings = field(default_factory=RoiSettings)
    extra_norm: bool = True
    fpn_norm: bool = False


def build_detector(trunk: Any, settings: DetectorSettings) -> C4Detector | FpnDetector:
    """A detector around a trunk (draws the new layers from torch's global generator)."""
    return (C4Detector if settings.head == "c4" else FpnDetector)(trunk, settings)


class _Detector(nn.Module):
    """What both kinds share: proposals, losses over all processes, detections."""

    divisor = 1
    """Height and width of a batch are multiples of it."""
    view_size = staticmethod(output_size)
    """The size of a test image's view."""
    class_layers = ("predictor.", "mask_head.predictor.")
    """Where the parameters lie whose shapes follow from the number of classes."""
    trunk: Any
    rpn: ProposalNetwork
    predictor: BoxPredictor
    settings: DetectorSettings

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}
        """What the last losses were computed of: which share of the objects some proposal covers."""

    def maps(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def region_features(self, maps: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def losses(
        self, images: Images, targets: Sequence[Target], world: Collectives | None = None
    ) -> dict[str, torch.Tensor]:
        """The loss terms in training mode, whose sum is trained.

        Args:
            images: a batch.
            targets: what is in each image.
            world: the processes whose batches make one: terms are divided by the regions of all.
        """
        maps = self.maps(images.pixels)
        proposals, losses = self.rpn(images, maps, targets)
        self.figures = {"proposal_recall": proposal_recall(proposals, targets)}
        regions = sample_regions(proposals, targets, self.settings.classes, self.settings.roi)
        boxes = [region.boxes for region in regions]
        scores, deltas = self.predictor(self.region_features(maps, boxes))
        objects = sum(int((region.labels < self.settings.classes).sum()) for region in regions)
        mean = mean_counts([float(len(scores)), float(objects)], world, scores.device)
        losses |= self.predictor.losses(scores, deltas, regions, targets, mean[0])
        losses |= self.more_losses(maps, regions, targets, mean[1])
        return losses

    def more_losses(
        self,
        maps: Sequence[torch.Tensor],
        regions: Sequence[Sampled],
        targets: Sequence[Target],
        share: float,
    ) -> dict[str, torch.Tensor]:
        return {}

    def detect(self, images: Images, wanted: Sequence[tuple[int, int]] | None = None) -> list[Found]:
        """The detections in evaluation mode, at the ``wanted`` (height, width) of each image."""
        maps = self.maps(images.pixels)
        proposals, _ = self.rpn(images, maps)
        boxes = [proposed.boxes for proposed in proposals]
        found = detect(
            self.predictor, self.region_features(maps, boxes), boxes, images.sizes, self.settings.roi
        )
        masks = self.region_masks(maps, found)
        final = []
        for one, its, size, target in zip(found, masks, images.sizes, wanted or images.sizes, strict=True):
            one.masks = its
            scaled = rescale(one, size, target)
            if scaled.masks is not None:
                scaled.masks = paste_masks(scaled.masks, scaled.boxes, target)
            final.append(scaled)
        return final

    def region_masks(
        self, maps: Sequence[torch.Tensor], found: Sequence[Found]
    ) -> Sequence[torch.Tensor | None]:
        return [None] * len(found)


class C4Detector(_Detector):
    """Faster R-CNN on the third stage; the fourth, with an extra norm, looks at each region.

    Args:
        trunk: a ResNet; its classifier is left out.
        settings: what it is made of.
    """

    def __init__(self, trunk: Any, settings: DetectorSettings) -> None:
        super().__init__()
        self.settings = settings
        self.trunk = trunk
        _, channels, self.stride = trunk.feature_info[-2]
        features = trunk.num_features
        self.rpn = ProposalNetwork(channels, [_SIZES], [self.stride], settings.rpn)
        self.norm: nn.Module = nn.BatchNorm2d(features) if settings.extra_norm else nn.Identity()
        self.predictor = BoxPredictor(features, settings.classes)

    def maps(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """The third stage's map: (N, C, H / 16, W / 16), rounded up."""
        trunk = self.trunk
        x = trunk.maxpool(trunk.relu(trunk.bn1(trunk.conv1(pixels))))
        return [trunk.layer3(trunk.layer2(trunk.layer1(x)))]

    def region_features(self, maps: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        """(regions, F): the fourth stage on 14 x 14 positions of each region, averaged."""
        first, *others = self.trunk.layer4
        if maps[0].device.type == "cpu" and isinstance(first, Bottleneck):
            x = self._first_block(first, maps[0], boxes)
        else:
            x = first(self._laid(pool(maps[0], boxes, 14, self.stride)))
        for block in others:
            x = block(x)
        if self.training:
            return self.norm(x).mean(dim=(2, 3))  # type: ignore[no-any-return]
        # A norm with fixed statistics and a mean may change places: one position each instead of 49.
        return self.norm(x.mean(dim=(2, 3), keepdim=True)).flatten(1)  # type: ignore[no-any-return]

    def _first_block(self, block: Any, features: torch.Tensor, boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stage's first block, a quarter of its work: pooling and a 1x1 convolution may change places.

        So its two see each position of the map once, and not of every region; the pooled sums are the same.
        """

        def of_regions(conv: nn.Conv2d, every: int) -> torch.Tensor:
            seen = F.conv2d(features, conv.weight)
            pooled = self._laid(pool(seen, boxes, 14, self.stride, every).to(seen.dtype))
            # A bias (a folded norm has one) must not be pooled: what lies beyond the map counts 0.
            return pooled if conv.bias is None else pooled + conv.bias.to(seen.dtype)[:, None, None]

        x = block.relu(block.bn1(of_regions(block.conv1, 1)))
        x = block.bn3(block.conv3(block.relu(block.bn2(block.conv2(x)))))
        shortcut, norm = block.downsample
        return block.relu(x + norm(of_regions(shortcut, shortcut.stride[0])))  # type: ignore[no-any-return]

    def _laid(self, pooled: torch.Tensor) -> torch.Tensor:
        """In memory as the network's filters are."""
        return pooled.contiguous(memory_format=_format_of(self.trunk))


class FpnDetector(_Detector):
    """Faster R-CNN or, with masks, Mask R-CNN on a feature pyramid of all four stages.

    Args:
        trunk: a ResNet; its classifier is left out.
        settings: what it is made of.
    """

    divisor = 32

    def __init__(self, trunk: Any, settings: DetectorSettings) -> None:
        super().__init__()
        self.settings = settings
        self.trunk = trunk
        stages = trunk.feature_info[1:]
        width = min(256, 4 * trunk.conv1.out_channels)  # 256 unless the trunk is a narrow one
        self.pyramid = FeaturePyramidNetwork(
            [channels for _, channels, _ in stages],
            width,
            LastLevelMaxPool(),
            nn.BatchNorm2d if settings.fpn_norm else None,
        )
        self.strides = [stride for _, _, stride in stages]
        strides = [*self.strides, 2 * self.strides[-1]]
        self.rpn = ProposalNetwork(width, [(size,) for size in _SIZES], strides, settings.rpn)
        self.fc1 = nn.Linear(width * 7 * 7, _HIDDEN)
        self.fc2 = nn.Linear(_HIDDEN, _HIDDEN)
        for layer in (self.fc1, self.fc2):
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
        self.predictor = BoxPredictor(_HIDDEN, settings.classes)
        self.mask_head = MaskHead(width, settings.classes) if settings.head == "mask-fpn" else None

    def maps(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """p2 to p6: (N, width, H / 4, W / 4) and so on, each half as large as the one before."""
        stages = stage_features(self.trunk, pixels)
        return list(self.pyramid({name: stages[name] for name, _, _ in self.trunk.feature_info[1:]}).values())

    def region_features(self, maps: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        pooled = pool_levels(maps[:4], boxes, 7, self.strides)
        return F.relu(self.fc2(F.relu(self.fc1(pooled.flatten(1)))))

    def more_losses(
        self,
        maps: Sequence[torch.Tensor],
        regions: Sequence[Sampled],
        targets: Sequence[Target],
        share: float,
    ) -> dict[str, torch.Tensor]:
        if self.mask_head is None:
            return {}
        boxes, labels, wanted = [], [], []
        for region, target in zip(regions, targets, strict=True):
            objects = torch.nonzero(region.labels < self.settings.classes).flatten()
            boxes.append(region.boxes[objects])
            labels.append(region.labels[objects])
            of_image = list(target.masks or [])
            wanted += [of_image[index] for index in region.objects[objects].tolist()]
        logits = self.mask_head(pool_levels(maps[:4], boxes, 14, self.strides))
        masks = mask_targets(wanted, torch.cat(boxes), logits.shape[-1])
        return {"loss_mask": mask_loss(logits, torch.cat(labels), masks, share)}

    def region_masks(
        self, maps: Sequence[torch.Tensor], found: Sequence[Found]
    ) -> Sequence[torch.Tensor | None]:
        if self.mask_head is None:
            return [None] * len(found)
        logits = self.mask_head(pool_levels(maps[:4], [one.boxes for one in found], 14, self.strides))
        labels = torch.cat([one.labels for one in found])
        mine = logits[torch.arange(len(labels), device=labels.device), labels].sigmoid()
        return list(mine.split([len(one.labels) for one in found]))


def _format_of(module: nn.Module) -> torch.memory_format:
    """Channels-last where the network's filters lie so."""
    weight = next(p for p in module.parameters() if p.ndim == 4)
    lies = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    return torch.channels_last if lies else torch.contiguous_format
