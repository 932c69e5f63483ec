"""Mask R-CNN with a feature pyramid against detectron2; ZOO_EXACT=1 as in ``test_detection_c4.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from transfer.detect.models.detectors import DetectorSettings, FpnDetector, build_detector
from transfer.detect.models.images import Images, Target, pad_images
from transfer.detect.models.roi import RoiSettings, pool_levels, sample_regions
from transfer.detect.models.rpn import RpnSettings
from zoo.models.factory import create_trunk

from .detection_cases import (
    DTYPE,
    EXACT,
    DetectionCase,
    check_found,
    detection_ids,
    fill_named,
    load_detection,
    picture,
    summary,
    their_name,
)

TIGHT: dict[str, float] = {"rtol": 1e-6, "atol": 1e-9} if EXACT else {}
BOXES: dict[str, float] = {"rtol": 0.0, "atol": 1e-4} if EXACT else {}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def names_of(with_norm: bool) -> dict[str, str]:
    names = {"trunk.": "", "rpn.": "proposal_generator.rpn_head."}
    for level in range(4):
        for ours, theirs in (("inner", "lateral"), ("layer", "output")):
            block, name = f"pyramid.{ours}_blocks.{level}.", f"backbone.fpn_{theirs}{level + 2}."
            names |= {f"{block}0.": name} | ({f"{block}1.": f"{name}norm."} if with_norm else {})
    for layer in (1, 2):
        names[f"fc{layer}."] = f"roi_heads.box_head.fc{layer}."
    for layer in range(4):
        names[f"mask_head.convolutions.{layer}."] = f"roi_heads.mask_head.mask_fcn{layer + 1}."
    return names | {"predictor.": "roi_heads.box_predictor.", "mask_head.": "roi_heads.mask_head."}


@pytest.fixture(scope="module")
def kept() -> dict[Any, Any]:
    """The values that the detectors are filled with."""
    return {}


def opened(case: DetectionCase, kept: dict[Any, Any]) -> tuple[FpnDetector, dict[str, str]]:
    config, norm = case.args["config"], case.args["fpn_norm"] == "BN"
    settings = DetectorSettings(
        "mask-fpn",
        case.args["num_classes"],
        RpnSettings(tuple(config["pre"]), tuple(config["post"]), config["rpn_bs"], 1.0),
        RoiSettings(config["roi_bs"], 1.0),
        fpn_norm=norm,
    )
    with torch.device("meta"):
        model = build_detector(create_trunk("resnet50"), settings)
    assert isinstance(model, FpnDetector)
    names = names_of(norm)
    fill_named(model, names, case.args["gains"], kept)
    model.train()
    if case.args["batchnorm"] == "eval":
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    return model, names


def batch_of(case: DetectionCase) -> tuple[Images, list[Target]]:
    pictures = [picture(one["name"], one["height"], one["width"]) for one in case.args["images"]]
    mean, std = (torch.tensor(values).to(DTYPE) for values in (MEAN, STD))
    args = case.args
    targets = [
        Target(torch.tensor(boxes), torch.tensor(labels), polygons)
        for boxes, labels, polygons in zip(
            args["gt_boxes_xyxy"], args["gt_classes_0based"], args["gt_polygons"], strict=True
        )
    ]
    return pad_images(pictures, mean, std, FpnDetector.divisor), targets


@pytest.mark.parametrize(
    "name", detection_ids("mask_rcnn_fpn", ("maskrcnn_fpn_fpnnorm_bneval", "maskrcnn_fpn_bntrain"))
)
def test_mask_rcnn_is_the_references(shared: Path, name: str, kept: dict[Any, Any]) -> None:
    case = load_detection(shared, name)
    model, names = opened(case, kept)
    images, targets = batch_of(case)
    if "pre/shape" in case.outputs:
        case.check("pre/shape", torch.tensor(images.pixels.shape))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    losses = model.losses(images, targets)
    for term, value in losses.items():
        case.check(f"train/{term}", value, **TIGHT)
    sum(losses.values()).backward()
    model.load_state_dict(state)
    for parameter, p in model.named_parameters():
        key = f"grad/{their_name(parameter, names)}"
        if key in case.outputs:
            gradient = p.grad.double()  # a sum over millions
            digest = torch.cat((torch.stack((gradient.norm(), gradient.sum())), gradient.flatten()[:3]))
            allowed = case.tolerance_of(key)
            exact = EXACT and case.args["batchnorm"] == "eval"
            norm = 1e-4 if exact else allowed["first_entry_L2_norm_rtol"]
            case.compare(key, digest[:1], case.outputs[key][:1], rtol=norm, atol=0.0)
            # Rounding is amplified where norms train: entries differ by percents, the length is what is tight.
            slack = 0.05 * float(gradient.norm()) if case.args["batchnorm"] == "train" else 0.0
            case.check(key, digest, rtol=allowed["rtol"], atol=slack + allowed["atol"])
    with torch.no_grad():
        check_parts_in_training(case, model, images, targets)
        if "infer/proposals0" in case.outputs:
            model.eval()
            check_inference(case, model, images, targets)


def check_parts_in_training(
    case: DetectionCase, model: FpnDetector, images: Images, targets: list[Target]
) -> None:
    maps = model.maps(images.pixels)
    for level, features in enumerate(maps, 2):
        case.check(f"train/p{level}_summary", summary(features), **TIGHT)
        case.check(f"train/p{level}_shape", torch.tensor(features.shape))
    proposals, _ = model.rpn(images, maps)
    regions = sample_regions(proposals, targets, model.settings.classes, model.settings.roi)
    case.check("train/n_proposals", torch.tensor([len(p.boxes) for p in proposals]))
    counts = [int((r.labels < model.settings.classes).sum()) for r in regions]
    case.check(
        "train/roi_fg_bg_counts",
        torch.tensor([[n, len(r.labels) - n] for n, r in zip(counts, regions, strict=True)]),
    )


def check_inference(case: DetectionCase, model: FpnDetector, images: Images, targets: list[Target]) -> None:
    maps = model.maps(images.pixels)
    proposals, _ = model.rpn(images, maps)
    for row, proposed in enumerate(proposals):
        case.check(f"infer/proposals{row}", proposed.boxes, **BOXES)
        case.check(f"infer/proposal_logits{row}", proposed.logits, **TIGHT)
    boxes = [target.boxes for target in targets]
    scores, deltas = model.predictor(model.region_features(maps, boxes))
    case.check("infer/gt_cls_score", scores, **TIGHT)
    case.check("infer/gt_bbox_pred", deltas, **TIGHT)
    masks = model.mask_head(pool_levels(maps[:4], boxes, 14, model.strides))
    assert list(masks.shape) == case.entry["mask_logits_shape"]
    case.check("infer/gt_mask_logits_summary", summary(masks), **TIGHT)
    case.check("infer/gt_mask_logits_class0_8x8", masks[:, 0, :8, :8], **TIGHT)
    wanted = [(h, w) for h, w in case.entry["output_sizes_hw"]]
    for row, one in enumerate(model.detect(images, wanted)):
        order = check_found(case, row, one)
        areas = one.masks.flatten(1).sum(dim=1)[order]
        case.compare(
            "mask areas", areas.double(), case.outputs[f"infer/det{row}_mask_area"].double(), rtol=0, atol=1
        )
