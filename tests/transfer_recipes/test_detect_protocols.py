"""Every published protocol of detection, from its table to two updates through the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from transfer.detect.models.detectors import FpnDetector
from transfer.detect.models.roi import RoiSettings
from transfer.detect.models.rpn import RpnSettings
from transfer.detect.optimizer import make_optimizer, parameter_groups
from transfer.detect.protocols import Protocol, choose_protocol, rescaled
from transfer.detect.run import detector_for
from transfer.voc import VOC_CLASSES
from weights.published import assert_clear, bundle_at, describe
from zoo.errors import InputError
from zoo.models.factory import create_trunk

VOC_SIZES, COCO_SIZES = tuple(range(480, 801, 32)), tuple(range(640, 801, 32))
C4 = {"rpn_before": (12000, 6000), "rpn_after": (2000, 1000), "extra_norm": True, "fpn_norm": False}
FPN = {"rpn_before": (2000, 1000), "rpn_after": (1000, 1000), "extra_norm": False, "fpn_norm": True}
COMMON = {
    "batch": 16,
    "most": 1333,
    "test_size": 800,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "drop": 0.1,
    "anchors": 256,
    "regions": 512,
    "precise_batches": 200,
}
MOCO = {"lr": 0.02, "warmup": 100, "warmup_factor": 0.001, "sizes": VOC_SIZES}
SWAV = {"lr": 0.1, "warmup": 1000, "warmup_factor": 0.333, "sizes": VOC_SIZES}
COCO = {"lr": 0.02, "warmup": 1000, "warmup_factor": 0.001, "sizes": COCO_SIZES}
STEPS = {"steps": 24000, "drops": (18000, 22000)}
# What was asked for: data set, method, head, schedule; and the numbers of shared/facts/protocols.md.
PROTOCOLS = {
    "voc07+12 moco": (("voc07+12", "moco_v2", "", ""), {**COMMON, **C4, **MOCO, **STEPS, "head": "c4"}),
    "voc07+12 swav": (("voc07+12", "swav", "", "24k"), {**COMMON, **C4, **SWAV, **STEPS, "head": "c4"}),
    "voc07+12 supervised": (("voc07+12", "supervised", "c4", ""), {**COMMON, **C4, **MOCO, **STEPS}),
    "voc07": (
        ("voc07", "moco_v1", "", ""),
        {**COMMON, **C4, **MOCO, "head": "c4", "steps": 7266, "drops": (5450, 6661)},
    ),
    "voc07+12 fpn": (("voc07+12", "swav", "fpn", ""), {**COMMON, **FPN, **SWAV, **STEPS, "head": "fpn"}),
    "coco 1x": (
        ("coco2017", "swav", "", ""),
        {**COMMON, **FPN, **COCO, "head": "mask-fpn", "steps": 90000, "drops": (60000, 80000)},
    ),
    "coco 2x": (
        ("coco2017", "moco_v2", "mask-fpn", "2x"),
        {**COMMON, **FPN, **COCO, "head": "mask-fpn", "steps": 180000, "drops": (120000, 160000)},
    ),
    "coco 1x c4": (
        ("coco2017", "moco_v2", "c4", "1x"),
        {**COMMON, **C4, **COCO, "head": "c4", "steps": 90000},
    ),
    "small": (
        ("voc07+12", "swav", "", "small"),
        {"regions": 64, "rpn_after": (100, 100), "test_size": 240, "batch": 2, "head": "c4", "lr": 0.0025},
    ),
}

NOT_RUN = ("voc07+12 supervised", "coco 1x c4")  # each is another one with another's head or rate


def chosen(dataset, method, head, schedule) -> Protocol:
    family = "coco" if dataset == "coco2017" else "voc"
    return choose_protocol(dataset, family, method, head, schedule, masks=family == "coco")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_table_is_that_of_the_papers(name):
    asked, wanted = PROTOCOLS[name]
    found = chosen(*asked)
    assert {key: getattr(found, key) for key in wanted} == wanted


def test_the_numbers_are_those_that_the_facts_say(shared):
    facts = " ".join((shared / "facts" / "protocols.md").read_text("utf-8").split())
    voc, swav = chosen("voc07+12", "moco_v2", "", ""), chosen("voc07+12", "swav", "", "")
    coco = chosen("coco2017", "swav", "", "")
    rpn, roi = RpnSettings(), RoiSettings()
    (voc_first, voc_last), (coco_first, coco_last) = ([step // 1000 for step in p.drops] for p in (voc, coco))
    decay = f"{voc.weight_decay:.0e}".replace("-0", "-")
    for sentence in (
        f"{len(VOC_CLASSES)} classes, nothing frozen",
        f"precise BN ({voc.precise_batches} iterations)",
        f"train sizes {voc.sizes[0]}..{voc.sizes[-1]} step {voc.sizes[1] - voc.sizes[0]}, max {voc.most}, "
        f"test {voc.test_size}, flip",
        f"RPN {voc.rpn_before[0]}/{voc.rpn_after[0]} train and {voc.rpn_before[1]}/{voc.rpn_after[1]} test, "
        f"{voc.anchors} anchors at {rpn.positive}, NMS 0.7",
        f"RoI {voc.regions} at {roi.positive}; test score {roi.score}, NMS {roi.nms}, {roi.detections} detections",
        f"SGD {voc.momentum}, wd {decay} (0 for norms), batch {voc.batch}, lr {voc.lr}, warm-up {voc.warmup} "
        f"iterations from {voc.warmup_factor}, {voc.steps // 1000}k iterations, x{voc.drop} at {voc_first}k and "
        f"{voc_last}k",
        f"lr {swav.lr}, warm-up {swav.warmup} iterations from {swav.warmup_factor}",
        f"batch {coco.batch}, lr {coco.lr}, {coco.steps // 1000}k iterations, steps {coco_first}k/{coco_last}k, "
        f"warm-up {coco.warmup} from {coco.warmup_factor}, sizes {coco.sizes[0]}..{coco.sizes[-1]}, RPN "
        f"{coco.rpn_before[0]}/{coco.rpn_after[0]} train, {coco.rpn_before[1]}/{coco.rpn_after[1]} test",
    ):
        assert sentence in facts


def test_fewer_images_a_step_rescale_by_rule():
    whole = chosen("voc07+12", "moco_v2", "", "")
    half, sentence = rescaled(whole, 8)
    assert (half.lr, half.steps, half.drops, half.warmup) == (0.01, 48000, (36000, 44000), 200)
    assert (
        "rate 0.02 -> 0.01" in sentence and "24000 -> 48000" in sentence and "warm-up 100 -> 200" in sentence
    )
    assert rescaled(whole, 16) == (whole, "")
    double, _ = rescaled(whole, 32)
    assert (double.lr, double.steps) == (0.04, 12000)
    assert replace(half, lr=whole.lr, batch=16, steps=24000, drops=whole.drops, warmup=100) == whole


def test_what_is_not_known_is_refused():
    with pytest.raises(InputError, match="no such head") as caught:
        chosen("voc07", "", "fnp", "")
    assert "did you mean fpn" in caught.value.fix
    with pytest.raises(InputError, match="no such schedule"):
        chosen("voc07", "", "", "3x")
    with pytest.raises(InputError, match="needs masks"):
        chosen("voc07", "", "mask-fpn", "")


def test_groups_and_norms_of_the_pyramid():
    protocol = chosen("coco2017", "swav", "", "")
    with torch.device("meta"):
        model = detector_for(create_trunk("resnet50"), protocol, 80, 0)
    assert isinstance(model, FpnDetector) and model.mask_head is not None
    decayed, free = parameter_groups(model, protocol.weight_decay)
    assert decayed["weight_decay"] == 1e-4 and free["weight_decay"] == 0.0
    assert len(free["params"]) == 106 + 2 * 8  # 53 norms of the trunk, 8 of the pyramid
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert model.rpn.objectness_logits.out_channels == 3 and model.rpn.strides == (4, 8, 16, 32, 64)


# --- two updates through the command line ---


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A ResNet-50 of a sixteenth of the width, of two methods."""
    folder = tmp_path_factory.mktemp("narrow")
    what = {"arch": "resnet50", "base_planes": 4, "num_features": 128}
    return {
        method: str(bundle_at(folder / method, describe(**what, method=method)).path)
        for method in ("swav", "moco_v2")
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """VOC and COCO in their true layout, with two training images and a test image each."""
    root = tmp_path_factory.mktemp("sets")
    shades = iter(range(1, 250, 7))

    def picture(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((20, 100, 3), next(shades), dtype=np.uint8)  # long: few pixels at 1333
        pixels[3:18, 20:60, 1] = 255
        Image.fromarray(pixels).save(file)

    thing = "<name>{}</name><pose>Left</pose><difficult>0</difficult>"
    box = "<bndbox><xmin>21</xmin><ymin>4</ymin><xmax>60</xmax><ymax>18</ymax></bndbox>"
    for year, splits in (("2007", {"trainval": 1, "test": 1}), ("2012", {"trainval": 1})):
        home = root / "VOCdevkit" / f"VOC{year}"
        for split, count in splits.items():
            names = [f"{year}_{split}{number}" for number in range(count)]
            for number, name in enumerate(names):
                picture(home / "JPEGImages" / f"{name}.jpg")
                text = f"<object>{thing.format(VOC_CLASSES[number])}{box}</object>"
                size = "<size><width>100</width><height>20</height></size>"
                (home / "Annotations").mkdir(exist_ok=True)
                (home / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{text}</annotation>")
            lists = home / "ImageSets" / "Main"
            lists.mkdir(parents=True, exist_ok=True)
            (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    categories = [{"id": number, "name": f"thing {number}"} for number in (1, 2, 5)]
    for split, count in (("train2017", 2), ("val2017", 1)):
        images, annotations = [], []
        for number in range(1, count + 1):
            picture(root / "coco" / split / f"{number:012d}.jpg")
            images.append({"id": number, "file_name": f"{number:012d}.jpg", "height": 20, "width": 100})
            outline = [20.0, 3.0, 60.0, 3.0, 60.0, 18.0, 20.0, 18.0]
            one = {"id": number, "image_id": number, "category_id": 5, "bbox": [20, 3, 40, 15], "iscrowd": 0}
            annotations.append({**one, "area": 600.0, "segmentation": [outline]})
        file = root / "coco" / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return root


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name not in NOT_RUN])
def test_two_updates_of_every_protocol(command, narrow, published, tmp_path, monkeypatch, name):
    groups = []

    def seen(model, protocol):
        optimizer = make_optimizer(model, protocol)
        groups.extend((group["weight_decay"], len(group["params"])) for group in optimizer.param_groups)
        return optimizer

    monkeypatch.setattr("transfer.detect.training.make_optimizer", seen)
    (dataset, method, head, schedule), wanted = PROTOCOLS[name]
    flags = [
        word
        for flag, value in (("--head", head), ("--schedule", schedule))
        if value
        for word in (flag, value)
    ]
    words = (
        "--model",
        narrow["swav" if method == "swav" else "moco_v2"],
        "--dataset",
        dataset,
        "--data",
        published,
    )
    code, out, err = command(
        "transfer", "detect", *words, *flags, "--steps", 2, "--batch-size", 1, "--precise-batches", 0,
        "--precision", "float32", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    trained = answer["details"]["trained_by"]
    times = wanted["batch"]
    for key, value in wanted.items():
        if key == "lr":
            assert trained["lr"] == pytest.approx(value / times)
        elif key in ("steps", "warmup"):
            assert trained[key] == pytest.approx(value * times, abs=times)
        elif key == "drops":
            assert trained[key] == [pytest.approx(step * times, abs=times) for step in value]
        elif key not in ("batch", "precise_batches"):
            assert trained[key] == (list(value) if isinstance(value, tuple) else value), key
    # What is decayed: 53 convolutions of the trunk and the new layers; not its norms, nor the new ones.
    norms = {"c4": 2 * 54, "fpn": 2 * (53 + 8), "mask-fpn": 2 * (53 + 8)}[trained["head"]]
    others = {"c4": 53 + 6 + 4, "fpn": 53 + 8 + 6 + 8, "mask-fpn": 53 + 8 + 6 + 8 + 12}[trained["head"]]
    assert groups == [(1e-4, others), (0.0, norms)]
    lines = [json.loads(line) for line in (tmp_path / "out/run-0/metrics.jsonl").read_text().splitlines()]
    base, warmup = trained["lr"], trained["warmup"]
    for step, line in enumerate(lines):
        share = step / warmup
        assert line["lr"] == pytest.approx(base * (trained["warmup_factor"] * (1 - share) + share))
        assert {"loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc", "proposal_recall"} <= line.keys()
        assert ("loss_mask" in line) == (trained["head"] == "mask-fpn")
    assert len(lines) == 2 and "flatters" in answer["details"]
    assert f"{times}: rate {wanted['lr']:g} -> {trained['lr']:g}, steps" in err
    kind = "mask_AP" if trained["head"] == "mask-fpn" else "AP"
    assert kind in answer["metrics"]
    assert answer["data"]["train"]["count"] == (1 if dataset == "voc07" else 2)
    if dataset != "coco2017":
        assert answer["details"]["average_precision"].startswith("11-point")


def test_a_batch_that_cannot_be_shared_out(command, narrow, published):
    words = ("--model", narrow["swav"], "--dataset", "voc07", "--data", published, "--head", "mask-fpn")
    assert_clear(command("transfer", "detect", *words), "needs masks")
    assert_clear(command("transfer", "detect", "--model", narrow["swav"], "--dataset", "voc7"), "voc07")
