"""Runs of MoCo: the recipes' numbers, exact resume, schedules, and what is published."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny import StopAfter, assert_same_state, go_on, image_folder, save_image, state, trace
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback
from zoo.errors import EXIT_SAVED, InputError
from zoo.models.factory import create_trunk
from zoo.pretrain.publish import publish_run, read_run
from zoo.pretrain.resolve import resolve
from zoo.pretrain.run import RunResult, start
from zoo.pretrain.session import Session
from zoo.weights.formats import read_model
from zoo.weights.hubs.local import LocalHub

# 24 images and batches of 8: an epoch is 3 steps.
TINY_MOCO: dict[str, Any] = {
    "trunk.arch": "resnet18",
    "trunk.base_planes": 4,
    "views.size": [16],
    "method.negatives": 20,
    "method.hidden": 16,
    "method.dim": 8,
    "method.shuffle_groups": 2,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}
RECIPES = ["moco_v1_rn50_200ep", "moco_v1_rn50w4_200ep", "moco_v2_rn50_200ep", "moco_v2_rn50_800ep"]


def train(
    images: Path, out: Path, *, recipe: str = "moco_v2_rn50_200ep", init_from: Path | None = None, **more: Any
) -> RunResult:
    callbacks = more.pop("callbacks", ())
    dotted = {key.replace("__", "."): value for key, value in more.items()}
    return start(
        recipe,
        data=str(images),
        out=out,
        overrides={**TINY_MOCO, **dotted},
        init_from=init_from,
        callbacks=callbacks,
        progress="quiet",
    )


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(images, tmp_path_factory.mktemp("moco") / "run")


@pytest.mark.parametrize("name", RECIPES)
def test_the_released_numbers(shared: Path, name: str) -> None:
    facts = json.loads((shared / "golden" / "augmentation_facts.json").read_text("utf-8"))
    numbers, own = facts["moco_hparams"]["both"], facts["moco_hparams"][name.split("_")[1]]
    recipe = resolve(name).recipe
    method = recipe.method
    assert recipe.trunk.arch == ("resnet50w4" if "w4" in name else "resnet50")
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("sgd", numbers["lr"])
    assert (recipe.optimizer.weight_decay, recipe.optimizer.momentum) == (numbers["wd"], numbers["momentum"])
    assert recipe.optimizer.exclude_one_dimensional is False
    assert recipe.batch_size == numbers["batch"]
    assert recipe.epochs == (800 if "800" in name else numbers["epochs"])
    assert (method.negatives, method.momentum, method.dim) == (numbers["K"], numbers["m"], numbers["dim"])
    assert method.temperature == own["T"]
    assert method.hidden == (2048 if own["mlp"] else 0)
    schedule = recipe.schedule
    assert (schedule.per, schedule.warmup_epochs, schedule.final_lr) == ("epoch", 0, 0)
    if own["cos"]:
        assert (schedule.name, schedule.drop_at) == ("cosine", ())
    else:
        assert schedule.name == "step"
        assert (list(schedule.drop_at), schedule.drop) == (own["schedule"], own["lr_drop"])
    assert recipe.engine.sync_batchnorm is False
    assert method.shuffle_groups == 8
    assert recipe.views.preset == f"moco-{name.split('_')[1]}"
    views = facts[f"moco_{name.split('_')[1]}"]
    assert list(recipe.views.std) == views["std"]
    assert (recipe.views.blur_p, recipe.views.jitter_p) == ((0.5, 0.8) if own["mlp"] else (0.0, 1.0))


# In the middle and at the end of an epoch of three steps.
@pytest.mark.parametrize(
    ("dictionary", "stop"), [("queue", 2), ("queue", 3), ("batch", 2), ("memory_bank", 2)]
)
def test_stopping_and_going_on_is_bit_for_bit(images, tmp_path, dictionary, stop):
    settings = {"method__dictionary": dictionary, "engine__accumulate": 2, "method__shuffle_groups": 4}
    whole = train(images, tmp_path / "whole", **settings)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(stop),), **settings)
    assert (half.step, half.exit_code) == (stop, EXIT_SAVED)
    rest = go_on(half.path)
    assert (rest.step, rest.exit_code) == (6, 0)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)


def test_what_a_checkpoint_holds(run):
    saved = state(run.path)
    assert saved["shared/learner/queue_ptr"].tolist() == [6 * 8 % 20]
    assert any(key.startswith("shared/learner/momentum_encoder.layer4") for key in saved)
    assert not torch.equal(
        saved["shared/learner/momentum_encoder.conv1.weight"], saved["shared/learner/trunk.conv1.weight"]
    )
    momenta = [key for key in saved if key.endswith("momentum_buffer")]
    query_encoder = [p for p in run.method.parameters() if p.requires_grad]
    assert len(momenta) == len(query_encoder)


def test_a_queue_that_no_batch_divides(tmp_path):
    """Ten images, batches of four, a queue of ten: two steps an epoch, and the pointer wraps."""
    data = image_folder(tmp_path / "images", count=10)
    done = train(data, tmp_path / "run", method__negatives=10, batch_size=4, method__shuffle_groups=1)
    assert (done.step, done.exit_code) == (4, 0)
    assert done.method.queue_ptr.tolist() == [6]
    torch.testing.assert_close(done.method.queue.norm(dim=0), torch.ones(10))


def test_multi_crop_trains(images, tmp_path):
    settings = {
        "views__count": [2, 3],
        "views__size": [16, 8],
        "views__min_scale": [0.2, 0.05],
        "views__max_scale": [1.0, 0.2],
    }
    done = train(images, tmp_path / "run", epochs=1, **settings)
    assert done.exit_code == 0
    both = train(images, tmp_path / "both", epochs=1, method__key_views=[0, 1], **settings)
    assert both.method.queue_ptr.tolist() == [3 * 16 % 20]


def test_rates_move_once_an_epoch(run, images, tmp_path):
    rates = [lr for _, _, lr in trace(run.path)]
    assert rates == pytest.approx([0.03] * 3 + [0.015] * 3)  # half a cosine over two epochs
    steps = train(
        images,
        tmp_path / "run",
        recipe="moco_v1_rn50_200ep",
        epochs=3,
        schedule__drop_at=[1, 2],
        schedule__warmup_epochs=1,
        schedule__start_lr=0.01,
    )
    # An epoch of warm-up per epoch is its first rate; then two drops.
    assert [lr for _, _, lr in trace(steps.path)] == pytest.approx([0.01] * 3 + [0.003] * 3 + [0.0003] * 3)


def test_extending_a_run_follows_the_longer_schedule(images, tmp_path):
    first = train(images, tmp_path / "run")
    before = trace(first.path)
    more = go_on(first.path, epochs=4)
    assert (more.step, more.exit_code) == (12, 0)
    assert trace(first.path)[:6] == before
    rates = [lr for _, _, lr in trace(first.path)[6:]]
    assert rates[:3] == pytest.approx([0.015] * 3)  # the third of four epochs
    assert rates[3:] == pytest.approx([0.03 * (1 - 0.5**0.5) / 2] * 3)


def test_drops_of_the_rate_are_held_against_the_run(images, tmp_path, caplog):
    with pytest.raises(InputError, match=r"drop_at belongs to schedule\.name step"):
        resolve("swav_tiny", {"schedule.drop_at": [3]})
    with caplog.at_level(logging.WARNING, logger="zoo"):
        train(images, tmp_path / "run", recipe="moco_v1_rn50_200ep", epochs=1)
    assert "drop_at [120, 160]" in caplog.text and "1 epochs" in caplog.text


def test_warnings_reach_the_log_and_errors_the_user(images, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="zoo"):
        train(images, tmp_path / "run", epochs=1, method__shuffle_groups=1)
    assert "keys are not shuffled" in caplog.text
    with pytest.raises(InputError, match="3 equal groups"):
        train(images, tmp_path / "bad", method__shuffle_groups=3)
    assert not (tmp_path / "bad").exists()


class Start(Callback):
    """The encoders before the first step."""

    def on_start(self, loop: Any) -> None:
        self.state = {key: value.clone() for key, value in loop.learner.state_dict().items()}


def test_other_weights_are_given_to_both_encoders(run, images, tmp_path):
    watch = Start()
    train(images, tmp_path / "run", epochs=1, seed=7, init_from=run.path, callbacks=(watch,))
    trunk = run.method.trunk.state_dict()
    for key, value in trunk.items():
        assert torch.equal(watch.state[f"trunk.{key}"], value)
        assert torch.equal(watch.state[f"momentum_encoder.{key}"], value)
    head = "projection_head.0.weight"
    assert torch.equal(watch.state[f"momentum_encoder.{head}"], watch.state[head])
    assert not torch.equal(watch.state[head], run.method.state_dict()[head])


def test_the_query_encoder_is_published(run):
    what, trunk, heads = read_run(run.path)
    assert what.method == "moco"
    plain = create_trunk("resnet18", base_planes=4)
    plain.load_state_dict(trunk)
    images = torch.randn(2, 3, 16, 16)
    run.method.eval()
    with torch.no_grad():
        torch.testing.assert_close(run.method.embed(images), plain.eval()(images), rtol=1e-4, atol=1e-5)
    assert {"queue", "queue_ptr", "projection_head.0.weight", "projection_head.2.bias"} <= heads.keys()


@pytest.mark.parametrize("dictionary", ["queue", "memory_bank"])
def test_of_the_heads_the_projection_alone_is_published(run, images, tmp_path, dictionary):
    if dictionary != "queue":
        run = train(images, tmp_path / "run", epochs=1, method__dictionary=dictionary)
    assert any(dictionary in key for key in read_run(run.path)[2])
    published = publish_run(run.path, name="me/moco", hub=LocalHub(tmp_path / "hub"))
    heads = load_file(published.path / "heads.safetensors")
    assert {key.split(".")[0] for key in heads} == {"projection_head"}


def test_heads_have_the_names_that_the_references_files_are_read_by(run, tmp_path):
    """Written in the reference's layout, a run is read back as what it was."""
    _, trunk, heads = read_run(run.path)
    encoder_q = {**trunk, **{k: v for k, v in heads.items() if k.startswith("projection_head.")}}
    encoder_k = {
        key.removeprefix("momentum_encoder."): value
        for key, value in heads.items()
        if key.startswith("momentum_encoder.")
    }
    assert encoder_k.keys() == encoder_q.keys()
    value = {f"module.{key}": heads[key] for key in ("queue", "queue_ptr")}
    for name, encoder in (("encoder_q", encoder_q), ("encoder_k", encoder_k)):
        value |= {
            f"module.{name}.{key.replace('projection_head.', 'fc.')}": tensor
            for key, tensor in encoder.items()
        }
    torch.save({"state_dict": value, "epoch": 2, "arch": "resnet18"}, tmp_path / "checkpoint.pth.tar")
    model = read_model(tmp_path / "checkpoint.pth.tar")
    assert (model.format, model.network.base_planes) == ("moco", 4)
    assert model.heads.keys() == heads.keys()
    assert all(torch.equal(model.heads[key], heads[key]) for key in heads)


def test_a_bank_larger_than_the_gpus_memory_is_refused_by_its_bytes(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 24 * 8 * 4  # images, numbers of each, bytes
    settings = {**TINY_MOCO, "method.dictionary": "memory_bank", "data.sources": [str(images)]}
    resolved = resolve("moco_v2_rn50_200ep", settings)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, needed - 1))
    with pytest.raises(InputError, match=f"take {needed} bytes") as caught:
        Session(resolved, torch.device("cuda", 1), WorldOfOne())
    assert "cuda:1 has" in caught.value.what
    # Processes on processors share the machine's.
    monkeypatch.setattr("zoo.pretrain.session.machine_memory", lambda: 3 * needed - 1)
    Session(resolved, torch.device("cpu"), WorldOfOne())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match=f"take {needed} bytes") as caught:
        Session(resolved, torch.device("cpu"), WorldOfOne())
    assert "each of 3 processes here has" in caught.value.what


def test_changed_settings_are_refused_when_a_run_goes_on(run):
    for key in ("method__momentum", "method__negatives", "schedule__name"):
        with pytest.raises(InputError, match="can't change"):
            go_on(run.path, **{key: {"schedule__name": "step"}.get(key, 1)})


def test_a_substitute_for_a_bad_image_does_not_confuse_the_memory_bank(tmp_path):
    data = image_folder(tmp_path / "images", count=8, classes=0)
    save_image(data / "000.png", 0)
    (data / "001.png").write_bytes(b"no image")
    done = train(
        data,
        tmp_path / "run",
        method__dictionary="memory_bank",
        data__on_error="skip",
        method__shuffle_groups=1,
        epochs=4,
    )
    assert (done.exit_code, done.bad_files) == (0, 1)
    torch.testing.assert_close(done.method.memory_bank.norm(dim=1), torch.ones(8))
