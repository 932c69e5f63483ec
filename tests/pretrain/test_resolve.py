"""Recipes: extended, overridden, checked, and every value with its source."""

from __future__ import annotations

import json

import pytest

from zoo.errors import InputError
from zoo.pretrain.resolve import differences, list_recipes, parse_assignments, resolve

PACKAGED = sorted(list_recipes())


def write(folder, name, text):
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_the_packaged_recipes_are_there_and_described():
    assert {"swav_tiny", "swav_rn50_800ep", "swav_rn50_bs256"} <= set(PACKAGED)
    assert all(summary for summary in list_recipes().values())


@pytest.mark.parametrize("name", PACKAGED)
def test_a_recipe_resolves_and_resolves_again_from_its_own_yaml(name, tmp_path):
    resolved = resolve(name, {"seed": 3, "optimizer.weight_decay": 1e-6, "data.sources": ["a: b # ü"]})
    again = resolve(write(tmp_path, "recipe.yaml", resolved.to_yaml()))
    assert again.recipe == resolved.recipe
    assert differences(again.recipe, resolved.recipe) == {}
    assert again.recipe.name == name
    assert (
        again.to_yaml().splitlines()[1].split("  #")[0] == resolved.to_yaml().splitlines()[1].split("  #")[0]
    )


def test_the_released_numbers(shared):
    facts = json.loads((shared / "golden" / "augmentation_facts.json").read_text("utf-8"))
    train, views = facts["swav_train_hparams"], facts["swav_multicrop"]
    large, small = (resolve(name).recipe for name in ("swav_rn50_800ep", "swav_rn50_bs256"))
    for recipe, numbers in (
        (large, train["800ep etc"]),
        (small, {**train["800ep etc"], "start_warmup": 0.0, "batch_total": 256, **train["bs256"]}),
    ):
        assert recipe.optimizer.lr == numbers["base_lr"]
        assert recipe.schedule.final_lr == numbers["final_lr"]
        assert recipe.schedule.start_lr == numbers["start_warmup"]
        assert recipe.schedule.warmup_epochs == numbers["warmup_epochs"]
        assert recipe.optimizer.weight_decay == numbers["wd"]
        assert recipe.batch_size == numbers["batch_total"]
        assert recipe.method.epsilon == numbers["epsilon"]
        assert recipe.method.sinkhorn_iterations == numbers["sinkhorn_iterations"]
        assert recipe.method.temperature == numbers["temperature"]
        assert recipe.method.freeze_prototypes_steps == numbers["freeze_prototypes_niters"]
        assert recipe.method.queue_length == numbers["queue_length"]
        assert (recipe.method.prototypes, recipe.method.hidden, recipe.method.dim) == (3000, 2048, 128)
        assert recipe.optimizer.name == "lars"
        assert recipe.optimizer.momentum == 0.9
        assert recipe.optimizer.exclude_one_dimensional is False
        crops = next(value for key, value in views["crops"].items() if key.startswith("2x224+6x96"))
        assert list(recipe.views.count) == crops["n"]
        assert list(recipe.views.size) == crops["size"]
        assert list(recipe.views.min_scale) == crops["min"]
        assert list(recipe.views.max_scale) == crops["max"]
        assert list(recipe.views.mean) == views["mean"]
        assert list(recipe.views.std) == views["std"]
        assert list(recipe.views.jitter) == list(views["jitter"].values())
        assert list(recipe.views.blur_radius) == views["blur_radius"]
        for key in ("jitter_p", "gray_p", "blur_p", "flip_p"):
            assert getattr(recipe.views, key) == views[key]
        assert recipe.trunk.arch == "resnet50"
    assert small.method.queue_start_epoch == train["bs256"]["epoch_queue_starts"]
    assert large.epochs == 800


def test_extends_overrides_key_by_key_and_keeps_the_sources(tmp_path):
    write(tmp_path, "base.yaml", "extends: swav_tiny\nmethod: {prototypes: 32}\nepochs: 9\n")
    mine = write(tmp_path, "mine.yaml", "extends: base.yaml\nmethod: {dim: 16}\nseed: 4\n")
    resolved = resolve(mine, parse_assignments(["epochs=3", "views.flip_p=0.25"]), {"seed": 5})
    recipe, sources = resolved.recipe, resolved.sources
    assert recipe.name == "mine"
    assert (recipe.method.prototypes, recipe.method.dim, recipe.method.hidden) == (32, 16, 512)
    assert (recipe.epochs, recipe.seed, recipe.views.flip_p) == (3, 5, 0.25)
    assert sources["method.dim"] == str(mine)
    assert sources["method.prototypes"] == str(tmp_path / "base.yaml")
    assert sources["method.hidden"] == "swav_tiny"
    assert sources["method.temperature"] == "swav_rn50_800ep"
    assert sources["epochs"] == "--set"
    assert sources["seed"] == "option"
    lines = resolved.to_yaml().splitlines()
    assert "seed: 5  # option" in lines
    assert "  temperature: 0.1  # swav_rn50_800ep" in lines
    assert "  ratio: [0.75, 1.3333333333333333]  # default" in lines


def test_a_mapping_is_a_recipe_too():
    resolved = resolve({"extends": "swav_tiny", "epochs": 7})
    assert (resolved.recipe.name, resolved.recipe.epochs) == ("custom", 7)
    assert resolved.sources["epochs"] == "given"


def test_values_after_set_are_yaml():
    sets = parse_assignments(
        ["optimizer.lr=1e-3", "views.size=[24, 12]", "trunk.base_planes=null", "data.workers=2", "name=x=y"]
    )
    recipe = resolve("swav_tiny", sets).recipe
    assert recipe.optimizer.lr == 0.001
    assert recipe.views.size == (24, 12)
    assert recipe.trunk.base_planes is None
    assert recipe.data.workers == 2
    assert recipe.name == "x=y"


@pytest.mark.parametrize("pair", ["epochs", "=3", ""])
def test_what_is_no_assignment_is_refused(pair):
    with pytest.raises(InputError, match="key=value"):
        parse_assignments([pair])


def test_a_value_that_is_no_yaml_is_refused():
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {"views.size": "[16, 8"})
    assert "views.size" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epoch", "epochs"),
        ("bach_size", "batch_size"),
        ("method.prototypse", "prototypes"),
        ("method.eps", None),
        ("optimizer.learning_rate", None),
        ("views.sizes", "size"),
        ("trunk.architecture", None),
        ("lr", "optimizer.lr"),
        ("warmup_epochs", "schedule.warmup_epochs"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_meant(key, meant):
    with pytest.raises(InputError, match="unknown key") as caught:
        resolve("swav_tiny", {key: 1})
    assert key in caught.value.where
    assert "--set" in caught.value.where
    assert caught.value.exit_code == 2
    if meant:
        assert f"did you mean {meant}?" in caught.value.fix
    assert "Known here: " in caught.value.fix


def test_an_unknown_key_in_a_file_is_traced_to_it(tmp_path):
    mine = write(tmp_path, "mine.yaml", "extends: swav_tiny\nmethod: {prototypse: 3}\n")
    with pytest.raises(InputError) as caught:
        resolve(mine)
    assert "method.prototypse" in caught.value.where
    assert str(mine) in caught.value.where


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ({"epochs": 0}, ["epochs", "0"]),
        ({"optimizer.lr": -1}, ["optimizer.lr", "-1"]),
        ({"optimizer.name": "adamax"}, ["optimizer.name", "'adamax'"]),
        ({"batch_size": 1}, ["batch_size", "two images or more, not 1"]),
        ({"method.crops_for_assign": [0, 0]}, ["method.crops_for_assign"]),
        ({"views.max_scale": [0.2, 0.3]}, ["views", "32 pixels"]),
        ({"views.jitter": [0.1, 0.1, 0.1, 0.9]}, ["views", "hue"]),
        ({"method": "swav"}, ["method"]),
        ({"optimizer": 3}, ["optimizer"]),
        ({"data.workers": -1}, ["data.workers"]),
        ({"data.on_error": "ignore"}, ["data.on_error", "'ignore'"]),
        ({"schema": 2}, ["schema"]),
    ],
)
def test_a_value_that_does_not_fit_names_its_key(sets, names):
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", sets)
    text = str(caught.value)
    assert all(name in text for name in names)
    assert "pydantic" not in text


@pytest.mark.parametrize("odd", ["count", "size", "min_scale", "max_scale"])
def test_crop_lists_of_unequal_length_name_the_odd_one(odd):
    values = {"count": [2], "size": [16], "min_scale": [0.1], "max_scale": [1.0]}
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {f"views.{odd}": values[odd]})
    assert f"{odd} has 1, the others 2" in str(caught.value)
    for other in set(values) - {odd}:
        assert f"{other} has" not in str(caught.value)


def test_a_key_given_twice_is_refused(tmp_path):
    mine = write(tmp_path, "mine.yaml", "extends: swav_tiny\nmethod:\n  dim: 8\n  dim: 16\n")
    with pytest.raises(InputError, match="'dim' is given twice") as caught:
        resolve(mine)
    assert caught.value.where == str(mine)


def test_anchors_and_merged_keys(tmp_path):
    text = "extends: swav_tiny\noptimizer: &rates {lr: 0.1}\nschedule: {<<: {final_lr: 0.2}, final_lr: 0.3}\n"
    recipe = resolve(write(tmp_path, "mine.yaml", text)).recipe
    assert (recipe.optimizer.lr, recipe.schedule.final_lr) == (0.1, 0.3)


@pytest.mark.parametrize(
    "odd", ["Stra\u00c3\u009fe", "a\x7fb", "a\nb: [", "a\u2028b", "\udcff", "\U000e0001", "\\u0041"]
)
def test_names_that_yaml_would_not_take_come_back(tmp_path, odd):
    mine = resolve({"extends": "swav_tiny", "name": odd}, options={"data.sources": [odd]})
    again = resolve(write(tmp_path, "again.yaml", mine.to_yaml())).recipe
    assert (again.data.sources, again.name) == ((odd,), odd)


def test_recipes_in_a_circle_are_refused(tmp_path):
    a = write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(InputError, match="circle") as caught:
        resolve(a)
    assert "a.yaml" in str(caught.value) and "b.yaml" in str(caught.value)


def test_a_circle_through_other_folders_is_seen_too(tmp_path):
    (tmp_path / "x").mkdir()
    a = write(tmp_path / "x", "a.yaml", "extends: ../x/b.yaml\n")
    write(tmp_path / "x", "b.yaml", "extends: ../x/a.yaml\n")
    with pytest.raises(InputError, match="circle"):
        resolve(a)


def test_a_file_may_be_called_like_the_recipe_it_extends(tmp_path):
    mine = write(tmp_path, "swav_tiny.yaml", "extends: swav_tiny\nepochs: 2\n")
    assert resolve(mine).recipe.epochs == 2


@pytest.mark.parametrize("text", ["[1, 2]", "", "a: [1", "\tx: 1", "a: !!python/object/apply:os.getcwd []"])
def test_a_file_that_is_no_recipe(tmp_path, text):
    with pytest.raises(InputError) as caught:
        resolve(write(tmp_path, "bad.yaml", text))
    assert str(tmp_path / "bad.yaml") in str(caught.value)


def test_a_recipe_that_lacks_a_key(tmp_path):
    with pytest.raises(InputError, match="lacks a key") as caught:
        resolve(write(tmp_path, "bare.yaml", "method: {name: swav}\nepochs: 2\nbatch_size: 4\n"))
    assert "optimizer" in str(caught.value)


def test_unknown_recipes_and_methods_say_what_was_meant(tmp_path):
    with pytest.raises(InputError, match="did you mean swav_tiny"):
        resolve("swav_tinny")
    with pytest.raises(InputError, match=r"can't be read"):
        resolve(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="did you mean swav"):
        resolve("swav_tiny", {"method.name": "swaw"})


def test_differences():
    first, second = (resolve("swav_tiny", sets).recipe for sets in ({}, {"epochs": 9, "method.dim": 4}))
    changed = differences(first, second)
    assert changed == {"method.dim": (128, 4), "epochs": (4, 9)}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer.betas", "[2, 3]", "less than 1"),
        ("views.std", "[0, 0, 0]", "greater than 0"),
        ("views.ratio", "[2, 1]", "smaller to the larger"),
        ("views.blur_radius", "[2, 1]", "smaller to the larger"),
        ("optimizer.lr", ".inf", "finite"),
        ("evaluation.crop", "300", "larger than the resized"),
        ("schedule.warmup_epochs", "1e308", "less than or equal"),
        ("views.jitter", "[1, 1, 1]", "too few values"),
        ("name", "2024-99-99", "not valid YAML"),
        ("epochs", "9" * 5000, "not valid YAML"),
        ("trunk.options", "[" * 1000, "not valid YAML"),
        ("name", "../../elsewhere", "folder"),
        ("name", '" "', "empty"),
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_starts(key, value, words):
    with pytest.raises(InputError, match=words):
        resolve("swav_tiny", {key: value})


def test_a_methods_key_without_its_prefix_is_understood():
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {"queue_length": "5"})
    assert "method.queue_length" in caught.value.fix
