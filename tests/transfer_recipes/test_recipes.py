"""kNN, linear and semi-supervised: right numbers, an untouched trunk, and a result with its evidence."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from tiny import image_folder
from transfer import RECIPES
from transfer.results import list_results, results_of
from transfer.run import open_context, transfer
from weights.published import names_no_place
from zoo.errors import InputError, RunError

FAST = {
    "knn": {},
    "linear": {"epochs": 60},
    "semisup": {"fraction": 0.5, "epochs": 2, "batch_size": 6, "lr": 0.001},
}


def fingerprint(module):
    """Every parameter and every buffer, by name and bytes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("knn", {"k": [1, 5]}),
        ("linear", {"epochs": 5}),
        ("linear", {"protocol": "swav", "epochs": 2, "lr": [0.1], "batch_size": 12}),
        (
            "linear",
            {"epochs": 2, "stages": ["layer1", "layer3", "final"], "norm": ["none", "batch"], "views": 1},
        ),
    ],
)
def test_a_frozen_trunk_stays_as_it_was(small, greys, recipe, settings):  # case 32
    where = open_context(small, str(greys))
    where.trunk.train()
    before = fingerprint(where.trunk)
    config = RECIPES.config(recipe).model_validate(settings)
    metrics = RECIPES.code(recipe)(where, config)["metrics"]
    assert fingerprint(where.trunk) == before
    assert where.trunk.training
    assert all(p.grad is None for p in where.trunk.parameters())
    assert metrics["top1"] > 0.5


def test_the_fingerprint_of_a_trunk_sees_its_statistics(small):
    trunk = zoo.load(small, progress=False)
    other = copy.deepcopy(trunk)
    other.bn1.running_mean += 1e-6
    assert fingerprint(other) != fingerprint(trunk)


@pytest.mark.parametrize("recipe", list(FAST))
def test_a_result_holds_its_evidence(small, greys, recipe, tmp_path):
    result = transfer(recipe, model=small, dataset=str(greys), settings=FAST[recipe], out=tmp_path / "out")
    assert result["path"] == str(tmp_path / "out" / "result.json")
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written == {"schema": 1, **{key: value for key, value in result.items() if key != "path"}}
    assert set(written) == {
        "schema",
        "recipe",
        "model",
        "weights_sha256",
        "trained",
        "dataset",
        "metrics",
        "intervals",
        "protocol",
        "preprocessing",
        "seeds",
        "data",
        "details",
        "versions",
        "machine",
        "seconds",
        "created",
    }
    assert written["recipe"] == recipe and written["dataset"] == "greys"
    config = RECIPES.config(recipe)(**FAST[recipe])
    settled = {"knn": lambda: config, "linear": lambda: config.settled(36)}.get(
        recipe, lambda: config.settled(18, 0.5)
    )()
    assert written["protocol"] == settled.model_dump(mode="json")
    assert written["protocol"].get("protocol") in (None, "cached", "small")
    for name in ("top1", "top5"):
        low, high = written["intervals"][name]
        assert 0 <= low <= written["metrics"][name] <= high <= 1
    hashes = written["data"]["split_sha256"]
    assert len(hashes["train"]) == len(hashes["val"]) == 64 and hashes["train"] != hashes["val"]
    if recipe != "semisup":
        trunk = written["details"]["trunk_sha256"]
        assert trunk["before"] == trunk["after"] == written["weights_sha256"]
    assert written["seeds"] == [0]
    assert written["weights_sha256"] == zoo.load(small, progress=False).zoo_info["weights_sha256"]
    assert written["data"]["classes"] == 3 and written["data"]["class_names"] == ["a", "b", "c"]
    assert written["data"]["train"]["count"] == 36 and written["data"]["val"]["count"] == 12
    assert written["data"]["train"]["sha256"] != written["data"]["val"]["sha256"]
    assert written["data"]["overlap"] == "none"
    assert written["versions"]["torch"] and written["versions"]["zoo"]
    assert written["seconds"] > 0 and written["created"].endswith("Z")
    assert 0 <= written["metrics"]["top1"] <= 1
    again = transfer(recipe, model=small, dataset=str(greys), settings=FAST[recipe], out=tmp_path / "again")
    assert again["metrics"] == result["metrics"]


@pytest.mark.parametrize("recipe", ["knn", "linear"])
@pytest.mark.parametrize("model", ["pixels:8", "random:resnet18@1"])
def test_easy_pictures_are_told_apart_by_anything(greys, recipe, model):
    result = transfer(recipe, model=model, dataset="g", data=str(greys), settings=FAST[recipe], **size(model))
    assert result["metrics"]["top1"] >= 0.9
    assert result["model"].startswith(model)


def size(model):
    return {} if model.startswith("pixels") else {"resize": 16, "crop": 16}


def test_pictures_without_a_rule_are_told_apart_by_chance(tmp_path):
    image_folder(tmp_path / "train", 96, 4, 16)
    # Other pictures: 96 apart in the seed, so that none is in both.
    for index in range(96):
        rng = np.random.default_rng(1000 + index)
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        place = tmp_path / "val" / f"class{index % 4}"
        place.mkdir(parents=True, exist_ok=True)
        coarse.resize((16, 16), Image.Resampling.BICUBIC).save(place / f"{index}.png")
    for recipe in ("knn", "linear"):
        result = transfer(recipe, model="pixels:8", dataset=str(tmp_path), settings=FAST[recipe])
        # 96 guesses among four: 0.25 with a deviation of 0.044.
        assert 0.10 < result["metrics"]["top1"] < 0.40
        assert "diverged" not in result["details"] or not result["details"]["diverged"]


def test_several_k_at_once(small, greys):
    metrics = transfer("knn", model=small, dataset=str(greys), settings={"k": [1, 5, 200]})["metrics"]
    assert set(metrics) == {f"{top}{k}" for top in ("top1", "top5") for k in ("", "_k1", "_k5", "_k200")}
    assert metrics["top1"] == metrics["top1_k1"]
    settings = {"k": 1, "temperature": [0.1, 1.0]}
    metrics = transfer("knn", model=small, dataset=str(greys), settings=settings)["metrics"]
    assert set(metrics) == {f"{top}{t}" for top in ("top1", "top5") for t in ("", "_t0.1", "_t1")}


def test_the_linear_recipe_chooses_without_the_test_images(small, greys):
    """Other test pictures: the same choice."""
    settings = {"epochs": 5, "lr": [0.001, 0.1], "weight_decay": [0.0, 1e-4]}
    where = open_context(small, str(greys))
    config = RECIPES.config("linear").model_validate(settings)
    first = RECIPES.code("linear")(where, config)
    assert first["chosen"]["lr"] in (0.001, 0.1) and first["chosen"]["weight_decay"] in (0.0, 1e-4)
    other = open_context(small, str(greys))
    other.labelled = dataclasses.replace(other.labelled, val=other.train)
    assert RECIPES.code("linear")(other, config)["chosen"] == first["chosen"]


def test_a_training_that_diverges_is_flagged_and_written(noise, tmp_path):
    settings = {"lr": [1e6], "epochs": 3}
    with pytest.raises(RunError, match="diverged") as caught:
        transfer("linear", model="pixels:1", dataset=str(noise), settings=settings, out=tmp_path / "out")
    assert "lr" in caught.value.fix and caught.value.exit_code == 1
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["details"]["diverged"] is True
    assert caught.value.where == str(tmp_path / "out" / "result.json")


def test_a_fine_tuning_that_diverges_is_flagged_and_written(small, greys, tmp_path):
    settings = {**FAST["semisup"], "lr": 1e30, "lr_head": 1e30}
    with pytest.raises(RunError, match="diverged"):
        transfer("semisup", model=small, dataset=str(greys), settings=settings, out=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["details"]["diverged"] is True and written["metrics"]["train_loss"] is None


def test_semisup_uses_a_balanced_share_and_says_that_the_head_went(small, greys):
    settings = {**FAST["semisup"], "fraction": 0.25}
    result = transfer("semisup", model=small, dataset=str(greys), settings=settings)
    assert result["details"]["labelled_images"] == 9
    assert "dropped, as expected" in result["details"]["head"]
    assert math.isfinite(result["metrics"]["train_loss"])


def test_semisup_takes_a_list_of_labelled_images(small, greys, tmp_path):  # case 58
    where = open_context(small, str(greys))
    paths = [Path(where.train.where(index)) for index in (0, 5, 7, 2)]
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    listed = tmp_path / "10percent.txt"
    listed.write_text("\n".join(names) + "\n\n")
    settings = {**FAST["semisup"], "labels": str(listed)}
    result = transfer("semisup", model=small, dataset=str(greys), settings=settings)
    assert result["details"]["labelled_images"] == 4
    digest = hashlib.sha256(listed.read_bytes()).hexdigest()
    assert result["protocol"]["labels"] == {"name": "10percent.txt", "sha256": digest}  # no path is published
    listed.write_text(f"{names[0]}\nn01440764_1.JPEG\nn01440764_2.JPEG\n")
    with pytest.raises(InputError, match=r"2 of 3 listed images .* n01440764_1\.JPEG") as caught:
        transfer("semisup", model=small, dataset=str(greys), settings=settings)
    assert caught.value.where == str(listed)
    listed.write_text(f"{paths[0].name}\n")
    with pytest.raises(InputError, match="Several training images"):
        transfer("semisup", model=small, dataset=str(greys), settings=settings)
    for text in (None, "\n"):
        listed.unlink() if text is None else listed.write_text(text)
        with pytest.raises(InputError, match="list of labelled images"):
            transfer("semisup", model=small, dataset=str(greys), settings=settings)


def test_semisup_trains_everything_with_two_rates(small, greys):
    where = open_context(small, str(greys))
    before = {name: value.clone() for name, value in where.trunk.named_parameters()}
    config = RECIPES.config("semisup").model_validate({**FAST["semisup"], "lr": 0.01})
    RECIPES.code("semisup")(where, config)
    after = dict(where.trunk.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert after["fc.weight"].shape == (3, 64)
    still = open_context(small, str(greys))
    RECIPES.code("semisup")(still, RECIPES.config("semisup").model_validate({**FAST["semisup"], "lr": 1e-30}))
    assert torch.equal(dict(still.trunk.named_parameters())["conv1.weight"], before["conv1.weight"])


def test_raw_pixels_can_not_be_fine_tuned(greys):
    with pytest.raises(InputError, match="nothing to fine-tune"):
        transfer("semisup", model="pixels:8", dataset=str(greys))


def test_what_is_wrong_is_said_before_any_work(small, greys):
    with pytest.raises(InputError, match="no transfer recipe") as caught:
        transfer("lienar", model=small, dataset=str(greys))
    assert "did you mean linear" in caught.value.fix
    with pytest.raises(InputError) as caught:
        transfer("knn", model=small, dataset=str(greys), settings={"temprature": 1})
    assert "temperature" in caught.value.fix
    with pytest.raises(InputError, match="The value -1 doesn't fit"):
        transfer("knn", model=small, dataset=str(greys), settings={"temperature": -1})
    with pytest.raises(InputError, match="larger than the resized"):
        transfer("knn", model=small, dataset=str(greys), resize=16, crop=24)
    for model in ("pixels:x", "pixels:0", "pixels:"):
        with pytest.raises(InputError, match="side in pixels"):
            transfer("knn", model=model, dataset=str(greys))
    with pytest.raises(InputError):
        transfer("knn", model="me/none", dataset=str(greys))


def test_results_are_found_again_by_the_weights(run, small, greys, tmp_path):
    mine = transfer("knn", model=str(run), dataset=str(greys), resize=16, crop=16)
    other = transfer("knn", model=small, dataset=str(greys))
    found = list_results()
    assert [result["model"] for result in found].count(mine["model"]) == 1 and len(found) == 2
    (tmp_path / "results" / "bad").mkdir()
    (tmp_path / "results" / "bad" / "result.json").write_text("{")
    (tmp_path / "results" / "future").mkdir()
    (tmp_path / "results" / "future" / "result.json").write_text('{"schema": 2}')
    (tmp_path / "results" / "partial").mkdir()
    (tmp_path / "results" / "partial" / "result.json").write_text('{"schema": 1}')
    (public,) = results_of(mine["weights_sha256"])
    assert public["metrics"] == mine["metrics"]
    names_no_place(json.dumps([public, *results_of(other["weights_sha256"])]), tmp_path, run, greys)


def test_every_recipe_is_where_it_is_said_to_be():
    for name, entry in RECIPES.items():
        assert RECIPES.config(name)().seed == 0 and callable(RECIPES.code(name)) and entry.summary


@pytest.mark.parametrize("unfair", [{"allow_overlap": True}, {"limit": 8}, {"test_on_train": True}])
def test_what_flatters_stays_out_of_the_card(tmp_path, monkeypatch, unfair):
    monkeypatch.setenv("ZOO_RESULTS", str(tmp_path / "results"))
    for name, protocol in (("fair", {"seed": 0}), ("unfair", {"seed": 0, **unfair})):
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        result = {"schema": 1, "recipe": name, "model": "x", "weights_sha256": "w", "protocol": protocol}
        (folder / "result.json").write_text(json.dumps(result))
    assert [result["recipe"] for result in results_of("w")] == ["fair"]


def test_a_data_set_that_numbers_its_classes():
    from zoo.data.named import TorchvisionImages

    class Numbers:
        labels = np.array([0, 2, 1, 2])

        def __len__(self):
            return 4

    source = TorchvisionImages("svhn", Numbers(), "val")
    assert source.classes == ("0", "1", "2") and source.label(1) == 2
    assert source.fingerprint()["split"] == "val"


def test_detection_says_which_options_it_lacks(small):
    with pytest.raises(InputError, match="no resize"):
        transfer("detect", model=small, dataset="builtin:photos-voc", resize=64)


def test_a_recipe_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_RESULTS", str(tmp_path / "results"))
    with pytest.raises(InputError):
        transfer("knn", model="me/nothing", dataset="builtin:photos")
    assert list((tmp_path / "results").iterdir()) == []
