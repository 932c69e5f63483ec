"""The region head of the papers' VOC detection, known to detectron2 by its name as soon as this is imported.

A YAML that names it (``ROI_HEADS.NAME: Res5ROIHeadsExtraNorm``) can be built in any process that did
``import transfer.detect.detectron2_engine.heads``. Source: MoCo ``detection/train_net.py``.
"""

from __future__ import annotations

from typing import Any

from .presence import need_detectron2

need_detectron2()

from detectron2.layers import get_norm  # noqa: E402
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads  # noqa: E402


class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """detectron2's C4 head with a norm after its last stage: ``res5.norm``."""

    def __init__(self, cfg: Any, input_shape: Any) -> None:
        super().__init__(cfg, input_shape)
        self.res5.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, self.res5[-1].out_channels))


if Res5ROIHeadsExtraNorm.__name__ not in ROI_HEADS_REGISTRY:  # a script of the papers' may have its own
    ROI_HEADS_REGISTRY.register(Res5ROIHeadsExtraNorm)
