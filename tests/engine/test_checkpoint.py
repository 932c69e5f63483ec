"""Checkpoints: whole or absent, verified, pruned, free of pickle."""

from __future__ import annotations

import errno
import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from zoo.engine import checkpoint as module
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.state import pack, unpack
from zoo.errors import InputError, RunError
from zoo.files import sha256_of
from zoo.tensors import write_safetensors

STATE = {
    "step": 3,
    "none": None,
    "flag": True,
    "rate": 0.1,
    "text": "é",
    "pair": (1, (2.5, "x")),
    "list": [1, [2, {"deep": torch.arange(3)}]],
    "optimizer": {"state": {0: {"momentum": torch.randn(2, 3)}, 7: {"step": torch.tensor(4.0)}}},
    "empty": {},
    "odd": {"$tensor": "a string"},
    "half": torch.ones(2, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
}


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def save(folder, step, value=None):
    return folder.save(
        step, {"value": torch.full((3,), float(step) if value is None else value)}, {"rank": 0}
    )


def test_pack_and_unpack_are_inverse_through_json():
    plain, tensors = pack(STATE)
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert_same(unpack(json.loads(json.dumps(plain)), tensors), STATE)


def test_pack_copies_tensors_and_makes_them_contiguous():
    source = torch.zeros(4, 4)
    _, tensors = pack(
        {"a": source.T, "b": source[1:2], "c": source.to(memory_format=torch.contiguous_format)}
    )
    source.add_(1)
    assert all(value.sum() == 0 and value.is_contiguous() for value in tensors.values())


def test_pack_names_what_it_cannot_save():
    with pytest.raises(TypeError, match="a/1 is a set"):
        pack({"a": [0, {1, 2}]})


def test_a_round_trip_through_the_disk(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(3, STATE, {"queue": torch.ones(2)})
    found, problems = folder.newest()
    assert problems == []
    assert (found.step, found.world_size) == (3, 1)
    assert_same(found.shared, STATE)
    assert_same(found.local, {"queue": torch.ones(2)})


def test_the_files_of_a_checkpoint(tmp_path):
    path = save(CheckpointFolder(tmp_path), 42)
    assert path.name == "step-00000042"
    names = {"global.json", "global.safetensors", "rank-0.json", "rank-0.safetensors"}
    assert {file.name for file in path.iterdir()} == names | {"manifest.json"}
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    assert (manifest["schema"], manifest["step"], manifest["world_size"]) == (1, 42, 1)
    assert manifest["files"] == {name: sha256_of(path / name) for name in names}
    for file in path.iterdir():
        assert file.stat().st_mode & 0o777 == 0o644
        assert not zipfile.is_zipfile(file)
        assert not file.read_bytes().startswith(b"\x80")  # how pickles start
    assert torch.equal(load_file(path / "global.safetensors")["value"], torch.full((3,), 42.0))


def test_the_newest_ones_stay(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=3)
    assert folder.steps() == []
    assert folder.newest() == (None, [])
    for step in (2, 4, 8, 10, 100):
        save(folder, step)
    assert folder.steps() == [8, 10, 100]


def test_what_lies_ahead_goes_because_it_was_damaged(tmp_path):
    """A run that went on from step 4 found 8 and 10 damaged: they must not push whole ones out."""
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (4, 8, 10):
        save(CheckpointFolder(tmp_path, keep=9), step)
    save(folder, 6)
    assert folder.steps() == [4, 6]


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # still a safetensors file, with another number in it
    path.write_bytes(data)


DAMAGES = {
    "bit": lambda path: flip_last_bit(path / "global.safetensors"),
    "cut": lambda path: os.truncate(path / "global.safetensors", 20),
    "replaced": lambda path: (path / "rank-0.safetensors").write_bytes(b"x"),
    "missing": lambda path: (path / "global.json").unlink(),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut": lambda path: os.truncate(path / "manifest.json", 10),
    "manifest no text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\xfd"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    DAMAGES[damage](save(folder, 4))
    found, problems = folder.newest()
    assert found.step == 2
    assert len(problems) == 1
    assert "step-00000004" in problems[0]
    with pytest.raises(InputError):
        folder.load(4)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_replaced_by_saving_the_step_again(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    DAMAGES[damage](save(folder, 4))
    save(folder, 4)
    found, problems = folder.newest()
    assert (found.step, problems) == (4, [])


def test_a_whole_checkpoint_of_the_step_is_kept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    save(folder, 2, value=-1.0)
    assert folder.load(2).shared["value"].tolist() == [2.0] * 3


def test_what_a_killed_process_left_is_ignored_and_swept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    left = tmp_path / ".step-00000004.abc.tmp"
    left.mkdir()
    (left / "global.safetensors").write_bytes(b"half")
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert folder.steps() == [2]
    assert folder.newest()[0].step == 2
    save(folder, 4)
    assert not left.exists()
    assert other.exists()


def test_a_future_schema_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = save(folder, 2)
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 2}))
    with pytest.raises(InputError, match="schema 2, this version reads schema 1") as caught:
        folder.load(2)
    assert "version" in caught.value.fix


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    path = save(folder, 2)
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    manifest["files"]["../../outside"] = sha256_of(outside)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError):
        folder.load(2)


@pytest.mark.parametrize("place", ["write_safetensors", "write_json"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_leaves_the_earlier_one_and_nothing_half(tmp_path, monkeypatch, place, code):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    calls = []

    def failing(path, value):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code), str(path))
        return original(path, value)

    original = getattr(module, place)
    monkeypatch.setattr(module, place, failing)
    with pytest.raises(RunError) as caught:
        save(folder, 4)
    assert len(calls) == 2
    assert os.strerror(code) in caught.value.what
    assert caught.value.where == str(tmp_path)
    assert caught.value.fix
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]
    assert folder.load(2).step == 2


def test_safetensors_own_disk_error_is_understood(tmp_path):
    with pytest.raises(OSError) as caught:
        write_safetensors(tmp_path / "no such folder" / "x.safetensors", {"a": torch.ones(1)})
    assert caught.value.errno == errno.ENOENT


def test_milestones_stay(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, keep_every=4)
    for step in (2, 4, 6, 8, 10, 11):
        save(folder, step)
    assert folder.steps() == [4, 8, 11]


def test_a_process_beyond_those_that_saved_gets_no_local_state(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    assert folder.load(2, rank=0).local == {"rank": 0}
    found = folder.load(2, rank=1)
    assert found.local is None
    assert found.shared["value"].tolist() == [2.0] * 3
    assert folder.newest(rank=5)[0].local is None
    assert folder.load_locals(2) == [{"rank": 0}]


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = save(folder, 2)
    found = folder.load(2)
    os.truncate(path / "global.safetensors", 20)
    assert found.shared["value"].tolist() == [2.0] * 3


def test_only_what_is_read_is_hashed_but_everything_must_be_there(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = save(folder, 2)
    flip_last_bit(path / "rank-0.json")
    assert folder.load(2, rank=1).step == 2
    assert not folder.is_whole(2)
    for reading in (folder.load, folder.load_locals, folder.verify):
        with pytest.raises(InputError, match="damaged"):
            reading(2)
    (path / "rank-0.json").unlink()
    with pytest.raises(InputError, match="missing"):
        folder.load(2, rank=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: [],
        lambda manifest: {**manifest, "files": None},
        lambda manifest: {**manifest, "files": {}},
        lambda manifest: {**manifest, "world_size": 2},
        lambda manifest: {**manifest, "world_size": "1"},
        lambda manifest: {**manifest, "world_size": 0},
        lambda manifest: {**manifest, "world_size": True},
        lambda manifest: {**manifest, "world_size": 10**12},
        lambda manifest: {**manifest, "step": 3},
        lambda manifest: {"schema": 1},
    ],
)
def test_a_manifest_that_makes_no_sense(tmp_path, change):
    folder = CheckpointFolder(tmp_path)
    path = save(folder, 2)
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    (path / "manifest.json").write_text(json.dumps(change(manifest)))
    found, problems = folder.newest()
    assert found is None
    assert "step-00000002" in problems[0]
