"""Data workers: nothing is left when they end, and clear words when something lacks."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streams import PLAN, SEED, stream

from cli.main import run as zoo_command
from tiny import half_jpeg, image_folder
from zoo.data import loader, resources
from zoo.data.folder import FileImages, open_folder
from zoo.data.open import ConcatImages
from zoo.data.resources import check_shared_memory, raise_handle_limit
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.errors import InputError, RunError, ZooError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

FORK = multiprocessing.get_context("fork")


def alive(pid: int) -> bool:
    """A process that is neither gone nor waits for its end to be noticed."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def workers_now() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def assert_nothing_left(pids: list[int], limit: float = 15.0) -> None:
    until = time.monotonic() + limit
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "data workers are left"
        time.sleep(0.1)
    if Path("/dev/shm").is_dir():
        assert [name for name in os.listdir("/dev/shm") if any(f"torch_{pid}_" in name for pid in pids)] == []


def in_a_process(call: Callable[[], object]) -> tuple[str, str, str]:
    """The kind, message and advice of the error that a call ends with in a process of its own."""
    receive, send = FORK.Pipe(duplex=False)

    def work() -> None:
        try:
            call()
            send.send(("none", "", ""))
        except ZooError as error:
            send.send((type(error).__name__, error.what, error.fix or ""))
        except BaseException as error:
            send.send((type(error).__name__, str(error), ""))

    process = FORK.Process(target=work)
    process.start()
    assert receive.poll(30), "the process hangs"
    found = receive.recv()
    process.join(15)
    assert process.exitcode is not None, "the process does not end"
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileImages:
    return open_folder(image_folder(tmp_path_factory.mktemp("images"), 14))


# Nothing is left when it ends, however it ends.


def open_handles() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("how", ["close", "del"])
def test_stopping_early_leaves_nothing(source: FileImages, how: str) -> None:
    list(stream(source, workers=2, last=2))  # what torch opens once stays open
    handles = open_handles()
    batches = stream(source, workers=2)
    for _ in range(5):
        next(batches)
    pids = workers_now()
    assert len(pids) == 2
    if how == "close":
        batches.close()  # type: ignore[attr-defined]
    else:
        del batches
    assert workers_now() == []
    assert_nothing_left(pids)
    assert open_handles() == handles


def test_an_error_in_the_consumer_leaves_nothing(source: FileImages) -> None:
    pids: list[int] = []

    def consume() -> None:
        for _ in stream(source, workers=2):
            pids.extend(workers_now())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    gc.collect()
    assert len(pids) == 2
    assert_nothing_left(pids)


def test_an_error_that_is_kept_keeps_no_workers(tmp_path: Path) -> None:
    image_folder(tmp_path, 7, classes=0)
    half_jpeg(tmp_path / "bad.jpg")
    batches = stream(open_folder(tmp_path), workers=2)
    with pytest.raises(InputError) as kept:
        for _ in batches:
            pids = workers_now()
    assert kept.value.__traceback__ is not None  # it holds the iterator that holds the workers
    assert len(pids) == 2
    assert_nothing_left(pids, limit=5)


_SCRIPT = """
import hashlib, multiprocessing, sys
from pathlib import Path
from zoo.data.folder import open_folder
from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan

def consume(source):
    plan = ViewPlan(tuple(CropSpec(*crop) for crop in CROPS))
    order = EpochOrder(len(source), 4, SEED)
    options = dict(first_step=0, last_step=10**9, workers=1)
    batches = view_batches(source, PlannedViews(plan), order, **options)
    for step, batch in zip(range(5), batches):
        print(*(hashlib.sha256(view.numpy().tobytes()).hexdigest() for view in batch.views), flush=True)
    print(multiprocessing.active_children()[0].pid, flush=True)
    raise ZeroDivisionError

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    consume(open_folder(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_started_either_way_batches_are_the_same_and_python_ends_after_an_error_that_nobody_catches(
    source: FileImages, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "script.py"
    crops = [(crop.size, crop.min_scale, crop.max_scale) for crop in PLAN.crops]
    script.write_text(f"SEED, CROPS = {SEED}, {crops}\n{_SCRIPT}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, source.name, method],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError")
    *found, pid = done.stdout.split()
    expected = [
        hashlib.sha256(view.numpy().tobytes()).hexdigest()
        for batch in stream(source, workers=0, last=5)
        for view in batch.views
    ]
    assert found == expected
    assert_nothing_left([int(pid)])


@pytest.mark.parametrize("batch_size", [4, 600])
def test_workers_of_a_killed_process_end(
    source: FileImages, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    # 600 images' colour parameters are more than a pipe holds: the workers then wait for a reader.
    images = ConcatImages([source] * 90)
    maker = PlannedViews(ViewPlan((CropSpec(4, 0.3, 1.0),) * 8), colors=False)
    monkeypatch.setattr(resources, "_ORPHAN_POLL", 0.2)
    monkeypatch.setattr(resources, "_ORPHAN_GRACE", 1.0)
    receive, send = FORK.Pipe(duplex=False)

    def consume() -> None:
        batches = stream(images, workers=2, maker=maker, batch_size=batch_size)
        next(batches)
        time.sleep(1)  # now they have made all the batches they may be ahead
        send.send(workers_now())
        time.sleep(60)

    process = FORK.Process(target=consume)
    process.start()
    assert receive.poll(30)
    pids = receive.recv()
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    process.kill()
    process.join()
    assert_nothing_left(pids)


# What lacks is said.


def test_a_worker_killed_while_training_computes_is_named(source: FileImages) -> None:
    batches = stream(source, workers=2)
    next(batches)
    victim = workers_now()[0]
    with pytest.raises(RunError, match=rf"process {victim}\) was killed \(signal: Killed\)") as caught:
        os.kill(victim, signal.SIGKILL)
        for _ in range(1000):
            time.sleep(0.01)
    assert "--resume" in (caught.value.fix or "")
    batches.close()  # type: ignore[attr-defined]
    assert workers_now() == []


def test_a_worker_killed_while_training_waits_is_named(source: FileImages) -> None:
    batches = stream(source, workers=1)
    next(batches)
    victim = workers_now()[0]
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(RunError, match=rf"process {victim}\) was killed"):
        signal.signal(signal.SIGALRM, lambda *_: os.kill(victim, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        for _ in batches:
            pass
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert workers_now() == []


class _Stubborn(FileImages):
    """A source whose error can't be sent to another process."""

    def open(self, index: int) -> Any:
        class Local(ZooError):
            pass

        raise Local("of a class that pickle does not find")


def test_a_batch_that_can_not_be_sent_is_no_endless_wait(source: FileImages) -> None:
    stubborn = _Stubborn("stubborn", Path("/"), source._paths)
    kind, what, _ = in_a_process(lambda: list(stream(stubborn, workers=1, last=2)))
    assert kind == "RunError"
    assert "ended unexpectedly" in what


def limit(name: str, soft: int, hard: int | None = None) -> None:
    import resource

    number = getattr(resource, name)
    resource.setrlimit(number, (soft, resource.getrlimit(number)[1] if hard is None else hard))


def test_a_low_limit_of_handles_is_raised(source: FileImages) -> None:
    import resource

    def call() -> None:
        limit("RLIMIT_NOFILE", 40)
        kept = list(stream(source, workers=4, last=30))  # holds about a hundred handles
        assert len(kept) == 30
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256

    assert in_a_process(call) == ("none", "", "")


def test_a_hard_limit_of_handles_is_told_beforehand(source: FileImages) -> None:
    def call() -> None:
        here = len(os.listdir("/dev/fd"))
        limit("RLIMIT_NOFILE", here + 40, here + 40)
        next(stream(source, workers=4))

    kind, what, fix = in_a_process(call)
    assert kind == "RunError"
    found = re.fullmatch(r"4 data workers need about (\d+) file handles .* the system allows (\d+)\.", what)
    assert found and int(found[1]) > int(found[2])
    assert "ulimit -n" in fix and "--workers" in fix


def test_running_out_of_handles_is_explained(source: FileImages) -> None:
    def call() -> None:
        enough = len(os.listdir("/dev/fd")) + 64
        limit("RLIMIT_NOFILE", enough, enough)
        kept = list(stream(source, workers=1, last=300))  # a consumer that keeps everything
        assert kept

    kind, what, fix = in_a_process(call)
    assert (kind, what[:39]) == ("RunError", "The process ran out of file handles whi")
    assert "ulimit -n" in fix


def test_the_limit_of_handles_is_never_lowered() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_handle_limit(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]


def test_shared_memory_that_runs_out_is_no_endless_wait(source: FileImages) -> None:
    maker = PlannedViews(ViewPlan((CropSpec(128, 0.3, 1.0),) * 8))

    def call() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit("RLIMIT_FSIZE", 2**20)  # as if /dev/shm had one megabyte
        # Eight batches are half of it, but they lie elsewhere as long as they aren't kept.
        assert sum(batch.size for batch in stream(source, workers=2, maker=maker, last=20)) == 80
        list(stream(source, workers=2, maker=maker, last=200))

    kind, what, fix = in_a_process(call)
    assert (kind, what[:22]) == ("RunError", "Shared memory ran out ")
    assert "--shm-size" in fix and "--workers" in fix


def little_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A file system with so many bytes left, whatever the folder."""
    real = os.statvfs("/")
    block = 4096
    fields = [*real]
    fields[0] = fields[1] = block
    fields[2] = fields[3] = fields[4] = free // block
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))


def test_too_little_shared_memory_is_told_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batch = 32 * 3 * (2 * 224**2 + 6 * 96**2)
    little_memory(monkeypatch, 64 * 2**20)  # docker's default
    with pytest.raises(RunError) as caught:
        check_shared_memory(batch, workers=8, ahead=2, folder=tmp_path)
    need, batches, size, free = map(float, re.findall(r"[\d.]*\d", caught.value.what))
    assert need == pytest.approx(17 * batch / 2**20, abs=0.1)
    assert (batches, free) == (17, 64)
    assert size == pytest.approx(batch / 2**20, abs=0.1)
    assert caught.value.where == str(tmp_path)
    assert "--shm-size" in (caught.value.fix or "")
    advised = re.match(r"use at most (\d+) worker", caught.value.fix or "")
    assert advised is not None
    check_shared_memory(batch, int(advised[1]), 2, tmp_path)  # the advice is right ...
    with pytest.raises(RunError):
        check_shared_memory(batch, int(advised[1]) + 1, 2, tmp_path)  # ... and not too careful


def test_shared_memory_that_suffices_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batch = 64 * 64 * 3 * 4
    little_memory(monkeypatch, 3 * batch)
    check_shared_memory(batch, 1, 2, tmp_path)
    little_memory(monkeypatch, 3 * batch - 4096)
    with pytest.raises(RunError, match="3 batches") as caught:
        check_shared_memory(batch, 1, 2, tmp_path)
    assert (caught.value.fix or "").startswith("use --workers 0")


def test_a_system_without_shared_memory_folder_is_not_judged(tmp_path: Path) -> None:
    check_shared_memory(2**40, 64, 2, tmp_path / "absent")


@pytest.mark.usefixtures("restored_logger")
def test_the_command_says_that_shared_memory_lacks(
    source: FileImages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    little_memory(monkeypatch, 4096)
    monkeypatch.setattr(loader, "_start_method", lambda: None)  # as where workers aren't forked
    options = ["--workers", "2", "--batch-size", "8", "--epochs", "1", "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as end:
        zoo_command(
            ["pretrain", "swav_tiny", "--data", source.name, "--out", str(tmp_path / "run"), *options]
        )
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert "MB of shared memory (5 batches of" in said
    assert "use --workers 0" in said
    assert "Traceback" not in said
