"""Batches of data workers lie in memory that is used again, but never while anything looks into it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from streams import bits, stream

from tiny import image_folder
from zoo.data.folder import FileImages, open_folder
from zoo.data.room import Room, arrived
from zoo.errors import RunError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

BYTES = np.dtype(np.uint8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileImages:
    return open_folder(image_folder(tmp_path_factory.mktemp("images"), 14))


def test_few_places_serve_many_batches(source: FileImages) -> None:
    places = set()
    for batch in stream(source, workers=2, last=60):
        places.add(batch.views[0].data_ptr())
    assert 2 <= len(places) <= 2 * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_kept_stays_as_it_is(source: FileImages, workers: int) -> None:
    kept: list[tuple[int, object]] = []
    expected = [bits(batch) for batch in stream(source, workers=0, last=60)]
    for step, batch in enumerate(stream(source, workers=workers, last=60)):
        assert bits(batch) == expected[step]
        if step % 7 == 0:
            kept.append((step, batch))  # more than there are slots
    for step, batch in kept:
        assert bits(batch) == expected[step]  # type: ignore[arg-type]


def test_a_part_of_a_batch_keeps_its_place(source: FileImages) -> None:
    rows, arrays, expected = [], [], []
    for step, batch in enumerate(stream(source, workers=1, last=40)):
        if step < 3:
            expected.append((batch.views[1][2:3].clone(), batch.views[0].numpy().copy()))
            rows.append(batch.views[1][2:3].permute(0, 2, 3, 1))
            arrays.append(batch.views[0].numpy())
        del batch
    for row, array, (pixels, whole) in zip(rows, arrays, expected, strict=True):
        assert torch.equal(row.permute(0, 3, 1, 2), pixels)
        assert np.array_equal(array, whole)


def test_numbers_that_are_collected_hold_no_views(source: FileImages) -> None:
    places, numbers = set(), []
    expected = [(batch.ids, batch.labels) for batch in stream(source, workers=0, last=40)]
    for batch in stream(source, workers=1, last=40):
        places.add(batch.views[0].data_ptr())
        numbers.append((batch.ids, batch.labels))
    assert len(places) <= 4
    assert all(
        torch.equal(a, b)
        for mine, same in zip(numbers, expected, strict=True)
        for a, b in zip(mine, same, strict=True)
    )


def test_a_tensor_that_is_kept_keeps_its_own_slot_alone() -> None:
    size = 8 * 2**20

    def mapped() -> int:
        places = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(int(last, 16) - int(first, 16) == size for first, last in places)

    room, before = Room(workers=2, ahead=2, size=size - 100, pieces=1), mapped()
    slot = room.take(0, [((10,), BYTES)])
    assert slot is not None
    kept = arrived(*slot.sent(slot.tensors))
    del room, slot
    assert before >= 8 and mapped() == before - 7
    kept.clear()
    assert mapped() == before - 8


def test_a_slot_is_free_again_when_the_last_tensor_is_gone() -> None:
    room = Room(workers=2, ahead=1, size=100, pieces=2)
    wanted = [((5, 4), BYTES), ((2, 3), np.dtype(np.int64))]
    slots = [room.take(1, wanted) for _ in range(4)]
    assert slots[3] is None and room.take(0, wanted) is not None
    first = slots[0]
    assert first is not None and first.number == 3
    first.tensors[0][:] = 7
    first.tensors[1][:] = torch.arange(6).view(2, 3)
    pixels, numbers = arrived(*first.sent([first.tensors[0].T, first.tensors[1][1]]))
    assert numbers.tolist() == [3, 4, 5] and pixels.shape == (4, 5) and int(pixels.sum()) == 140
    del pixels
    assert room.take(1, wanted) is None
    last = numbers[2:]
    del numbers
    assert room.take(1, wanted) is None and last.tolist() == [5]
    del last
    again = room.take(1, wanted)
    assert again is not None and again.number == first.number


def test_a_slot_stays_taken_when_a_forked_process_drops_its_copy() -> None:
    room = Room(workers=1, ahead=1, size=100, pieces=1)
    slot = room.take(0, [((5,), BYTES)])
    assert slot is not None
    tensors = arrived(*slot.sent(slot.tensors))
    child = os.fork()
    if not child:
        tensors.clear()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    again = room.take(0, [((5,), BYTES)])
    assert again is not None and again.number != slot.number
    tensors.clear()
    back = room.take(0, [((5,), BYTES)])
    assert back is not None and back.number == slot.number


def test_a_batch_that_does_not_fit_gets_no_slot() -> None:
    room = Room(workers=1, ahead=2, size=10, pieces=1)
    assert room.take(0, [((mmap.PAGESIZE + 1,), BYTES)]) is None
    assert room.take(0, [((10,), BYTES)]) is not None


def test_memory_that_the_system_does_not_give_is_told() -> None:
    with pytest.raises(RunError, match="MB for their batches") as caught:
        Room(workers=4, ahead=2, size=2**57, pieces=3)
    assert "--workers" in (caught.value.fix or "")


def test_shared_memory_files_are_not_needed(source: FileImages) -> None:
    batches = stream(source, workers=1)
    next(batches)
    maps = Path("/proc/self/maps").read_text()
    batches.close()  # type: ignore[attr-defined]
    assert "/torch_" not in maps
