"""Methods with a bank on several processes: one process's numbers, and exact resume in the middle of an epoch."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.engine.loop import Callback, Loop, StepRecord
from zoo.engine.precision import Precision
from zoo.engine.signals import StopRequest
from zoo.pretrain.losses.deepcluster import nearest, rows_of_all, sinkhorn_offsets, spherical_kmeans
from zoo.pretrain.session import _Step

from .deepcluster_world import KINDS, STEPS, epoch_batches, method_of
from .world import in_processes, rows_of

EPOCHS = 3
STOP = 4  # in the second epoch
STOPPED = ["deepcluster", "soft"]  # hard codes are kept as clusters are
# Rows that many centroids start from, one of them twice: clusters without any row, and without one in a process.
MANY = torch.tensor([0, 0, *range(2, 50, 2)])


class Watch(Callback):
    """Notes losses, and asks for a stop after a step (0: before the first one)."""

    def __init__(self, stop: StopRequest, after: int | None) -> None:
        self.stop, self.after, self.losses = stop, after, []

    def on_start(self, loop: Loop) -> None:
        if self.after == 0:
            self.stop.signal = signal.SIGUSR1

    def on_step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        if record.step + 1 == self.after:
            self.stop.signal = signal.SIGUSR1


def session(
    world: Collectives, folder: Path, kind: str, after: int | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """Train from the folder's newest checkpoint, if there is one, to the end or to a stop."""
    method = method_of(kind, world)

    def batches(first: int) -> Any:
        for step in range(first, EPOCHS * STEPS):
            yield epoch_batches(step // STEPS, world)[step % STEPS]

    stop = StopRequest()
    watch = Watch(stop, after)
    checkpoints = CheckpointFolder(folder)
    loop = Loop(
        learner=method,
        optimizer=torch.optim.SGD(method.param_groups(False), lr=0.1, momentum=0.9),
        lr_at=lambda step: 0.1,
        batches=batches,
        prepare=lambda batch: batch.views,
        precision=Precision("float64", torch.device("cpu")),
        steps_per_epoch=STEPS,
        total_steps=EPOCHS * STEPS,
        checkpoints=CheckpointWriter(checkpoints, world),
        callbacks=[watch],
        world=world,
        compute=method.step if world.world_size == 1 else DistributedDataParallel(_Step(method)),
        accumulate=accumulate,
    )
    saved, _ = checkpoints.newest_for(world)
    if saved is not None:
        same = saved.world_size == world.world_size
        loop.restore(saved, None if same else checkpoints.load_locals(saved.step))
    loop.run(stop)
    state = {key: value.clone() for key, value in method.state_dict().items()}
    return {"losses": watch.losses, "state": state, "local": method.local_state(), "step": loop.step}


def bodies(world: Collectives, folder: str, rows: torch.Tensor) -> dict[str, Any]:
    place = Path(folder)
    results: dict[str, Any] = {}
    for kind in KINDS:
        results[f"{kind} whole"] = session(world, place / f"{kind} whole", kind)
    for kind in STOPPED:
        stopped = place / f"{kind} stopped"
        results[f"{kind} stopped"] = session(world, stopped, kind, STOP)
        if world.rank == 0:
            shutil.copytree(stopped, place / f"{kind} to go on")
        results[f"{kind} resumed"] = session(world, stopped, kind)
        results[f"{kind} dealt"] = session(world, place / f"{kind} of one", kind)
    results["unstarted"] = session(world, place / "unstarted", "deepcluster", 0)
    results["started"] = session(world, place / "unstarted", "deepcluster")
    mine = rows_of(world, rows)
    start = rows_of_all(mine, torch.tensor([30, 2, 17, 55, 31]), world)
    offsets = sinkhorn_offsets(mine, rows[:5], 0.05, 4, world)
    exchanged = getattr(world, "bytes_exchanged", 0)
    centroids, labels = spherical_kmeans(mine, start, 6, world)
    exchanged_by_kmeans = getattr(world, "bytes_exchanged", 0) - exchanged
    results["many"] = spherical_kmeans(mine, rows[MANY], 1, world)
    results["sets"] = {
        "start": start,
        "centroids": centroids,
        "labels": labels,
        "offsets": offsets,
        "codes": nearest(mine, rows[:5] / 0.05, offsets),
        "bytes": exchanged_by_kmeans,
    }
    return results


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(60, 4, generator=generator, dtype=torch.float64), dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(folder: Path, rows: torch.Tensor) -> list[dict[str, Any]]:
    for kind in STOPPED:
        session(WorldOfOne(), folder / f"{kind} of one", kind, STOP)
    return in_processes(bodies, 2, str(folder), rows)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("alone")
    return {kind: session(WorldOfOne(), place / kind, kind) for kind in KINDS}


def assert_close(one: dict[str, Any], other: dict[str, Any], last: int = EPOCHS * STEPS) -> None:
    assert one["losses"][-last:] == pytest.approx(other["losses"][-last:], rel=1e-9)
    for key, value in one["state"].items():
        torch.testing.assert_close(other["state"][key], value, rtol=1e-7, atol=1e-9, msg=key)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_losses_of_one(alone, pair, kind):
    for result in pair:
        assert len(result[f"{kind} whole"]["losses"]) == EPOCHS * STEPS
        assert_close(alone[kind], result[f"{kind} whole"])
    first, second = (result[f"{kind} whole"] for result in pair)
    assert_equal(first["state"], second["state"])  # prototypes are equal without being sent
    # Each has its own share of the rows: of each batch the first half and the second.
    places = torch.arange(STEPS * 8).view(STEPS, 2, 4)
    for rank, result in enumerate((first, second)):
        mine = places[:, rank].flatten()
        local, whole = result["local"], alone[kind]["local"]
        assert torch.equal(local["index"], whole["index"][mine])
        torch.testing.assert_close(local["bank"], whole["bank"][:, mine], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", STOPPED)
def test_going_on_in_the_middle_of_an_epoch_is_bit_for_bit(pair, kind):
    for result in pair:
        whole, stopped, resumed = (result[f"{kind} {which}"] for which in ("whole", "stopped", "resumed"))
        assert stopped["step"] == STOP and resumed["step"] == EPOCHS * STEPS
        assert stopped["losses"] + resumed["losses"] == whole["losses"]
        assert_equal(resumed["state"], whole["state"])
        assert_equal(resumed["local"], whole["local"])


@pytest.mark.parametrize("kind", STOPPED)
def test_one_process_goes_on_where_two_were(folder, alone, pair, kind):
    resumed = session(WorldOfOne(), folder / f"{kind} to go on", kind)
    assert len(resumed["losses"]) == EPOCHS * STEPS - STOP
    assert_close(resumed, alone[kind], last=EPOCHS * STEPS - STOP)
    assert torch.equal(resumed["local"]["index"], alone[kind]["local"]["index"])


@pytest.mark.parametrize("kind", STOPPED)
def test_two_processes_go_on_where_one_was(alone, pair, kind):
    for result in pair:
        dealt = result[f"{kind} dealt"]
        assert len(dealt["losses"]) == EPOCHS * STEPS - STOP
        assert_close(dealt, alone[kind], last=EPOCHS * STEPS - STOP)


def test_a_stop_in_the_first_pass_leaves_no_trace(pair):
    for result in pair:
        assert (result["unstarted"]["step"], result["unstarted"]["local"]) == (0, {})
        assert_equal(result["started"]["losses"], result["deepcluster whole"]["losses"])
        assert_equal(result["started"]["state"], result["deepcluster whole"]["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_parts_is_the_same_up_to_rounding(tmp_path, alone, kind):
    parts = session(WorldOfOne(), tmp_path, kind, accumulate=4)
    assert_close(parts, alone[kind])


def test_sets_are_assigned_together(pair, rows):
    start = rows[[30, 2, 17, 55, 31]]
    centroids, labels = spherical_kmeans(rows, start, 6)
    offsets = sinkhorn_offsets(rows, rows[:5], 0.05, 4)
    codes = nearest(rows, rows[:5] / 0.05, offsets)
    for rank, result in enumerate(pair):
        found, mine = result["sets"], slice(30 * rank, 30 * rank + 30)
        assert torch.equal(found["start"], start)
        torch.testing.assert_close(found["centroids"], centroids)
        torch.testing.assert_close(found["offsets"], offsets)
        assert torch.equal(found["labels"], labels[mine]) and torch.equal(found["codes"], codes[mine])
        assert found["bytes"] == 6 * 5 * (4 + 1) * 8  # sums of K vectors, and K counts: none of the rows


def test_empty_clusters_stay_where_they_are_for_all_processes(pair, rows):
    centroids, labels = spherical_kmeans(rows, rows[MANY], 1)
    first = nearest(rows, rows[MANY])  # what the move was made of
    assert 1 not in first.tolist()
    assert set(first[:30].tolist()) != set(first[30:].tolist())
    for rank, result in enumerate(pair):
        found, of_mine = result["many"]
        assert torch.equal(of_mine, labels[30 * rank : 30 * rank + 30])
        torch.testing.assert_close(found, centroids)
        torch.testing.assert_close(found[1], rows[0])
    assert torch.equal(pair[0]["many"][0], pair[1]["many"][0])
