"""The order of samples in shards: complete, keyed, the same for any number of processes, found at any step."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from made_shards import shard_folder

from tiny import image_folder
from zoo.data.loader import EpochOrder
from zoo.data.open import open_source
from zoo.data.shards.order import _LONGEST, ShardOrder, _cut, order_of

COUNTS = np.array([7, 1, 0, 30, 12, 5, 22, 9, 3, 11])  # 100 samples
LANES = [1, 2, 4]


def epoch(order, number=0):
    return np.stack(list(order.rows(number, 0, order.batches)))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("window", [1, 2, 50])
@pytest.mark.parametrize("batch", [4, 8, 20])
def test_every_sample_once_an_epoch(lanes, window, batch):
    order = ShardOrder(COUNTS, batch, 3, lanes=lanes, window=window)
    assert order.batches == 100 // batch
    for number in range(3):
        ids = epoch(order, number).ravel()
        assert ids.dtype == np.int64
        assert len(ids) == order.batches * batch
        assert len(set(ids.tolist())) == len(ids)
        assert set(ids.tolist()) <= set(range(100))


def test_over_the_epochs_all_are_seen():
    order = ShardOrder(COUNTS, 16, 0, lanes=4)  # four are left over each time
    seen = np.zeros(100, int)
    for number in range(40):
        seen[epoch(order, number).ravel()] += 1
    assert seen.sum() == 40 * 96
    assert seen.min() >= 30


def test_epochs_and_seeds_are_different_sequences():
    orders = [epoch(ShardOrder(COUNTS, 8, seed), number).tobytes() for seed in (0, 1) for number in (0, 1)]
    assert len(set(orders)) == 4
    assert epoch(ShardOrder(COUNTS, 8, 1), 1).tobytes() == orders[3]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_batches_are_the_same_for_any_number_of_processes(lanes, world):
    alone = epoch(ShardOrder(COUNTS, 8, 3, lanes=lanes), 1)
    parts = [epoch(ShardOrder(COUNTS, 8, 3, rank, world, lanes=lanes), 1) for rank in range(world)]
    assert np.array_equal(np.concatenate(parts, 1), alone)


@pytest.mark.parametrize("lanes", LANES)
def test_any_step_is_found_without_those_before_it(lanes):
    order = ShardOrder(COUNTS, 4, 3, lanes=lanes, window=2)
    whole = epoch(order, 2)
    for first in range(order.batches):
        assert np.array_equal(np.stack(list(order.rows(2, first, order.batches))), whole[first:])
    assert np.array_equal(np.stack(list(order.rows(2, 3, 5))), whole[3:5])
    assert list(order.rows(2, 4, 4)) == []


def shards_of(ids, counts):
    return np.searchsorted(np.cumsum(counts), ids, "right")


def test_processes_read_different_shards():
    counts = np.full(64, 100)
    seen = []
    for rank in range(4):
        order = ShardOrder(counts, 400, 0, rank, 4, lanes=4)
        seen.append(set(shards_of(epoch(order).ravel(), counts).tolist()))
    assert sum(map(len, seen)) == 64
    assert len(set.union(*seen)) == 64


@pytest.mark.parametrize(("lanes", "window"), [(1, 8), (2, 4), (4, 2)])
def test_few_shards_are_read_at_a_time_and_each_in_one_stretch(lanes, window):
    counts = np.full(64, 50)
    ids = epoch(ShardOrder(counts, 8, 0, lanes=lanes, window=window))
    shards = shards_of(ids, counts)
    first, last = np.full(64, 10**9), np.full(64, -1)
    for step, row in enumerate(shards):
        first[row] = np.minimum(first[row], step)
        last[row] = np.maximum(last[row], step)
    open_at_once = [((first <= step) & (last >= step)).sum() for step in range(len(shards))]
    assert max(open_at_once) <= lanes * (window + 2)  # a window may begin and end within a shard


def test_samples_are_shuffled_within_and_over_shards():
    counts = np.full(32, 100)
    ids = epoch(ShardOrder(counts, 32, 0, window=16)).ravel()
    assert len(set(shards_of(ids[:200], counts).tolist())) >= 14
    steps = np.abs(np.diff(ids))
    assert (steps == 1).mean() < 0.01
    # Which shards come first changes with the epoch.
    other = epoch(ShardOrder(counts, 32, 0, window=16), 1).ravel()
    assert set(shards_of(ids[:200], counts).tolist()) != set(shards_of(other[:200], counts).tolist())


def test_lanes_suit_the_batch():
    chosen = {
        batch: ShardOrder(COUNTS, batch, 0).lanes for batch in (2, 8, 63, 64, 96, 100, 256, 4096, 2**20)
    }
    assert chosen == {2: 1, 8: 1, 63: 1, 64: 2, 96: 2, 100: 2, 256: 8, 4096: 64, 2**20: 64}


def test_a_long_shard_is_taken_for_several():
    assert _cut(np.array([3, 0, 5])).tolist() == [3, 5]
    cut = _cut(np.array([10, 3 * _LONGEST + 1, 7]))
    assert cut.sum() == 3 * _LONGEST + 18
    assert cut.max() <= _LONGEST
    assert cut.tolist()[1:5] == [49153, 49152, 49152, 49152]


def test_the_next_shards_are_announced():
    told = []
    order = ShardOrder(np.full(12, 10), 4, 0, lanes=1, window=3, soon=lambda ids: told.append(ids))
    rows = order.rows(0, 0, order.batches)
    first = next(rows)
    assert len(told) == 1
    assert len(told[0]) == 6  # a window and the next one
    assert set((np.asarray(told[0][:3]) // 10).tolist()) >= set((first // 10).tolist())
    list(rows)
    assert [len(ids) for ids in told] == [6, 6, 6, 3]
    assert told[0][3:] == told[1][:3]


def test_a_hundred_million_samples_cost_nothing_like_their_number():
    counts = np.full(10_000, 10_000)
    tracemalloc.start()
    order = ShardOrder(counts, 4096, 0, 3, 64)
    row = next(order.rows(5, 20_000, 20_001))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(row) == 64
    assert peak < 20e6


def test_the_order_follows_the_source(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    shards = open_source(str(shard_folder(tmp_path / "shards")))
    assert isinstance(order_of(shards, 4, 0), ShardOrder)
    assert order_of(shards, 4, 0).samples == 15
    folder = open_source(str(image_folder(tmp_path / "images", 6)))
    assert order_of(folder, 4, 0, 0, 2) == EpochOrder(6, 4, 0, 0, 2)
