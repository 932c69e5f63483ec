"""Presets: every number is the published one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from zoo.data.views.params import DRAWS_PER_VIEW, CropSpec, ViewPlan, draw_views
from zoo.data.views.presets import PRESETS, Preset, find_preset
from zoo.errors import InputError
from zoo.pretrain.config import EvaluationConfig, ViewsConfig

# Crops in the facts -> the presets that have them.
SWAV_CROPS = {
    "2x224+6x96 (100/200/400/800ep, bs256)": ["swav-2x224+6x96", "swav-opencv-2x224+6x96"],
    "2x224 (400ep_2x224)": ["swav-2x224"],
    "dcv2 400ep 2x160+4x96": ["swav-2x160+4x96"],
    "rn50w2": ["swav-2x224+4x96"],
    "rn50w4": ["swav-w4-2x224+4x96"],
}
OTHERS = {
    "moco-v1": "moco_v1",
    "moco-v2": "moco_v2",
    "amdim-128": "amdim_imagenet128",
    "amdim-64": "amdim_stl10_64",
    "amdim-32": "amdim_cifar32",
}


@pytest.fixture(scope="module")
def facts(shared) -> dict[str, Any]:
    return json.loads((shared / "golden" / "augmentation_facts.json").read_text("utf-8"))


def numbers(text: str) -> list[float]:
    return [float(Fraction(number)) for number in re.findall(r"[\d./]+", text)]


def found(pattern: str, text: str, otherwise: str) -> list[float]:
    match = re.search(pattern, text)
    return numbers(match[1] if match else otherwise)


def read_order(order: list[str]) -> dict[str, Any]:
    """The plan's fields that a list of the reference's transforms states, torchvision's defaults filled in."""
    step = {}
    for at, text in enumerate(order):
        for name in ("Crop", "Translate", "Jitter", "Grayscale", "Blur", "Flip"):
            if f"{name}(" in text or f"{name}WithReflect(" in text or text.endswith(name):
                step[name] = at, text
    out: dict[str, Any] = {"translate": 0, "blur_p": 0.0, "flip_p": 0.5, "jitter_p": 0.0, "gray_p": 0.0}
    if "Crop" in step:
        crop = step["Crop"][1]
        out["ratio"] = found(r"ratio[^(]*\(([\d./,]+)\)", crop, "3/4,4/3")
        out["interpolation"] = "bicubic" if "bicubic" in crop else "bilinear"
        if match := re.search(r"Crop\((\d+)", crop):
            out["crop"] = [int(match[1]), *found(r"scale[^(]*\(([\d.,]+)\)", crop, "0.08,1")]
    if "Translate" in step:
        out["translate"], out["translate_p"] = numbers(step["Translate"][1])
    if "Jitter" in step:
        at, text = step["Jitter"]
        out["jitter"] = found(r"ColorJitter\(([\d.,]+)\)", text, "")
        (out["jitter_p"],) = [1.0] if "ALWAYS" in text else found(r"\], (?:p=)?([\d.]+)\)$", text, "")
        out["gray_first"] = step["Grayscale"][0] < at
    if "Grayscale" in step:
        (out["gray_p"],) = numbers(step["Grayscale"][1])
    if "Blur" in step:
        assert step["Blur"][0] > step["Grayscale"][0]
        out["blur_radius"] = found(r"(?:U\(|\[)([\d.]+,[\d.]+)", step["Blur"][1], "")
        (out["blur_p"],) = found(r"(?:p=|\], )([\d.]+)", step["Blur"][1], "")
    return out


def assert_plan(plan: ViewPlan, stated: dict[str, Any]) -> None:
    stated = dict(stated)
    crop = stated.pop("crop", None)
    if crop is not None:
        assert set(plan.crops) == {CropSpec(*crop)}
    for key, value in stated.items():
        mine = getattr(plan, key)
        assert (list(mine) if isinstance(mine, tuple) else mine) == value, key


def assert_test(test: Any, steps: list[str], size: int) -> None:
    text = " ".join(steps)
    resize = found(r"Resize\((\d+)", text, str(size))
    crop = found(r"CenterCrop\((\d+)", text, str(size))
    assert (test.resize, test.crop) == (*resize, *crop)
    assert test.interpolation == ("bicubic" if "bicubic" in text else "bilinear")


def test_the_reader_of_orders_reads():
    assert read_order(["RandomApply([ColorJitter(1,2,3,4)], 0.7)", "RandomGrayscale(0.3)"]) == {
        "translate": 0,
        "blur_p": 0.0,
        "flip_p": 0.5,
        "jitter": [1, 2, 3, 4],
        "jitter_p": 0.7,
        "gray_p": 0.3,
        "gray_first": False,
    }
    steps = ["RandomResizedCrop(9, scale=(0.5,1))", "RandomGrayscale(p=0.3)", "PILBlur(p=0.4, radius U(1,2))"]
    read = read_order(steps)
    assert (read["crop"], read["ratio"], read["interpolation"]) == ([9, 0.5, 1], [3 / 4, 4 / 3], "bilinear")
    assert (read["gray_p"], read["blur_p"], read["blur_radius"], read["jitter_p"]) == (0.3, 0.4, [1, 2], 0.0)


@pytest.mark.parametrize("crops", SWAV_CROPS)
def test_swavs_distortions_and_crops(facts, crops):
    of = facts["swav_multicrop"]
    stated = of["crops"][crops]
    rows = zip(stated["n"], stated["size"], stated["min"], stated["max"], strict=True)
    expected = tuple(CropSpec(size, low, high) for n, size, low, high in rows for _ in range(n))
    for name in SWAV_CROPS[crops]:
        plan = find_preset(name).plan
        assert plan.crops == expected
        assert_plan(plan, read_order(of["order"]))
        assert list(plan.mean) == of["mean"] and list(plan.std) == of["std"]
        assert list(plan.jitter) == list(of["jitter"].values())
        assert list(plan.blur_radius) == of["blur_radius"]
        for key in ("jitter_p", "gray_p", "blur_p", "flip_p"):
            assert getattr(plan, key) == of[key]
        assert plan.blur == ("gaussian" if "opencv" in name else "pil")
        assert not plan.shared_flip


def test_every_published_crop_of_swav_has_a_preset(facts):
    assert set(facts["swav_multicrop"]["crops"]) == set(SWAV_CROPS)
    assert find_preset("swav") is find_preset("swav-2x224+6x96")


def test_the_blur_of_the_released_weights(facts):
    note = facts["swav_multicrop"]["note"]
    kernel, factor, offset = (
        float(re.search(pattern, note)[1])
        for pattern in (r"(\d+)x\d+ kernel", r"rand\*([\d.]+)", r"\+([\d.]+)")
    )
    plan = find_preset("swav-opencv-2x224+6x96").plan
    assert (plan.blur, plan.blur_kernel) == ("gaussian", kernel)
    assert plan.blur_radius == (offset, pytest.approx(offset + factor))


def test_a7_is_swav_with_simclrs_scale():
    swav, ablation = find_preset("swav").plan, find_preset("swav-a7-2x224+6x96").plan
    assert [crop.min_scale for crop in ablation.crops] == [0.08] * 2 + [0.05] * 6
    assert [crop.max_scale for crop in ablation.crops] == [1.0] * 2 + [0.14] * 6
    assert ablation == replace(swav, crops=ablation.crops)


@pytest.mark.parametrize("name", OTHERS)
def test_moco_and_amdim(facts, name):
    of, preset = facts[OTHERS[name]], find_preset(name)
    plan, stated = preset.plan, read_order(of["order"])
    assert_plan(plan, stated)
    if "mean_255" in of:
        assert plan.mean == tuple(value / 255 for value in of["mean_255"])
        assert plan.std == tuple(value / 255 for value in of["std_255"])
    else:
        assert (list(plan.mean), list(plan.std)) == (of["mean"], of["std"])
    assert len(plan.crops) == 2
    assert plan.shared_flip == bool(of.get("shared_flip"))
    if name.startswith("amdim"):
        size = plan.crops[0].size
        assert size == int(name.split("-")[1])
        assert_test(preset.test, of["test"], size)
        assert plan.blur_p == 0
    else:
        assert plan.blur == "pil"


def test_amdims_small_images_are_moved_whole():
    plan = find_preset("amdim-32").plan
    assert set(plan.crops) == {CropSpec(32, 1.0, 1.0)}
    views = draw_views(plan, 32, 32, [[0.1] * DRAWS_PER_VIEW] * 2)
    assert [(v.top, v.left, v.height, v.width) for v in views] == [(0, 0, 32, 32)] * 2


@pytest.mark.parametrize(("name", "statistics"), [("linear", "moco_v1"), ("linear-swav", "swav_multicrop")])
def test_linear_evaluation(facts, name, statistics):
    of, preset = facts["swav_eval_linear"], find_preset(name)
    assert_plan(preset.plan, read_order(of["train"]))
    assert_test(preset.test, of["val"], 224)
    assert list(preset.plan.mean) == facts[statistics]["mean"]
    assert list(preset.plan.std) == facts[statistics]["std"]
    assert len(preset.plan.crops) == 1


def test_simclr():
    """Appendix A and the released ``data_util.py``: strength 1, kernel 224 // 10 made odd."""
    plan = find_preset("simclr").plan
    assert set(plan.crops) == {CropSpec(224, 0.08, 1.0)} and len(plan.crops) == 2
    assert (plan.jitter, plan.jitter_p, plan.gray_p) == ((0.8, 0.8, 0.8, 0.2), 0.8, 0.2)
    assert (plan.blur, plan.blur_p, plan.blur_radius) == ("gaussian", 0.5, (0.1, 2.0))
    assert plan.blur_kernel == 2 * (224 // 10 // 2) + 1
    assert plan.interpolation == find_preset("simclr").test.interpolation == "bicubic"


@pytest.mark.parametrize("size", [32, 64, 128])
def test_small_presets_fit_small_images(size):
    preset = find_preset(f"small-{size}")
    swav = find_preset("swav").plan
    (large, count), (small, _) = preset.plan.groups
    assert (large, count) == (size, 2)
    assert small == size / 2  # SwAV's 96 / 224, at a side that halves evenly
    assert preset.test.crop == size
    for key in ("ratio", "jitter_p", "gray_p", "flip_p", "mean", "std", "blur"):
        assert getattr(preset.plan, key) == getattr(swav, key)
    assert "this project's choice" in preset.source


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_a_preset_is_named_explained_and_valid(preset: Preset):
    assert PRESETS[preset.name] is preset
    assert len(preset.source) > 10 and len(preset.summary) > 10
    keys = json.loads(json.dumps(ViewsConfig.keys_of(preset.plan)))  # they go through YAML
    assert ViewsConfig(**keys).plan() == preset.plan
    test = preset.test
    assert EvaluationConfig(resize=test.resize, crop=test.crop, interpolation=test.interpolation)
    stated = [(int(n), int(size)) for n, size in re.findall(r"(\d+)x(\d+)", preset.name)]
    if stated:
        assert [(count, size) for size, count in preset.plan.groups] == stated


def test_names_and_plans_are_unique():
    assert len({preset.summary for preset in PRESETS.values()}) == len(PRESETS)
    assert len({preset.plan for preset in PRESETS.values()}) == len(PRESETS)


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(InputError, match="no view preset") as caught:
        find_preset("moco-v3")
    assert "did you mean moco-v" in caught.value.fix
    assert all(name in caught.value.fix for name in PRESETS)
