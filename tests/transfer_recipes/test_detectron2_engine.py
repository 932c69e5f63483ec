"""Training in detectron2, against its Python part: from ten VOC images to a result, and back into fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from transfer.detect.annotations import Objects
from transfer.detect.batches import view_for_test
from transfer.detect.coco_scores import read_results
from transfer.detect.config import DetectConfig
from transfer.detect.datasets import read_sets
from transfer.detect.detectron2_engine.data import register
from transfer.detect.detectron2_engine.engine import precision_for
from transfer.detect.detectron2_engine.settings import contradictions
from transfer.detect.judge import detect_one
from transfer.detect.saved import load_detector
from transfer.detect.scores import Detections, voc_scores
from transfer.detect.training import Normalisation
from transfer.run import transfer
from weights.published import assert_clear
from zoo.conversion import convert
from zoo.engine.precision import Precision
from zoo.errors import InputError, RunError, Stopped

from .detectron2_part import narrow, part

__all__ = ["narrow", "part"]

SETTINGS = {
    "engine": "detectron2",
    "schedule": "small",
    "steps": 5,
    "min_size": 64,
    "max_size": 96,
    "precise_batches": 2,
    "save_every": 2,
}


@pytest.fixture(scope="module")
def ten(shared, tmp_path_factory):
    """Ten training and four test images of VOC, as a VOC folder."""
    whole = shared / "data" / "voc_like" / "VOCdevkit" / "VOC2007"
    home = tmp_path_factory.mktemp("voc") / "VOC2007"
    (home / "ImageSets" / "Main").mkdir(parents=True)
    for split, count in (("trainval", 10), ("test", 4)):
        names = (whole / "ImageSets" / "Main" / f"{split}.txt").read_text().split()[:count]
        (home / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            for kind, end in (("JPEGImages", "jpg"), ("Annotations", "xml")):
                (home / kind).mkdir(exist_ok=True)
                shutil.copy(whole / kind / f"{name}.{end}", home / kind)
    return home


@pytest.fixture(scope="module")
def trained(narrow, ten, tmp_path_factory):
    """Five steps on ten images, and the folder that they left."""
    out = tmp_path_factory.mktemp("trained") / "out"
    return transfer("detect", model=narrow, dataset=str(ten), settings=SETTINGS, out=out), out


def fresh(code, part, *words):
    """Run code in a new interpreter that has detectron2."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(part)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(folder):
    return [json.loads(line) for line in (folder / "run-0" / "metrics.jsonl").read_text().splitlines()]


# --- from end to end ---


def test_five_iterations_on_ten_images_and_their_score(trained, ten):
    result, out = trained
    assert 0 <= result["metrics"]["AP50"] <= 1 and np.isfinite(result["metrics"]["train_loss"])
    assert result["protocol"]["engine"] == "detectron2" and result["data"]["train"]["count"] == 10
    told = result["details"]["detectron2"]
    assert told["version"] == "0.6" and set(told["feature_differences"]) == {"res2", "res3", "res4", "res5"}
    assert max(told["feature_differences"].values()) < 1e-4
    steps = lines(out)
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert all(
        line["loss"] == pytest.approx(sum(v for k, v in line.items() if k.startswith("loss_")))
        for line in steps
    )
    home = out / "run-0" / "detectron2"
    assert {file.name for file in home.glob("*.pth")} == {"model_final.pth"}
    from detectron2.config import get_cfg

    cfg = get_cfg()
    cfg.merge_from_file(str(home / "train.yaml"), allow_unsafe=False)
    assert str(home / "backbone.pkl") == cfg.MODEL.WEIGHTS and cfg.INPUT.FORMAT == "RGB"
    assert pytest.approx([123.675, 116.28, 103.53]) == cfg.MODEL.PIXEL_MEAN
    assert pytest.approx([58.395, 57.12, 57.375]) == cfg.MODEL.PIXEL_STD
    assert not cfg.MODEL.RESNETS.STRIDE_IN_1X1 and cfg.MODEL.BACKBONE.FREEZE_AT == 0
    assert cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm" and cfg.MODEL.ROI_HEADS.NUM_CLASSES == 20


def test_the_rates_are_the_protocols(trained):
    result, out = trained
    protocol = result["details"]["trained_by"]
    for line in lines(out):
        share = line["step"] / protocol["warmup"]
        factor = protocol["warmup_factor"] * (1 - share) + share
        assert line["lr"] == pytest.approx(protocol["lr"] * factor, rel=1e-6)


def test_our_data_under_our_names(trained, ten):
    from detectron2.config import get_cfg
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.evaluation import PascalVOCDetectionEvaluator
    from detectron2.structures import Boxes, Instances

    _, out = trained
    cfg = get_cfg()
    cfg.merge_from_file(str(out / "run-0" / "detectron2" / "train.yaml"))
    (train,), (test,) = cfg.DATASETS.TRAIN, cfg.DATASETS.TEST
    assert train.startswith("zoo_") and len(DatasetCatalog.get(train)) == 10
    sets = read_sets(str(ten), None, DetectConfig())
    for record, picture in zip(DatasetCatalog.get(test), sets.test.pictures, strict=True):
        assert record["image_id"] == picture.name and record["file_name"] == str(picture.path)
        assert [one["bbox"] for one in record["annotations"]] == picture.objects.boxes.tolist()
    assert MetadataCatalog.get(test).thing_classes == list(sets.test.classes)
    # Its own evaluator, which reads the annotation files itself, scores as we do. No two scores are alike: what is
    # sorted first of equal ones is numpy's choice.
    rng, left, found = np.random.default_rng(0), iter(np.arange(999, 0, -1) / 1000), []
    for picture in sets.test.pictures:
        boxes = np.repeat(picture.objects.boxes, 3, axis=0) + rng.normal(0, 6, (3 * len(picture.objects), 4))
        labels = np.repeat(picture.objects.labels, 3)
        found.append(Detections(boxes, np.array([next(left) for _ in labels]), labels))
    judge = PascalVOCDetectionEvaluator(test)
    judge.reset()
    for picture, one in zip(sets.test.pictures, found, strict=True):
        instances = Instances((1, 1), pred_boxes=Boxes(torch.from_numpy(one.boxes).float()))
        instances.scores, instances.pred_classes = torch.from_numpy(one.scores), torch.from_numpy(one.labels)
        judge.process([{"image_id": picture.name}], [{"instances": instances}])
    theirs = judge.evaluate()["bbox"]
    ours = voc_scores([p.objects for p in sets.test.pictures], found, 20).summary(
        "11-point", every_class=True
    )
    assert 0.02 < ours["AP"] < 0.9
    assert {name: value / 100 for name, value in theirs.items()} == pytest.approx(ours)


def test_a_saved_yaml_in_a_fresh_process(trained, part, ten):
    """Its own head is known there by one import; what it finds is what was found, also by our detector."""
    _, out = trained
    code = """
        import json, sys
        import numpy as np, torch
        from PIL import Image
        import transfer.detect.detectron2_engine.heads
        from detectron2.checkpoint import DetectionCheckpointer
        from detectron2.config import get_cfg
        from detectron2.modeling import build_model
        torch.set_num_threads(1)
        cfg = get_cfg()
        cfg.merge_from_file(sys.argv[1])
        model = build_model(cfg).eval()
        DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
        view = torch.from_numpy(np.load(sys.argv[2]))
        with torch.no_grad():
            found = model([{"image": view, "height": int(sys.argv[3]), "width": int(sys.argv[4])}])[0]["instances"]
        assert not {"detectron2.model_zoo", "pkg_resources"} & sys.modules.keys()  # it wants an old setuptools
        print(json.dumps([found.pred_boxes.tensor.tolist(), found.scores.tolist(), found.pred_classes.tolist()]))
    """
    sets = read_sets(str(ten), None, DetectConfig())
    kept = read_results(out / "run-0" / "detections.json", sets.test)[0]
    view, size = view_for_test(sets.test, 0, 64, 96)
    np.save(out / "view.npy", view.numpy())
    yaml = out / "run-0" / "detectron2" / "model.yaml"
    boxes, scores, labels = json.loads(fresh(code, part, yaml, out / "view.npy", *size))
    assert len(scores) and labels == kept.labels.tolist()
    np.testing.assert_allclose(boxes, kept.boxes, atol=1e-3)
    np.testing.assert_allclose(scores, kept.scores, atol=1e-6)
    saved = load_detector(out)
    ours = detect_one(
        saved.detector,
        view,
        size,
        Normalisation(saved.mean, saved.std),
        Precision("float32", torch.device("cpu")),
    )
    assert len(ours.scores) == len(scores)
    np.testing.assert_allclose(np.sort(ours.scores), np.sort(scores), atol=1e-4)


def test_a_stopped_training_goes_on(narrow, ten, trained, tmp_path, monkeypatch):
    from detectron2.engine import SimpleTrainer, hooks

    whole, folder = trained
    run_step = SimpleTrainer.run_step
    settings = {**SETTINGS, "save_every": 100}

    def stop_in_the_third(self):
        run_step(self)
        if self.iter == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(SimpleTrainer, "run_step", stop_in_the_third)
        patch.setattr(hooks.LRScheduler, "state_dict", lambda self: {})  # newer ones forget it
        with pytest.raises(Stopped, match="saved"):
            transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "part")
    assert len(lines(tmp_path / "part")) == 3
    again = transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "part")
    assert again["metrics"] == whole["metrics"]
    first, second = (
        torch.load(place / "run-0" / "detectron2" / "model_final.pth", weights_only=True)["model"]
        for place in (folder, tmp_path / "part")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [line["loss"] for line in lines(tmp_path / "part")] == [line["loss"] for line in lines(folder)]


def test_two_years_are_no_set_that_it_can_score(part, ten, tmp_path):
    """Its evaluator reads one year's folder: of both years it would score one, and not say so."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    images = read_sets(str(ten), None, DetectConfig()).train
    assert MetadataCatalog.get(register(images, "mine", "train")).evaluator_type == "pascal_voc"
    images.pictures[-1].path = tmp_path / "VOC2012" / "JPEGImages" / "a.jpg"
    name = register(images, "voc07+12", "train")
    about = MetadataCatalog.get(name)
    assert not hasattr(about, "evaluator_type") and not hasattr(about, "dirname")
    assert about.thing_classes == list(images.classes) and len(DatasetCatalog.get(name)) == 10


def test_two_processes_share_a_batch(narrow, ten, trained, part, tmp_path, monkeypatch):
    """An image each gives the losses of both in one process: norms and samples don't know who has an image."""
    monkeypatch.setenv("PYTHONPATH", str(part))
    settings = {**SETTINGS, "steps": 1, "precise_batches": 0, "batch_size": 2, "nproc": 2}
    result = transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "two")
    assert result["details"]["detectron2"]["version"] == "0.6" and np.isfinite(result["metrics"]["AP50"])
    (together,), alone = lines(tmp_path / "two"), lines(trained[1])[0]
    names = [name for name in alone if name == "loss" or name.startswith("loss_")]
    assert {name: together[name] for name in names} == pytest.approx(
        {name: alone[name] for name in names}, rel=1e-3
    )


def test_one_that_diverges_is_flagged(narrow, ten, tmp_path, capfd):
    settings = {**SETTINGS, "lr": 1e20, "warmup_steps": 0, "steps": 8}
    with pytest.raises(RunError, match="diverged"):
        transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "off")
    assert json.loads((tmp_path / "off" / "result.json").read_text())["details"]["diverged"]
    assert "Traceback" not in capfd.readouterr().err  # detectron2 would print one; it is in its log
    assert "FloatingPointError" in (tmp_path / "off" / "run-0" / "detectron2" / "detectron2.log").read_text()


# --- what is refused ---


def test_contradictions_are_named():
    weights = {"INPUT.FORMAT": "RGB", "MODEL.PIXEL_STD": [58.395, 57.12, 57.375], "MODEL.RESNETS.DEPTH": 50}
    assert contradictions({"MODEL.PIXEL_STD": (58.4, 57.12, 57.38), "INPUT.FORMAT": "RGB"}, weights) == []
    (said,) = contradictions({"MODEL.PIXEL_STD": [1.0, 1.0, 1.0], "SOLVER.GAMMA": 0.5}, weights)
    assert said.startswith("MODEL.PIXEL_STD is [1.0, 1.0, 1.0]") and "58.395" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("INPUT: {FORMAT: BGR}", "INPUT.FORMAT is BGR"),
        ("MODEL: {PIXEL_MEAN: [103.53, 116.28, 123.675]}", "MODEL.PIXEL_MEAN is [103.53"),
        ("MODEL: {PIXEL_STD: [1.0, 1.0, 1.0]}", "MODEL.PIXEL_STD is [1.0"),
        ("MODEL: {RESNETS: {STRIDE_IN_1X1: True}}", "STRIDE_IN_1X1 is True"),
        ("MODEL: {NO_SUCH_KEY: 1}", "NO_SUCH_KEY"),
        ("_BASE_: mine.yaml", "no YAML that detectron2 takes"),
        ("- a list", "no YAML that detectron2 takes"),
        ("MODEL: {DEVICE: !!python/object/apply:os.mkdir [ran]}", "no YAML that detectron2 takes"),
        ("MODEL: {ROI_HEADS: {NAME: Res5ROIHeads}}", "roi_heads.res5.norm"),
    ],
)
def test_a_yaml_that_contradicts_the_weights(narrow, ten, tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    settings = {**SETTINGS, "yaml": str(tmp_path / "mine.yaml")}
    with pytest.raises((InputError, RunError)) as caught:
        transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "out")
    assert said in str(caught.value) and not (tmp_path / "ran").exists()


def test_a_yaml_is_laid_over_the_protocol(narrow, ten, tmp_path, caplog):
    (tmp_path / "mine.yaml").write_text(
        "MODEL: {WEIGHTS: other.pkl, ROI_HEADS: {SCORE_THRESH_TEST: 0.2}}\nSOLVER: {BASE_LR: 5.0}\n"
    )
    settings = {**SETTINGS, "yaml": str(tmp_path / "mine.yaml"), "steps": 1, "precise_batches": 0}
    result = transfer("detect", model=narrow, dataset=str(ten), settings=settings, out=tmp_path / "out")
    assert result["details"]["detectron2"]["yaml_changes"] == {"MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.2}
    assert result["protocol"]["yaml"]["name"] == "mine.yaml"
    assert any(
        "MODEL.WEIGHTS" in r.getMessage() and "SOLVER.BASE_LR" in r.getMessage() for r in caplog.records
    )
    assert lines(tmp_path / "out")[0]["lr"] < 1


def test_networks_that_detectron2_cant_build(small, ten, tmp_path, command):
    words = ("transfer", "detect", "--engine", "detectron2", "--dataset", ten, "--out", tmp_path / "out")
    assert_clear(command(*words, "--model", small), "usual width only", "--engine torchvision")
    words = (*words, "--model", "random:resnet18")
    assert_clear(command(*words, "--head", "c4"), "bottlenecks", "--head fpn")
    assert_clear(command(*words, "--head", "detr"), "no DETR")
    assert_clear(command(*words, "--head", "fpn", "--precision", "bfloat16"), "bfloat16", "float32")
    assert_clear(command(*words, "--yaml", tmp_path / "none.yaml"), "no such file", "none.yaml")
    assert not (tmp_path / "out").exists()
    assert precision_for("auto", torch.device("cpu")) == "float32"
    assert precision_for("float16", torch.device("cuda", 0)) == "float16"


@pytest.mark.parametrize(
    "value",
    [
        {"model": {"stem.conv1.weight": [1.0, 2.0], "res2.0.conv1.weight": "text"}, "__author__": "me"},
        [1, 2, 3],
        {"model": Objects, "__author__": "me"},
    ],
    ids=["lists", "a list", "a class"],
)
def test_a_pickle_that_isnt_one_of_arrays(ten, tmp_path, command, value):
    import pickle

    (tmp_path / "it.pkl").write_bytes(pickle.dumps(value))
    words = ("transfer", "detect", "--engine", "detectron2", "--dataset", ten, "--out", tmp_path / "out")
    assert_clear(command(*words, "--model", tmp_path / "it.pkl"), "it.pkl")


def test_yaml_where_there_are_no_settings(narrow, tmp_path):
    with pytest.raises(InputError, match="no settings"):
        convert(narrow, to="torchvision", out=tmp_path / "it.pth", yaml=True)
    (tmp_path / "it.yaml").write_text("mine")
    with pytest.raises(InputError, match="settings would be written"):
        convert(narrow, to="detectron2", out=tmp_path / "it.pkl", yaml=True)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["it.yaml"]
    done = convert(narrow, to="detectron2", out=tmp_path / "it.pkl", yaml=True, force=True)
    assert done.yaml == tmp_path / "it.yaml" and "PIXEL_STD" in done.yaml.read_text()
    assert done.to_json()["yaml"] == str(done.yaml) and len(done.usage) == 5


# --- one table ---


@pytest.mark.parametrize("head", ["c4", "mask-fpn"])
def test_both_engines_train_alike(narrow, ten, shared, tmp_path, head):
    """The same model, data, schedule and seed: the losses of the first iterations side by side.

    They stay together until rounding decides whether one more region is a candidate (``benchmarks/two_engines.py``).
    """
    data = ten if head == "c4" else shared / "data" / "coco_like"
    settings = {
        **SETTINGS,
        "head": head,
        "steps": 2,
        "limit": 4,
        "precision": "float32",
        "method": "moco",
    }
    settings |= {"schedule": "24k" if head == "c4" else "1x", "batch_size": 2, "precise_batches": 0}
    found = {}
    for engine in ("torchvision", "detectron2"):
        chosen, out = {**settings, "engine": engine}, tmp_path / engine
        transfer("detect", model=narrow, dataset=str(data), settings=chosen, out=out)
        found[engine] = lines(out)
    for own, there in zip(found["torchvision"], found["detectron2"], strict=True):
        names = [name for name in there if name == "loss" or name.startswith("loss_")]
        assert len(names) == (6 if head == "mask-fpn" else 5)
        for name in names:
            assert own[name] == pytest.approx(there[name], rel=1e-5, abs=1e-6), (own["step"], name)
        assert own["lr"] == pytest.approx(there["lr"], rel=1e-6)
