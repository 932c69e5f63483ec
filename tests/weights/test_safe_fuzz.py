"""Damaged files end in a value or in one error: nothing else is raised, printed or waited for."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import random
import time
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save

from zoo.errors import InputError
from zoo.weights.safe import Content, look_at, read_content

FLIPS = 500  # for each seed file


def _torch(content: object, zipped: bool, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return file.getvalue()


CONTENT = {
    "state": collections.OrderedDict(w=torch.arange(6.0).reshape(2, 3), b=torch.ones(2).bfloat16()),
    "args": argparse.Namespace(lr=0.1, sizes=[224, 96], rest={"x": (1, None)}),
    "best": np.float64(1.5),
    "set": {1, 2},
    "blob": b"\x00\xff",
}
ARRAYS = {
    "model": {"w": np.arange(6.0).reshape(2, 3), "t": np.array(["a", "bc"])},
    "matching_heuristics": True,
}
SEEDS = {
    "zip": _torch(CONTENT, zipped=True),
    "legacy": _torch(CONTENT, zipped=False),
    "safetensors": save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int8)}),
    "text": pickle.dumps(ARRAYS, protocol=0),
    "pickle": pickle.dumps(ARRAYS, protocol=4),
    "frames": pickle.dumps(ARRAYS, protocol=5),
}


def _damaged(draw: random.Random, data: bytes, places: list[int]) -> bytes:
    made = bytearray(data)
    kind = draw.random()
    for _ in range(1 if kind < 0.7 else draw.randint(2, 5)):
        place = draw.choice(places)
        made[place] = made[place] ^ 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(256)
    if kind > 0.95:  # bytes that are lost or come twice
        place, length = draw.choice(places), draw.randint(1, 20)
        made[place : place + length] = made[place : place + length] * draw.randrange(3)
    return bytes(made)


@pytest.mark.parametrize("name", SEEDS)
def test_flipped_bytes_end_in_a_value_or_in_one_error(tmp_path, capfd, name):
    data = SEEDS[name]
    draw = random.Random(f"safe {name}")
    places = [place for place, byte in enumerate(data) if byte not in b"\0Z"]  # no padding
    path = tmp_path / "file"
    outcomes: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        for _ in range(FLIPS):
            path.write_bytes(_damaged(draw, data, places))
            start = time.process_time()
            try:
                content = read_content(path)
            except InputError as error:
                assert error.where == str(path) and str(error).isascii()
                outcomes["refused"] += 1
            else:
                assert isinstance(content, Content) and repr(content)
                outcomes["read"] += 1
            look_at(path)
            slowest = max(slowest, time.process_time() - start)
    assert [str(warning.message) for warning in printed] == []
    assert tuple(capfd.readouterr()) == ("", "")
    assert slowest < 2
    assert outcomes["refused"] > FLIPS / 10
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
