"""DETR against its reference; ZOO_EXACT=1 computes in float64 and tightens the tolerances."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from transfer.detect.config import DetectConfig
from transfer.detect.datasets import open_sets
from transfer.detect.detr.detector import (
    DetrDetector,
    DetrSettings,
    detr_groups,
    post_process,
    valid_places,
)
from transfer.detect.detr.loss import NO_OBJECT, WEIGHTS, set_loss
from transfer.detect.detr.matching import Wanted, match, match_costs, wanted_of
from transfer.detect.detr.protocol import choose_detr
from transfer.detect.detr.transformer import Transformer, TransformerSettings, sine_embedding
from transfer.detect.detr.views import crop_boxes, detr_size, in_shares
from transfer.detect.models.images import Images
from transfer.detect.optimizer import learning_rate, make_optimizer
from transfer.detect.views import flip_boxes
from zoo.models.factory import create_trunk

from .cases import hash_signed
from .detection_cases import DTYPE, EXACT, DetectionCase, fill_named, load_detection, summary

TIGHT: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6} if EXACT else {}
LAYERS = ("aux0", "aux1", "last")


@pytest.mark.parametrize("kind", ["norm", "raw"])
def test_the_sine_embedding(shared: Path, kind: str) -> None:
    case = load_detection(shared, f"detr_pos_sine_{kind}")
    place = sine_embedding(
        ~case.inputs["mask"].bool(), 2 * case.args["num_pos_feats"], case.args["normalize"]
    )
    assert place.dtype == torch.float32
    case.check("pos", place)


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_the_transformer(shared: Path, kind: str) -> None:
    case = load_detection(shared, f"detr_transformer_{kind}")
    args = case.args
    settings = TransformerSettings(
        args["d_model"], args["nhead"], args["ff"], args["enc"], args["dec"], 0.1, args["normalize_before"]
    )
    model = Transformer(settings).to(DTYPE).eval()
    fill_named(model, {}, {}, {})
    mask = case.inputs["mask"].bool()
    src = hash_signed("detr/src", (3, 32, 6, 7), 1.5).to(DTYPE).requires_grad_()
    place, query = (
        hash_signed(f"detr/{name}", shape, 1.0).to(DTYPE)
        for name, shape in (("pos", (3, 32, 6, 7)), ("query", (9, 32)))
    )
    said, memory = model(src, place, query, ~mask)
    case.check("hs", said, **TIGHT)
    case.check("memory", memory.transpose(1, 2).reshape(3, 32, 6, 7), **TIGHT)
    said.square().mean().backward()
    assert src.grad is not None
    case.check("grad_src_summary", summary(src.grad), **TIGHT)
    names = ("encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.linear2.weight")
    names += ("decoder.layers.0.multihead_attn.out_proj.weight", "decoder.norm.weight")
    norms = [model.get_parameter(name).grad.double().norm() for name in names]  # type: ignore[union-attr]
    case.check("grad_norms", torch.stack(norms), **TIGHT)
    # Without padding no mask is needed: the answer is the same.
    with torch.no_grad():
        full = torch.ones_like(mask)
        assert torch.allclose(model(src, place, query, full)[0], model(src, place, query)[0], atol=1e-5)


def heads_of(case: DetectionCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and boxes of all layers that the case has boxes of."""
    rows = [row for row, name in enumerate(LAYERS) if f"pred_boxes_{name}" in case.inputs]
    logits = torch.stack([hash_signed(f"detr/logits{row}", (3, 9, 8), 3.0) for row in rows])
    boxes = torch.stack([case.inputs[f"pred_boxes_{LAYERS[row]}"] for row in rows])
    return logits.to(DTYPE).requires_grad_(), boxes.to(DTYPE).requires_grad_()


def wanted_in(case: DetectionCase) -> Wanted:
    labels = [torch.tensor(one, dtype=torch.int64) for one in case.args["target_labels"]]
    return wanted_of(labels, [case.inputs[f"target_boxes{row}"].to(DTYPE) for row in range(len(labels))])


def test_the_matching(shared: Path) -> None:
    case = load_detection(shared, "detr_matcher")
    logits, boxes = heads_of(case)
    wanted = wanted_in(case)
    costs = match_costs(logits.log_softmax(3).detach(), boxes, wanted)
    first = 0
    for row, count in enumerate(wanted.counts):
        theirs = case.outputs["cost"][row, :, first : first + count]
        case.compare(f"cost of image {row}", costs[0, row, :, :count], theirs, **case.tolerance_of("cost"))
        first += count
    pairs = match(costs, wanted.counts)
    for row in range(3):
        mine = pairs.image == row
        case.check(f"match{row}_query", pairs.query[mine])
        case.check(f"match{row}_target", pairs.target[mine])


def check_terms(case: DetectionCase, found: Any, prefix: str = "") -> torch.Tensor:
    """Hold the terms of all layers against the case's, and give the weighted total."""
    layers = len(found.cardinality_error)
    columns = {**found.terms, "cardinality_error": found.cardinality_error}
    for name, values in columns.items():
        for layer in range(layers):
            suffix = "" if layer == layers - 1 else f"_{layer}"
            case.check(f"{prefix}{name}{suffix}", values[layer], **TIGHT)
    case.check(f"{prefix}class_error", found.class_error, **TIGHT)
    return torch.stack([WEIGHTS[name] * values for name, values in found.terms.items()]).sum()


def test_the_set_loss(shared: Path) -> None:
    case = load_detection(shared, "detr_criterion")
    assert case.args["eos_coef"] == NO_OBJECT
    logits, boxes = heads_of(case)
    found = set_loss(logits, boxes, wanted_in(case), 5.0)
    total = check_terms(case, found)
    case.check("weighted_total", total, **TIGHT)
    total.backward()
    assert logits.grad is not None and boxes.grad is not None
    case.check("grad_logits_last", logits.grad[-1], **TIGHT)
    case.check("grad_boxes_last", boxes.grad[-1], **TIGHT)
    case.check("grad_boxes_aux0", boxes.grad[0], **TIGHT)


def test_a_batch_without_any_object(shared: Path) -> None:
    case = load_detection(shared, "detr_criterion_no_targets")
    logits, boxes = heads_of(case)
    none = wanted_of([torch.zeros(0, dtype=torch.int64)] * 3, [torch.zeros(0, 4, dtype=DTYPE)] * 3)
    found = set_loss(logits, boxes, none, 1.0)
    total = check_terms(case, found)
    total.backward()
    assert float(found.matched_iou) == 0.0 and boxes.grad is not None and not boxes.grad.any()


def test_what_becomes_of_the_queries(shared: Path) -> None:
    case = load_detection(shared, "detr_postprocess")
    logits, boxes = (x.detach()[-1] for x in heads_of(case))
    sizes = [(h, w) for h, w in case.args["target_sizes_hw"]]
    for row, found in enumerate(post_process(logits, boxes, sizes)):
        assert (found.scores.diff() <= 0).all()
        back = found.rows.argsort()
        case.check(f"scores{row}", found.scores[back])
        case.check(f"labels{row}", found.labels[back])
        case.check(f"boxes{row}", found.boxes[back])


def test_targets_and_views(shared: Path, tmp_path: Path) -> None:
    case = load_detection(shared, "detr_targets")
    for width, height, short, most, *wanted in case.args[
        "resize_table [w, h, size, max_size] -> [new h, new w]"
    ]:
        assert list(detr_size(height, width, short, most)) == wanted
    width, height = case.args["image_wh"]
    annotations = [
        {**one, "id": number, "image_id": 1} for number, one in enumerate(case.args["annotations"])
    ]
    categories = [{"id": number, "name": f"thing {number}"} for number in (1, 2, 3, 5, 90)]
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        Image.fromarray(np.full((height, width, 3), len(split), np.uint8)).save(tmp_path / split / "a.png")
        image = {"id": 1, "file_name": "a.png", "height": height, "width": width}
        content = {"images": [image], "annotations": annotations, "categories": categories}
        file = tmp_path / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    sets = open_sets(str(tmp_path), None, DetectConfig(head="detr"))
    objects = sets.train.pictures[0].objects
    boxes, labels = objects.boxes, np.array(sets.train.numbers)[objects.labels]
    case.check("prepared_boxes", torch.from_numpy(boxes))
    case.check("labels", torch.from_numpy(labels))
    case.check("area", torch.from_numpy(objects.areas))
    flipped = flip_boxes(boxes, width)
    case.check("flipped_boxes", torch.from_numpy(flipped))
    size = detr_size(height, width, 100, 150)
    case.check("resized_size_hw", torch.tensor(size))
    resized = flipped * np.array([size[1] / width, size[0] / height] * 2)
    case.check("resized_boxes", torch.from_numpy(resized))
    case.check("normalised_cxcywh", in_shares(torch.from_numpy(resized), size))
    cropped, rows = crop_boxes(boxes, 10, 8, 40, 50)
    case.check("cropped_boxes", torch.from_numpy(cropped))
    case.check("cropped_labels", torch.from_numpy(labels[rows]))


def test_the_mask_is_asked_at_the_nearest_pixel() -> None:
    sizes, padded, places = [(96, 128), (128, 75)], (128, 131), (4, 5)
    full = torch.zeros(2, *padded)
    for row, (height, width) in enumerate(sizes):
        full[row, :height, :width] = 1
    wanted = torch.nn.functional.interpolate(full[:, None], size=places)[:, 0].bool()
    assert torch.equal(valid_places(sizes, padded, places), wanted)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    x = tensor.detach().double().flatten()
    return torch.cat((torch.stack((x.norm(), x.sum())), x[:3]))


def test_the_whole_detector_and_a_step(shared: Path) -> None:
    case = load_detection(shared, "detr_full_r50")
    args = case.args
    settings = DetrSettings(
        args["num_classes"],
        queries=args["num_queries"],
        width=args["hidden_dim"],
        heads=args["nheads"],
        hidden=args["ff"],
        layers=args["enc"],
        dropout=0.0,
    )
    with torch.device("meta"):
        model = DetrDetector(create_trunk("resnet50"), settings)
    fill_named(model, {"trunk.": ""}, args["gains"], {})
    model.train()
    sizes = [(h, w) for h, w in args["images_hw"]]
    pixels = torch.zeros(2, 3, 128, 128, dtype=DTYPE)
    for row, (height, width) in enumerate(sizes):
        pixels[row, :, :height, :width] = hash_signed(f"detr/im{row}", (3, height, width), 2.0)
    logits, boxes = model.outputs(Images(pixels, sizes))
    case.check("pred_logits", logits[-1], **TIGHT)
    case.check("pred_boxes", boxes[-1], **TIGHT)
    case.check("aux0_boxes", boxes[0], **TIGHT)
    total = check_terms(case, set_loss(logits, boxes, wanted_in(case), 3.0), "loss/")
    case.check("weighted_total", total, **TIGHT)
    total.backward()

    named = {name.removeprefix("trunk."): p for name, p in model.named_parameters() if p.requires_grad}
    for key in case.outputs:
        if key.startswith("grad/"):
            check_digest(case, key, digest(named[key.removeprefix("grad/")].grad))  # type: ignore[arg-type]
    protocol = choose_detr("coco", "")
    optimizer = make_optimizer(model, protocol)
    for group in optimizer.param_groups:  # as the loop does
        group["lr"] = protocol.lr * group.get("lr_scale", 1.0)
    before = {name: p.detach().clone() for name, p in named.items()}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), protocol.clip)
    case.check("total_grad_norm_before_clip", norm.double(), **TIGHT)
    optimizer.step()
    for key in case.outputs:
        if key.startswith("step/"):
            name = key.removeprefix("step/")
            change = digest(named[name].detach().double() - before[name].double())
            check_digest(case, key, torch.cat((change[:1], change[2:])))


def check_digest(case: DetectionCase, key: str, got: torch.Tensor) -> None:
    """The length is the tight test: sums cancel."""
    allowed = case.tolerance_of(key)
    norm = allowed.pop("first_entry_L2_norm_rtol")
    case.compare(key, got[:1], case.outputs[key][:1], rtol=1e-6 if EXACT else norm, atol=1e-12)
    case.check(key, got, **allowed)


def test_what_learns_and_at_which_rate(shared: Path) -> None:
    args = load_detection(shared, "detr_param_groups").args
    protocol = choose_detr("coco", "300ep")
    with torch.device("meta"):
        model = DetrDetector(create_trunk("resnet50"), DetrSettings(91))
    of_trunk = {
        name.removeprefix("trunk."): p for name, p in model.named_parameters() if name[:6] == "trunk."
    }
    learning = [name for name, p in of_trunk.items() if p.requires_grad]
    assert learning == args["trainable_backbone_tensors"]
    assert [name for name in of_trunk if name not in learning] == args["frozen_backbone_tensors"]
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    groups = detr_groups(model, protocol.lr, protocol.backbone_lr)
    for number, group in enumerate(groups):
        assert len(group["params"]) == args[f"group{number}_n_tensors"]
        assert sum(p.numel() for p in group["params"]) == args[f"group{number}_n_values"]
    rates = [protocol.lr * group.get("lr_scale", 1.0) for group in groups]
    assert rates == pytest.approx(args["lr"]) and protocol.weight_decay == args["weight_decay"]
    at = learning_rate(protocol.lr, 1.0, 0, (protocol.drop_epoch,), protocol.drop)  # a step an epoch
    for epoch, wanted in args["lr_by_epoch [main, backbone]"].items():
        got = [at(int(epoch)) * group.get("lr_scale", 1.0) for group in groups]
        assert got == pytest.approx(wanted)
    default, mine = args["default_args"], asdict(protocol)
    theirs = {"queries": "num_queries", "width": "hidden_dim", "hidden": "dim_feedforward", "heads": "nheads"}
    theirs |= {"dropout": "dropout", "layers": "enc_layers", "epochs": "epochs"}
    assert {name: mine[name] for name in theirs} == {name: default[key] for name, key in theirs.items()}
    assert default["dec_layers"] == mine["layers"] and mine["clip"] == args["clip_max_norm"]
    assert {name: args["weight_dict"][name] for name in WEIGHTS} == WEIGHTS
