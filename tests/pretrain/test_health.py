"""The doctor: what is measured, which collapse is named, and that a run is the same with it as without."""

from __future__ import annotations

import json
import logging
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from cli.main import run as zoo_command
from tiny import TINY, StopAfter, as_options, assert_same_state, go_on, lines, trace, train
from zoo.engine.checkpoint import CheckpointFolder
from zoo.errors import RunError
from zoo.pretrain.collapse import EVENTS, Monitor, advice_for, read_events
from zoo.pretrain.health import figures_of
from zoo.pretrain.methods.base import Seen
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.resolve import resolve
from zoo.pretrain.run import start

LN8 = math.log(8)
HEALTHY = {
    "chance": LN8,
    "rank": 30.0,
    "spread": 0.7,
    "usage": 0.8,
    "top_share": 0.2,
    "code_entropy": 0.8,
    "grad_norm": 1.0,
}


# --- the monitor ---


def told(monitor, losses, figures=None, every=10):
    """(name, step) of all events of a run with these losses; ``figures``: of a step that is looked at."""
    found = []
    for step, loss in enumerate(losses):
        look = step % every == 0
        given = (figures(step) if callable(figures) else figures or {"chance": LN8}) if look else {}
        found += monitor.update(step, loss, given)
    return [(event.name, event.step) for event in found], found


def test_a_loss_that_stays_at_ln_k_is_told_once_with_the_number():
    (name_and_step,), (event,) = told(Monitor({"stuck-at-chance": "this"}), [LN8 + 0.001] * 400)
    assert name_and_step == ("stuck-at-chance", 29)
    assert "the loss is 2.080" in str(event)
    assert "ln 8 = 2.079" in str(event) and str(event).endswith("What helps: this")


def test_a_loss_beyond_chance_that_does_not_fall_diverges():
    rng = random.Random(0)
    worse = [LN8 * 2 + step * 0.01 + rng.gauss(0, 0.05) for step in range(400)]
    assert told(Monitor(), worse)[0] == [("diverging", 29)]
    assert told(Monitor(quiet_until=10**6), worse)[0] == [("diverging", 299)]
    assert told(Monitor(), worse[::-1][:350])[0] == []  # it falls
    wild = [LN8 * 4 + rng.gauss(0, 2) for _ in range(30)]
    assert told(Monitor(), sorted(wild)[::-1])[0] == []
    low_then_lower = sorted(wild)[1::2] + sorted(wild)[::2]  # by chance, of as wide a spread
    assert told(Monitor(), low_then_lower)[0] == [("diverging", 29)]
    assert told(Monitor(), [3.0] * 15 + [float("inf")] * 15)[0] == [("diverging", 29)]


def test_healthy_losses_are_quiet():
    rng = random.Random(0)
    for start_at in (1.3, 1.05):  # times ln K
        falling = [LN8 * (start_at * 0.99**step + 0.3) + rng.gauss(0, 0.02) for step in range(500)]
        assert told(Monitor(), falling, HEALTHY)[0] == []
    hovering = [LN8 * (1 + rng.gauss(0, 0.01)) for _ in range(500)]
    assert told(Monitor(), hovering, HEALTHY)[0] == []


def test_a_loss_that_is_held_back_has_more_time():
    assert told(Monitor(quiet_until=250), [LN8] * 250)[0] == []
    assert told(Monitor(quiet_until=250), [LN8] * 260)[0] == [("stuck-at-chance", 250)]
    assert told(Monitor(quiet_until=10**6), [LN8] * 400)[0] == [("stuck-at-chance", 299)]


def test_without_a_known_chance_no_loss_is_stuck():
    assert told(Monitor(), [LN8] * 400, {"grad_norm": 1.0})[0] == []


@pytest.mark.parametrize(
    ("name", "sick"),
    [
        ("rank-collapse", {"rank": 1.2}),
        ("rank-collapse", {"spread": 0.01}),
        ("one-prototype", {"top_share": 0.99}),
        ("uniform-codes", {"code_entropy": 0.9999}),
    ],
)
def test_each_collapse_has_its_name_and_is_told_once(name, sick):
    assert told(Monitor(), [1.0] * 300, {**HEALTHY, **sick})[0] == [(name, 20)]
    healthy_again = [1.0] * 300
    passing = told(Monitor(), healthy_again, lambda step: {**HEALTHY, **(sick if step < 20 else {})})
    assert passing[0] == []
    back = told(Monitor(), healthy_again, lambda step: {**HEALTHY, **(sick if step // 50 % 2 else {})})
    assert back[0] in ([(name, 70)], [])  # codes count only where they were uniform from the beginning
    assert (back[0] == []) == (name == "uniform-codes")


def test_what_explains_the_rest_is_told_alone():
    all_at_once = {"chance": LN8, "rank": 1.0, "spread": 0.0, "top_share": 1.0, "code_entropy": 1.0}
    assert told(Monitor(), [LN8] * 300, all_at_once)[0] == [("rank-collapse", 20)]
    uniform = {**HEALTHY, "code_entropy": 1.0}
    assert told(Monitor(), [LN8] * 300, uniform)[0] == [("uniform-codes", 20)]


def test_codes_that_become_uniform_are_a_loss_that_is_stuck():
    found = told(Monitor(), [LN8] * 300, lambda step: {**HEALTHY, "code_entropy": 1.0 if step else 0.8})
    assert found[0] == [("stuck-at-chance", 29)]


def test_a_gradient_that_is_not_finite_is_told_at_once():
    found = told(
        Monitor(), [1.0] * 50, lambda step: {**HEALTHY, "grad_norm": math.inf if step == 20 else 1.0}
    )
    assert found[0] == [("non-finite-gradient", 20)]


def test_what_was_told_before_a_resume_is_not_told_again():
    monitor = Monitor()
    monitor.remember(["rank-collapse"])
    assert told(monitor, [LN8] * 300, {**HEALTHY, "rank": 1.0})[0] == []


def test_advice_names_the_recipes_own_keys_and_values():
    swav = advice_for(resolve("swav_rn50_bs256").recipe)
    assert set(swav) == set(EVENTS)
    assert "method.epsilon (now 0.05)" in swav["uniform-codes"]
    stuck = swav["stuck-at-chance"]
    for part in (
        "epsilon",
        "optimizer.lr (now 0.6)",
        "method.prototypes (now 3000)",
        "(now 5005 steps)",
        "3840",
    ):
        assert part in stuck
    simclr = advice_for(resolve("simclr_rn50_bs256").recipe)
    assert not any("epsilon" in text or "prototypes" in text or "queue" in text for text in simclr.values())
    assert "optimizer.lr (now 0.3)" in simclr["rank-collapse"]
    assert "schedule.warmup_epochs" in simclr["rank-collapse"]
    assert "schedule.warmup_steps" in advice_for(resolve("amdim_ndf64_64px").recipe)["rank-collapse"]


# --- the figures ---


def test_figures_of_embeddings_with_known_geometry():
    same = figures_of(Seen(8, F.normalize(torch.ones(9, 4), dim=1)))
    assert same["chance"] == pytest.approx(LN8)
    assert same["rank"] == pytest.approx(1, abs=1e-5) and same["spread"] == pytest.approx(0, abs=1e-3)
    axes = torch.eye(4).repeat(3, 1)
    all_ways = figures_of(Seen(8, torch.cat((axes, -axes))))
    assert all_ways["rank"] == pytest.approx(4) and all_ways["spread"] == pytest.approx(1)
    line = figures_of(Seen(8, torch.cat((axes[:1], -axes[:1])).repeat(5, 1)))
    assert line["rank"] == pytest.approx(1) and line["spread"] == pytest.approx(1)
    few = figures_of(
        Seen(8, F.normalize(torch.randn(9, 64, generator=torch.Generator().manual_seed(0)), dim=1))
    )
    assert 8 < few["rank"] <= 9  # no more than there are rows


def test_figures_of_scores_and_codes():
    taken = torch.eye(8)[[0, 0, 0, 0, 0, 0, 1, 1]]
    found = figures_of(Seen(8, scores=taken, codes=torch.full((4, 8), 1 / 8)))
    assert (found["usage"], found["top_share"]) == (0.25, 0.75)
    assert found["entropy"] == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / LN8)
    more = figures_of(Seen(20, scores=torch.eye(20)[[0] * 5 + [1] * 5]))
    assert more["usage"] == 0.2  # two of the ten that ten rows can take
    assert found["code_entropy"] == pytest.approx(1)
    assert figures_of(Seen(8, codes=torch.eye(8)))["code_entropy"] == 0
    without = torch.cat((torch.full((2, 8), 1 / 8), torch.zeros(2, 8)))  # images that have no code yet
    assert figures_of(Seen(8, codes=without))["code_entropy"] == pytest.approx(1)
    assert figures_of(Seen(1, scores=torch.ones(9, 1))) == {"chance": 0.0}
    assert figures_of(Seen(8, torch.eye(4), scores=torch.eye(4))) == {
        "chance": pytest.approx(LN8)
    }  # too few rows
    assert figures_of(Seen(8, scores=torch.ones(9, 8))) == {"chance": pytest.approx(LN8)}  # none is nearest
    assert figures_of(Seen(8, queue_age=3))["queue_age"] == 3


def test_figures_keep_no_graph_and_change_nothing():
    scores = torch.randn(5, 8, requires_grad=True)
    seen = Seen(8, scores=scores)
    assert not seen.scores.requires_grad
    generator = torch.get_rng_state()
    figures_of(seen)
    assert torch.equal(torch.get_rng_state(), generator)


# --- runs ---


def folder_of_grey(folder):
    folder.mkdir()
    for number in range(24):
        Image.fromarray(np.full((20, 20, 3), 128, np.uint8)).save(folder / f"{number:02d}.png")
    return folder


LONG = {"epochs": 50, "checkpoint__every_epochs": None, "method__dim": 64, "method__hidden": 128}


# A rate thousands of times too large, and a temperature at which that shows in the loss: 14 times chance, and
# rising. Two looks in 40 steps are too few for another name to come first. At a rate of 0.001 nothing is named.
TOO_FAST = {"optimizer__lr": 3.0, "method__temperature": 0.02, "health__every": 20}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("uniform-codes", {"method__epsilon": 5.0}),
        ("rank-collapse", {"grey": True, "views__jitter_p": 0.0}),
        ("diverging", TOO_FAST),
    ],
)
def test_a_planted_collapse_is_named_within_50_steps(images, tmp_path, caplog, name, settings):
    data = folder_of_grey(tmp_path / "grey") if settings.pop("grey", False) else images
    with caplog.at_level(logging.WARNING, logger="zoo"):
        run = train(data, tmp_path / "run", **LONG, callbacks=(StopAfter(40),), **settings)
    (event,) = read_events(run.path / "events.jsonl")
    assert event["name"] == name and event["step"] < 50 and event["schema"] == 1
    assert caplog.text.count(name) == 1 and event["advice"] in caplog.text


def test_constant_scores_are_one_warning_with_ln_k(images, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(
        SwAV,
        "_scores",
        lambda self, embeddings: 0 * embeddings.sum() + embeddings.new_zeros(len(embeddings), 8),
    )
    with caplog.at_level(logging.WARNING, logger="zoo"):
        train(images, tmp_path / "run", **LONG, callbacks=(StopAfter(40),))
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "What helps" in text]
    assert warning.startswith("uniform-codes")
    for word in ("the loss is 2.079", "ln 8 = 2.079", "epsilon", "optimizer.lr", "prototypes", "freeze"):
        assert word in warning


def test_the_small_recipe_is_healthy_and_measured(finished):
    found = lines(finished.path)
    assert not (finished.path / "events.jsonl").exists()
    keys = {key for key in found[0] if key.startswith("health/")}
    assert keys >= {
        f"health/{key}" for key in ("grad_norm", "chance", "rank", "spread", "usage", "code_entropy")
    }
    assert found[0]["health/chance"] == pytest.approx(LN8)
    assert not any(key.startswith("health/") for line in found[1:] for key in line)  # every tenth step


QUEUE = {"method__queue_length": 16, "method__queue_start_epoch": 0}


def test_a_run_is_the_same_without_its_doctor(images, tmp_path):
    watched = train(images, tmp_path / "watched", health__every=1, **QUEUE)
    alone = train(images, tmp_path / "alone", health__every=0, **QUEUE)
    assert trace(watched.path) == trace(alone.path)
    assert_same_state(watched.path, alone.path)
    found = lines(watched.path)
    assert [line["health/queue_age"] for line in found] == [0, 0, 2, 2, 2, 2]
    assert all(line["health/grad_norm"] > 0 for line in found)
    assert not any("health" in key for line in lines(alone.path) for key in line)


def test_the_gradient_is_measured_in_parts_and_in_half_precision(images, tmp_path):
    whole = lines(train(images, tmp_path / "whole", epochs=1, precision="float64").path)
    parts = lines(
        train(images, tmp_path / "parts", epochs=1, precision="bfloat16", engine__accumulate=2).path
    )
    assert parts[0]["health/grad_norm"] > 0 and parts[0]["health/rank"] > 1
    assert whole[0]["health/grad_norm"] > 0


@pytest.mark.parametrize(
    ("recipe", "settings", "outcomes"),
    [
        ("moco_v2_rn50_200ep", {"method.negatives": 16, "method.shuffle_groups": 2}, 17),
        ("simclr_rn50_bs256", {}, 15),
        ("deepclusterv2_rn50_400ep_2x224", {"method.prototypes": [4, 4]}, 4),
        ("selav2_rn50_400ep_2x224", {"method.prototypes": [4], "method.codes": "soft"}, 4),
        ("supervised_rn50_200ep_2x224", {}, 2),
    ],
)
def test_every_method_says_what_it_sees(images, tmp_path, recipe, settings, outcomes):
    keys = ("trunk.base_planes", "batch_size", "epochs", "precision", "device", "data.workers")
    small = {key: TINY[key] for key in keys} | {"trunk.arch": "resnet18", "epochs": 1}
    views = {"views.count": [2], "views.size": [16], "views.min_scale": [0.3], "views.max_scale": [1.0]}
    heads = {} if "supervised" in recipe else {"method.hidden": 16, "method.dim": 8}
    run = start(
        recipe,
        data=str(images),
        out=tmp_path / "run",
        overrides={**small, **views, **heads, **settings},
        progress="quiet",
    )
    first = lines(run.path)[0]
    assert first["health/chance"] == pytest.approx(math.log(outcomes))
    if "supervised" not in recipe:
        assert 1 < first["health/rank"] <= 8 and 0 < first["health/spread"] < 1
    assert ("health/usage" in first) == ("v2_rn50_400ep" in recipe)
    assert ("health/code_entropy" in first) == ("selav2" in recipe)


def test_stop_on_collapse_saves_and_fails(images, tmp_path):
    plant = {**LONG, "method__epsilon": 5.0, "health__every": 2}
    run = train(images, tmp_path / "run", health__stop_on_collapse=True, **plant)
    assert (run.exit_code, run.step, run.event.name) == (1, 5, "uniform-codes")
    assert CheckpointFolder(run.path / "checkpoints").steps()[-1] == 5
    with pytest.raises(RunError, match=r"saved at step 5 of 150 \(uniform-codes") as caught:
        run.require_finished()
    assert "method.epsilon (now 5)" in caught.value.fix and "--resume" in caught.value.fix
    assert caught.value.exit_code == 1
    further = go_on(run.path, callbacks=(StopAfter(12),))
    assert further.exit_code == 75 and further.step == 12
    assert len(read_events(run.path / "events.jsonl")) == 1
    # What comes after the checkpoint that is gone on from will be told again.
    (run.path / "checkpoints" / "step-00000012" / "manifest.json").unlink()
    (run.path / "events.jsonl").open("a").write(
        json.dumps({"name": "x", "step": 11, "seen": "", "advice": ""}) + "\n"
    )
    go_on(run.path, callbacks=(StopAfter(6),))
    assert [event["step"] for event in read_events(run.path / "events.jsonl")] == [4]


def test_stop_on_collapse_from_the_command_line(images, tmp_path, capfd):
    sets = as_options({**TINY, "method.epsilon": 5, "health.every": 1, "epochs": 50})
    with pytest.raises(SystemExit) as caught:
        words = ["pretrain", "--data", str(images), "--out", str(tmp_path / "run"), *sets]
        zoo_command([*words, "--stop-on-collapse", "--quiet"])
    said = capfd.readouterr()
    assert caught.value.code == 1 and said.out == ""
    assert (
        "uniform-codes" in said.err and "method.epsilon (now 5)" in said.err and "Traceback" not in said.err
    )


def test_a_doctor_that_fails_is_off_and_the_run_goes_on(images, tmp_path, monkeypatch, caplog, finished):
    def failing(seen):
        raise ArithmeticError("no figures today")

    monkeypatch.setattr("zoo.pretrain.health.figures_of", failing)
    with caplog.at_level(logging.WARNING, logger="zoo"):
        run = train(images, tmp_path / "run")
    assert caplog.text.count("no figures today") == 1
    assert_same_state(run.path, finished.path)


# --- a loss that is not finite ---


def test_the_step_the_parameters_and_the_files_are_written_down(images, tmp_path, monkeypatch):
    step = SwAV.step
    calls = []

    def failing(self, views, batch, given=None):
        loss, logs = step(self, views, batch, given)
        calls.append(batch.ids.tolist())
        return (loss * math.nan if len(calls) == 3 else loss), logs

    monkeypatch.setattr(SwAV, "step", failing)
    with pytest.raises(RunError) as caught:
        train(images, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "nonfinite.json").read_text("utf-8"))
    assert (found["schema"], found["step"], found["epoch"]) == (1, 2, 0)
    assert found["parameters"]["values"] == {"count": 0, "first": []}
    gradients = found["parameters"]["gradients"]
    assert gradients["count"] == found["parameters"]["count"] and "trunk.conv1.weight" in gradients["first"]
    (process,) = found["processes"]
    assert process["loss"] == "nan"
    assert [image["sample"] for image in process["images"]] == calls[2]
    files = sorted(images.rglob("*.png"))
    assert [image["file"] for image in process["images"]] == [str(files[sample]) for sample in calls[2]]
    assert caught.value.where.endswith("nonfinite.json")
    assert "trunk.conv1.weight" in caught.value.what and "8 images" in caught.value.what


def test_weights_and_views_that_are_not_finite_are_named(images, tmp_path):
    sick = sorted(images.rglob("*.png"))[5]
    red = np.asarray(Image.open(sick))[0, 0].tolist()

    def view(picture):
        numbers = torch.from_numpy(np.array(picture.resize((12, 12)))).permute(2, 0, 1).float() / 255
        return numbers * math.nan if np.asarray(picture)[0, 0].tolist() == red else numbers

    with pytest.raises(RunError) as caught:
        start(
            data=str(images),
            out=tmp_path / "run",
            overrides=TINY,
            views=[view, view],
            progress="quiet",
        )
    found = json.loads((tmp_path / "run" / "nonfinite.json").read_text("utf-8"))
    assert [image["file"] for image in found["processes"][0]["images"] if "not_finite" in image] == [
        str(sick)
    ]
    assert str(sick) in caught.value.what
