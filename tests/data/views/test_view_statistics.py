"""The drawn parameters have the reference's distributions, over 20,000 draws, and don't disturb each other.

Limits: Kolmogorov-Smirnov and chi-square at p = 1e-5, shares at five standard deviations. All draws are
keyed or seeded, so a verdict doesn't change from run to run.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import ColorJitter, RandomResizedCrop

from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import (
    DRAWS_PER_VIEW,
    ORDERS,
    CropSpec,
    ViewParams,
    ViewPlan,
    draw_view,
    draw_views,
)
from zoo.data.views.presets import PRESETS, find_preset
from zoo.keyed import keyed_key, keyed_uniforms

COUNT = 20_000
LEAST_P = 1e-5
SWAV = find_preset("swav").plan


def uniforms(name: str, count: int = COUNT) -> list[list[float]]:
    return keyed_uniforms(keyed_key(1, name), count * DRAWS_PER_VIEW).reshape(count, -1).tolist()


def draw(
    plan: ViewPlan, height: int, width: int, name: str = "draws", count: int = COUNT
) -> list[ViewParams]:
    return [draw_view(plan, plan.crops[0], height, width, row) for row in uniforms(name, count)]


def same_distribution(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return stats.ks_2samp(ours, theirs, method="asymp").pvalue > LEAST_P


def uniform_between(values: np.ndarray, low: float, high: float) -> bool:
    assert low <= values.min() and values.max() <= high
    return stats.kstest(values, "uniform", args=(low, high - low)).pvalue > LEAST_P


def share_is(hits: np.ndarray, p: float) -> bool:
    return abs(np.mean(hits) - p) <= 5 * math.sqrt(p * (1 - p) / len(hits))


# --- crops ---

CROPS = {
    "SwAV large": (375, 500, (0.14, 1.0), (3 / 4, 4 / 3)),
    "SwAV small, upright": (500, 333, (0.05, 0.14), (3 / 4, 4 / 3)),
    "AMDIM, small image": (60, 64, (0.3, 1.0), (0.7, 1.4)),
    "very wide": (60, 400, (0.08, 1.0), (3 / 4, 4 / 3)),
    "very tall": (400, 80, (0.14, 1.0), (3 / 4, 4 / 3)),
}


@pytest.mark.parametrize("case", CROPS)
def test_crops_are_torchvisions(case):
    height, width, scale, ratio = CROPS[case]
    plan = ViewPlan((CropSpec(32, *scale),), ratio=ratio)
    ours = np.array([(v.top, v.left, v.height, v.width) for v in draw(plan, height, width, case)], float)
    torch.manual_seed(1)
    image = torch.empty(1, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(COUNT)], float
    )
    assert (ours >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all() and (ours[:, 1] + ours[:, 3] <= width).all()
    for measure in (
        lambda b: b[:, 2] * b[:, 3] / (height * width),  # share of the area
        lambda b: np.log(b[:, 3] / b[:, 2]),  # log aspect
        lambda b: b[:, 0],
        lambda b: b[:, 1],
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),  # where in the room that there is
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        assert same_distribution(measure(ours), measure(theirs))
    if case.startswith("very"):
        # How often none of ten attempts fits: nothing of an image this long can be a crop of all of it.
        central = RandomResizedCrop.get_params(image, [1.0, 1.0], list(ratio))
        mine, other = ((boxes == central).all(axis=1).mean() for boxes in (ours, theirs))
        assert 0.001 < other < 0.5
        assert abs(mine - other) <= 5 * math.sqrt(2 * other / COUNT)


def test_a_wrong_distribution_would_be_seen():
    """The tests have teeth: an aspect that is uniform instead of log-uniform fails."""
    u = np.array(uniforms("teeth"))
    log_uniform = np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * u[:, 0]
    uniform = np.log(3 / 4 + (4 / 3 - 3 / 4) * u[:, 1])
    assert not same_distribution(log_uniform, uniform)
    assert not share_is(u[:, 0] < 0.5, 0.53)


@pytest.mark.parametrize(("height", "width"), [(10, 100), (100, 10), (7, 1000), (1, 5), (5, 1)])
def test_an_image_too_long_for_any_crop_gets_torchvisions_central_box(height, width):
    plan = ViewPlan((CropSpec(8, 1.0, 1.0),))
    view = draw_view(plan, plan.crops[0], height, width, [0.5] * DRAWS_PER_VIEW)
    expected = RandomResizedCrop.get_params(torch.empty(1, height, width), [1.0, 1.0], [3 / 4, 4 / 3])
    assert (view.top, view.left, view.height, view.width) == expected


def test_a_single_pixel_can_be_cropped():
    views = draw(SWAV, 1, 1, count=100)
    assert {(v.top, v.left, v.height, v.width) for v in views} == {(0, 0, 1, 1)}


# --- colours, flips, blur ---


@pytest.mark.parametrize(
    "name", ["swav", "moco-v1", "moco-v2", "amdim-128", "amdim-64", "small-64", "simclr"]
)
def test_each_decision_has_its_probability(name):
    plan = find_preset(name).plan
    views = draw(plan, 100, 120, name)
    for hits, p in (
        ([v.flip for v in views], plan.flip_p),
        ([v.jitter is not None for v in views], plan.jitter_p),
        ([v.gray for v in views], plan.gray_p),
        ([v.blur_radius is not None for v in views], plan.blur_p),
    ):
        assert share_is(np.array(hits), p), (name, p, np.mean(hits))
    radii = np.array([v.blur_radius for v in views if v.blur_radius is not None])
    assert len(radii) == 0 or uniform_between(radii, *plan.blur_radius)


@pytest.mark.parametrize("name", ["swav", "moco-v1", "amdim-128"])
def test_jitter_is_torchvisions(name):
    plan = find_preset(name).plan
    drawn = [v for v in draw(plan, 100, 120, name) if v.jitter is not None]
    reference = ColorJitter(*plan.jitter)
    ranges = (reference.brightness, reference.contrast, reference.saturation, reference.hue)
    torch.manual_seed(2)
    theirs = [ColorJitter.get_params(*ranges) for _ in range(len(drawn))]
    for which, (low, high) in enumerate(ranges):
        ours = np.array([v.jitter[which] for v in drawn])
        assert uniform_between(ours, low, high)
        assert same_distribution(ours, np.array([params[1 + which] for params in theirs]))
    orders = [v.jitter_order for v in drawn]
    assert set(orders) == set(ORDERS)
    counts = [orders.count(order) for order in ORDERS]
    assert stats.chisquare(counts).pvalue > LEAST_P
    their_orders = [tuple(params[0].tolist()) for params in theirs]
    table = [counts, [their_orders.count(order) for order in ORDERS]]
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_the_blur_radius_is_the_references():
    radii = [v.blur_radius for v in draw(SWAV, 100, 120) if v.blur_radius is not None]
    generator = random.Random(3)
    assert same_distribution(radii, [generator.uniform(0.1, 2.0) for _ in radii])


def test_brightness_never_falls_below_nothing():
    plan = ViewPlan((CropSpec(8, 0.5, 1.0),), jitter=(1.5, 0.0, 0.0, 0.0), jitter_p=1.0)
    view = draw_view(plan, plan.crops[0], 40, 40, [0.0] * DRAWS_PER_VIEW)
    assert view.jitter == (0.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("p", ["flip_p", "jitter_p", "gray_p", "blur_p"])
def test_never_and_always_are_meant(p):
    def outcomes(value):
        views = draw(replace(SWAV, **{p: value}), 100, 120, count=500)
        parts = {"flip_p": "flip", "jitter_p": "jitter", "gray_p": "gray", "blur_p": "blur_radius"}
        return {bool(getattr(view, parts[p])) for view in views}

    assert outcomes(0.0) == {False}
    assert outcomes(1.0) == {True}


# --- AMDIM ---


def test_amdims_translation_is_uniform_over_81_offsets():
    plan = find_preset("amdim-32").plan
    shifts = [view.shift for view in draw(plan, 32, 32)]
    offsets = [(x, y) for x in range(-4, 5) for y in range(-4, 5)]
    counts = np.array([shifts.count(offset) for offset in offsets])
    assert counts.sum() == COUNT
    stays = offsets.index((0, 0))
    expected = np.full(81, COUNT * plan.translate_p / 81)
    expected[stays] += COUNT * (1 - plan.translate_p)
    assert stats.chisquare(counts, expected).pvalue > LEAST_P
    assert share_is(np.array([shift != (0, 0) for shift in shifts]), 0.8 * 80 / 81)


@pytest.mark.parametrize("name", ["amdim-128", "amdim-64", "amdim-32"])
def test_amdims_views_share_their_flip_and_nothing_else(name):
    maker = PlannedViews(find_preset(name).plan)
    pairs = [maker.params(80, 90, keyed_key(0, "views", 0, sample)) for sample in range(2000)]
    assert all(first.flip == second.flip for first, second in pairs)
    assert share_is(np.array([first.flip for first, _ in pairs]), 0.5)
    assert np.mean([first.gray == second.gray for first, second in pairs]) < 0.7  # 0.25^2 + 0.75^2 = 0.625
    assert np.mean([(first.jitter is None) == (second.jitter is None) for first, second in pairs]) < 0.75
    assert sum(first == second for first, second in pairs) < 20


# --- independence ---


def test_the_numbers_of_a_view_are_independent():
    u = np.array(uniforms("columns"))
    off_diagonal = np.corrcoef(u.T) - np.eye(DRAWS_PER_VIEW)
    assert np.abs(off_diagonal).max() < 5 / math.sqrt(COUNT)
    for column in u.T:
        assert uniform_between(column, 0.0, 1.0)


def test_what_is_drawn_for_a_view_is_independent():
    """Box, flip, order, factors, grayscale and blur: none tells about another."""
    views = [v for v in draw(SWAV, 300, 400) if v.jitter is not None]
    measures = {
        "area": [v.height * v.width for v in views],
        "aspect": [math.log(v.width / v.height) for v in views],
        "top": [v.top / (301 - v.height) for v in views],
        "left": [v.left / (401 - v.width) for v in views],
        "flip": [v.flip for v in views],
        "order": [ORDERS.index(v.jitter_order) for v in views],
        **{f"factor {which}": [v.jitter[which] for v in views] for which in range(4)},
        "gray": [v.gray for v in views],
        "blur": [v.blur_radius is not None for v in views],
    }
    table = np.corrcoef(np.array(list(measures.values()), float)) - np.eye(len(measures))
    table[0, 1:4] = table[1:4, 0] = 0  # large boxes have no room to move and none for every aspect
    assert np.abs(table).max() < 5 / math.sqrt(len(views))
    decisions = [
        (v.flip, v.jitter is not None, v.gray, v.blur_radius is not None) for v in draw(SWAV, 300, 400)
    ]
    assert np.abs(np.corrcoef(np.array(decisions, float).T) - np.eye(4)).max() < 5 / math.sqrt(COUNT)
    blurred = [v for v in views if v.blur_radius is not None]
    for name in ("flip", "gray"):
        r = np.corrcoef([v.blur_radius for v in blurred], [getattr(v, name) for v in blurred])[0, 1]
        assert abs(r) < 5 / math.sqrt(len(blurred))


def test_views_samples_epochs_and_seeds_are_independent():
    """(samples x views) matrices of each number: no column, row or neighbour knows of another."""
    maker = PlannedViews(SWAV)
    views, samples = len(SWAV.crops), COUNT // len(SWAV.crops)

    def measures(seed: int, epoch: int) -> np.ndarray:
        drawn = [maker.params(300, 400, keyed_key(seed, "views", epoch, s)) for s in range(samples)]
        of = [
            [(v.top, v.left, v.height * v.width, v.flip, v.gray, v.jitter is not None, v.blur_radius or 0) for v in row]
            for row in drawn
        ]  # fmt: skip
        return np.array(of, float)  # samples, views, measures

    first = measures(0, 0)
    limit = 5 / math.sqrt(samples)
    for other, name in (
        (measures(0, 1), "epoch"),
        (measures(1, 0), "seed"),
        (np.roll(first, 1, 0), "sample"),
    ):
        for view in range(views):
            for measure in range(first.shape[2]):
                r = np.corrcoef(first[:, view, measure], other[:, view, measure])[0, 1]
                assert abs(r) < limit, (name, view, measure)
    for measure in range(first.shape[2]):
        between_views = np.corrcoef(first[:, :, measure].T) - np.eye(views)
        assert np.abs(between_views).max() < limit, measure


def test_one_views_numbers_change_no_other_view():
    rows = uniforms("others", 8)
    before = draw_views(SWAV, 300, 400, rows)
    for changed in range(8):
        other = [row if view != changed else [1 - v for v in row] for view, row in enumerate(rows)]
        after = draw_views(SWAV, 300, 400, other)
        assert [a != b for a, b in zip(after, before, strict=True)] == [view == changed for view in range(8)]


def test_more_views_leave_the_first_ones_alone():
    key = keyed_key(0, "views", 2, 3)
    two = PlannedViews(replace(SWAV, crops=SWAV.crops[:2])).params(300, 400, key)
    assert PlannedViews(SWAV).params(300, 400, key)[:2] == two


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"jitter_p": 0.0}, {"jitter", "jitter_order"}),
        ({"jitter": (0.1, 0.1, 0.1, 0.0)}, {"jitter"}),
        ({"gray_p": 1.0}, {"gray"}),
        ({"flip_p": 1.0}, {"flip"}),
        ({"blur_p": 1.0}, {"blur_radius"}),
        ({"blur_radius": (1.0, 1.5)}, {"blur_radius"}),
        ({"ratio": (1.0, 1.0)}, {"top", "left", "height", "width"}),
    ],
)
def test_one_distortions_settings_change_no_other_draw(change, parts):
    before, after = (draw(plan, 300, 400, count=500) for plan in (SWAV, replace(SWAV, **change)))
    differing = {
        name for a, b in zip(after, before, strict=True) for name in vars(a) if getattr(a, name) != getattr(b, name)
    }  # fmt: skip
    assert differing == parts


def test_the_parameters_are_a_pure_function_of_the_key():
    key = keyed_key(5, "views", 1, 7)
    for preset in PRESETS.values():
        maker = PlannedViews(preset.plan)
        first = maker.params(300, 400, key)
        np.random.seed(1), random.seed(1), torch.manual_seed(1)
        assert PlannedViews(preset.plan).params(300, 400, key) == first
        assert maker.params(300, 400, keyed_key(5, "views", 2, 7)) != first
        assert [view.size for view in first] == [crop.size for crop in preset.plan.crops]
