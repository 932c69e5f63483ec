"""kill -9 of the other methods' runs, resumed, is the undisturbed run: their queues, banks and averages too."""

import random
import signal

import pytest
from test_kill import launch, wait_for_step

from tiny import as_options, assert_same_state, go_on, image_folder, trace
from zoo.pretrain.run import start

SHARED = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 8,
    "views.size": [16],
    "method.hidden": 16,
    "method.dim": 8,
    "batch_size": 8,
    "epochs": 12,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
    "checkpoint.every_steps": 2,
}
METHODS = {
    "moco_v2_rn50_200ep": {"method.negatives": 20, "method.shuffle_groups": 2, "method.momentum": 0.9},
    "simclr_rn50_bs256": {},
    "deepclusterv2_rn50_400ep_2x224": {"method.prototypes": [8, 6]},
    "selav2_rn50_400ep_2x224": {"method.prototypes": [8, 6], "method.codes": "soft"},
    "swav_rn50_bs256_momentum": {
        "views.count": [2],
        "views.min_scale": [0.2],
        "views.max_scale": [1.0],
        "method.prototypes": 8,
        "method.queue_length": 16,
        "method.queue_start_epoch": 1,
    },
}
STEPS = 36


@pytest.mark.parametrize("recipe", METHODS)
def test_kill_at_random_moments(tmp_path, monkeypatch, recipe):
    data = image_folder(tmp_path / "images")
    settings = {**SHARED, **METHODS[recipe]}
    with monkeypatch.context() as patch:
        patch.setattr("zoo.engine.precision.processors", lambda: 1)
        whole = start(
            recipe, data=str(data), out=tmp_path / "whole", overrides=settings, progress="quiet"
        ).path
    run, draw = tmp_path / "run", random.Random(recipe)
    words = [recipe, "--data", data, "--out", run, "--quiet", *as_options(settings)]
    with open(tmp_path / "log", "wb") as log:
        process = launch(*words, log=log)
        assert wait_for_step(process, run, draw.randrange(3, STEPS - 12)), (tmp_path / "log").read_text()
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = go_on(run)
    assert (done.step, done.exit_code) == (STEPS, 0)
    assert trace(run) == trace(whole)
    assert_same_state(run, whole)
    assert not list(run.rglob("*.tmp"))
