"""The operations of detection against detectron2's, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from transfer.detect.models.anchors import cell_anchors, grid_anchors
from transfer.detect.models.boxes import decode, encode, match, sample_labels
from transfer.detect.models.images import Found
from transfer.detect.models.masks import mask_targets, paste_masks
from transfer.detect.models.roi import RoiSettings, levels_of, pool, pool_levels, rescale, select_detections
from transfer.detect.models.rpn import select_proposals
from transfer.detect.optimizer import learning_rate
from transfer.detect.precise import precise_batchnorm
from transfer.detect.views import flip_boxes, output_size, resize
from transfer.voc import read_annotation

from .cases import fill_rule, hash_signed
from .detection_cases import OPERATIONS, detection_ids, load_detection, picture

IDS = detection_ids(OPERATIONS)
START = {"rtol": 1e-5, "atol": 1e-5}


def ids(beginning: str) -> list[str]:
    """The cases of one operation."""
    return [name for name in IDS if name.startswith(beginning)] or IDS[:1]


def test_every_case_has_a_test() -> None:
    here = Path(__file__).read_text("utf-8") + Path(__file__).with_name("test_detection_c4.py").read_text(
        "utf-8"
    )
    known = [name for name in IDS if not name.startswith(("ops_box_coder", "ops_rpn_proposals", "lr_"))]
    assert [name for name in known if name not in here and name != f"{OPERATIONS}*"] == []


@pytest.mark.parametrize("name", ids("ops_box_coder"))
def test_box_coder(shared: Path, name: str) -> None:
    case = load_detection(shared, name)
    weights = tuple(case.args["weights"])
    case.check("get_deltas", encode(case.inputs["src"], case.inputs["target"], weights))
    case.check("apply_deltas", decode(case.inputs["deltas"], case.inputs["src"], weights))


def test_matcher(shared: Path) -> None:
    case = load_detection(shared, "ops_matcher")
    truth, anchors = case.inputs["gt"], case.inputs["anchors"]
    for name, limits in (("rpn", (0.3, 0.7, True)), ("roi", (0.5, 0.5, False))):
        index, labels = match(truth, anchors, *limits)
        case.check(f"{name}_match", index)
        case.check(f"{name}_label", labels)
    index, labels = match(truth[:0], anchors, 0.3, 0.7, True)
    assert not index.any() and not labels.any()


def test_sampling_counts(shared: Path) -> None:
    case = load_detection(shared, "ops_sampling_counts")
    for positives, negatives, count, fraction, *wanted in next(iter(case.args.values())):
        every = torch.arange(positives + negatives)
        found = sample_labels(every[:positives], every[positives:], count, fraction, torch.Generator())
        assert [len(part) for part in found] == wanted
        assert len(set(torch.cat(found).tolist())) == sum(wanted)


@pytest.mark.parametrize("name", ["ops_anchors_c4", "ops_anchors_fpn"])
def test_anchors(shared: Path, name: str) -> None:
    case = load_detection(shared, name)
    for level, (sizes, stride) in enumerate(zip(case.args["sizes"], case.args["strides"], strict=True)):
        found = grid_anchors(cell_anchors(sizes), tuple(case.args["feature_shapes_hw"][level]), stride)
        case.check(f"level{level}_first6", found[:6])
        case.check(f"level{level}_last6", found[-6:])
        x = found.double()
        rows = torch.arange(1, len(x) + 1).double()[:, None]
        sums = [x.sum(), x.square().sum(), (rows * x).sum(), torch.tensor(float(len(x)))]
        case.check(f"level{level}_checksum", torch.stack([torch.as_tensor(s).double() for s in sums]))


def test_pooling(shared: Path) -> None:
    case = load_detection(shared, "ops_roialign_c4")
    boxes = [case.inputs["boxes0"], case.inputs["boxes1"]]
    case.check("pooled", pool(hash_signed("ops/feat", (2, 4, 7, 8), 2.0), boxes, 14, 16))
    case = load_detection(shared, "ops_roialign_fpn")
    boxes = [case.inputs["boxes0"], case.inputs["boxes1"]]
    shapes = {"p2": (56, 64), "p3": (28, 32), "p4": (14, 16), "p5": (7, 8)}
    maps = [hash_signed(f"ops/{level}", (2, 4, *shape), 2.0) for level, shape in shapes.items()]
    case.check("level_minus2", levels_of(torch.cat(boxes), 2, 5) - 2)
    case.check("pooled", pool_levels(maps, boxes, 7, (4, 8, 16, 32)))


@pytest.mark.parametrize("name", ids("ops_rpn_proposals"))
def test_proposals(shared: Path, name: str) -> None:
    case = load_detection(shared, name)
    sizes = [tuple(size) for size in case.args["image_sizes_hw"]]
    limits = case.args["pre_nms_topk"], case.args["post_nms_topk"], case.args["training"]
    boxes, logits = case.inputs["decoded_boxes"], case.inputs["logits"]
    for row, found in enumerate(select_proposals([boxes], [logits], sizes, *limits)):
        case.check(f"boxes{row}", found.boxes)
        case.check(f"logits{row}", found.logits)
    broken = boxes.clone()
    broken[0, 3] = float("nan")
    if case.args["training"]:
        with pytest.raises(FloatingPointError):
            select_proposals([broken], [logits + 100 * broken.isnan().any(2)], sizes, *limits)
    else:
        assert select_proposals([broken], [logits], sizes, *limits)[0].boxes.isfinite().all()


def test_detections(shared: Path) -> None:
    case = load_detection(shared, "ops_detections")
    args = case.args
    settings = RoiSettings(score=args["score_thresh"], nms=args["nms_thresh"], detections=args["topk"])
    found = select_detections(
        case.inputs["boxes"], case.inputs["probabilities"], tuple(args["image_hw"]), settings
    )
    for name in ("boxes", "scores"):
        case.check(name, getattr(found, name))
    case.check("classes", found.labels)
    # The reference counts among the rows that are finite.
    finite = case.inputs["boxes"].isfinite().all(1) & case.inputs["probabilities"].isfinite().all(1)
    case.check("proposal_index", (finite.cumsum(0) - 1)[found.rows])
    assert not finite.all()


def test_postprocess(shared: Path) -> None:
    case = load_detection(shared, "ops_postprocess")
    boxes = case.inputs["boxes"]
    numbers = torch.arange(len(boxes))
    found = Found(boxes, torch.ones(len(boxes)), numbers, numbers)
    scaled = rescale(found, tuple(case.args["image_hw"]), tuple(case.args["output_hw"]))
    case.check("boxes", scaled.boxes)
    case.check("kept_classes", scaled.labels)


def test_resize_and_flip(shared: Path) -> None:
    case = load_detection(shared, "ops_resize_flip")
    table = next(value for key, value in case.args.items() if key.startswith("table"))
    for height, width, short, most, *wanted in table:
        assert list(output_size(height, width, short, most)) == wanted
    pixels = picture("ops/im", 13, 19).permute(1, 2, 0).numpy()
    size = tuple(case.args["resize_to_hw"])
    resized = torch.from_numpy(resize(pixels, size).copy()).int() - case.outputs["resized_hwc"].int()
    assert resized.abs().max() <= 1
    boxes = case.inputs["boxes"].numpy()
    factor = torch.tensor([size[1] / 19, size[0] / 13] * 2)
    case.check("resized_boxes", case.inputs["boxes"] * factor)
    case.check("flipped_boxes", torch.from_numpy(flip_boxes(boxes, 19)))


@pytest.mark.parametrize("name", ids("lr_"))
def test_learning_rates(shared: Path, name: str) -> None:
    case = load_detection(shared, name)
    args = case.args
    at = learning_rate(
        args["base_lr"], args["warmup_factor"], args["warmup_iters"], tuple(args["steps"]), args["gamma"]
    )
    case.check("lr", [at(step) for step in args["iterations"]])


def test_precise_batchnorm(shared: Path) -> None:
    case = load_detection(shared, "ops_precise_bn")
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, stride=2),
        nn.BatchNorm2d(4),
    )
    for key, tensor in net.state_dict().items():
        tensor.copy_(fill_rule(key, tensor.shape, 1.0))
    shapes = ((2, 3, 8, 9), (2, 3, 10, 7), (2, 3, 6, 6))
    batches = [hash_signed(f"pbn/{i}", shape, i + 1.0) for i, shape in enumerate(shapes)]
    precise_batchnorm(net.train(), batches, net)
    for key, value in net.state_dict().items():
        if key in case.outputs:
            case.check(key, value)
    assert [m.momentum for m in net if isinstance(m, nn.BatchNorm2d)] == [0.1, 0.1]


def test_masks(shared: Path) -> None:
    case = load_detection(shared, "ops_mask_targets")
    found = mask_targets(case.args["polygons"], case.inputs["boxes"], case.args["mask_size"])
    case.check("targets", found.to(torch.uint8))
    case = load_detection(shared, "ops_mask_paste")
    masks = hash_signed("ops/mk", (3, 28, 28), 4.0).sigmoid()
    pasted = paste_masks(masks, case.inputs["boxes"], tuple(case.args["image_hw"]))
    assert ((pasted != case.outputs["pasted"]).sum(dim=(1, 2)) <= 2).all()


def test_voc_annotation(shared: Path, tmp_path: Path) -> None:
    case = load_detection(shared, "ops_voc_annotation")
    file = tmp_path / "000007.xml"
    file.write_text(case.args["xml"])
    found: Any = read_annotation(file)
    names = case.args["class_names"]
    boxes = torch.tensor([thing.box for thing in found.objects], dtype=torch.float32)
    assert torch.equal(boxes, case.outputs["boxes_xyxy"])
    assert [names.index(thing.name) for thing in found.objects] == case.outputs["classes"].tolist()


def test_parameter_groups_are_named_c4_param_groups(shared: Path) -> None:
    from transfer.detect.models.detectors import DetectorSettings, build_detector
    from transfer.detect.optimizer import parameter_groups
    from zoo.models.factory import create_trunk

    from .detection_cases import their_name
    from .test_detection_c4 import NAMES

    case = load_detection(shared, "c4_param_groups")
    with torch.device("meta"):
        model = build_detector(create_trunk("resnet50"), DetectorSettings("c4", 20))
    name_of = {id(p): their_name(name, NAMES) for name, p in model.named_parameters()}
    found = {
        group["weight_decay"]: sorted(name_of[id(p)] for p in group["params"])
        for group in parameter_groups(model, 1e-4)
    }
    assert found[0.0] == sorted(case.args["no_decay"])
    assert found[1e-4] == sorted(case.args["decay"])
