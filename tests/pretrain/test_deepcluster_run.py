"""Runs of DeepCluster-v2 and SeLa-v2: the recipes' numbers, exact resume, bad files, and what is published."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny import StopAfter, assert_same_state, go_on, image_folder, state, trace
from zoo.engine.loop import Callback
from zoo.errors import EXIT_SAVED, InputError
from zoo.pretrain.publish import read_run
from zoo.pretrain.resolve import resolve
from zoo.pretrain.run import RunResult, start

# 24 images and batches of 8: an epoch is 3 steps.
TINY: dict[str, Any] = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 4,
    "views.size": [16, 8],
    "views.count": [2, 1],
    "method.prototypes": [8, 6, 4],
    "method.hidden": 16,
    "method.dim": 8,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}
RECIPES = {
    "deepclusterv2_rn50_800ep": (800, "swav-2x224+6x96"),
    "deepclusterv2_rn50_400ep_2x160_4x96": (400, "swav-2x160+4x96"),
    "deepclusterv2_rn50_400ep_2x224": (400, "swav-2x224"),
    "selav2_rn50_400ep_2x160_4x96": (400, "swav-2x160+4x96"),
    "selav2_rn50_400ep_2x224": (400, "swav-2x224"),
}
DEEPCLUSTER, SELA = "deepclusterv2_rn50_400ep_2x160_4x96", "selav2_rn50_400ep_2x160_4x96"


def train(images: Path, out: Path, recipe: str = DEEPCLUSTER, **more: Any) -> RunResult:
    callbacks = more.pop("callbacks", ())
    dotted = {key.replace("__", "."): value for key, value in more.items()}
    overrides = {**TINY, **dotted}
    return start(
        recipe, data=str(images), out=out, overrides=overrides, callbacks=callbacks, progress="quiet"
    )


@pytest.fixture(scope="module")
def runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    place = tmp_path_factory.mktemp("runs")
    return {recipe: train(images, place / recipe, recipe) for recipe in (DEEPCLUSTER, SELA)}


@pytest.mark.parametrize("name", RECIPES)
def test_the_released_numbers(name: str) -> None:
    recipe = resolve(name).recipe
    epochs, preset = RECIPES[name]
    assert (recipe.epochs, recipe.views.preset, recipe.batch_size) == (epochs, preset, 4096)
    assert recipe.method.name == ("deepcluster_v2" if name.startswith("deepcluster") else "sela_v2")
    assert recipe.method.prototypes == (3000, 3000, 3000)
    assert (recipe.method.temperature, recipe.method.dim, recipe.method.hidden) == (0.1, 128, 2048)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("lars", 4.8, 1e-6)
    assert (schedule.warmup_epochs, schedule.start_lr, schedule.final_lr) == (10, 0.3, 0.0048)


@pytest.mark.parametrize("recipe", [DEEPCLUSTER, SELA])
def test_the_bank_holds_a_unit_vector_of_each_image(runs, recipe):
    run = runs[recipe]
    assert (run.step, run.exit_code) == (6, 0)
    assert all(0 < loss < 12 for _, loss, _ in trace(run.path))
    bank = run.method.bank
    torch.testing.assert_close(bank.norm(dim=2), torch.ones(2, 24))
    assert sorted(run.method.index.tolist()) == list(range(24))


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [(DEEPCLUSTER, {}), (SELA, {}), (SELA, {"method__codes": "soft", "engine__accumulate": 2})],
)
def test_a_run_that_is_stopped_again_and_again_is_the_same(images, tmp_path, recipe, settings):
    whole = train(images, tmp_path / "whole", recipe, **settings)
    run = train(images, tmp_path / "run", recipe, callbacks=(StopAfter(1),), **settings)
    assert (run.step, run.exit_code) == (1, EXIT_SAVED)
    for step in (3, 5, 6):  # in the middle of an epoch and at its end
        go_on(run.path, callbacks=(StopAfter(step),))
    assert trace(run.path) == trace(whole.path)
    assert_same_state(run.path, whole.path)


class StopAtStart(Callback):
    """Asks for a stop before anything is computed, so that the pass over the images meets it."""

    def on_start(self, loop: Any) -> None:
        self.state = {key: value.clone() for key, value in loop.learner.state_dict().items()}
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_stop_in_the_first_pass_is_saved_at_once(runs, images, tmp_path):
    watch = StopAtStart()
    run = train(images, tmp_path / "run", callbacks=(watch,))
    assert (run.step, run.exit_code) == (0, EXIT_SAVED)
    assert not any(key.startswith("local/learner") for key in state(run.path))
    for key, value in run.method.state_dict().items():
        assert torch.equal(value, watch.state[key]), key
    assert go_on(run.path).step == 6
    assert trace(run.path) == trace(runs[DEEPCLUSTER].path)
    assert_same_state(run.path, runs[DEEPCLUSTER].path)


def test_data_workers_change_nothing(runs, images, tmp_path):
    run = train(images, tmp_path / "run", data__workers=1)
    assert trace(run.path) == trace(runs[DEEPCLUSTER].path)
    assert_same_state(run.path, runs[DEEPCLUSTER].path)


def test_the_time_of_a_pass_counts(images, tmp_path):
    class Watch(Callback):
        records: list[Any]

        def on_start(self, loop: Any) -> None:
            self.records = []

        def on_step(self, record: Any) -> None:
            self.records.append(record)

    watch = Watch()
    train(images, tmp_path / "run", callbacks=(watch,), epochs=1)
    first, second, _ = watch.records
    assert first.time > first.step_time  # but a step's speed is its own
    assert second.time - first.time == pytest.approx(second.step_time)


def test_the_centroids_rest_within_an_epoch_and_learned_prototypes_move(images, tmp_path):
    class Watch(Callback):
        def on_start(self, loop: Any) -> None:
            self.learner, self.seen = loop.learner, []

        def on_step(self, record: Any) -> None:
            self.seen.append([head.weight.detach().clone() for head in self.learner.heads()])

    for recipe, rests in ((DEEPCLUSTER, True), (SELA, False)):
        watch = Watch()
        train(images, tmp_path / recipe, recipe, callbacks=(watch,), optimizer__lr=1.0)
        for head in range(3):
            first, second, third, fourth = (step[head] for step in watch.seen[:4])
            assert torch.equal(first, second) is rests
            assert torch.equal(second, third) is rests
            assert not torch.equal(third, fourth)


def test_what_is_published(runs):
    for recipe, run in runs.items():
        what, trunk, heads = read_run(run.path)
        assert what.method == ("deepcluster_v2" if recipe == DEEPCLUSTER else "sela_v2")
        names = {key.split(".")[0] for key in heads}
        assert names == {"projection_head", "prototypes"}  # no image's embedding, no image's cluster
        assert heads["prototypes.prototypes2.weight"].shape == (4, 8)
        assert "conv1.weight" in trunk


def test_too_many_clusters_and_a_stray_view_are_bad_input(images, tmp_path):
    with pytest.raises(InputError, match="24 images an epoch can't fill 25 clusters"):
        train(images, tmp_path / "run", method__prototypes=25)
    with pytest.raises(InputError, match="View 3 is to be remembered"):
        train(images, tmp_path / "run", method__crops_for_assign=[0, 3])
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="a list of such numbers"):
        resolve(DEEPCLUSTER, {"method.prototypes": "[3, 0]"})


def test_an_image_that_cannot_be_read_is_reported_once_an_epoch(tmp_path, caplog):
    data = image_folder(tmp_path / "images", count=9, classes=0)
    (data / "001.png").write_bytes(b"no image")
    with caplog.at_level(logging.INFO, logger="zoo"):
        run = train(data, tmp_path / "run", data__on_error="skip", epochs=4)
    assert (run.exit_code, run.bad_files) == (0, 1)
    assert caplog.text.count("filling the memory bank") == 1
    assert "single epoch" not in caplog.text


def test_flops_are_those_of_a_step_not_of_the_pass(runs):
    run = runs[DEEPCLUSTER]
    report = json.loads((run.path / "efficiency.json").read_text("utf-8"))
    views = [torch.rand(16, 3, 16, 16), torch.rand(8, 3, 8, 8)]
    with FlopCounterMode(display=False) as counter:
        sum(scores.sum() for scores in run.method.train()(views)[1]).backward()
    assert report["flops_per_step"] == counter.get_total_flops()
