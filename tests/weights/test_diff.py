"""``zoo diff``: nothing that differs is passed over, nothing that is alike is reported."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from zoo.diff import diff
from zoo.pretrain.publish import publish_run
from zoo.weights.bundle import read_bundle, write_bundle

from .published import assert_clear, bundle_at, describe, publish, weights_of


def write(folder, what, trunk, heads=None, classifier=None):
    folder.mkdir()
    return str(write_bundle(folder, what, trunk, heads or {}, "# A card\n", classifier).path)


def save(path, value):
    torch.save(value, path)
    return str(path)


def test_the_same_is_identical(tmp_path):
    publish("me/one", tag="v1")
    folder = str(bundle_at(tmp_path / "a").path)
    for first, second in (("me/one", "me/one@v1"), ("me/one", folder), (folder, folder)):
        found = diff(first, second)
        assert found.identical and found.sha256[0] == found.sha256[1]
        assert found.sha256[0] == read_bundle(tmp_path / "a").weights_sha256
        assert sum(part.equal for part in found.parts) == 120 and not any(
            part.different for part in found.parts
        )
        assert found.worst == [] and found.known == {}


def test_containers_and_wrappers_are_no_difference(tmp_path):
    trunk = weights_of(describe(method="unknown"), 1)
    plain = save(tmp_path / "a.pth", trunk)
    wrapped = save(
        tmp_path / "b.pth", {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in trunk.items()}}
    )
    found = diff(plain, wrapped)
    assert found.identical
    # What only a bundle knows of itself is no difference either, but its preprocessing is another one here.
    bundle = write(tmp_path / "c", describe(licence="mit"), trunk)
    assert diff(plain, bundle).known.keys() == {"preprocessing.resize", "preprocessing.crop"}
    assert diff(plain, bundle).sha256[0] == diff(plain, bundle).sha256[1]


def test_a_changed_value_is_found_and_measured(tmp_path):
    first = weights_of(describe())
    second = {name: value.clone() for name, value in first.items()}
    second["layer3.0.conv2.weight"][1, 2, 0, 1] += 0.5
    second["layer1.0.bn1.bias"][0] = 3.0
    second["bn1.num_batches_tracked"] += 7
    found = diff(save(tmp_path / "a.pth", first), save(tmp_path / "b.pth", second))
    assert not found.identical and found.sha256[0] != found.sha256[1] and found.known == {}
    assert (found.only_first, found.only_second, found.shapes, found.dtypes) == ([], [], [], [])
    parts = {part.name: part for part in found.parts}
    assert {name: part.different for name, part in parts.items()} == {
        "stem": 1, "layer1": 1, "layer2": 0, "layer3": 1, "layer4": 0,
    }  # fmt: skip
    worst = {each.name: each for each in found.worst}
    assert set(worst) == {"layer3.0.conv2.weight", "layer1.0.bn1.bias", "bn1.num_batches_tracked"}
    weight = first["layer3.0.conv2.weight"].double()
    each = worst["layer3.0.conv2.weight"]
    assert each.max_abs == pytest.approx(0.5, rel=1e-6)
    assert each.relative == pytest.approx(0.5 / float(weight.norm()), rel=1e-6)
    angle = torch.cosine_similarity(weight.flatten(), second["layer3.0.conv2.weight"].double().flatten(), 0)
    assert each.cosine == pytest.approx(float(angle), rel=1e-9)
    assert (
        worst["layer1.0.bn1.bias"].max_abs == 3.0 and worst["layer1.0.bn1.bias"].relative is None
    )  # it was zero
    assert parts["layer3"].max_abs == pytest.approx(0.5, rel=1e-6) and 0 < parts["layer3"].relative < 0.1
    assert parts["layer4"].relative == 0 and parts["layer4"].cosine == pytest.approx(1)


def test_the_worst_come_first(tmp_path):
    first = weights_of(describe())
    second = {name: value.clone() for name, value in first.items()}
    for factor, name in (
        (1.5, "layer1.0.conv1.weight"),
        (-1.0, "layer2.0.conv1.weight"),
        (1.1, "conv1.weight"),
    ):
        second[name] *= factor
    second["bn1.num_batches_tracked"] += 1000  # which are not what a network computes with
    found = diff(save(tmp_path / "a.pth", first), save(tmp_path / "b.pth", second), worst=2)
    assert [each.name for each in found.worst] == ["layer2.0.conv1.weight", "layer1.0.conv1.weight"]
    assert found.worst[0].cosine == pytest.approx(-1) and found.worst[0].relative == pytest.approx(2)


def test_heads_and_classifiers_count(tmp_path):
    trunk, what = weights_of(describe()), describe(num_classes=3)
    classifier = {"weight": torch.ones(3, 64), "bias": torch.zeros(3)}
    first = write(tmp_path / "a", what, trunk, {"prototypes.weight": torch.ones(3, 2)}, classifier)
    second = write(tmp_path / "b", describe(), trunk, {"prototypes.weight": torch.ones(4, 2)})
    found = diff(first, second)
    assert sorted(found.only_first) == ["classifier.bias", "classifier.weight"] and found.only_second == []
    assert found.shapes == [("heads.prototypes.weight", [3, 2], [4, 2])]
    assert found.sha256[0] == found.sha256[1] and not found.identical  # the trunk is the same
    assert diff(second, first).only_second == found.only_first


def test_types_differ(tmp_path):
    trunk = weights_of(describe())
    first = write(tmp_path / "a", describe(), trunk, {"queue": torch.ones(2, dtype=torch.float16)})
    second = write(tmp_path / "b", describe(), trunk, {"queue": torch.ones(2)})
    found = diff(first, second)
    assert found.dtypes == [("heads.queue", "float16", "float32")] and not found.identical
    half = {name: value.half() if value.is_floating_point() else value for name, value in trunk.items()}
    found = diff(save(tmp_path / "a.pth", trunk), save(tmp_path / "b.pth", half))
    assert found.known == {"stored as": (["float32"], ["float16"])}
    assert 0 < found.worst[0].relative < 1e-3


def test_other_networks_differ_in_keys_and_shapes(tmp_path):
    first = save(tmp_path / "a.pth", weights_of(describe()))
    second = save(tmp_path / "b.pth", weights_of(describe(arch="resnet34", base_planes=4)))
    found = diff(first, second)
    assert found.known == {"network": ("resnet18 (base_planes 8)", "resnet34 (base_planes 4)")}
    assert "layer1.2.conv1.weight" in found.only_second and found.only_first == []
    assert ("conv1.weight", [8, 3, 7, 7], [4, 3, 7, 7]) in found.shapes
    shared = [part for part in found.parts if part.name == "stem"]
    assert shared[0].equal == 1  # the counter


def test_numbers_that_are_none(tmp_path):
    first = weights_of(describe())
    first["bn1.bias"][0] = math.nan
    second = {name: value.clone() for name, value in first.items()}
    places = save(tmp_path / "a.pth", first), save(tmp_path / "b.pth", second)
    assert diff(*places).identical  # the same bits
    second["bn1.bias"][1] = 1.0
    found = diff(places[0], save(tmp_path / "b.pth", second))
    assert (found.worst[0].name, found.worst[0].max_abs, found.worst[0].cosine) == ("bn1.bias", None, None)
    assert next(part for part in found.parts if part.name == "stem").max_abs is None
    json.dumps(found.to_json(), allow_nan=False)


def test_what_they_say_of_themselves(tmp_path):
    trunk = weights_of(describe())
    how = {**describe().preprocessing, "crop": 24}
    recipe = {"name": "swav_tiny", "epochs": 2, "optimizer": {"lr": 0.1}}
    one = describe(recipe=recipe, licence="mit", preprocessing=how)
    two = describe(
        recipe={**recipe, "optimizer": {"lr": 0.3}, "seed": 1}, licence="apache-2.0", method="moco"
    )
    found = diff(write(tmp_path / "a", one, trunk), write(tmp_path / "b", two, trunk))
    assert found.known == {
        "method": ("swav", "moco"),
        "licence": ("mit", "apache-2.0"),
        "preprocessing.crop": (24, 32),
        "recipe.optimizer.lr": (0.1, 0.3),
        "recipe.seed": (None, 1),
    }
    assert not found.identical
    unknown = dataclasses.replace(two, recipe={}, licence="unspecified", method="unknown", preprocessing=how)
    assert diff(str(tmp_path / "a"), write(tmp_path / "c", unknown, trunk)).identical


def test_a_run_and_what_was_published_of_it_are_identical(run):
    publish_run(run, name="me/run")
    assert diff(str(run), "me/run").identical


def test_amdim_has_its_own_stages(tmp_path):
    from zoo.models.factory import create_trunk

    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 1}
    what = describe(arch="amdim", base_planes=None, num_features=16, options=options)
    folder = write(tmp_path / "a", what, create_trunk("amdim", options=options).state_dict())
    names = [part.name for part in diff(folder, folder).parts]
    assert "layer_list.0" in names and "rkhs_block_5" in names


# --- the command ---


def test_the_exit_code_is_that_of_diff(command, tmp_path):
    publish("me/one")
    publish("me/two", seed=1, what=describe(licence="mit"))
    code, out, err = command("diff", "me/one", "me/one")
    assert (code, err) == (0, "") and "identical" in out
    code, out, err = command("diff", "me/one", "me/two")
    assert (code, err) == (1, "")
    assert "Values by stage" in out and "layer4" in out and "Tensors that differ most" in out
    answer = json.loads(command("diff", "me/one", "me/two", "--json")[1])
    assert answer["schema"] == 1 and answer["identical"] is False and len(answer["worst"]) == 8
    assert answer["known"] == {} and {"name", "equal", "different"} <= set(answer["parts"][0])
    code, out, err = command("diff", "me/one", "me/one", "--json")
    assert code == 0 and json.loads(out)["identical"]


def test_long_lists_are_cut_on_the_screen_only(command, tmp_path):
    first = save(tmp_path / "a.pth", weights_of(describe()))
    second = save(tmp_path / "b.pth", weights_of(describe(arch="resnet34")))
    code, out, _ = command("diff", first, second)
    assert code == 1 and "Only in B (96)" in out and "... and 86 more" in out
    assert len(json.loads(command("diff", first, second, "--json")[1])["only_second"]) == 96


def test_bad_input(command, tmp_path):
    publish("me/one")
    assert_clear(command("diff", "me/one", "me/none"), "me/none")
    assert_clear(command("diff", "random:resnet18", "me/one"), "random:resnet18")
    (tmp_path / "x.pth").write_text("<html>")
    assert_clear(command("diff", "me/one", tmp_path / "x.pth"), "x.pth", "HTML")
