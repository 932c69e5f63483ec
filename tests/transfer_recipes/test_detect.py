"""The detection recipe from end to end: trained, scored, resumed, stopped, predicted from."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from transfer.detect.judge import _ByVoc
from transfer.detect.models.images import Target
from transfer.detect.protocols import choose_protocol
from transfer.detect.run import detector_for
from transfer.detect.saved import load_detector
from transfer.detect.training import Normalisation, make_images
from transfer.run import transfer
from weights.published import assert_clear, bundle_at
from zoo.engine.loop import Loop
from zoo.engine.precision import Precision
from zoo.errors import InputError, RunError, Stopped
from zoo.models.factory import create_trunk
from zoo.pretrain.rundir import RunLock
from zoo.tensors import read_safetensors

STEPS = {"steps": 4, "min_size": 64, "max_size": 96, "limit": 2, "precise_batches": 2, "save_every": 2}
STEPS |= {"precision": "float32"}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Enough training images that each class is among them."""
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 4})


@pytest.fixture
def judged(small, tmp_path):
    def run(name, **settings):
        return transfer(
            "detect",
            model=small,
            dataset="builtin:photos-voc",
            settings={**STEPS, **settings},
            out=tmp_path / name,
        )

    return run


def weights(folder):
    return read_safetensors(folder / "run-0" / "detector" / "detector.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_from_end_to_end(small, judged, tmp_path):
    result = judged("a")
    assert 0 <= result["metrics"]["AP50"] <= 1 and 0 <= result["metrics"]["AP"] <= 1
    assert math.isfinite(result["metrics"]["train_loss"])
    assert result["data"]["train"]["count"] == 2 and result["data"]["test"]["split"] == "test"
    assert result["weights_sha256"] == zoo.load(small, progress=False).zoo_info["weights_sha256"]
    details = result["details"]
    assert details["scored_on"] == "test" and details["average_precision"].startswith("area")
    assert len(details["per_class"]) == result["data"]["classes"] == 6 and details["other_ap"][
        "11-point"
    ].keys() == {
        "AP",
        "AP50",
        "AP75",
    }
    assert not (tmp_path / "a" / "run-0" / "checkpoints").exists()
    assert judged("b")["metrics"] == result["metrics"] and same(
        weights(tmp_path / "a"), weights(tmp_path / "b")
    )
    # The same call in the same folder only reads what is there.
    stamp = (tmp_path / "a" / "run-0" / "metrics.jsonl").stat().st_mtime_ns
    assert judged("a")["metrics"] == result["metrics"]
    assert (tmp_path / "a" / "run-0" / "metrics.jsonl").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="Another training was begun"):
        judged("a", lr=0.5)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["result.json", "run-0"]


def test_two_processes_never_train_in_one_folder(judged, tmp_path):
    (tmp_path / "a").mkdir()
    with RunLock(tmp_path / "a"), pytest.raises(RunError, match=f"pid {os.getpid()}"):
        judged("a")
    assert not (tmp_path / "a" / "run-0").exists()


def test_what_fails_while_detecting_or_after_it_is_made_up_for(judged, tmp_path, monkeypatch):
    folder, add, calls = tmp_path / "part" / "run-0", _ByVoc.add, []

    def fail(*_):
        raise ZeroDivisionError

    def fail_at_the_second(self, images, found):
        calls.append(len(images))
        return add(self, images, found) if len(calls) < 2 else fail()

    monkeypatch.setattr("transfer.detect.judge._TOGETHER", 1)
    with monkeypatch.context() as patch:
        patch.setattr(_ByVoc, "add", fail_at_the_second)
        with pytest.raises(ZeroDivisionError):
            judged("part")
    assert not [path for path in folder.iterdir() if "detections" in path.name]
    with monkeypatch.context() as patch:
        patch.setattr("transfer.detect.run.save_detector", fail)
        with pytest.raises(ZeroDivisionError):
            judged("part")
    assert (folder / "checkpoints").is_dir() and not (folder / "scores.json").exists()
    (folder / "detections.json").write_text("[]")  # of whatever age
    again, whole = judged("part"), judged("whole")
    assert again["metrics"] == whole["metrics"]
    for name in ("detections.json", "scores.json", "metrics.jsonl"):
        lines = [(tmp_path / run / "run-0" / name).read_text() for run in ("part", "whole")]
        if name == "metrics.jsonl":  # trained once
            lines = [[json.loads(line)["step"] for line in text.splitlines()] for text in lines]
        assert lines[0] == lines[1]
    assert len(json.loads((folder / "detections.json").read_text())) > 0


def test_a_stopped_training_goes_on_bit_for_bit(judged, tmp_path, monkeypatch):
    whole = judged("whole")
    train = Loop._one_step

    def stop_after_the_third(self, batch, epoch):
        self.halted = self.step == 2
        return train(self, batch, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_one_step", stop_after_the_third)
        with pytest.raises(Stopped, match="saved"):
            judged("part")
    assert (tmp_path / "part" / "run-0" / "checkpoints" / "step-00000003").is_dir()
    assert judged("part")["metrics"] == whole["metrics"]
    assert same(weights(tmp_path / "part"), weights(tmp_path / "whole"))
    lines = (tmp_path / "part" / "run-0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_several_runs_give_mean_and_deviation(judged):
    result = judged("runs", runs=2, steps=1, seed=5)
    runs = result["details"]["runs"]
    assert [run["seed"] for run in runs] == [5, 6]
    losses = [run["train_loss"] for run in runs]
    assert losses[0] != losses[1] and result["metrics"]["train_loss"] == pytest.approx(sum(losses) / 2)
    assert result["details"]["deviation"].keys() == runs[0]["metrics"].keys()


def test_two_processes_are_one_with_the_joint_batch(judged, tmp_path):
    """Rates, draws, norms and divisors are those of the whole batch: only sums are rounded in another order."""
    settings = {"batch_size": 4, "limit": 4, "steps": 3, "lr": 0.02, "warmup_steps": 0}
    alone, together = judged("one", **settings), judged("two", **settings, nproc=2)
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "run-0" / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for a, b in zip(first, second, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=2e-3)
    assert math.isclose(alone["metrics"]["train_loss"], together["metrics"]["train_loss"], rel_tol=2e-3)
    for name, value in weights(tmp_path / "one").items():
        if value.is_floating_point():
            assert torch.allclose(value, weights(tmp_path / "two")[name], rtol=0.02, atol=0.02), name


@pytest.mark.parametrize("head", ["c4", "mask-fpn"])
def test_half_precision_comes_near(head):
    protocol = choose_protocol("own", "own", "", head, "small", masks=True)
    detector = detector_for(create_trunk("resnet50", base_planes=8), protocol, 3, seed=0).train()
    plan = Normalisation((127.0,) * 3, (60.0,) * 3)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 96), dtype=np.uint8))
    outline = [[10.0, 10.0, 50.0, 10.0, 50.0, 60.0]]
    losses = []
    for name in ("float32", "bfloat16"):
        how = Precision(name, torch.device("cpu"))
        target = Target(torch.tensor([[10.0, 10.0, 50.0, 60.0]]), torch.tensor([1]), [outline])
        target.generator = torch.Generator().manual_seed(0)
        with how.autocast():
            terms = detector.losses(make_images(detector, [pixels], plan, how), [target])
        assert all(term.dtype == torch.float32 for term in terms.values())
        sum(terms.values()).backward()
        losses.append({key: float(term.detach()) for key, term in terms.items()})
    assert losses[0].keys() == losses[1].keys() and ("loss_mask" in losses[0]) == (head == "mask-fpn")
    for key, value in losses[0].items():
        # Anchors stay the same samples. Proposals that move a little are others, so their terms are other means.
        close = 0.1 if key.startswith("loss_rpn") else 1.0
        assert losses[1][key] == pytest.approx(value, rel=close, abs=0.02), key
    assert all(p.grad is not None for name, p in detector.named_parameters())


def test_a_detector_that_diverges_is_flagged(judged):
    with pytest.raises(RunError, match="diverged"):
        judged("off", steps=8, lr=1e20, warmup_steps=0)


def test_what_has_no_stages_is_refused(tmp_path):
    with pytest.raises(InputError, match="stages of a ResNet"):
        transfer("detect", model="random:amdim", settings=STEPS, out=tmp_path / "x")


def test_on_the_command_line_and_pictures(command, small, tmp_path):
    flags = [word for key, value in STEPS.items() for word in (f"--{key.replace('_', '-')}", value)]
    words = ("transfer", "detect", "--model", small, *flags, "--test-on-train", "--out", tmp_path / "out")
    code, out, err = command(*words, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["details"]["scored_on"] == "trainval" and answer["dataset"] == "builtin:photos-voc"
    saved = load_detector(tmp_path / "out")
    assert saved.detector.rpn.settings.after == (100, 100) and saved.mean[0] == pytest.approx(123.675)
    pictures = tmp_path / "pictures" / "inner"
    pictures.mkdir(parents=True)
    for name in ("a.jpg", "b.png"):
        pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / name)
    words = ("predict", tmp_path / "out", pictures.parent, "-o", tmp_path / "drawn", "--score", 0)
    code, out, err = command(*words, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert [image["image"] for image in answer["images"]] == ["inner/a.jpg", "inner/b.png"]
    assert set(answer["images"][0]["labels"]) <= set(saved.classes)
    written = json.loads((tmp_path / "drawn" / "predictions.json").read_text())
    assert written["images"] == answer["images"]
    drawn = np.asarray(Image.open(tmp_path / "drawn" / "inner" / "a.png"))
    assert drawn.shape == (50, 70, 3)
    assert answer["images"][0]["boxes"] == [] or (drawn != np.asarray(Image.open(pictures / "a.jpg"))).any()
    assert_clear(command("predict", tmp_path / "none", pictures, "-o", tmp_path / "x"), "No trained detector")
    assert_clear(
        command("predict", tmp_path / "out", tmp_path / "nothing", "-o", tmp_path / "x"), "no picture"
    )
    (tmp_path / "out/run-0/detector/detector.safetensors").write_bytes(b"damaged")
    assert_clear(
        command("predict", tmp_path / "out", pictures, "-o", tmp_path / "x"), "not a whole safetensors"
    )


def test_masks_are_trained_scored_and_drawn(shared, command, tmp_path):
    model = str(bundle_at(tmp_path / "model").path)
    flags = ("--steps", 1, "--min-size", 64, "--max-size", 96, "--limit", 2, "--precise-batches", 1)
    words = (
        "transfer",
        "detect",
        "--model",
        model,
        "--dataset",
        "coco2017",
        "--data",
        shared / "data" / "coco_like",
    )
    code, out, err = command(*words, *flags, "--schedule", "small", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert {"AP", "AR100", "mask_AP", "mask_AR100"} <= answer["metrics"].keys()
    assert answer["details"]["trained_by"]["head"] == "mask-fpn" and answer["data"]["category_ids"][-1] == 90
    kept = json.loads((tmp_path / "out" / "run-0" / "detections.json").read_text())
    assert all(one["category_id"] in answer["data"]["category_ids"] for one in kept)
    picture = next((shared / "data" / "coco_like" / "val2017").glob("*.jpg"))
    code, out, err = command(
        "predict", tmp_path / "out", picture, "-o", tmp_path / "drawn", "--score", 0, "--json"
    )
    assert code == 0, err
    image = json.loads(out)["images"][0]
    assert len(image["masks"]) == len(image["boxes"]) == len(image["category_ids"])
