"""Starting from a trained detector, and what can be got wrong before one is built."""

from __future__ import annotations

import json
import math

import pytest
import torch

from transfer.detect.config import DetectConfig
from transfer.detect.datasets import open_sets, open_together
from transfer.detect.detr.detector import DetrDetector, DetrSettings
from transfer.detect.models.detectors import DetectorSettings, build_detector
from transfer.detect.photos import write_photos_voc
from transfer.detect.saved import SavedDetector, load_detector, save_detector, start_from
from transfer.detect.training import Normalisation
from transfer.detect.worker import main as worker
from transfer.run import transfer
from weights.published import assert_clear, in_fresh_process
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.weights.fill import STANDARD_PREPROCESSING

COLOURS = Normalisation((127.0,) * 3, (60.0,) * 3)
STEPS = {"steps": 1, "min_size": 64, "max_size": 96, "limit": 2, "precise_batches": 1, "precision": "float32"}


def detector_of(head, classes, seed=0, arch="resnet18"):
    torch.manual_seed(seed)
    trunk = create_trunk(arch, base_planes=8)
    if head == "detr":
        return DetrDetector(trunk, DetrSettings(classes, queries=5, width=32, hidden=16, layers=1))
    return build_detector(trunk, DetectorSettings(head, classes))


def kept_at(folder, detector, classes, colours=COLOURS):
    saved = SavedDetector(detector, classes, (), colours.mean, colours.std, 240, 480)
    save_detector(folder, saved, "resnet18")
    return folder


def equal(state, other, names):
    return all(torch.equal(state[name], other[name]) for name in names)


# --- cases.md [40]: a checkpoint with other classes ---


@pytest.mark.parametrize("head", ["c4", "fpn", "mask-fpn", "detr"])
def test_with_other_classes_only_the_class_layers_are_new_and_named(tmp_path, head):
    trained = detector_of(head, 5, seed=1)
    folder = kept_at(tmp_path / "detector", trained, tuple("abcde"))
    fresh, detector = detector_of(head, 2).state_dict(), detector_of(head, 2)
    said = start_from(detector, ("a", "z"), COLOURS, folder)
    state, theirs = detector.state_dict(), trained.state_dict()
    new = said.split("are new: ")[1].split(", ")
    assert set(new) == {name for name in state if name.startswith(tuple(detector.class_layers))}
    assert {name for name in state if state[name].shape != theirs[name].shape} <= set(new)
    others = [name for name in state if name not in new]
    assert equal(state, theirs, others) and equal(state, fresh, new) and len(others) > 50
    assert "5 other classes" in said
    # As many classes, but others: their layers mean nothing here.
    other = detector_of(head, 5)
    assert "are new" in start_from(other, tuple("vwxyz"), COLOURS, folder)
    assert equal(other.state_dict(), detector_of(head, 5).state_dict(), new)
    same = detector_of(head, 5)
    assert start_from(same, tuple("abcde"), COLOURS, folder).startswith("all ")
    assert equal(same.state_dict(), theirs, theirs)


def test_another_network_or_normalisation_is_refused(tmp_path):
    folder = kept_at(tmp_path / "detector", detector_of("c4", 2), ("a", "b"))
    for other in (detector_of("fpn", 2), detector_of("c4", 2, arch="resnet34")):
        with pytest.raises(InputError, match="another network") as caught:
            start_from(other, ("a", "b"), COLOURS, folder)
        assert "--head" in caught.value.fix
    with pytest.raises(InputError, match="another normalisation"):
        start_from(detector_of("c4", 2), ("a", "b"), Normalisation((0.0,) * 3, (1.0,) * 3), folder)
    with pytest.raises(InputError, match="No trained detector"):
        start_from(detector_of("c4", 2), ("a", "b"), COLOURS, tmp_path / "none")


def test_on_the_command_line_the_optimizer_is_fresh(command, small, tmp_path, monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 8, "test": 4})
    first = transfer(
        "detect", model=small, settings=STEPS, dataset="builtin:photos-voc", out=tmp_path / "first"
    )
    (tmp_path / "mine").mkdir()
    write_photos_voc(tmp_path / "mine")
    for file in (tmp_path / "mine").rglob("*.xml"):  # all objects are of one class
        text = file.read_text()
        for name in first["data"]["class_names"]:
            text = text.replace(f"<name>{name}</name>", "<name>thing</name>")
        file.write_text(text)
    flags = [word for key, value in STEPS.items() for word in (f"--{key.replace('_', '-')}", value)]
    words = ("transfer", "detect", "--model", small, "--dataset", tmp_path / "mine", *flags)
    code, out, err = command(
        *words, "--init-from", tmp_path / "first", "--out", tmp_path / "second", "--json"
    )
    assert code == 0, err
    assert "6 other classes, so these are new: predictor.cls_score.weight, predictor.cls_score.bias" in err
    answer = json.loads(out)
    assert answer["details"]["flatters"].endswith("started from a trained detector")
    assert answer["protocol"]["init_from"] == "first"  # not where it lies
    assert load_detector(tmp_path / "second").classes == ("thing",)
    (line,) = (tmp_path / "second/run-0/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 0 and math.isfinite(json.loads(line)["loss"])
    # Begun from another detector it is another training.
    assert_clear(command(*words, "--out", tmp_path / "second"), "Another training was begun")


# --- cases.md [37]: built from what was saved, in a new process ---


def test_a_saved_detector_is_whole_in_a_new_process(tmp_path):
    torch.manual_seed(0)
    trunk = create_trunk("resnet50", base_planes=4)
    detector = build_detector(trunk, DetectorSettings("c4", 2)).eval()
    saved = SavedDetector(detector, ("a", "b"), (3, 7), COLOURS.mean, COLOURS.std, 240, 480)
    save_detector(tmp_path / "detector", saved, "resnet50")
    code = """
        import sys
        from pathlib import Path
        from transfer.detect.saved import load_detector
        saved = load_detector(Path(sys.argv[1]))
        print(type(saved.detector.norm).__name__, saved.detector.norm.num_features, saved.numbers)
        print(sum(float(value.double().sum()) for value in saved.detector.state_dict().values()))
    """
    norm, total = in_fresh_process(code, tmp_path / "detector").stdout.splitlines()
    assert norm == "BatchNorm2d 128 (3, 7)"
    mine = sum(float(value.double().sum()) for value in detector.state_dict().values())
    assert float(total) == pytest.approx(mine, rel=1e-12)


# --- cases.md [65]: the order of channels ---


def test_the_normalisation_is_the_models_in_rgb(small, tmp_path, monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 8, "test": 4})
    transfer("detect", model=small, settings=STEPS, dataset="builtin:photos-voc", out=tmp_path / "out")
    facts = json.loads((tmp_path / "out/run-0/detector/detector.json").read_text())
    assert facts["channels"] == "RGB"
    for key in ("mean", "std"):
        assert facts[key] == pytest.approx([255 * value for value in STANDARD_PREPROCESSING[key]])


# --- cases.md [14], [15] and what is said before any model is built ---


def test_a_name_that_is_not_known_is_said_in_full_before_any_model_is_looked_for(command, tmp_path):
    words = ("transfer", "detect", "--model", tmp_path / "no-model", "--dataset")
    assert_clear(command(*words, "my_val"), "where: my_val", "known: voc07+12")
    assert_clear(command(*words, "coco2107"), "did you mean coco2017")


def test_what_is_missing_is_listed_before_any_model_is_looked_for(command, tmp_path):
    root = tmp_path / "VOC2007"
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / part).mkdir(parents=True)
    (root / "ImageSets/Main/trainval.txt").write_text("000001\n000002\n")
    words = ("transfer", "detect", "--model", tmp_path / "no-model", "--dataset", tmp_path)
    code, out, err = command(*words, "--test-split", "my_val")
    assert (code, out) == (2, "") and "no-model" not in err and "Traceback" not in err
    for name in ("ImageSets/Main/my_val.txt", "JPEGImages/000001.jpg", "Annotations/000002.xml"):
        assert name in err
    code, _, err = command(*words)
    assert code == 2 and "ImageSets/Main/test.txt" in err


# --- several processes look into the images once ---


class Told(WorldOfOne):
    """The second of two processes, which hears what the first one found."""

    rank, world_size = 1, 2

    def __init__(self, value):
        self.value = value

    def gather_values(self, value):
        return [json.loads(json.dumps(self.value)), value]


def test_the_others_take_the_first_ones_word(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 8, "test": 4})
    write_photos_voc(tmp_path)
    config = DetectConfig(limit=3)
    first = open_sets(str(tmp_path), None, config)
    for file in (tmp_path / "VOC2007/JPEGImages").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)  # who looked into it would see no picture
    second = open_together(str(tmp_path), None, config, Told(first.sizes))
    for mine, theirs in ((first.train, second.train), (first.test, second.test)):
        assert mine.fingerprint() == theirs.fingerprint() and mine.notes == theirs.notes
        assert [p.size for p in mine.pictures] == [p.size for p in theirs.pictures]
    with pytest.raises(InputError, match="The first process can't use the data"):
        open_together(str(tmp_path), None, config, Told(None))
    with pytest.raises(InputError, match="wrong with the data"):
        open_together(str(tmp_path), None, config, WorldOfOne())


def test_what_all_processes_find_is_said_by_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 4})
    monkeypatch.setenv("ZOO_LAUNCH_FOLDER", str(tmp_path))  # as of one group of processes
    work = {
        "reference": "nobody/nothing",
        "dataset": "builtin:photos-voc",
        "data": None,
        "out": str(tmp_path),
    }
    for reference in ("nobody/nothing", "nobody/nothing", "random:amdim"):
        request = {"work": {**work, "reference": reference}, "settings": {}, "sizes": None}
        (tmp_path / "request.json").write_text(json.dumps(request))
        assert worker(str(tmp_path / "request.json")) == 2
    said = capfd.readouterr().err
    assert said.count("where: nobody/nothing") == 1 and said.count("stages of a ResNet") == 1
