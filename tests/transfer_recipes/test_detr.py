"""DETR as a recipe: protocols, trained, resumed, in two processes, chosen among rates, predicted from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from transfer.detect.annotations import BoxSet, Objects, Picture
from transfer.detect.config import DetectConfig
from transfer.detect.datasets import open_sets
from transfer.detect.detr.choice import choose_rate, hold_out
from transfer.detect.detr.detector import DetrDetector
from transfer.detect.detr.protocol import check_objects, choose_detr, settled_detr
from transfer.detect.detr.stream import detr_stream
from transfer.detect.saved import load_detector
from transfer.run import transfer
from weights.published import assert_clear
from zoo.engine.loop import Loop
from zoo.errors import InputError, RunError, Stopped
from zoo.tensors import read_safetensors

STEPS = {"head": "detr", "steps": 4, "min_size": 64, "max_size": 96, "save_every": 2, "precision": "float32"}
SMALL = choose_detr("own", "")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 8, "test": 2})


@pytest.fixture
def judged(small, tmp_path):
    def run(name, **settings):
        settings = {**STEPS, **settings}
        return transfer(
            "detect", model=small, dataset="builtin:photos-voc", settings=settings, out=tmp_path / name
        )

    return run


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return read_safetensors(folder / "run-0" / "detector" / "detector.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def boxes_of(*counts):
    """A set of images with so many objects each; there are no files."""
    pictures = []
    for number, count in enumerate(counts):
        none = np.zeros(count, dtype=bool)
        boxes = np.tile([1.0, 2.0, 30.0, 40.0], (count, 1))
        objects = Objects(boxes, np.zeros(count, dtype=np.int64), none, none, np.ones(count))
        pictures.append(Picture(f"{number}.png", Path(f"{number}.png"), None, objects, number))
    return BoxSet("table", "train", ("thing",), pictures)


# --- protocols ---


def test_the_published_protocol_for_coco():
    found, sentence = settled_detr(DetectConfig(head="detr"), "coco", 118287, processes=32)
    assert (found.batch, sentence) == (64, "")
    assert (found.lr, found.backbone_lr, found.weight_decay, found.clip) == (1e-4, 1e-5, 1e-4, 0.1)
    assert found.steps == 300 * 118287 // 64 and found.drops == (200 * 118287 // 64,) and found.drop == 0.1
    assert found.sizes == tuple(range(480, 801, 32)) and (found.most, found.test_size) == (1333, 800)
    assert (found.crop_shorts, found.crop_sides) == ((400, 500, 600), (384, 600))
    fewer, sentence = settled_detr(DetectConfig(head="detr"), "coco", 118287, processes=4)
    assert (fewer.batch, fewer.lr, fewer.steps) == (8, 1e-4, 300 * 118287 // 8) and "rate stays" in sentence


def test_the_small_protocol_and_what_is_asked_of_it():
    asked = DetectConfig(head="detr", batch_size=2, queries=40, backbone_lr=[3e-5], min_size=120, crops=True)
    found, _ = settled_detr(asked, "own", 10, processes=1)
    assert SMALL.queries == 25 and SMALL.test_size == 240 and SMALL.width < 256
    assert (found.queries, found.backbone_lr, found.steps) == (40, 3e-5, 2 * SMALL.steps)
    assert found.crop_shorts == tuple(side // 2 for side in SMALL.crop_shorts)
    assert settled_detr(DetectConfig(head="detr", crops=False), "own", 10, 1)[0].crop_shorts == ()
    with pytest.raises(InputError, match="no schedule 24k"):
        settled_detr(DetectConfig(head="detr", schedule="24k"), "own", 10, 1)


def test_sets_that_are_not_meant_for_it():
    with pytest.raises(InputError, match="nothing to learn"):
        check_objects(boxes_of(0, 0), 25)
    (said,) = check_objects(boxes_of(3, 30, 0, 26), 25)
    assert (
        said.startswith("2 images")
        and "up to 30" in said
        and "1.png, 3.png" in said
        and "--queries 30" in said
    )
    assert check_objects(boxes_of(25, 0), 25) == []


# --- the choice of a rate ---


def test_the_rate_is_chosen_on_images_held_out():
    images = boxes_of(*[1] * 30)
    asked = []

    def judge(rate, kept, held):
        names = [{picture.name for picture in part.pictures} for part in (kept, held)]
        assert not names[0] & names[1] and len(names[0]) == 27 and len(names[1]) == 3
        asked.append((rate, frozenset(names[1])))
        return {"metrics": {} if rate == 9.0 else {"AP": {1e-5: 0.25, 5e-5: 0.5, 1e-4: 0.5}[rate]}}

    rate, said = choose_rate([1e-5, 5e-5, 1e-4, 9.0, 1e-5], images, 0, judge)
    assert rate == said["chosen"] == 5e-5 and len({held for _, held in asked}) == 1 and len(asked) == 4
    assert said["AP"] == {"1e-05": 0.25, "5e-05": 0.5, "0.0001": 0.5, "9": None}
    assert "3 of the 30 training images, held out" in said["by"]
    assert hold_out(images, 0)[1].fingerprint() == said["held_out"] != hold_out(images, 1)[1].fingerprint()
    with pytest.raises(InputError, match="too few"):
        choose_rate([1e-5, 1e-4], boxes_of(4, 0), 0, judge)
    with pytest.raises(RunError, match="every rate"):
        choose_rate([9.0], images, 0, judge)


# --- from end to end ---


def test_a_stopped_training_goes_on_bit_for_bit(judged, tmp_path, monkeypatch):
    """With dropout: what it draws follows from the step."""
    monkeypatch.setattr("transfer.detect.detr.protocol._SMALL", replace(SMALL, dropout=0.3))
    before = torch.get_rng_state()
    whole = judged("whole")
    assert torch.equal(torch.get_rng_state(), before)
    step = Loop._one_step

    def stop_after_the_third(self, batch, epoch):
        self.halted = self.step == 2
        return step(self, batch, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_one_step", stop_after_the_third)
        with pytest.raises(Stopped, match="saved"):
            judged("part")
    torch.manual_seed(99)
    assert judged("part")["metrics"] == whole["metrics"]
    assert same(weights(tmp_path / "part"), weights(tmp_path / "whole"))
    first, second = (lines_of(tmp_path / name / "run-0") for name in ("whole", "part"))
    assert [line["loss"] for line in first] == [line["loss"] for line in second]
    for line in first:
        assert 0 <= line["matched_iou"] <= 1 and 0 <= line["no_object_share"] <= 1
        assert line["loss"] == pytest.approx(
            sum(value for name, value in line.items() if name.startswith("loss_"))
        )
    assert whole["details"]["trained_by"]["head"] == "detr" and "selection" not in whole["details"]
    with pytest.raises(InputError, match="Another training was begun"):
        judged("whole", queries=30)


def test_the_frozen_parts_stay(judged, small, tmp_path):
    judged("x", backbone_lr=1e-3)
    before, after = zoo.load(small, progress=False).state_dict(), weights(tmp_path / "x")
    for name, value in before.items():
        if "num_batches_tracked" in name:
            assert f"trunk.{name}" not in after
        else:
            learns = name.startswith(("layer2", "layer3", "layer4")) and value.dim() == 4
            assert torch.equal(after[f"trunk.{name}"], value) != learns, name


def test_box_terms_are_divided_by_the_mean_count_of_all_processes(judged, tmp_path):
    settings = {"steps": 1, "crops": False}
    judged("two", nproc=2, batch_size=4, **settings)
    judged("one", nproc=1, batch_size=2, **settings)  # the images of the first process
    two, one = (lines_of(tmp_path / name / "run-0")[0] for name in ("two", "one"))
    sets = open_sets("builtin:photos-voc", None, DetectConfig(head="detr"))
    stream = detr_stream(sets.train, 0, SMALL)
    counts = [len(sets.train.pictures[stream.place(position)[1]].objects) for position in range(4)]
    assert counts[0] + counts[1] != counts[2] + counts[3]
    share = (counts[0] + counts[1]) / (sum(counts) / 2)
    assert two["loss_bbox"] == pytest.approx(share * one["loss_bbox"], rel=1e-4)
    assert two["loss_giou"] == pytest.approx(share * one["loss_giou"], rel=1e-4)
    assert two["loss_ce"] == pytest.approx(one["loss_ce"], rel=1e-4)


def test_a_sweep_on_the_command_line_and_pictures(command, small, tmp_path):
    flags = [word for key, value in STEPS.items() for word in (f"--{key.replace('_', '-')}", value)]
    words = (
        "transfer",
        "detect",
        "--model",
        small,
        *flags,
        "--steps",
        1,
        "--out",
        tmp_path / "out",
        "--json",
    )
    code, out, err = command(*words, "--backbone-lr", "1e-5", "5e-5", "1e-4")
    assert code == 0, err
    answer = json.loads(out)
    said = answer["details"]["selection"]
    assert list(said["AP"]) == ["1e-05", "5e-05", "0.0001"] and "1 of the 8 training images" in said["by"]
    assert answer["details"]["trained_by"]["backbone_lr"] == said["chosen"] in (1e-5, 5e-5, 1e-4)
    assert answer["protocol"]["backbone_lr"] == [1e-5, 5e-5, 1e-4] and answer["data"]["train"]["count"] == 8
    assert "images held out" in err
    code, out, err = command(*words[:-1], "--backbone-lr", "1e-5,5e-5,1e-4")  # all of it is read from there
    assert code == 0 and f"backbone_lr {said['chosen']:g}: the best by AP on 1 of the 8" in " ".join(
        out.split()
    )
    claims = {
        path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/training.json")
    }
    assert claims.keys() == {"backbone-lr-1e-05", "backbone-lr-5e-05", "backbone-lr-0.0001", "run-0"}
    assert [claims[name]["train"]["count"] for name in ("backbone-lr-1e-05", "run-0")] == [7, 8]
    picture = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(picture)
    code, out, err = command(
        "predict", tmp_path / "out", picture, "-o", tmp_path / "drawn", "--score", 0, "--json"
    )
    assert code == 0, err
    (image,) = json.loads(out)["images"]
    assert len(image["boxes"]) == 25 and image["scores"] == sorted(image["scores"], reverse=True)
    assert isinstance(load_detector(tmp_path / "out").detector, DetrDetector)
    assert_clear(command(*words, "5e-5"), "A word too many")
    assert_clear(command(*words, "--backbone-lr", "1e-5", "0"), "greater than 0")


def test_two_updates_of_the_published_protocol(command, small, tmp_path):
    categories = [{"id": number, "name": f"thing {number}"} for number in (1, 5, 90)]
    for split, count in (("train2017", 3), ("val2017", 1)):
        (tmp_path / split).mkdir()
        images, annotations = [], []
        for number in range(1, count + 1):
            name = f"{number}.png"
            Image.fromarray(np.full((20, 30 + number, 3), 9 * number + count, np.uint8)).save(
                tmp_path / split / name
            )
            images.append({"id": number, "file_name": name, "height": 20, "width": 30 + number})
            box = {"bbox": [3, 4, 20, 10], "area": 200.0, "iscrowd": 0, "category_id": 90}
            annotations.append({**box, "id": number, "image_id": number})
        file = tmp_path / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            json.dumps(
                {"images": images, "annotations": annotations[1:] or annotations, "categories": categories}
            )
        )
    words = (
        "transfer",
        "detect",
        "--model",
        small,
        "--head",
        "detr",
        "--dataset",
        "coco2017",
        "--data",
        tmp_path,
    )
    # Small maps: they are quick, and torch 2.14 breaks down on 1x1 convolutions of 8 channels over large ones.
    words += ("--steps", 2, "--max-size", 160, "--precision", "float32")
    code, out, err = command(*words, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    answer = json.loads(out)
    trained = answer["details"]["trained_by"]
    wanted = choose_detr("coco", "").to_json() | {"batch": 2, "steps": 450, "drops": [300], "most": 160}
    assert trained == json.loads(json.dumps(wanted)) and answer["data"]["train"]["count"] == 3
    assert "2 images a step instead of 64; the rate stays 0.0001" in err
    assert [line["lr"] for line in lines_of(tmp_path / "out" / "run-0")] == [1e-4, 1e-4]
    assert "AP50" in answer["metrics"] and answer["data"]["category_ids"] == [1, 5, 90]
    found = json.loads((tmp_path / "out" / "run-0" / "detections.json").read_text())
    assert len(found) == 100 and {one["category_id"] for one in found} <= {1, 5, 90}


def test_options_of_detr_alone(judged):
    for settings in ({"backbone_lr": 1e-5}, {"queries": 5}, {"crops": False}):
        with pytest.raises(InputError, match="Only DETR"):
            judged("x", head="c4", **settings)
    with pytest.raises(InputError, match="c4, fpn, mask-fpn, detr"):
        judged("y", head="dert")


def test_images_without_boxes_are_trained_on_and_boxes_outside_are_cut(command, small, tmp_path):
    rows = {
        "train": ["a,,,,,", "b,5,5,40,90,x", "b,200,200,210,210,x", "b,3,4,20,20,y"],
        "test": ["c,1,1,20,20,x"],
    }
    for split, lines in rows.items():
        for name in {line[0] for line in lines}:
            Image.fromarray(np.full((64, 64, 3), ord(name), np.uint8)).save(tmp_path / f"{name}.png")
        text = "".join(line.replace(",", ".png,", 1) + "\n" for line in lines)
        (tmp_path / f"{split}.csv").write_text("image,xmin,ymin,xmax,ymax,label\n" + text)
    flags = [word for key, value in STEPS.items() for word in (f"--{key.replace('_', '-')}", value)]
    words = ("transfer", "detect", "--model", small, *flags, "--steps", 2, "--data", tmp_path, "--queries", 1)
    code, out, err = command(*words, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    notes = " | ".join(json.loads(out)["details"]["notes"])
    assert "1 images of train without an object to train on are kept" in notes
    assert "--keep-empty" not in notes  # nobody asked for it
    assert "reach beyond" in notes and "empty or outside and dropped" in notes
    assert "1 images of train have more objects (up to 2) than the detector has queries (1)" in notes
    assert err.index("more objects") < err.index("100%") if "100%" in err else "more objects" in err
    lines = lines_of(tmp_path / "out" / "run-0")
    assert len(lines) == 2 and all(math.isfinite(line["loss"]) for line in lines)


def test_of_two_processes_a_rate_that_diverges_ends_itself_alone(judged, capfd):
    result = judged("two", nproc=2, batch_size=2, steps=3, backbone_lr=(1e30, 1e-5), seed=1)
    selection = result["details"]["selection"]
    assert selection["chosen"] == 1e-5 and selection["AP"]["1e+30"] is None
    assert isinstance(selection["AP"]["1e-05"], float) and result["details"]["diverged"] is False
    assert capfd.readouterr().err.count("backbone lr 1e+30: diverged") == 1


def test_a_training_that_diverges_is_flagged(judged):
    with pytest.raises(RunError, match="diverged"):
        judged("off", steps=8, lr=1e20)
