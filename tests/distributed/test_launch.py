"""Several processes of one command: exit codes, signals, restarts, output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zoo.engine import launch as launching
from zoo.engine.launch import launch
from zoo.errors import InputError

ROOT = Path(launching.__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


START = """
import os, signal, sys, time
from pathlib import Path
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
signal.alarm(120)  # a test that went wrong ends as well

def note(name, text=""):
    Path(f".{name}-{rank}").write_text(str(text))
    os.replace(f".{name}-{rank}", f"{name}-{restart}-{rank}")

def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

note("started", os.getpid())
"""


def script(body: str) -> list[str]:
    Path("script.py").write_text(START + textwrap.dedent(body), "utf-8")
    return ["script.py"]


def notes(name: str) -> list[str]:
    """Which processes noted it: restart and rank."""
    return sorted(path.name.removeprefix(f"{name}-") for path in Path().glob(f"{name}-*"))


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([1, 0], 1),
        ([0, 3], 1),
        ([2, 2], 2),
        ([75, 75], 75),
        ([75, 0], 75),
        ([130, 130], 130),
    ],
)
def test_exit_codes(codes: list[int], code: int) -> None:
    both_started = 'wait_for("started-0-0", "started-0-1")'
    assert launch(script(f"{both_started}\nsys.exit({codes}[rank])"), 2) == code
    assert notes("started") == ["0-0", "0-1"]


def test_an_exception_is_a_failure(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert launch(script("if rank == 1: raise LookupError('deliberately')"), 2) == 1
    assert "LookupError: deliberately" in capfd.readouterr().err
    assert "process 1 of 2 failed with exit code 1" in caplog.text


def test_bad_input_of_one_ends_the_others_and_is_not_tried_again() -> None:
    body = """
    if rank == 1:
        wait_for("started-0-0")
        sys.exit(2)
    while True:
        time.sleep(1)
    """
    assert launch(script(body), 2, max_restarts=3) == 2
    assert notes("started") == ["0-0", "0-1"]


@pytest.mark.parametrize("code", [75, 130])
def test_who_leaves_on_request_gives_the_others_time(code: int) -> None:
    body = f"""
    if rank == 0:
        sys.exit({code})
    wait_for("started-0-0")
    try:
        while True:  # until the launcher has seen that the other one ended
            os.kill(int(Path("started-0-0").read_text()), 0)
            time.sleep(0.01)
    except ProcessLookupError:
        time.sleep(0.3)
    note("saved")
    sys.exit({code})
    """
    assert launch(script(body), 2, max_restarts=1) == code
    assert notes("saved") == ["0-1"]
    assert notes("started") == ["0-0", "0-1"]


KILLED = """
if restart == 0:
    if rank == 1:
        wait_for("started-0-0")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)
"""


def test_a_killed_process_fails_the_group(caplog: pytest.LogCaptureFixture) -> None:
    assert launch(script(KILLED), 2) == 1
    assert "process 1 of 2 was killed by SIGKILL" in caplog.text


def test_a_killed_process_restarts_the_group(caplog: pytest.LogCaptureFixture) -> None:
    assert launch(script(KILLED), 2, max_restarts=2) == 0
    assert notes("started") == ["0-0", "0-1", "1-0", "1-1"]
    assert "was killed by SIGKILL; starting all 2 again (1 of 2)" in caplog.text


def test_restarts_are_counted() -> None:
    all_started = 'wait_for(f"started-{restart}-0", f"started-{restart}-1")'
    assert launch(script(f"{all_started}\nsys.exit(rank)"), 2, max_restarts=2) == 1
    assert notes("started") == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


WORLD = """
import torch
from zoo.engine.world import open_world

torch.set_num_threads(1)
with open_world(torch.device("cpu")) as world:
    if restart == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note("sum", world.sum_(torch.tensor([world.rank + 1])).item())
"""


def test_a_process_killed_during_an_exchange() -> None:
    assert launch(script(WORLD), 2, max_restarts=1) == 0
    assert notes("sum") == ["1-0", "1-1"]
    assert Path("sum-1-0").read_text() == Path("sum-1-1").read_text() == "3"


# Stops like a training run; the second process passes the signal to the launcher, as a terminal would.
POLITE = """
from zoo.engine.signals import StopRequest

with StopRequest() as stop:
    note("ready")
    if rank == 1:
        wait_for("ready-0-0")
        os.kill(os.getppid(), {number})
    while stop.signal is None:
        time.sleep(0.01)
    note("saved", stop.signal.name)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75), ("SIGUSR2", 75)]
)
def test_a_signal_reaches_all_and_they_save(name: str, code: int) -> None:
    assert launch(script(POLITE.format(number=f"signal.{name}")), 2, max_restarts=1) == code
    assert notes("started") == ["0-0", "0-1"]
    assert [Path(f"saved-0-{rank}").read_text() for rank in (0, 1)] == [name, name]


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    signal.signal(signal.SIGINT, lambda *_: note("asked"))  # and goes on
    note("ready")
    wait_for("ready-0-0", "ready-0-1")
    if rank == 1:
        os.kill(os.getppid(), signal.SIGINT)
        wait_for("asked-0-0", "asked-0-1")
        os.kill(os.getppid(), signal.SIGINT)
    while True:
        time.sleep(0.01)
    """
    monkeypatch.setattr(launching, "_TO_END_S", 0.2)
    assert launch(script(body), 2, max_restarts=1) == 130
    assert notes("started") == ["0-0", "0-1"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 1)])
def test_a_signal_before_anything_can_be_saved(name: str, code: int) -> None:
    body = f"""
    if rank == 1:
        wait_for("started-0-0")
        os.kill(os.getppid(), signal.{name})
    while True:
        time.sleep(0.01)
    """
    assert launch(script(body), 2, max_restarts=1) == code
    assert notes("started") == ["0-0", "0-1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_processes_save_when_the_launcher_is_killed() -> None:
    command = script(POLITE.format(number="signal.SIGKILL"))
    code = f"from zoo.engine.launch import launch; launch({command}, 2)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(Path.cwd())}
    killed = subprocess.run([sys.executable, "-c", code], env=env, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    end = time.monotonic() + 30
    while notes("saved") != ["0-0", "0-1"]:
        assert time.monotonic() < end, notes("saved")
        time.sleep(0.01)


def test_output_and_words(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 5)
    body = """
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "WORLD_SIZE", "LOCAL_RANK")
    print(f"{rank}:", sys.argv[1:], *(os.environ[name] for name in names), __name__, flush=True)
    os.system("echo from a child")
    """
    words = ["$$", "${local_rank}", "ä ö", "--x=1", ""]
    assert launch([*script(body), *words], 2) == 0
    out, err = capfd.readouterr()
    assert out == f"0: {words} 2 PASSIVE 2 0 __main__\nfrom a child\n"
    assert f"1: {words} 2 PASSIVE 2 1 __main__\n" in err
    assert "from a child" in err
    assert "OMP_NUM_THREADS" not in os.environ


def test_what_all_have_to_say_is_said_once() -> None:
    body = """
    from zoo.engine.launch import first_to_say
    if first_to_say("the same"):
        note("same")
    assert first_to_say(f"of {rank} alone")
    """
    assert launch(script(body), 2) == 0
    assert len(notes("same")) == 1
    assert launching.first_to_say("the same") and launching.first_to_say("the same")  # nobody shares this one


def test_a_users_own_thread_count_holds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    command = script("print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])")
    assert launch([sys.executable, *command], 1) == 0
    assert capfd.readouterr().out == "7 ACTIVE\n"


def test_a_module_is_imported_from_where_this_process_would(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/a_module.py").write_text("import sys\nprint(sys.argv[1:])\n", "utf-8")
    Path("zoo").mkdir()  # in the folder that the processes start in
    Path("zoo/__init__.py").write_text("raise ImportError('another zoo')\n", "utf-8")
    monkeypatch.syspath_prepend("elsewhere")
    monkeypatch.setattr(sys, "path", [str(Path(entry).absolute()) for entry in sys.path if entry])
    assert launch(["-m", "a_module", "word"], 1) == 0
    assert capfd.readouterr().out == "['word']\n"


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", "temporary")
    before = dict(os.environ)
    assert launch(script("sys.exit(75)"), 2) == 75
    assert list(Path("temporary").iterdir()) == []
    assert dict(os.environ) == before


@pytest.mark.parametrize(("command", "nproc", "restarts"), [([], 1, 0), (["x.py"], 0, 0), (["x.py"], 1, -1)])
def test_what_can_not_be_started(command: list[str], nproc: int, restarts: int) -> None:
    with pytest.raises(InputError, match="Can't start"):
        launch(command, nproc, restarts)
