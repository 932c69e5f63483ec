"""Whole runs with a user's own views, with colours made on the device, and with other channels than three."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torchvision.transforms import v2

import zoo
from cli.main import run as zoo_command
from tiny import (
    TINY,
    StopAfter,
    as_options,
    assert_same_state,
    go_on,
    image_folder,
    pixels,
    state,
    trace,
    train,
    with_tiny,
)
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback
from zoo.engine.precision import choose_precision
from zoo.errors import EXIT_SAVED, InputError
from zoo.pretrain.images import RunImages, view_preparer
from zoo.pretrain.publish import read_run
from zoo.pretrain.resolve import resolve


def view(size, *then):
    return v2.Compose([v2.RandomResizedCrop(size, scale=(0.3, 1.0), antialias=True), v2.PILToTensor(), *then])


OWN = [view(12), view(12), view(8)]


def pretrain(data, out, views=OWN, **options):
    overrides = {**TINY, **options.pop("overrides", {})}
    return zoo.pretrain(
        "swav_tiny", data=str(data), out=out, overrides=overrides, views=views, progress="quiet", **options
    )


def info(run):
    return json.loads((run / "run.json").read_text("utf-8"))


# --- own views ---


def test_own_views_train_and_are_repeatable(images, tmp_path):
    seen = set()

    def watched(image):
        seen.add(image.size)
        return [one(image) for one in OWN]

    run = pretrain(images, tmp_path / "a", watched)
    assert (run.step, run.exit_code) == (6, 0)
    assert info(run.path)["own_views"] is True
    assert seen == {(20, 20)}
    again = pretrain(images, tmp_path / "b")  # a list of callables, one after the other: the same draws
    assert trace(run.path) == trace(again.path)
    assert_same_state(run.path, again.path)


def test_own_views_go_on_bit_for_bit_and_only_with_the_same_views(images, finished, tmp_path):
    whole = pretrain(images, tmp_path / "whole")
    half = pretrain(images, tmp_path / "half", callbacks=(StopAfter(2),))
    assert (half.step, half.exit_code) == (2, EXIT_SAVED)
    before = state(half.path)
    with pytest.raises(InputError, match="started with your own transforms") as caught:
        go_on(half.path)
    assert "--views" in caught.value.fix and str(half.path) in caught.value.where
    assert before.keys() == state(half.path).keys()
    zoo.pretrain(resume=half.path, views=OWN, progress="quiet")
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)
    with pytest.raises(InputError, match="started with the recipe's views") as caught:
        zoo.pretrain(resume=finished.path, views=OWN, progress="quiet")
    assert "leave the transforms away" in caught.value.fix


def test_floating_point_views_are_taken_as_finished(images, tmp_path):
    """The user's own normalisation by the recipe's numbers comes to the same as the recipe's."""
    views = resolve("swav_tiny").recipe.views
    finish = (v2.ToDtype(torch.float32, scale=True), v2.Normalize(views.mean, views.std))
    floats = [view(12, *finish), view(12, *finish), view(8, *finish)]
    short = {"overrides": {"epochs": 1}}
    losses = [
        trace(pretrain(images, tmp_path / str(i), v, **short).path) for i, v in enumerate((OWN, floats))
    ]
    assert losses[0][0][1] == pytest.approx(losses[1][0][1], rel=1e-4)
    other = [view(12, finish[0]), view(12, finish[0]), view(8, finish[0])]
    assert trace(pretrain(images, tmp_path / "2", other, **short).path)[0][1] != pytest.approx(
        losses[0][0][1], rel=1e-4
    )


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ([view(12)], "at least two views"),
        ([], "gave no views"),
        ([view(12), lambda image: image], "1 x 12 px (uint8) + 1 x 30 px"),
        ([view(12), lambda image: "picture"], "str"),
        ([view(12), view(12), v2.Grayscale()], "made 3 channels into 1"),
    ],
)
def test_views_that_can_not_be_trained_on_are_refused_before_a_folder_is_made(tmp_path, views, words):
    data = image_folder(tmp_path / "images", 8)
    Image.fromarray(pixels(0, 30)).save(data / "class0" / "zz.png")
    with pytest.raises(InputError) as caught:
        pretrain(data, tmp_path / "run", views, overrides={"method.crops_for_assign": [0]})
    assert words in str(caught.value)


def test_own_views_from_the_command_line(images, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_transforms_of_a_test.py").write_text(
        "from torchvision.transforms import v2\n"
        "one = v2.Compose([v2.RandomResizedCrop(12, antialias=True), v2.PILToTensor()])\n"
        "views = [one, one]\n"
    )
    flags = as_options({**TINY, "epochs": 1})

    def run(*words):
        with pytest.raises(SystemExit) as caught:
            zoo_command([str(word) for word in ("pretrain", *words)])
        return caught.value.code or 0, capfd.readouterr().err

    start = ["--data", images, "--out", "run", "-q", *flags]
    assert run(*start, "--views", "my_transforms_of_a_test:views")[0] == 0
    assert info(tmp_path / "run")["own_views"] is True
    for place, words in (
        ("my_transforms_of_a_test", "MODULE:NAME"),
        ("my_transforms_of_a_test:nothing", "nothing"),
        ("no_such_module_at_all:views", "no_such_module_at_all"),
    ):
        code, err = run("--data", images, "--out", "other", "-q", *flags, "--views", place)
        assert code == 2 and err.startswith("error: ") and words in err
        assert not (tmp_path / "other").exists()
    sys.modules.pop("my_transforms_of_a_test")


# --- colours on the device ---


def test_colours_on_the_device_train_and_go_on_bit_for_bit(images, finished, tmp_path):
    colours = {"data__augment_on": "device", "views__jitter_p": 1.0, "views__blur_p": 0.5}
    whole = train(images, tmp_path / "whole", **colours)
    assert (whole.step, whole.exit_code) == (6, 0)
    assert info(whole.path)["augment_on"] == "device"
    half = train(images, tmp_path / "half", callbacks=(StopAfter(2),), **colours)
    go_on(half.path)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)
    assert info(finished.path)["augment_on"] == "worker"  # auto on a CPU


def test_the_trunk_sees_the_same_views_wherever_colours_are_made(images):
    cpu, prepared = torch.device("cpu"), []
    for place in ("worker", "device"):
        settings = with_tiny(data__sources=[str(images)], data__augment_on=place, views__jitter_p=1.0)
        recipe = resolve("swav_tiny", settings).recipe
        run_images = RunImages(recipe, None, WorldOfOne())
        run_images.place(None, cpu)
        prepare = view_preparer(recipe, choose_precision("float32", cpu))
        prepared.append([view for batch in run_images.batches(0, 3, cpu) for view in prepare(batch)])
    for in_worker, on_device in zip(*prepared, strict=True):
        assert in_worker.dtype == on_device.dtype == torch.float32
        assert in_worker.stride() == on_device.stride()
        # Normalised values, standard deviation 1: rounding to 8 bits at other places.
        difference = (in_worker - on_device).abs()
        assert difference.max() < 0.4
        assert 0 < difference.mean() < 0.03


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_colours_on_the_device_train_in_half_precision(images, tmp_path, half):
    colours = {"data__augment_on": "device", "views__jitter_p": 1.0, "views__blur_p": 1.0}
    run = train(images, tmp_path / "run", precision=half, epochs=1, **colours)
    assert (run.step, run.exit_code) == (3, 0)
    assert all(np.isfinite(loss) for _, loss, _ in trace(run.path))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_colours_on_the_device_do_not_depend_on_workers(images, tmp_path):
    alone = train(images, tmp_path / "alone", data__augment_on="device", epochs=1)
    helped = train(images, tmp_path / "helped", data__augment_on="device", epochs=1, data__workers=1)
    assert trace(alone.path) == trace(helped.path)
    assert_same_state(alone.path, helped.path)


# --- views apart ---


def test_views_apart_are_the_same_views_in_order(images):
    cpu = torch.device("cpu")
    prepared = []
    for apart in (False, True):
        settings = with_tiny(data__sources=[str(images)], engine__views_apart=apart)
        recipe = resolve("swav_tiny", settings).recipe
        run_images = RunImages(recipe, None, WorldOfOne())
        prepare = view_preparer(recipe, choose_precision("float32", cpu))
        prepared.append(prepare(next(iter(run_images.batches(0, 1, cpu)))))
    together, apart = prepared
    assert len(apart) == sum(recipe.views.count) and {len(view) for view in apart} == {recipe.batch_size}
    for one, other in zip(
        (view for group in together for view in group.split(recipe.batch_size)), apart, strict=True
    ):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("parts", [1, 2])
def test_batchnorm_sees_one_view_of_every_image_at_a_time(images, tmp_path, parts):
    seen = []

    class Watch(Callback):
        def on_start(self, loop):
            loop.learner.trunk.bn1.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))

    train(images, tmp_path / "run", callbacks=(Watch(),), engine__views_apart=True, engine__accumulate=parts)
    assert set(seen) == {TINY["batch_size"] // parts}


def test_where_colours_are_made_can_not_change(images, tmp_path):
    run = train(images, tmp_path / "run", data__augment_on="device", callbacks=(StopAfter(2),))
    with pytest.raises(InputError, match=r"data\.augment_on can't change"):
        go_on(run.path, data__augment_on="worker")


# --- other channels ---


def used_by_nobody_else(monkeypatch, folder):
    for variable in ("ZOO_HOME", "ZOO_CACHE", "ZOO_RUNS"):
        monkeypatch.setenv(variable, str(folder / variable))


@pytest.mark.parametrize("place", ["worker", "device"])
def test_gray_images_from_training_to_features(images, tmp_path, monkeypatch, place):
    used_by_nobody_else(monkeypatch, tmp_path)
    run = train(images, tmp_path / "run", data__channels=1, data__augment_on=place)
    assert (run.step, run.exit_code) == (6, 0)
    assert all(np.isfinite(loss) for _, loss, _ in trace(run.path))
    assert run.method.trunk.conv1.weight.shape[1] == 1
    assert "gray_p: 0.0  # for 1 channel" in (run.path / "recipe.yaml").read_text("utf-8")
    half = train(
        images, tmp_path / "half", data__channels=1, data__augment_on=place, callbacks=(StopAfter(2),)
    )
    go_on(half.path)
    assert_same_state(half.path, run.path)

    zoo.publish(run.path, name="me/gray")
    model = zoo.load("me/gray", progress=False)
    assert model.conv1.weight.shape[1] == 1
    assert torch.equal(model.conv1.weight, run.method.trunk.conv1.weight)
    assert len(model.zoo_info["preprocessing"]["mean"]) == len(model.zoo_info["preprocessing"]["std"]) == 1
    found = zoo.extract(model, str(images))["features"]
    assert found.shape == (24, model.fc.in_features) and found.isfinite().all()
    assert found.std(dim=0).max() > 0
    # Coloured files were turned gray: gray copies of them have the same features.
    gray = tmp_path / "gray"
    for path in sorted(images.rglob("*.png")):
        (gray / path.parent.name).mkdir(parents=True, exist_ok=True)
        Image.open(path).convert("L").save(gray / path.parent.name / path.name)
    assert torch.allclose(zoo.extract(model, str(gray))["features"], found, atol=1e-6)


def test_images_of_five_channels_from_training_to_features(tmp_path, monkeypatch):
    used_by_nobody_else(monkeypatch, tmp_path)
    data = tmp_path / "bands"
    data.mkdir()
    for seed in range(16):
        bands = np.concatenate([pixels(seed), pixels(seed + 100)], axis=2)[:, :, :5]
        tifffile.imwrite(data / f"{seed:02d}.tif", bands, photometric="minisblack", planarconfig="contig")
    run = train(data, tmp_path / "run", data__channels=5, epochs=1, views__mean=[0.5] * 5)
    assert (run.step, run.exit_code) == (2, 0)
    zoo.publish(run.path, name="me/five")
    model = zoo.load("me/five", progress=False)
    assert model.conv1.weight.shape[1] == 5
    assert model.zoo_info["preprocessing"]["mean"] == [0.5] * 5
    features = zoo.extract(model, str(data))["features"]
    assert features.shape == (16, model.fc.in_features) and features.isfinite().all()


def test_images_of_another_number_of_channels_are_refused_by_name(tmp_path):
    data = image_folder(tmp_path / "images", 8)
    with pytest.raises(InputError) as caught:
        train(data, tmp_path / "run", data__channels=5)
    assert ".png" in str(caught.value) and "--channels" in caught.value.fix


def test_the_number_of_channels_can_not_change(images, tmp_path):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(2),))
    with pytest.raises(InputError, match=r"can't change when a run goes on"):
        go_on(run.path, data__channels=1)


def test_a_preset_trains(images, tmp_path):
    small = {"views__preset": "small-32", "views__count": [2, 1], "views__size": [16, 8]}
    run = train(images, tmp_path / "run", epochs=1, **small)
    recipe = resolve(run.path / "recipe.yaml").recipe
    assert (recipe.views.preset, recipe.views.blur_p, recipe.evaluation.crop) == ("small-32", 0.0, 32)
    assert run.exit_code == 0


# --- what belongs to a run, wherever it is taken up ---


def test_own_views_leave_no_colours_for_the_device(images, tmp_path):
    with pytest.raises(InputError, match="nothing is left for the device"):
        pretrain(images, tmp_path / "run", overrides={"data.augment_on": "device"})
    assert not (tmp_path / "run").exists()


def test_a_class_index_is_found_from_another_folder_and_not_published(images, tmp_path, monkeypatch):
    names = sorted(folder.name for folder in images.iterdir())
    (tmp_path / "classes.txt").write_text("\n".join(names))
    monkeypatch.chdir(tmp_path)
    train(images, tmp_path / "run", epochs=1, data__class_index="classes.txt", checkpoint__copy_to="copies")
    assert list((tmp_path / "copies").iterdir())
    monkeypatch.chdir("/")
    assert go_on(tmp_path / "run", epochs=2).step == 6
    public = read_run(tmp_path / "run")[0].recipe
    assert public["data"]["class_index"] == "classes.txt"
    assert public["checkpoint"]["copy_to"] is None
