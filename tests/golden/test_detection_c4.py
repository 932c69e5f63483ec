"""Faster R-CNN C4 against detectron2: losses, gradients, one update, proposals and detections.

In float32, by the tolerances, two of the four cases (both kinds of norm, with the extra one and without);
ZOO_EXACT=1 takes all of them, in float64 and with six digits: about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transfer.detect.models.anchors import cell_anchors
from transfer.detect.models.boxes import match
from transfer.detect.models.detectors import C4Detector, DetectorSettings, build_detector
from transfer.detect.models.images import Images, Target, pad_images
from transfer.detect.models.roi import RoiSettings, pool, sample_regions
from transfer.detect.models.rpn import RpnSettings
from transfer.detect.optimizer import parameter_groups
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

NAMES = {
    "trunk.": "",
    "rpn.": "proposal_generator.rpn_head.",
    "predictor.": "roi_heads.box_predictor.",
    "norm.": "roi_heads.res5.norm.",
}
TIGHT: dict[str, float] = {"rtol": 1e-6, "atol": 1e-9} if EXACT else {}
BOXES: dict[str, float] = {"rtol": 0.0, "atol": 1e-4} if EXACT else {}


@pytest.fixture(scope="module")
def detectors() -> dict[Any, Any]:
    """Detectors with the extra norm and without, filled, and the values that they are filled with."""
    return {"kept": {}}


@pytest.fixture(params=detection_ids("c4", ("c4_extranorm_bneval", "c4_plain_bntrain")))
def opened(
    request: pytest.FixtureRequest, shared: Path, detectors: dict[Any, Any]
) -> Iterator[tuple[DetectionCase, C4Detector]]:
    case = load_detection(shared, request.param)
    extra = case.args["extra_norm"]
    if extra not in detectors:
        detectors[extra] = filled(case, detectors["kept"])
    model, state = detectors[extra]
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    model.train()
    if case.args["batchnorm"] == "eval":
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    yield case, model


def filled(case: DetectionCase, kept: dict[Any, Any]) -> tuple[C4Detector, dict[str, torch.Tensor]]:
    config = case.args["config"]
    settings = DetectorSettings(
        "c4",
        case.args["num_classes"],
        RpnSettings(
            tuple(config["RPN.PRE_NMS_TOPK (train,test)"]),
            tuple(config["RPN.POST_NMS_TOPK (train,test)"]),
            config["RPN.BATCH_SIZE_PER_IMAGE"],
            config["POSITIVE_FRACTION (both)"],
        ),
        RoiSettings(config["ROI_HEADS.BATCH_SIZE_PER_IMAGE"], config["POSITIVE_FRACTION (both)"]),
        extra_norm=case.args["extra_norm"],
    )
    with torch.device("meta"):
        model = build_detector(create_trunk("resnet50"), settings)
    assert isinstance(model, C4Detector)
    return model, fill_named(model, NAMES, case.args["gains"], kept)


def batch_of(case: DetectionCase) -> tuple[Images, list[Target]]:
    pictures = [picture(one["name"], one["height"], one["width"]) for one in case.args["images"]]
    mean, std = (torch.tensor(case.args["config"][key]).to(DTYPE) for key in ("pixel_mean", "pixel_std"))
    targets = [
        Target(torch.tensor(boxes), torch.tensor(labels))
        for boxes, labels in zip(case.args["gt_boxes_xyxy"], case.args["gt_classes_0based"], strict=True)
    ]
    return pad_images(pictures, mean, std), targets


def raw(flat: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """What the convolution gave: (N, positions x A[, 4]) -> (N, A [x 4], H, W)."""
    shaped = flat.unflatten(1, (maps.shape[2], maps.shape[3], -1)).flatten(3)
    return shaped.permute(0, 3, 1, 2)


def test_training_is_the_references(opened: tuple[DetectionCase, C4Detector]) -> None:
    case, model = opened
    images, targets = batch_of(case)
    seen: dict[str, torch.Tensor] = {}
    handle = model.norm.register_forward_hook(lambda *args: seen.update(res5=args[2]))
    losses = model.losses(images, targets)
    handle.remove()
    for name, value in losses.items():
        case.check(f"train/{name}", value, **TIGHT)
    total = sum(losses.values())
    case.check("train/total", total, **TIGHT)
    total.backward()
    norms_train = case.args["batchnorm"] == "train"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        key = f"grad/{their_name(name, NAMES)}"
        if key in case.outputs:
            check_gradient(case, key, p.grad.double(), norms_train)
    check_the_update(case, model, before, norms_train)
    res5 = seen["res5"]
    case.check("train/res5_shape", torch.tensor(res5.shape))
    case.check("train/res5_mean_std", torch.stack((res5.mean(), res5.std(correction=0))), **TIGHT)
    for key in (key for key in case.outputs if key.startswith("after/")):
        state = {their_name(name, NAMES): value for name, value in model.state_dict().items()}
        if key == "after/num_batches_tracked":
            counts = {int(v) for name, v in state.items() if name.endswith("num_batches_tracked")}
            assert counts == set(case.outputs[key].tolist())
        else:
            case.check(key, state[key.removeprefix("after/")][:16])


def check_gradient(case: DetectionCase, key: str, gradient: torch.Tensor, norms_train: bool) -> None:
    digest = torch.cat((torch.stack((gradient.norm(), gradient.sum())), gradient.flatten()[:3]))
    allowed, length = case.tolerance_of(key), float(gradient.norm())
    if norms_train:
        # Rounding is amplified: single entries differ by percents, the length is what is tight.
        case.check(key, digest, rtol=0.0, atol=0.05 * length + allowed["atol"])
    elif EXACT:
        case.check(key, digest, rtol=1e-4, atol=1e-6 * length)
    else:
        case.check(key, digest, rtol=allowed["rtol"], atol=allowed["atol"])
    norm = allowed["first_entry_L2_norm_rtol"]
    case.compare(key, digest[:1], case.outputs[key][:1], rtol=norm, atol=0.0)


def check_the_update(
    case: DetectionCase, model: C4Detector, before: dict[str, torch.Tensor], norms_train: bool
) -> None:
    groups = parameter_groups(model, 1e-4)
    assert len(groups) == int(case.outputs["n_param_groups"])
    torch.optim.SGD(groups, lr=0.02, momentum=0.9).step()
    for name, p in model.named_parameters():
        key = f"step/{their_name(name, NAMES)}"
        if key in case.outputs:
            change = p.detach().double() - before[name].double()
            first = (torch.stack((change.norm(), change.sum())), change.flatten()[:3])
            digest = torch.cat((*first, p.detach().double().flatten()[:3]))
            length = float(change.norm())
            scale: dict[str, float] = {}
            if norms_train:
                scale = {"rtol": 1e-4, "atol": 0.05 * length + case.tolerance_of(key)["atol"]}
            elif EXACT:
                scale = {"rtol": 1e-4, "atol": 1e-6 * length}
            case.check(key, digest, **scale)


def test_the_parts_in_training_are_the_references(opened: tuple[DetectionCase, C4Detector]) -> None:
    case, model = opened
    images, targets = batch_of(case)
    with torch.no_grad():
        maps = model.maps(images.pixels)
        logits, deltas = model.rpn.scores(maps)
        anchors = model.rpn.anchors(maps)
        proposals = model.rpn.propose(anchors, logits, deltas, images.sizes)
        regions = sample_regions(proposals, targets, model.settings.classes, model.settings.roi)
    case.check("train/res4_summary", summary(maps[0]), **TIGHT)
    case.check("train/res4_shape", torch.tensor(maps[0].shape))
    case.check("train/res4_corner", maps[0][:, :4, :3, :3], **TIGHT)
    case.check("train/objectness_summary", summary(raw(logits[0], maps[0])), **TIGHT)
    case.check("train/deltas_summary", summary(raw(deltas[0], maps[0])), **TIGHT)
    counts = []
    for target in targets:
        _, labels = match(target.boxes, anchors[0], 0.3, 0.7, keep_best=True)
        counts.append([int((labels == value).sum()) for value in (1, 0, -1)])
    case.check("train/rpn_label_counts_pos_neg_ignored", torch.tensor(counts))
    case.check("train/n_proposals", torch.tensor([len(p.boxes) for p in proposals]))
    objects = [int((r.labels < model.settings.classes).sum()) for r in regions]
    case.check(
        "train/roi_fg_bg_counts",
        torch.tensor([[n, len(r.labels) - n] for n, r in zip(objects, regions, strict=True)]),
    )
    for row, proposed in enumerate(proposals):
        case.check(f"train/proposals{row}", proposed.boxes[:20], **BOXES)
        case.check(f"train/proposal_logits{row}", proposed.logits[:20], **TIGHT)


def test_inference_is_the_references(opened: tuple[DetectionCase, C4Detector]) -> None:
    case, model = opened
    if "infer/objectness" not in case.outputs:
        pytest.skip("the case has no inference")
    model.eval()
    images, targets = batch_of(case)
    case.check("pre/summary", summary(images.pixels), **TIGHT)
    case.check("pre/shape", torch.tensor(images.pixels.shape))
    case.check("pre/image_sizes", torch.tensor(images.sizes))
    case.check("pre/corner_first", images.pixels[:, :, :2, :3], **TIGHT)
    case.check("pre/corner_last", images.pixels[:, :, -2:, -3:], **TIGHT)
    with torch.no_grad():
        maps = model.maps(images.pixels)
        case.check("infer/res4_summary", summary(maps[0]), **TIGHT)
        logits, deltas = model.rpn.scores(maps)
        anchors = model.rpn.anchors(maps)
        case.check("anchors/cell", cell_anchors((32, 64, 128, 256, 512)))
        case.check("anchors/first30", anchors[0][:30].double())
        case.check("anchors/last30", anchors[0][-30:].double())
        case.check("infer/objectness", raw(logits[0], maps[0]).float())
        case.check("infer/deltas_summary", summary(raw(deltas[0], maps[0])), **TIGHT)
        case.check("infer/deltas_corner", raw(deltas[0], maps[0])[:, :8, :2, :3], **TIGHT)
        for row, proposed in enumerate(model.rpn.propose(anchors, logits, deltas, images.sizes)):
            case.check(f"infer/proposals{row}", proposed.boxes, **BOXES)
            case.check(f"infer/proposal_logits{row}", proposed.logits, **TIGHT)
        boxes = [target.boxes for target in targets]
        pooled = pool(maps[0], boxes, 14, 16)
        case.check("infer/gt_pooled_summary", summary(pooled), **TIGHT)
        case.check("infer/gt_pooled_corner", pooled[:, :3, :4, :4], **TIGHT)
        case.check("infer/gt_res5_summary", summary(model.norm(model.trunk.layer4(pooled))), **TIGHT)
        features = model.region_features(maps, boxes)
        case.check("infer/gt_box_features", features[:, :64], **TIGHT)
        scores, moves = model.predictor(features)
        case.check("infer/gt_cls_score", scores, **TIGHT)
        case.check("infer/gt_bbox_pred", moves, **TIGHT)
        wanted = [(h, w) for h, w in case.entry["output_sizes_hw"]]
        found = model.detect(images, wanted)
    for row, one in enumerate(found):
        check_found(case, row, one)
