"""The command line: exit codes, clean output, one clear message and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tiny import TINY, ZOO, StopAfter, as_options, half_jpeg, image_folder, lines, train
from zoo.pretrain.resolve import list_recipes

# A stem for crops this small, or runs would warn of them.
SETS = as_options(
    {key: value for key, value in TINY.items() if key not in ("epochs", "batch_size", "device")}
    | {"trunk.stem": "small"}
)
FLAGS = ["--epochs", "1", "--batch-size", "8", "--device", "cpu", *SETS]


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch, restored_logger):
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), 16)


def assert_clear(error, *names):
    """One message with a place and advice, no traceback; warnings may come before it."""
    error = "".join(line for line in error.splitlines(True) if not line.startswith("warning: "))
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert "unexpected" not in error
    assert len(error.splitlines()) <= 4
    for name in names:
        assert str(name) in error


def assert_finished(out, run, steps):
    """One line of result: where, that it is finished, and how many steps."""
    assert out.startswith(f"{run}: finished")
    assert out.endswith("\n") and out.count("\n") == 1
    assert str(steps) in out.removeprefix(str(run))


# --- the installed command ---


def test_version(zoo):
    code, out, _ = zoo("--version")
    assert code == 0 and out.startswith("zoo 0.")


def test_help_lists_the_commands():
    done = subprocess.run([ZOO, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for command in ("demo", "pretrain", "runs", "recipes", "env"):
        assert command in done.stdout
    assert done.stderr == ""


def test_looking_and_mistyping_load_no_torch(tmp_path):
    code = (
        "import sys\n"
        "from cli.main import run\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n"
        "        run(line.split())\n"
        "    except SystemExit as end:\n"
        "        codes.append(end.code) if 'codes' in globals() else globals().update(codes=[end.code])\n"
        "    assert 'torch' not in sys.modules, line\n"
        "print('CODES', codes)\n"
    )
    commands = {
        "--help": 0,
        "pretrain --help": 0,
        "recipes": 0,
        "recipes --json": 0,
        "recipes show swav_tiny": 0,
        "recipes diff swav_tiny swav_rn50_800ep": 0,
        f"runs {tmp_path}": 0,
        f"table --results {tmp_path}": 0,
        "pretrain swav_tinny": 2,
        "pretrain --set epoch=3": 2,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == f"CODES {[code or 0 for code in commands.values()]}"


def in_a_shell(line, folder):
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("closed", "code"), [("<&-", 2), (">&-", 0), ("2>&-", 0)])
def test_closed_streams(closed, code, tmp_path):
    """As cron and some launchers start programs."""
    words = "rm me/none" if code else "runs"
    done = in_a_shell(f"{ZOO} {words} {closed}", tmp_path)
    assert done.returncode == code, done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
@pytest.mark.parametrize("words", ["runs", "--help", "recipes --json"])
def test_output_to_a_full_disk(words, tmp_path):
    done = in_a_shell(f"{ZOO} {words} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: No space left on device.") and "fix:   free some space" in done.stderr
    )
    assert done.stderr.count("\n") == 3  # and nothing from Python at its end


def test_a_hidden_package_is_said_plainly(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("")
    done = subprocess.run(
        [ZOO, "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert_clear(done.stderr, "`cli`", tmp_path / "cli")


def test_the_installed_command_trains_and_keeps_the_streams_apart(images, tmp_path):
    """The whole way once in a process of its own: data on standard output, notes on standard error."""
    one = (
        (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
        if hasattr(os, "sched_setaffinity")
        else None
    )
    done = subprocess.run(
        [ZOO, "pretrain", "--data", images, "--out", tmp_path / "run", "--json", *FLAGS],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=one,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == lines(tmp_path / "run")
    assert "note: training in" in done.stderr


# --- training ---


def test_quiet_prints_only_the_result(zoo, images, tmp_path):
    code, out, err = zoo("pretrain", "swav_tiny", "--data", images, "--out", tmp_path / "run", "-q", *FLAGS)
    assert code == 0
    assert_finished(out, tmp_path / "run", 2)
    assert err == ""


def test_lines_show_loss_rate_speed_and_time_left(zoo, images, tmp_path):
    code, out, err = zoo("pretrain", "--data", images, "--out", tmp_path / "run", "--lines", *FLAGS)
    assert code == 0
    last = [line for line in err.splitlines() if line.startswith("step 2/2")]
    assert len(last) == 1
    assert all(word in last[0] for word in ("loss", "lr", "img/s", "left"))
    assert out.count("\n") == 1


def test_several_sources_and_a_default_place(zoo, images, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_RUNS", str(tmp_path / "runs"))
    code, out, _ = zoo("pretrain", "--data", images, "--data", images, "-q", *FLAGS)
    assert code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("swav_tiny-")
    assert_finished(out, run, 4)
    sources = yaml.safe_load((run / "recipe.yaml").read_text("utf-8"))["data"]["sources"]
    assert sources == [str(images)] * 2
    code, out, _ = zoo("runs", "--json")
    (row,) = json.loads(out)["runs"]
    assert (row["run"], row["state"], row["step"], row["total_steps"]) == (str(run), "finished", 4, 4)


def test_resume_and_extend(zoo, images, tmp_path):
    train(images, tmp_path / "run", epochs=1, callbacks=(StopAfter(1),))
    code, out, err = zoo("pretrain", "--resume", tmp_path / "run", "--lines")
    assert code == 0
    assert_finished(out, tmp_path / "run", 2)
    assert "going on from step 1 of 2" in err
    code, out, err = zoo("pretrain", "--resume", tmp_path / "run", "--set", "epochs=2")
    assert code == 0
    assert_finished(out, tmp_path / "run", 4)
    assert "epochs 1 -> 2" in err


def test_a_warning_is_shown_even_when_quiet(zoo, images, tmp_path):
    code, _, err = zoo(
        "pretrain", "--data", images, "--out", tmp_path / "run", "-q", *FLAGS, "--set", "method.prototypes=99"
    )
    assert code == 0
    assert err.startswith("warning: more prototypes (99)")


def test_on_error_skip_counts_and_reports(zoo, tmp_path):
    data = image_folder(tmp_path / "images", 7)
    half_jpeg(data / "class0" / "bad.jpg")
    words = ["pretrain", "--data", data, "--out", tmp_path / "run", "-q", *FLAGS]
    code, out, err = zoo(*words)
    assert code == 2
    assert_clear(err, "bad.jpg", "--on-error skip")
    assert out == ""
    words[4] = tmp_path / "again"
    code, out, err = zoo(*words, "--on-error", "skip")
    assert code == 0
    assert "1 unreadable image" in err


# --- bad input ---


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["swav_tinny"], ["swav_tinny", "did you mean swav_tiny?"]),
        (["nowhere.yaml"], ["nowhere.yaml"]),
        (["--set", "method.prototypse=3"], ["method.prototypse", "did you mean prototypes?"]),
        (["--set", "epochs"], ["key=value"]),
        (["--set", "views.size=[16"], ["views.size"]),
        (["--set", "views.size=[16]"], ["size has 1, the others 2"]),
        (["--epochs", "0"], ["epochs"]),
        (["--precision", "int8"], ["precision", "int8"]),
        (["--device", "cuda:99", "--data", "IMAGES", "--batch-size", "8"], ["cuda:99"]),
        (["--device", "meta", "--data", "IMAGES", "--batch-size", "8"], ["device: meta"]),
        (["--data", "NOTHING"], ["NOTHING"]),
        (["--data", "EMPTY"], ["No pictures", "EMPTY"]),
        (["--data", "IMAGES", "--batch-size", "17"], ["batch (17)", "16 images"]),
        (["--data", "IMAGES", "--batch-size", "8", "--init-from", "NOTHING"], ["NOTHING"]),
        (["--resume", "NOTHING"], ["no such run"]),
        (["--resume", "NOTHING", "--nproc", "2"], ["no such run"]),
        (["--resume", "EMPTY"], ["--init-from"]),
        (["swav_tiny", "--resume", "EMPTY"], ["RECIPE and --resume"]),
        (["--out", "x", "--resume", "EMPTY"], ["--out and --resume"]),
        (["--on-error", "ignore"], ["data.on_error"]),
    ],
)
def test_bad_input_is_exit_code_2_with_a_clear_message(zoo, images, tmp_path, monkeypatch, words, names):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_RUNS", str(tmp_path / "runs"))
    (tmp_path / "EMPTY").mkdir()
    code, out, err = zoo("pretrain", *(str(images) if word == "IMAGES" else word for word in words))
    assert code == 2
    assert out == ""
    assert_clear(err, *names)
    assert [path.name for path in tmp_path.iterdir()] == ["EMPTY"]  # nothing half-written


@pytest.mark.parametrize(
    "words", [["pretrain", "--nonsense"], ["nonsense"], ["pretrain", "--epochs", "many"], ["recipes", "show"]]
)
def test_a_usage_error_is_exit_code_2(zoo, words):
    code, out, err = zoo(*words)
    assert code == 2
    assert out == ""
    assert "Usage" in err and "Traceback" not in err


def test_an_output_folder_with_something_in_it(zoo, images, tmp_path):
    (tmp_path / "x").write_text("mine")
    code, _, err = zoo("pretrain", "--data", images, "--out", tmp_path, *FLAGS)
    assert code == 2
    assert_clear(err, tmp_path, "--out", "--resume")
    code, _, err = zoo("pretrain", "--data", images, "--out", tmp_path / "x", *FLAGS)
    assert code == 2
    assert_clear(err, tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_exit_code_1(zoo, images, tmp_path):
    (tmp_path / "x").write_text("mine")
    places = [tmp_path / "x" / "run"]
    if os.path.isdir("/proc/self"):
        places.append("/proc/zoo-run")
    for place in places:
        code, out, err = zoo("pretrain", "--data", images, "--out", place, "-q", *FLAGS)
        assert (code, out) == (1, "")
        assert_clear(err, "Making the run's folder failed", place)


def test_a_traceback_only_with_debug(zoo):
    for words in (["--debug", "pretrain", "swav_tinny"], ["pretrain", "swav_tinny", "--debug"]):
        code, _, err = zoo(*words)
        assert code == 2
        assert "Traceback" in err
        assert "error: There is no recipe of this name." in err


def test_the_unexpected_is_exit_code_1_without_a_traceback(zoo, monkeypatch):
    def failing(root):
        raise LookupError("something\nodd")

    monkeypatch.setattr("zoo.pretrain.rundir.list_runs", failing)
    code, _, err = zoo("runs")
    assert code == 1
    assert "LookupError: something odd" in err and "--debug" in err
    assert "Traceback" not in err
    assert "Traceback" in zoo("runs", "--debug")[2]


def test_ctrl_c_before_training_is_exit_code_130(zoo, monkeypatch):
    def interrupted(root):
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.pretrain.rundir.list_runs", interrupted)
    code, _, err = zoo("runs")
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"),
        # torch's words on a processor
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
)
def test_memory_running_out_is_said(zoo, monkeypatch, error):
    def failing(root):
        raise error

    monkeypatch.setattr("zoo.pretrain.rundir.list_runs", failing)
    code, _, err = zoo("runs")
    assert code == 1
    assert "memory" in err and "batch_size" in err


# --- looking ---


def test_runs(zoo, images, tmp_path):
    train(images, tmp_path / "a", epochs=1)
    train(images, tmp_path / "b", epochs=1, callbacks=(StopAfter(1),))
    (tmp_path / "notes").mkdir()
    code, out, err = zoo("runs", tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == 1
    rows = {os.path.basename(row["run"]): row for row in found["runs"]}
    assert set(rows) == {"a", "b"}
    assert (rows["a"]["state"], rows["a"]["step"], rows["a"]["total_steps"]) == ("finished", 2, 2)
    assert (rows["b"]["state"], rows["b"]["saved_step"], rows["b"]["recipe"]) == ("stopped", 1, "swav_tiny")
    assert rows["a"]["loss"] == lines(tmp_path / "a")[-1]["loss"]
    code, out, _ = zoo("runs", tmp_path)
    assert code == 0
    assert "1/2" in out and "2/2" in out and "stopped" in out


def test_one_damaged_run_does_not_hide_the_others(zoo, images, tmp_path):
    train(images, tmp_path / "a", epochs=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text('{"schema": 1}')
    (tmp_path / "a" / "checkpoints" / "step-00000002.bak").mkdir()  # a copy that somebody put aside
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"a": 1}\nnull\n{"step": 9, "lo')
    code, out, _ = zoo("runs", tmp_path, "--json")
    assert code == 0
    rows = {os.path.basename(row["run"]): row for row in json.loads(out)["runs"]}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"a": "finished", "b": "unreadable", "c": "unreadable"}
    assert (rows["a"]["step"], rows["a"]["saved_step"]) == (2, 2)
    assert zoo("runs", tmp_path)[0] == 0


def test_no_runs(zoo, tmp_path):
    code, out, _ = zoo("runs", tmp_path / "nothing")
    assert code == 0
    assert "no runs in" in out
    assert json.loads(zoo("runs", tmp_path, "--json")[1])["runs"] == []


def test_recipes(zoo, tmp_path):
    code, out, err = zoo("recipes", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"schema": 1, "recipes": list_recipes()}
    assert "swav_rn50_800ep" in zoo("recipes")[1]
    code, out, _ = zoo("recipes", "show", "swav_tiny", "--set", "epochs=9")
    assert code == 0
    assert "epochs: 9  # --set" in out.splitlines()
    assert yaml.safe_load(out)["method"]["name"] == "swav"
    shown = json.loads(zoo("recipes", "show", "swav_tiny", "--json")[1])
    assert shown["schema"] == 1
    assert shown["recipe"]["batch_size"] == 64
    assert shown["sources"]["batch_size"] == "swav_tiny"
    (tmp_path / "mine.yaml").write_text(out)
    assert zoo("recipes", "show", tmp_path / "mine.yaml")[0] == 0


def test_recipes_diff(zoo):
    code, out, _ = zoo("recipes", "diff", "swav_rn50_800ep", "swav_rn50_bs256", "--json")
    assert code == 0
    changed = json.loads(out)["differences"]
    assert changed["optimizer.lr"] == [4.8, 0.6]
    assert changed["batch_size"] == [4096, 256]
    assert "method.prototypes" not in changed
    code, out, _ = zoo("recipes", "diff", "swav_rn50_800ep", "swav_rn50_bs256")
    assert code == 0
    assert any(line.split()[:3] == ["batch_size", "4096", "256"] for line in out.splitlines())
    assert zoo("recipes", "diff", "swav_tiny", "nothing")[0] == 2


def test_env(zoo):
    code, out, err = zoo("env", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == 1
    assert found["packages"]["torch"]
    assert found["processors"] >= 1
    assert set(found["folders"]) == {"hub", "cache", "runs", "results"}
    code, out, _ = zoo("env")
    assert code == 0
    assert "torchvision" in out and found["folders"]["hub"] in out
