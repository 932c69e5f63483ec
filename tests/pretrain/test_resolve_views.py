"""View presets and channels in recipes: what is set, what is respected, what is refused, and what says so."""

from __future__ import annotations

import json

import pytest

from zoo.data.views.presets import PRESETS, find_preset
from zoo.errors import InputError
from zoo.pretrain.resolve import differences, parse_assignments, resolve


def write(folder, name, text):
    path = folder / name
    path.write_text(text, "utf-8")
    return path


# --- presets ---


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_views_and_the_test_transform(name):
    preset = find_preset(name)
    resolved = resolve("swav_tiny", {"views.preset": name})
    assert resolved.recipe.views.plan() == preset.plan
    assert resolved.recipe.views.preset == name
    test = resolved.recipe.evaluation
    assert (test.resize, test.crop) == (preset.test.resize, preset.test.crop)
    assert test.interpolation == preset.test.interpolation
    for key in ("views.size", "views.jitter", "views.std", "evaluation.crop"):
        assert resolved.sources[key] == f"preset {name}"
    assert resolved.sources["views.preset"] == "--set"
    assert resolved.sources["epochs"] == "swav_tiny"


def test_what_a_recipe_said_before_is_forgotten():
    assert resolve("swav_tiny").recipe.views.jitter == (0.2, 0.2, 0.1, 0.05)
    resolved = resolve("swav_tiny", {"views.preset": "moco-v2"})
    assert resolved.recipe.views.jitter == (0.4, 0.4, 0.4, 0.1)
    assert "swav_tiny" not in {
        s for key, s in resolved.sources.items() if key.startswith(("views.", "evaluation."))
    }


@pytest.mark.parametrize(
    "words",
    [
        ["views.preset=moco-v2", "views.gray_p=0.5", "views.std=[0.3,0.3,0.3]", "evaluation.crop=200"],
        ["views.gray_p=0.5", "evaluation.crop=200", "views.std=[0.3,0.3,0.3]", "views.preset=moco-v2"],
    ],
)
def test_explicit_keys_win_in_any_order(words):
    resolved = resolve("swav_tiny", parse_assignments(words))
    views = resolved.recipe.views
    assert (views.gray_p, views.std) == (0.5, (0.3, 0.3, 0.3))
    assert (views.jitter, views.size) == ((0.4, 0.4, 0.4, 0.1), (224,))
    assert (resolved.recipe.evaluation.resize, resolved.recipe.evaluation.crop) == (256, 200)
    assert resolved.sources["views.gray_p"] == resolved.sources["evaluation.crop"] == "--set"
    assert resolved.sources["views.jitter"] == "preset moco-v2"
    lines = resolved.to_yaml().splitlines()
    assert "  gray_p: 0.5  # --set" in lines
    assert "  jitter: [0.4, 0.4, 0.4, 0.1]  # preset moco-v2" in lines


def test_a_preset_in_a_file_and_keys_beside_it(tmp_path):
    base = write(tmp_path, "base.yaml", "extends: swav_tiny\nviews: {flip_p: 0.1, preset: simclr}\n")
    resolved = resolve(base)
    assert (resolved.recipe.views.flip_p, resolved.recipe.views.blur) == (0.1, "gaussian")
    # A recipe that extends it refines it, or takes another preset altogether.
    finer = resolve(write(tmp_path, "finer.yaml", "extends: base.yaml\nviews: {blur_p: 0.2}\n")).recipe.views
    assert (finer.blur_p, finer.flip_p, finer.blur, finer.preset) == (0.2, 0.1, "gaussian", "simclr")
    other = resolve(write(tmp_path, "other.yaml", "extends: base.yaml\nviews: {preset: moco-v1}\n")).recipe
    assert other.views.plan() == find_preset("moco-v1").plan
    assert resolve(base, {"views.preset": "amdim-64"}).recipe.views.plan() == find_preset("amdim-64").plan


def test_an_option_wins_over_a_preset_set_beside_it():
    views = resolve("swav_tiny", {"views.preset": "moco-v1"}, {"views.gray_p": 0.3}).recipe.views
    assert (views.gray_p, views.gray_first) == (0.3, True)


@pytest.mark.parametrize("name", ["swav", "amdim-32", "simclr"])
def test_a_resolved_recipe_can_be_used_again(tmp_path, name):
    first = resolve("swav_tiny", {"views.preset": name, "views.flip_p": 0.25})
    again = resolve(write(tmp_path, "recipe.yaml", first.to_yaml()))
    assert differences(first.recipe, again.recipe) == {}
    assert again.recipe.views.plan() == first.recipe.views.plan()


def test_the_short_name_says_what_it_stands_for():
    resolved = resolve("swav_tiny", {"views.preset": "swav"})
    assert resolved.recipe.views.plan() == find_preset("swav-2x224+6x96").plan
    assert resolved.sources["views.size"] == "preset swav-2x224+6x96"


@pytest.mark.parametrize("place", ["set", "file"])
def test_an_unknown_preset(tmp_path, place):
    with pytest.raises(InputError) as caught:
        if place == "set":
            resolve("swav_tiny", {"views.preset": "moco-v22"})
        else:
            resolve(write(tmp_path, "a.yaml", "extends: swav_tiny\nviews: {preset: moco-v22}\n"))
    assert "did you mean moco-v2?" in caught.value.fix
    assert "moco-v22" in str(caught.value)


def test_a_misspelt_key_beside_a_preset():
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {"views.preset": "moco-v2", "views.grey_p": 0.5})
    assert "did you mean gray_p?" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("views.ratio", [2, 1], "smaller to the larger"),
        ("views.blur_radius", [2.0, 0.1], "smaller to the larger"),
        ("views.blur_kernel", 22, "odd"),
        ("views.blur_kernel", 1_000_001, "1001"),
        ("views.blur_radius", [0.1, 1e6], "reaches beyond views of"),
        ("views.translate", 8, "moves half of the view"),
        ("views.jitter", [0.4, 0.4, 0.4, 0.7], "0..0.5"),
        ("views.jitter", [0.4, 0.4], "views.jitter"),
        ("views.min_scale", [0.3, 0.5], "min 0.5 <= max 0.3"),
        ("views.interpolation", "nearest", "bicubic"),
        ("views.gray_p", 1.5, "views.gray_p"),
        ("views.blur", "box", "gaussian"),
        ("evaluation.crop", 500, "larger than the resized image"),
    ],
)
def test_values_that_make_no_views_are_refused(key, value, words):
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {key: value})
    assert words in str(caught.value)
    assert caught.value.where.startswith(key.split(".")[0])


# --- channels ---


@pytest.mark.parametrize("by", ["option", "--set"])
def test_one_channel_adapts_the_views_and_says_so(by):
    three = resolve("swav_tiny").recipe.views
    layers = ({}, {"data.channels": 1}) if by == "option" else ({"data.channels": 1}, {})
    resolved = resolve("swav_tiny", *layers)
    views = resolved.recipe.views
    assert views.mean == (pytest.approx(sum(three.mean) / 3, abs=1e-4),)
    assert views.std == (pytest.approx(sum(three.std) / 3, abs=1e-4),)
    assert views.jitter == (*three.jitter[:2], 0.0, 0.0)
    assert views.gray_p == 0.0
    assert (views.blur_p, views.size) == (three.blur_p, three.size)
    for key in ("mean", "std", "jitter", "gray_p"):
        assert resolved.sources[f"views.{key}"] == "for 1 channel"
    assert "  gray_p: 0.0  # for 1 channel" in resolved.to_yaml().splitlines()
    assert "  channels: 1  # " + by in resolved.to_yaml().splitlines()


def test_many_channels_get_as_many_numbers():
    resolved = resolve("swav_tiny", {"data.channels": 5})
    views = resolved.recipe.views
    assert len(views.mean) == len(views.std) == 5
    assert len(set(views.mean)) == 1
    assert resolved.sources["views.mean"] == "for 5 channels"


def test_three_channels_change_nothing():
    assert resolve("swav_tiny", {"data.channels": 3}).recipe.views == resolve("swav_tiny").recipe.views


def test_a_preset_is_adapted_too():
    resolved = resolve("swav_tiny", {"views.preset": "moco-v1", "data.channels": 1})
    assert resolved.recipe.views.jitter == (0.4, 0.4, 0.0, 0.0)
    assert resolved.recipe.views.mean == (pytest.approx(0.449, abs=1e-3),)
    assert resolved.sources["views.jitter"] == "for 1 channel"
    assert resolved.sources["views.min_scale"] == "preset moco-v1"


def test_what_the_user_set_is_respected():
    explicit = {
        "data.channels": 1,
        "views.mean": [0.3],
        "views.std": [0.1],
        "views.jitter": [0.1, 0.2, 0.0, 0.0],
    }
    resolved = resolve("swav_tiny", explicit)
    views = resolved.recipe.views
    assert (views.mean, views.std, views.jitter) == ((0.3,), (0.1,), (0.1, 0.2, 0.0, 0.0))
    assert resolved.sources["views.mean"] == resolved.sources["views.jitter"] == "--set"
    assert resolved.sources["views.gray_p"] == "for 1 channel"


def test_statistics_of_a_file_that_fit_are_kept(tmp_path):
    text = "extends: swav_tiny\ndata: {channels: 2}\nviews: {mean: [0.3, 0.4], std: [0.1, 0.2]}\n"
    resolved = resolve(write(tmp_path, "two.yaml", text))
    assert (resolved.recipe.views.mean, resolved.recipe.views.std) == ((0.3, 0.4), (0.1, 0.2))
    assert resolved.sources["views.mean"].endswith("two.yaml")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("views.gray_p", 0.2, ["no saturation, hue or grayscale", "views.gray_p"]),
        ("views.jitter", [0.4, 0.4, 0.4, 0.1], ["no saturation, hue or grayscale", "views.jitter"]),
        ("views.mean", [0.5, 0.5, 0.5], ["views.mean has 3 numbers", "1 channels"]),
        ("views.std", [0.5, 0.5], ["views.std has 2 numbers"]),
    ],
)
def test_a_contradiction_is_refused(key, value, words):
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {"data.channels": 1, key: value})
    assert all(word in str(caught.value) for word in words)


def test_statistics_for_another_number_of_channels_are_refused_with_three_as_well():
    with pytest.raises(InputError, match="has 1 numbers for images of 3 channels"):
        resolve("swav_tiny", {"views.mean": [0.5], "views.std": [0.2]})


def test_an_adapted_recipe_can_be_used_again(tmp_path):
    first = resolve("swav_tiny", {"data.channels": 1})
    path = write(tmp_path, "recipe.yaml", first.to_yaml())
    assert differences(first.recipe, resolve(path).recipe) == {}
    assert json.dumps(first.recipe.to_dict()) == json.dumps(resolve(path).recipe.to_dict())


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_a_number_of_channels_that_is_none(value):
    with pytest.raises(InputError) as caught:
        resolve("swav_tiny", {"data.channels": value})
    assert "data.channels" in str(caught.value)
