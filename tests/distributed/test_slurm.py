"""SLURM jobs, with commands of our own in SLURM's place: what is submitted, and what happens to signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import ROOT, assert_same_state, image_folder, trace, train
from zoo.engine.slurm import QueuedCommand
from zoo.engine.slurm_request import parse_slurm
from zoo.errors import InputError

from .cluster import JOB, calls, cluster, command, sent, zoo
from .training import PAIR, environment, images_of, pair, steps_of, wait_until, words

submitit = pytest.importorskip("submitit")

__all__ = ["cluster", "zoo"]  # fixtures


# What is asked for


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nodes=2"], {"nodes": 2, "tasks": 1, "world_size": 2}),
        (["nodes=8,gpus=8"], {"tasks": 8, "world_size": 64, "gpus_per_node": "8"}),
        (["gpus=a100:4"], {"tasks": 4, "gpus_per_node": "a100:4"}),
        (["gpus=4,tasks=2"], {"tasks": 2, "gpus_per_node": "4"}),
        (["gpus=0,tasks=3"], {"tasks": 3, "gpus_per_node": None}),
        (["gpus_per_node=2,ntasks-per-node=4,cpus_per_task=5"], {"tasks": 4, "cpus_per_task": 5}),
        (["cpus=5"], {"srun_args": ["--kill-on-bad-exit=1", "--cpus-per-task=5"]}),
        (["partition=a,b,nodes=3"], {"partition": "a,b", "nodes": 3}),
        (["partition=a", "qos=q,account=x"], {"partition": "a", "qos": "q", "account": "x"}),
        (["name=n,constraint=a&b,mem=64G"], {"job_name": "n", "constraint": "a&b", "mem": "64G"}),
        (["nodes=1,nodes=4"], {"nodes": 4}),
        (["time=90"], {"time": 90, "delay": 300}),
        (["time=24:00:00"], {"time": 1440}),
        (["time=1:30"], {"time": 2}),
        (["time=2-1"], {"time": 49 * 60}),
        (["time=1-0:30:01"], {"time": 1471}),
        (["time=8"], {"delay": 120}),
        (["time=8,delay=60"], {"delay": 60, "signal": "USR2@60"}),
        (["requeues=0"], {"requeues": 0}),
        (["qos=q"], {"requeue": True, "signal": "USR2@300", "time": None}),
        (
            ["exclusive=true,nodelist=n[1-2,5],reservation=r"],
            {"exclusive": True, "nodelist": "n[1-2,5]", "reservation": "r"},
        ),
        (["x_of_this_cluster=1"], {"x-of-this-cluster": "1"}),
    ],
)
def test_what_is_asked_for(words: list[str], expected: dict[str, Any]) -> None:
    request = parse_slurm(words)
    found = {**request.parameters["additional_parameters"], **request.parameters, **vars(request)}
    found["world_size"] = request.world_size
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gpu", "not of the form KEY=VALUE"),
        ("partition=a,exclusive", "a switch is KEY=true"),
        ("partition=", "partition has no value"),
        ("partitoin=a", "did you mean partition"),
        ("reservaton=a", "did you mean reservation"),
        ("a b=c", "no such option"),
        ("nodes=0", "nodes must be a whole number, 1 or more"),
        ("nodes=two", "nodes must be"),
        ("gpus=-1", "gpus must be"),
        ("cpus=0", "cpus must be"),
        ("time=soon", "time must be"),
        ("time=0", "time must be"),
        ("time=1-2-3", "time must be"),
        ("time=5,delay=300", r"less than the job's whole time \(300 s\)"),
        ("mem=64", "with its unit"),
        ("requeues=-1", "requeues must be"),
        ("signal=TERM@10", "delay=SECONDS"),
        ("gpus_per_task=1", "each task takes its own"),
        ("array=1-3", "a run is one job"),
    ],
)
def test_what_can_not_be_asked_for(word: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_slurm([word])
    assert "--slurm" in str(caught.value)


# What is submitted


def test_the_job_that_is_submitted(cluster: Path, tmp_path: Path, zoo: Any) -> None:
    words = ["--data", "photos", "--slurm", "partition=gpu,nodes=2,gpus=4,time=1-0"]
    code, said, _ = zoo("pretrain", *words, "--slurm=reservation=mine,cpus=9", "--epochs", "3")
    assert code == 0
    (run,) = (tmp_path / "runs").glob("swav_tiny-*[0-9]")
    logs = run.with_name(f"{run.name}.slurm")
    for part in (f"job {JOB}: 2 node(s) x 4 task(s)", f"{run}\n", f"{JOB}_0_log.out", f"scancel {JOB}"):
        assert part in said
    assert list(run.iterdir()) == []
    script = (logs / f"{JOB}_submission.sh").read_text("utf-8").splitlines()
    assert {line.removeprefix("#SBATCH --") for line in script if line.startswith("#SBATCH")} == {
        "partition=gpu",
        "nodes=2",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "cpus-per-task=9",
        "time=1440",
        "signal=USR2@300",
        "requeue",
        "reservation=mine",
        f"job-name={run.name}",
        f"output={logs}/%j_0_log.out",
        "open-mode=append",
    }
    (start,) = (shlex.split(line) for line in script if line.startswith("srun"))
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=9", sys.executable} < set(start)
    inner = ["pretrain", "--data", "photos", "--epochs", "3", "--out", str(run)]
    assert sent(logs) == QueuedCommand(["-m", "_zoo_entry", *inner], str(run), 100)


def test_a_job_for_programs(cluster: Path, tmp_path: Path, zoo: Any) -> None:
    code, said, _ = zoo("pretrain", "--out", "here", "--slurm", "requeues=3", "--json")
    assert code == 0
    run, logs = tmp_path / "here", tmp_path / "here.slurm"
    assert json.loads(said) == {"schema": 1, "job": JOB, "run": str(run), "logs": str(logs)}
    words = ["-m", "_zoo_entry", "pretrain", "--out", "here", "--json"]
    assert sent(logs) == QueuedCommand(words, str(run), 3)


def test_a_run_that_goes_on_as_a_job(cluster: Path, tmp_path: Path, zoo: Any) -> None:
    run = train(image_folder(tmp_path / "images"), tmp_path / "run", epochs=1).path
    code, said, error = zoo("pretrain", "--resume", "run", "--slurm", "tasks=3")
    assert (code, said) == (2, "")
    assert "1 node(s) x 3 task(s)" in error  # of the run's own batch of 8
    code, said, _ = zoo("pretrain", "--resume", "run", "--slurm", "tasks=4")
    assert code == 0
    assert f"run:    {run}\n" in said
    words = ["-m", "_zoo_entry", "pretrain", "--resume", "run"]
    assert sent(tmp_path / "run.slurm") == QueuedCommand(words, str(run), 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nodes=3", "can't be shared equally by 3 node(s) x 1 task(s)"),
        ("nodes=1 --nproc 2", "can't be used together"),
        ("nodes=1 --set epoch=2", "epochs"),
        ("nodes=1 --out slurm", "not empty"),
        ("nodes=1 --resume nowhere", "no such run"),
        ("nodes=1 --out 50%", "choose another --out"),
        ("qos=none", "Invalid qos specification"),
    ],
)
def test_what_is_refused_before_it_waits_in_a_queue(
    cluster: Path, tmp_path: Path, zoo: Any, words: str, message: str
) -> None:
    refuse = "print('sbatch: error: Invalid qos specification', file=sys.stderr)\nsys.exit(1)"
    command(cluster, "sbatch", refuse)
    code, said, error = zoo("pretrain", "--slurm", *words.split())
    assert (code, said) == (2, "")
    assert message in error
    left = {path.name for path in tmp_path.rglob("*") if path.parent != cluster}
    assert left <= {"slurm", "runs"}


def test_without_slurm_or_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zoo: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, error = zoo("pretrain", "--slurm", "nodes=1")
    assert code == 2
    assert "login node" in error
    for name in [name for name in sys.modules if name.split(".")[0] == "submitit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "submitit", None)
    code, _, error = zoo("pretrain", "--slurm", "nodes=1")
    assert code == 2
    assert "pip install 'vision-model-zoo[slurm]'" in error


# What a task does


def queued(tmp_path: Path, body: str, requeues: int = 5) -> QueuedCommand:
    file = tmp_path / "script.py"
    file.write_text("import os, signal, sys, time\n" + textwrap.dedent(body), "utf-8")
    return QueuedCommand([str(file)], str(tmp_path / "run"), requeues)


def code_of(task: Callable[[], None]) -> int | None:
    """What it leaves with; None if it comes back."""
    try:
        task()
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code
    return None


# Stops like a training run, after the scheduler's signal to its parent.
STOPPED = """
def stop(number, frame):
    sys.exit({code})

for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), stop)
signal.alarm(60)
os.kill(os.getppid(), signal.{name})
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("code", "first", "other"),
    [(0, None, None), (75, 75, 0), (130, 130, 0), (2, 2, 2), (1, 1, 1), (9, 9, 9)],
)
def test_exit_codes(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, first: Any, other: Any
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    task = queued(tmp_path, f"sys.exit({code})")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert code_of(task) == other
    assert calls(cluster, "scontrol") == []
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert code_of(task) == first
    assert calls(cluster, "scontrol") == ([f"requeue {JOB}"] if code == 75 else [])


@pytest.mark.parametrize(
    ("name", "state", "again"),
    [
        ("SIGUSR2", "COMPLETING", True),
        ("SIGUSR1", "RUNNING", True),
        ("SIGTERM", "RUNNING", True),
        ("SIGTERM", "COMPLETING", False),  # by scancel, or by a preemption that has queued it again
        ("SIGTERM", "", False),
        ("SIGINT", "RUNNING", False),
    ],
)
def test_which_signals_queue_it_again(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str, again: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    command(cluster, "squeue", f"print({state!r})")
    before = signal.getsignal(signal.SIGUSR2)
    assert code_of(queued(tmp_path, STOPPED.format(name=name, code=75))) == (130 if name == "SIGINT" else 75)
    assert calls(cluster, "scontrol") == ([f"requeue {JOB}"] if again else [])
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize("code", [1, -signal.SIGUSR2, 2])
def test_a_signal_before_anything_can_be_saved(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    if code < 0:
        body = "os.kill(os.getppid(), signal.SIGUSR2)\ntime.sleep(60)"
    else:
        body = STOPPED.format(name="SIGUSR2", code=code)
    assert code_of(queued(tmp_path, body)) == (2 if code == 2 else 75)
    assert calls(cluster, "scontrol") == ([] if code == 2 else [f"requeue {JOB}"])


def test_who_is_killed_has_failed(cluster: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert code_of(queued(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")) == 1
    assert "killed by SIGKILL" in caplog.text
    assert calls(cluster, "scontrol") == []


def test_it_is_not_queued_again_for_ever(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    task = queued(tmp_path, STOPPED.format(name="SIGUSR2", code=75), requeues=2)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert code_of(task) == 75
    assert len(calls(cluster, "scontrol")) == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert code_of(task) == 75
    assert len(calls(cluster, "scontrol")) == 1
    assert "it was 2 time(s) already" in caplog.text
    assert f"--resume {tmp_path / 'run'}" in caplog.text


def test_slurm_may_refuse(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    command(cluster, "scontrol", "print('Requested operation is disabled', file=sys.stderr)\nsys.exit(1)")
    assert code_of(queued(tmp_path, STOPPED.format(name="SIGUSR2", code=75))) == 75
    assert "Requested operation is disabled" in caplog.text


def test_what_the_command_finds_in_its_environment(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = tmp_path / "told"
    names = ("OMP_NUM_THREADS", "SLURM_RESTART_COUNT")
    task = queued(tmp_path, f"open({str(told)!r}, 'w').write(' '.join(map(os.environ.get, {names})))")
    task()
    assert told.read_text() == "1 0"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    task()
    assert told.read_text() == "6 1"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    task()
    assert told.read_text() == "3 4"


def test_submitits_own_executors_run_it(cluster: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    task = queued(tmp_path, f"open({str(done)!r}, 'a').write('x')")
    for cluster_name in ("debug", "local"):
        executor = submitit.AutoExecutor(tmp_path / cluster_name, cluster=cluster_name)
        assert executor.submit(task).result() is None
    assert done.read_text() == "xx"


# All of it: submitted, told that its time is up, queued again, done


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_whose_time_is_up_loses_nothing(
    cluster: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zoo: Any, processes: int
) -> None:
    images, out = images_of(tmp_path_factory), tmp_path / "run"
    # A step of one process takes a few milliseconds only.
    settings = {**PAIR, "checkpoint__every_steps": None, **({"epochs": 40} if processes == 1 else {})}
    asked = f"tasks={processes},time=30,delay=120"
    assert zoo(*words(images, out, **settings), "--slurm", asked)[0] == 0
    logs = tmp_path / "run.slurm"
    log = logs / f"{JOB}_0_log.out"
    job = {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": JOB, "SLURM_NTASKS": str(processes)}
    given = environment(TASKS=str(tmp_path / "tasks"), **job)
    batch = ["bash", str(logs / f"{JOB}_submission.sh")]
    process = subprocess.Popen(batch, env=given)
    wait_until(lambda: steps_of(out) > 4, process, log)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR2)
    assert process.wait(120) == 75, log.read_text("utf-8")
    assert 4 < steps_of(out) < 3 * settings["epochs"]
    assert calls(cluster, "scontrol") == [f"requeue {JOB}"]
    (saved,) = (out / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == steps_of(out)
    said = log.read_text("utf-8")
    assert "stopped and saved" in said
    assert "queued again" in said
    assert "preempted" not in said  # which is what submitit's handler would have said

    again = subprocess.run(batch, env={**given, "SLURM_RESTART_COUNT": "1"}, timeout=240, check=False)
    assert again.returncode == 0, log.read_text("utf-8")
    assert "going on with" in log.read_text("utf-8")
    if processes == 1:
        undisturbed = train(images, tmp_path / "straight", **settings).path
    else:
        undisturbed = pair(tmp_path_factory)
    assert trace(out) == trace(undisturbed)
    assert_same_state(out, undisturbed)
    assert len(calls(cluster, "scontrol")) == 1
