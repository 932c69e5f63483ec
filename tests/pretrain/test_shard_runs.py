"""Runs on tar shards, and runs whose length is counted in images."""

from __future__ import annotations

import pytest

from tiny import StopAfter, assert_same_state, go_on, half_jpeg, image_folder, lines, trace, train
from zoo.data.folder import open_folder
from zoo.data.shards.write import write_shards
from zoo.engine.loop import Callback
from zoo.errors import InputError
from zoo.optim.schedule import WarmupCosine
from zoo.pretrain.resolve import resolve


class Ids(Callback):
    """The samples of each batch."""

    def __init__(self):
        self.ids = []

    def on_batch(self, batch):
        self.ids.append(batch.ids.tolist())


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """40 images in four shards."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(open_folder(image_folder(folder / "images", 40)), folder / "s", count=10)
    return folder / "s"


@pytest.fixture(scope="module")
def undisturbed(shards, tmp_path_factory):
    """Two epochs of five steps, and the samples of each."""
    seen = Ids()
    out = tmp_path_factory.mktemp("run") / "r"
    train(f"{shards}/{{000000..000003}}.tar", out, callbacks=(seen,))
    return out, seen.ids


def test_each_epoch_sees_every_sample_once(undisturbed):
    _, ids = undisturbed
    for epoch in (ids[:5], ids[5:]):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(40))
    assert ids[:5] != ids[5:]


def test_workers_change_nothing(shards, undisturbed, tmp_path):
    seen = Ids()
    train(f"{shards}/{{000000..000003}}.tar", tmp_path / "r", data__workers=2, callbacks=(seen,))
    assert seen.ids == undisturbed[1]
    assert trace(tmp_path / "r") == trace(undisturbed[0])
    assert_same_state(tmp_path / "r", undisturbed[0])


@pytest.mark.parametrize("step", [2, 7])
def test_a_stopped_run_goes_on_with_the_very_next_sample(shards, undisturbed, tmp_path, monkeypatch, step):
    monkeypatch.chdir(shards.parent)
    first, second = Ids(), Ids()
    out = tmp_path / "r"
    stopped = train("s/{000000..000003}.tar", out, callbacks=(first, StopAfter(step)))
    assert (stopped.exit_code, stopped.step) == (75, step)
    monkeypatch.chdir(tmp_path)  # the pattern was made absolute
    go_on(out, callbacks=(second,), data__workers=1)
    assert first.ids + second.ids == undisturbed[1]
    assert_same_state(out, undisturbed[0])


def test_other_shards_are_not_gone_on_with(shards, tmp_path):
    out = tmp_path / "r"
    train(f"{shards}/{{000000..000003}}.tar", out, callbacks=(StopAfter(2),))
    with pytest.raises(InputError, match="not what the run was started on"):
        go_on(out, data__sources=[f"{shards}/{{000000..000002}}.tar"])


def test_unreadable_images_of_shards_stop_or_are_counted(tmp_path):
    folder = image_folder(tmp_path / "images", 23)
    half_jpeg(folder / "class0" / "bad.jpg")
    write_shards(open_folder(folder), tmp_path / "s", count=6)
    with pytest.raises(InputError) as caught:
        train(tmp_path / "s", tmp_path / "a")
    assert "class0_bad.jpg (at byte" in caught.value.where
    result = train(tmp_path / "s", tmp_path / "b", data__on_error="skip")
    assert (result.exit_code, result.bad_files) == (0, 1)
    assert "class0_bad.jpg" in (tmp_path / "b" / "bad_files.jsonl").read_text()


# --- counted in images ---


def test_a_run_of_so_many_samples(shards, tmp_path):
    result = train(shards, tmp_path / "r", samples=100)  # 12 steps of 8: two and a half passes
    assert result.total_steps == 12
    steps = lines(tmp_path / "r")
    assert [line["epoch"] for line in steps] == [0] * 5 + [1] * 5 + [2] * 2
    # The schedule ends with the run, not with an epoch.
    recipe = resolve("swav_tiny").recipe
    schedule, base = recipe.schedule, recipe.optimizer.lr
    warmup = round(schedule.warmup_epochs * 5)
    expected = WarmupCosine(base, schedule.final_lr, schedule.start_lr, warmup, 12)
    assert [line["lr"] for line in steps] == [expected.at(step) for step in range(12)]


def test_less_than_a_pass(shards, tmp_path):
    seen = Ids()
    assert train(shards, tmp_path / "r", samples=24, callbacks=(seen,)).total_steps == 3
    assert len({sample for batch in seen.ids for sample in batch}) == 24


def test_a_run_can_be_extended_in_samples(shards, tmp_path):
    out = tmp_path / "r"
    train(shards, out, samples=24)
    assert go_on(out, samples="4e1").total_steps == 5
    assert len(lines(out)) == 5
    with pytest.raises(InputError, match="has done 5 steps already"):
        go_on(out, samples=16)


@pytest.mark.parametrize("value", ["1e9", 1_000_000_000, 1e9, "1000000000", "1.0e+9"])
def test_how_samples_are_written(value):
    assert resolve("swav_tiny", options={"samples": value}).recipe.samples == 10**9


@pytest.mark.parametrize("value", [0, -5, "many", 1.5, 7])
def test_samples_that_make_no_run(value):
    with pytest.raises(InputError, match="samples"):
        resolve("swav_tiny", options={"samples": value})


def test_epochs_are_counted_where_nothing_is_said():
    recipe = resolve("swav_tiny").recipe
    assert recipe.samples is None
    assert recipe.total_steps(7) == 7 * recipe.epochs
