"""Dashboards: each for real, and what happens when one fails or is not there."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import ROOT, TESTS, assert_same_state, go_on, image_folder, lines, train
from zoo.engine.dashboards import TRACKERS, Tracker, Wandb, check_trackers, choose_trackers
from zoo.engine.loop import Callback, StepRecord
from zoo.engine.trackers import without_secrets
from zoo.errors import InputError

SECRET = "do-not-tell-0123456789"
CONFIG = {"name": "tiny", "views": {"size": (16, 8)}, "device": "cpu"}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


class Stumble(Exception):
    pass


class StumbleAt(Callback):
    """Ends a run as a crash would, after steps that no checkpoint holds."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: StepRecord) -> None:
        if record.step == self.step:
            raise Stumble


def crash_and_resume(images: Path, run: Path, name: str) -> None:
    """Steps 0-3 with a checkpoint after 0 and 1, lost are 2 and 3; then all six."""
    trackers = choose_trackers([name], run, run.name, CONFIG)
    with pytest.raises(Stumble):
        train(images, run, callbacks=(*trackers, StumbleAt(3)), checkpoint__every_steps=2)
    assert len(lines(run)) == 4
    result = go_on(run, callbacks=tuple(choose_trackers([name], run, run.name, CONFIG)))
    assert result.exit_code == 0


# --- who is there ---------------------------------------------------------------------------------


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="no tracker of this name") as caught:
        check_trackers(["tensorbord"])
    assert "did you mean tensorboard? Known: tensorboard, trackio, wandb" in str(caught.value)


@pytest.mark.parametrize("name", TRACKERS)
def test_an_absent_package_is_named_with_its_install_line(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="is not installed") as caught:
        choose_trackers([name], tmp_path, "run", {})
    assert f"pip install 'vision-model-zoo[{name}]'" in str(caught.value)


def test_a_folder_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb_of_a_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "wandb", ("wandb", "wandb_of_a_run", Wandb))
    with pytest.raises(InputError, match="wandb is not installed"):
        check_trackers(["wandb"])


# --- failures -------------------------------------------------------------------------------------


class Broken(Tracker):
    """Fails where it is told to; counts what it is asked to do."""

    def __init__(self, folder: Path, where: str) -> None:
        super().__init__("broken", folder, "run", CONFIG)
        self.where = where
        self.calls: list[str] = []

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what == self.where:
            raise ConnectionError(f"refused, token={SECRET}\nand more")

    def _open(self, step: int) -> None:
        self._do("open")

    def _write(self, step: int, figures: object) -> None:
        self._do("write")

    def _finish(self) -> None:
        self._do("finish")


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("open", ["open", "finish"]),
        ("write", ["open", "write", "finish"]),
        ("finish", ["open", *["write"] * 6, "finish"]),
    ],
)
def test_a_failing_tracker_costs_one_warning(images, tmp_path, caplog, monkeypatch, where, calls):
    monkeypatch.setenv("BROKEN_API_TOKEN", SECRET)
    tracker = Broken(tmp_path, where)
    # A stem for crops this small, or the run would warn of them.
    assert train(images, tmp_path / "run", callbacks=(tracker,), trunk__stem="small").exit_code == 0
    assert tracker.calls == calls
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "broken failed while" in warning and "ConnectionError: refused, token=***" in warning
    assert SECRET not in caplog.text and "\n" not in warning


def test_secrets_are_blotted_out_and_words_are_not(monkeypatch):
    monkeypatch.setenv("MY_SECRET_KEY", SECRET)
    monkeypatch.setenv("EMPTY_TOKEN", "")
    monkeypatch.setenv("SHORT_KEY", "a")
    monkeypatch.setenv("HOME_OF_RUNS", "plain-and-long-value")
    assert without_secrets(f"a {SECRET} plain-and-long-value") == "a *** plain-and-long-value"


# --- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once_after_a_crash(images, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    crash_and_resume(images, run, "tensorboard")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    written = lines(run)
    for key in ("loss", "lr", "img_s", "epoch"):
        shown = [(scalar.step, scalar.value) for scalar in events.Scalars(key)]
        assert [step for step, _ in shown] == list(range(6))
        assert [value for _, value in shown] == pytest.approx([line[key] for line in written], rel=1e-6)
    recipe = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    name: tiny" in recipe


def test_tensorboard_changes_nothing_in_the_run(images, tmp_path):
    with_it = train(
        images,
        tmp_path / "a",
        callbacks=tuple(choose_trackers(["tensorboard"] * 2, tmp_path / "a", "a", CONFIG)),
    )
    without = train(images, tmp_path / "b")
    assert_same_state(with_it.path, without.path)
    assert len(list((tmp_path / "a" / "tensorboard").iterdir())) == 1  # named twice, opened once


def test_tensorboard_leaves_tensorflow_alone(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')\n")
    code = (
        "import sys, types; from pathlib import Path\n"
        "from zoo.engine.dashboards import choose_trackers\n"
        "tracker, = choose_trackers(['tensorboard'], Path(sys.argv[1]), 'run', {})\n"
        "tracker.on_start(types.SimpleNamespace(step=0)); tracker.log(0, {'x': 1.0}); tracker.close()\n"
        "assert not tracker.failed\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, env=environment)
    assert list((tmp_path / "tensorboard").iterdir())


# --- wandb and trackio, where they are installed --------------------------------------------------


def everything_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def test_wandb_offline_goes_on_with_the_same_run(images, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    run = tmp_path / "run"
    crash_and_resume(images, run, "wandb")
    name = json.loads((run / "trackers.json").read_text("utf-8"))["id"]
    folders = list(
        (run / "wandb").glob("offline-run-*")
    )  # one a session: TIME-ID, or TIME-ID-1 in the same second
    assert folders
    assert all(re.fullmatch(rf"offline-run-\d+_\d+-{name}(-\d+)?", folder.name) for folder in folders)
    # wandb writes from a process of its own, which may have no time before the first session's crash.
    contents = [(folder / f"run-{name}.wandb").read_bytes() for folder in folders]
    words = (b"global_step", b"loss", b"vision-model-zoo")
    assert any(all(word in content for word in words) for content in contents)
    assert SECRET.encode() not in everything_in(run)
    assert capfd.readouterr().out == ""


def test_trackio_goes_on_with_the_same_run(images, tmp_path):
    pytest.importorskip("trackio")
    code = (
        "import sys; from pathlib import Path; from test_trackers import crash_and_resume\n"
        "crash_and_resume(Path(sys.argv[1]), Path(sys.argv[2]), 'trackio')\n"
    )
    environment = {  # trackio reads where to write when it is imported
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "SOME_TOKEN": SECRET,
        "PYTHONPATH": os.pathsep.join((str(TESTS / "engine"), str(TESTS), str(ROOT))),
    }
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", code, str(images), str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    name = "run-" + json.loads((run / "trackers.json").read_text("utf-8"))["id"]
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "select run_name, run_id, step, metrics from metrics order by id"
        ).fetchall()
    assert {row[0] for row in rows} == {name} and len({row[1] for row in rows}) == 1
    assert [row[2] for row in rows] == [0, 1, 2, 3, 2, 3, 4, 5]  # done again, shown again
    losses = {row[2]: json.loads(row[3])["loss"] for row in rows}
    assert losses == {line["step"]: line["loss"] for line in lines(run)}
    assert SECRET.encode() not in everything_in(tmp_path / "trackio")
