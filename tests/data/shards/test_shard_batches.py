"""Training from shards: every sample once, the same batches for any workers, processes and starting point."""

from __future__ import annotations

import pytest
from made_shards import png, write_tar

from zoo.data.loader import view_batches
from zoo.data.open import open_source
from zoo.data.shards.order import order_of
from zoo.data.shards.tar import members
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.errors import InputError

SHARDS, EACH, BATCH = 12, 50, 24  # 600 images, 25 batches
PLAN = ViewPlan((CropSpec(8, 0.3, 1.0), CropSpec(4, 0.1, 0.3)))
SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        content = []
        for number in range(shard * EACH, (shard + 1) * EACH):
            content += [(f"{number:04d}.png", png(number)), (f"{number:04d}.cls", b"%d" % (number % 7))]
        write_tar(folder / f"{shard:02d}.tar", content)
    return folder


@pytest.fixture(scope="module")
def source(folder):
    return open_source(f"{folder}/{{00..11}}.tar")


def stream(source, workers=0, first=0, last=None, rank=0, world=1, **options):
    order = order_of(source, BATCH, SEED, rank, world)
    last = order.batches if last is None else last
    maker = PlannedViews(PLAN)
    return view_batches(source, maker, order, first_step=first, last_step=last, workers=workers, **options)


@pytest.fixture(scope="module")
def alone(source):
    return list(stream(source, last=28))  # an epoch and three steps


def bits(batch):
    """Everything a batch holds."""
    parts = [*batch.views, batch.ids, batch.labels]
    return [part.numpy().tobytes() for part in parts] + [batch.epoch, repr(batch.bad)]


def ids(batches):
    return [sample for batch in batches for sample in batch.ids.tolist()]


def test_every_sample_once_an_epoch(source, alone):
    assert sorted(ids(alone[:25])) == list(range(600))
    assert {batch.epoch for batch in alone[25:]} == {1}
    assert ids(alone[25:]) != ids(alone[:5])
    assert all(
        label == sample % 7
        for b in alone
        for sample, label in zip(b.ids.tolist(), b.labels.tolist(), strict=True)
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(source, alone, workers):
    assert [bits(b) for b in stream(source, workers, 17, 28)] == [bits(b) for b in alone[17:]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 3])
def test_two_processes_share_each_batch(source, alone, workers):
    parts = [list(stream(source, workers, 20, 28, rank=rank, world=2)) for rank in range(2)]
    for whole, first, second in zip(alone[20:], *parts, strict=True):
        assert first.ids.tolist() + second.ids.tolist() == whole.ids.tolist()
        images = [view.unflatten(0, (-1, BATCH // 2)) for part in (first, second) for view in part.views]
        assert images[0].shape[1] == BATCH // 2
        assert first.views[1].tolist() + second.views[1].tolist() == whole.views[1].tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("first", "workers"), [(1, 0), (13, 3), (24, 1), (25, 0), (27, 0)])
def test_a_resume_goes_on_with_the_same_batches(source, alone, first, workers):
    last = min(first + 4, 28)
    assert [bits(b) for b in stream(source, workers, first, last)] == [bits(b) for b in alone[first:last]]


def test_damage_stops_or_is_skipped_and_counted(folder, tmp_path):
    for path in folder.glob("0[0-3].tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = open_source(str(tmp_path))
    data = bytearray((tmp_path / "01.tar").read_bytes())
    place = [m for m in members(lambda o, n: bytes(data[o : o + n]), len(data)) if m.name.endswith(".png")][7]
    data[place.data + 20 : place.data + 120] = bytes(100)  # a picture
    hit = [m for m in members(lambda o, n: bytes(data[o : o + n]), len(data)) if m.name.endswith(".png")][9]
    data[hit.start : hit.start + 100] = b"x" * 100  # and a header
    (tmp_path / "01.tar").write_bytes(bytes(data))
    with pytest.raises(InputError) as caught:
        list(stream(source, workers=1))
    assert "01.tar" in caught.value.where
    found = list(stream(source, workers=1, skip_bad=True))
    bad = [left for batch in found for left in batch.bad]
    assert {left.sample for left in bad} == {57, 59}
    assert f"0057.png (at byte {place.start})" in " ".join(left.where for left in bad)
    assert all(batch.size == BATCH for batch in found)
    assert not {57, 59} & set(ids(found))
    assert [bits(b) for b in found] == [bits(b) for b in stream(source, skip_bad=True)]
