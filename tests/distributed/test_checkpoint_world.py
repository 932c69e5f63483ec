"""Checkpoints of several processes: written by all, read by as many or by others, failing together."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.engine import checkpoint_writer
from zoo.engine.checkpoint import Checkpoint, CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.errors import RunError

from .world import in_processes

Results = list[dict[str, Any]]


def begin(writer: CheckpointWriter, world: Collectives, step: int, size: int = 3) -> None:
    shared = {"value": torch.full((size,), float(100 * world.rank + step))}
    writer.begin(step, shared, {"queue": torch.full((size,), float(world.rank)), "step": step})


def save(writer: CheckpointWriter, world: Collectives, *steps: int) -> None:
    for step in steps:
        begin(writer, world, step)
        writer.wait()


def summary(found: Checkpoint | None) -> dict[str, Any]:
    assert found is not None
    return {
        "step": found.step,
        "world size": found.world_size,
        "shared": found.shared["value"],
        "local": found.local,
    }


@contextlib.contextmanager
def largest_file(size: int, here: bool) -> Iterator[None]:
    """The system refuses this process files above a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def told(error: pytest.ExceptionInfo[RunError]) -> list[str | None]:
    return [error.value.what, error.value.where, error.value.fix]


def of_two(world: Collectives, place: str) -> dict[str, Any]:
    """All that two processes do."""
    folder = CheckpointFolder(Path(place) / "checkpoints", keep=2, keep_every=4)
    writer = CheckpointWriter(folder, world, patience=30)
    result: dict[str, Any] = {}
    save(writer, world, 2, 4, 6)
    save(writer, world, 6)
    result["finished"] = writer.finished()
    result["steps"] = folder.steps()
    result["newest"] = [summary(folder.newest_for(world)[0])]
    world.barrier()

    if world.rank == 0:
        os.truncate(folder.path(6) / "rank-1.safetensors", 20)
    world.barrier()
    found, problems = folder.newest_for(world)
    result["newest"].append(summary(found))
    result["problems"] = problems
    result["alone"] = (folder.newest()[0] or found).step if world.rank == 0 else None
    world.barrier()
    save(writer, world, 8)
    begin(writer, world, 9)
    end = time.monotonic() + 30
    polled: list[int] = []
    while polled[-1:] != [9] and time.monotonic() < end:
        polled += writer.finished()
    result["polled"] = polled
    result["newest"].append(summary(folder.newest_for(world)[0]))
    world.barrier()

    with largest_file(1 << 16, here=world.rank == 1):
        begin(writer, world, 10, size=100_000)
        with pytest.raises(RunError) as caught:
            writer.wait()
    result["full"] = told(caught)
    result["after full"] = sorted(entry.name for entry in folder.folder.iterdir())
    world.barrier()
    writer.begin(10, {}, {"value": float("nan") if world.rank == 1 else 0.0})  # no JSON
    with pytest.raises(RunError) as caught:
        writer.wait()
    result["no JSON"] = told(caught)
    save(writer, world, 10)
    result["again"] = [writer.finished(), summary(folder.newest_for(world)[0])]

    apart = CheckpointFolder(Path(place) / f"machine {world.rank}")
    writer = CheckpointWriter(apart, world, patience=0.5)
    begin(writer, world, 2)
    with pytest.raises(RunError) as caught:
        begin(writer, world, 4)
    result["apart"] = told(caught)
    result["apart has"] = [entry.name for entry in apart.folder.iterdir()] if world.rank == 0 else None
    checkpoint_writer._PATIENCE_AT_THE_END_S = 0.2
    writer = CheckpointWriter(apart, world, patience=20)
    if world.rank == 0:
        begin(writer, world, 6)
    else:
        world.gather_values([None, None, None])  # its share of beginning; then it is gone
    writer.close()
    world.barrier()
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def two(place: Path) -> Results:
    return in_processes(of_two, 2, str(place))


def test_each_process_gets_its_own_state_and_that_of_all(two: Results) -> None:
    for rank, result in enumerate(two):
        assert result["finished"] == [2, 4, 6]
        assert result["steps"] == [4, 6]
        for found, step in zip(result["newest"], [6, 4, 9], strict=True):
            assert (found["step"], found["world size"]) == (step, 2)
            assert found["shared"].tolist() == [float(step)] * 3  # what the first process said
            assert found["local"]["queue"].tolist() == [float(rank)] * 3
            assert found["local"]["step"] == step


def test_damage_to_one_processs_file_turns_all_to_the_older_one(two: Results) -> None:
    for result in two:
        assert result["newest"][1]["step"] == 4
        (problem,) = result["problems"]
        assert "step-00000006" in problem
        assert "rank-1.safetensors" in problem
    assert two[0]["alone"] == 6  # who needs only the shared state can take the newer one


def test_every_process_can_see_the_end_without_waiting(two: Results) -> None:
    assert [result["polled"] for result in two] == [[8, 9], [8, 9]]


def test_one_processs_full_disk_is_everybodys_error_and_passes(two: Results) -> None:
    assert two[0]["full"] == two[1]["full"]
    for result in two:
        what, where, _ = result["full"]
        assert what.startswith("Process 1: Saving a checkpoint failed: File too large")
        assert where.endswith("checkpoints")
        assert result["after full"] == ["step-00000004", "step-00000008", "step-00000009"]
        assert "Process 1: Saving a checkpoint failed: ValueError" in result["no JSON"][0]
        finished, newest = result["again"]
        assert finished == [10]
        assert newest["step"] == 10


def test_a_folder_that_is_not_shared_is_said(two: Results) -> None:
    for result in two:
        what, _, fix = result["apart"]
        assert "the files of process 1 (of 2, counted from 0) are missing" in what
        assert "a file system that all machines share" in fix
    assert two[0]["apart has"] == []


def test_the_files_of_two(two: Results, place: Path) -> None:
    names = {f"{name}.{kind}" for name in ("global", "rank-0", "rank-1") for kind in ("json", "safetensors")}
    path = place / "checkpoints" / "step-00000010"
    assert {file.name for file in path.iterdir()} == names | {"manifest.json"}


def of_four(world: Collectives, place: str) -> dict[str, Any]:
    """All that four processes do."""
    folder = CheckpointFolder(Path(place) / "checkpoints")
    found, problems = folder.newest_for(world)
    result: dict[str, Any] = {"newest": summary(found), "problems": problems}
    result["locals"] = folder.load_locals(found.step if found else 0)
    writer = CheckpointWriter(folder, world, patience=30)
    save(writer, world, 14)
    result["after"] = summary(folder.newest_for(world)[0])

    apart = CheckpointFolder(Path(place) / ("shared" if world.rank in (0, 2) else f"own {world.rank}"))
    writer = CheckpointWriter(apart, world, patience=3)
    begin(writer, world, 2)
    with pytest.raises(RunError) as caught:
        writer.wait()
    result["apart"] = told(caught)
    return result


def test_two_then_one_then_four(two: Results, place: Path) -> None:
    folder = CheckpointFolder(place / "checkpoints")
    one = WorldOfOne()
    found, problems = folder.newest_for(one)
    assert (summary(found)["step"], summary(found)["world size"], problems) == (10, 2, [])
    assert summary(found)["local"]["queue"].tolist() == [0.0] * 3
    assert [local["queue"].tolist() for local in folder.load_locals(10)] == [[0.0] * 3, [1.0] * 3]
    assert folder.load(10, rank=2).local is None
    writer = CheckpointWriter(folder, one)
    save(writer, one, 12)

    four = in_processes(of_four, 4, str(place))
    for rank, result in enumerate(four):
        assert (result["newest"]["step"], result["newest"]["world size"], result["problems"]) == (12, 1, [])
        assert result["newest"]["shared"].tolist() == [12.0] * 3
        assert (result["newest"]["local"] is None) == (rank > 0)
        assert [local["queue"].tolist() for local in result["locals"]] == [[0.0] * 3]
        assert (result["after"]["step"], result["after"]["world size"]) == (14, 4)
        assert result["after"]["local"]["queue"].tolist() == [float(rank)] * 3
        assert "the files of process 1, 3 (of 4, counted from 0) are missing" in result["apart"][0]

    assert [local["queue"].tolist() for local in folder.load_locals(14)] == [[float(r)] * 3 for r in range(4)]
    os.truncate(folder.path(14) / "rank-3.safetensors", 20)  # nobody's file among fewer, but needed to go on
    found, problems = folder.newest_for(one)
    assert summary(found)["step"] == 12
    assert "rank-3.safetensors" in problems[0]
