"""A second copy of the checkpoints at an fsspec address."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_copy import CheckpointCopy, without_credentials
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError

SECRET = "pass/word"
ADDRESS = f"faraway://me:{SECRET}@host/run?token=tickettickets"


class FarAway(MemoryFileSystem):
    """Memory that fails or waits when told to, and remembers what was put there."""

    protocol = "faraway"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    put: list[str] = []  # noqa: RUF012
    refused: str | None = None
    gate: threading.Event | None = None

    @classmethod
    def _strip_protocol(cls, path):
        place = path.partition("://")[2].rpartition("@")[2].partition("?")[0] if "://" in path else path
        return "/" + place.strip("/")

    def put_file(self, lpath, rpath, **options):
        if FarAway.gate is not None:
            assert FarAway.gate.wait(30)
        if FarAway.refused is not None and FarAway.refused in rpath:
            raise PermissionError(f"me:{SECRET} and tickettickets are not welcome at {ADDRESS}")
        FarAway.put.append(rpath)
        super().put_file(lpath, rpath, **options)


@pytest.fixture
def far():
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    FarAway.store, FarAway.pseudo_dirs, FarAway.put = {}, [""], []
    FarAway.refused = FarAway.gate = None
    yield FarAway
    if FarAway.gate is not None:
        FarAway.gate.set()


def writer_in(folder, copy_to, **arguments):
    return CheckpointWriter(CheckpointFolder(folder, **arguments), WorldOfOne(), copy_to=str(copy_to))


def save(writer, *steps, copied=True):
    for step in steps:
        writer.begin(step, {"value": torch.full((3,), float(step))}, {"queue": torch.tensor([step])})
        writer.wait()
        if copied:
            writer.close()


def far_steps(far, whole=True):
    end = "manifest.json" if whole else "global.json"
    return sorted(int(name.split("/")[-2][5:]) for name in far.store if name.endswith(end))


@pytest.mark.parametrize("kind", ["file", "path", "memory"])
def test_copies_are_checkpoints(tmp_path, kind):
    address = {"file": f"file://{tmp_path}/a b/copy", "path": tmp_path / "a b" / "copy"}.get(kind)
    writer = writer_in(tmp_path / "checkpoints", address or f"memory://{tmp_path}", keep=2, keep_every=4)
    save(writer, 2, 4, 6, 8, 9, 10)
    place = tmp_path / "a b" / "copy"
    if kind == "memory":
        memory = fsspec.filesystem("memory")
        memory.get(str(tmp_path), str(place), recursive=True)
        memory.rm(str(tmp_path), recursive=True)
    copies = CheckpointFolder(place)
    assert copies.steps() == writer.folder.steps() == [4, 8, 9, 10]
    for step in copies.steps():
        copies.verify(step)
        assert copies.load(step).shared["value"].tolist() == [float(step)] * 3
        for file in writer.folder.path(step).iterdir():
            assert (copies.path(step) / file.name).read_bytes() == file.read_bytes()


def test_a_relative_path_is_that_of_the_beginning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = writer_in(tmp_path / "checkpoints", "copy")
    monkeypatch.chdir("/")
    save(writer, 2)
    assert CheckpointFolder(tmp_path / "copy").load(2).step == 2


def test_the_manifest_comes_last_and_nothing_is_copied_twice(tmp_path, far):
    writer = writer_in(tmp_path, ADDRESS)
    save(writer, 2, 4)
    put = [name.removeprefix("/host/run/") for name in far.put]
    assert put[0] == "copy.json"
    assert [Path(name).parent.name for name in put[1:]] == ["step-00000002"] * 5 + ["step-00000004"] * 5
    assert put[5].endswith("manifest.json")
    assert put[10].endswith("manifest.json")
    far.put.clear()
    save(writer_in(tmp_path, ADDRESS), 6)  # the run goes on later
    assert {Path(name).parent.name for name in far.put} == {"step-00000006"}
    assert far_steps(far) == [4, 6]


def test_a_copy_that_fails_is_a_warning_and_made_up_for(tmp_path, far, caplog):
    writer = writer_in(tmp_path, ADDRESS, keep=1, keep_every=4)
    save(writer, 2)
    far.refused = "manifest"
    with caplog.at_level(logging.WARNING, "zoo"):
        save(writer, 4, 6)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert all("copying checkpoints to faraway://***@host/run?*** failed" in text for text in warnings)
    assert "PermissionError" in warnings[0]
    assert "not welcome" in warnings[0]
    assert writer.finished() == [2, 4, 6]
    assert writer.folder.steps() == [4, 6]
    assert far_steps(far) == [2]  # the only whole one stays
    far.refused = None
    save(writer, 7)
    assert far_steps(far) == far_steps(far, whole=False) == [4, 7]


def test_credentials_never_reach_the_log(tmp_path, far, caplog, monkeypatch):
    monkeypatch.setenv("FARAWAY_TOKEN", "from-the-environment")
    writer = writer_in(tmp_path, ADDRESS)
    far.refused = "step"
    with caplog.at_level(logging.DEBUG, "zoo"):
        save(writer, 2)
        far.put_file, whole = _failing_with("from-the-environment"), far.put_file
        try:
            save(writer, 4)
        finally:
            far.put_file = whole
    assert len(caplog.records) >= 2
    for secret in ("word", "ticket", "from-the-environment"):
        assert secret not in caplog.text


def _failing_with(text):
    def failing(self, *arguments, **options):
        raise OSError(text)

    return failing


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://key:secret@bucket/run?token=abc", "s3://***@bucket/run?***"),
        ("sftp://me@host:22/run", "sftp://***@host:22/run"),
        ("sftp://me:sec/ret@host/run", "sftp://***@host/run"),
        ("sftp://me:s@cret@host/run", "sftp://***@host/run"),
        ("sftp://me:s?cret@host/run", "sftp://***"),
        ("https://host/run?token=a@b", "https://***"),
        ("s3://bucket/me@home/run", "s3://bucket/me@home/run"),
        ("/mnt/me@home/run?", "/mnt/me@home/run?"),
    ],
)
def test_what_is_shown_of_an_address(address, shown):
    assert without_credentials(address) == shown


def test_another_runs_address_is_left_alone(tmp_path, far, caplog):
    save(writer_in(tmp_path / "first", ADDRESS), 100, 200)
    before = dict(far.store)
    with caplog.at_level(logging.WARNING, "zoo"):
        save(writer_in(tmp_path / "second", ADDRESS), 10, 300)
    assert far.store == before
    assert len(caplog.records) == 2
    assert "another run" in caplog.records[0].getMessage()
    del far.store["/host/run/copy.json"]  # nobody knows whose
    save(writer_in(tmp_path / "third", ADDRESS), 1)
    assert far_steps(far) == [100, 200]


def test_a_run_whose_disk_was_lost_goes_on_with_its_copy(tmp_path, far):
    save(writer_in(tmp_path / "lost", ADDRESS), 2, 4)
    fsspec.filesystem("faraway").get("/host/run", str(tmp_path / "new"), recursive=True)
    writer = writer_in(tmp_path / "new", ADDRESS)
    assert writer.folder.newest()[0].step == 4
    save(writer, 6)
    assert far_steps(far) == [4, 6]


def test_training_does_not_wait_for_a_slow_copy(tmp_path, far):
    far.gate = threading.Event()
    writer = writer_in(tmp_path, ADDRESS, keep=1)
    save(writer, 2, 4, 6, copied=False)
    assert writer.finished() == [2, 4, 6]
    assert far.store == {}
    assert set(writer.folder.steps()) <= {2, 4, 6}  # one that is being copied stays meanwhile
    far.gate.set()
    writer.close()
    assert far_steps(far) == [6]
    save(writer, 8)
    assert writer.folder.steps() == far_steps(far) == [8]


def test_a_step_is_not_pruned_while_somebody_holds_it(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(2, {}, {})
    with folder.held(2) as path:
        folder.save(4, {}, {})
        assert path.is_dir()
    folder.save(6, {}, {})
    assert folder.steps() == [6]


def test_what_is_damaged_is_not_copied(tmp_path, far, caplog):
    writer = writer_in(tmp_path, ADDRESS)
    far.refused = "step"
    save(writer, 2)
    far.refused = None
    os.truncate(tmp_path / "step-00000002" / "global.safetensors", 9)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "zoo"):
        save(writer, 4)
        writer.close()
    assert far_steps(far) == [4]
    assert [record.getMessage() for record in caplog.records if "not copied" in record.getMessage()]
    assert far_steps(far, whole=False) == [4]


def test_another_content_of_a_step_replaces_the_copy(tmp_path, far):
    writer = writer_in(tmp_path, ADDRESS)
    save(writer, 2)
    os.truncate(tmp_path / "step-00000002" / "global.safetensors", 9)
    again = writer_in(tmp_path, ADDRESS)
    again.begin(2, {"value": torch.zeros(9)}, {})
    again.close()
    manifest = json.loads(far.store["/host/run/step-00000002/manifest.json"].getvalue())
    assert manifest == json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())


def test_without_new_threads_the_copy_is_made_in_line(tmp_path, far, monkeypatch):
    writer = writer_in(tmp_path, ADDRESS)
    start = threading.Thread.start

    def refuse(thread):
        if "copy" in thread.name:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    save(writer, 2, 4)
    assert far_steps(far) == [2, 4]


@pytest.mark.parametrize(
    ("address", "what", "fix"),
    [
        ("", "is empty", "s3://bucket/folder"),
        ("nosuchkind://bucket/run", "nosuchkind://", "s3://bucket/folder"),
        ("far1://me:secret@bucket/run", "far1:// need a package", 'pip install "no_such_package_of_ours"'),
        ("far2://bucket/run", "far2:// need a package", 'pip install "fsspec[far2]"'),
    ],
)
def test_addresses_that_cannot_be_used(tmp_path, monkeypatch, address, what, fix):
    monkeypatch.setitem(
        known_implementations, "far1", {"class": "no_such_package_of_ours.Files", "err": "Install it"}
    )
    monkeypatch.setitem(
        known_implementations,
        "far2",
        {"class": "fsspec.implementations.no_such_module.Files", "err": "Install it"},
    )
    with pytest.raises(InputError, match=what) as caught:
        CheckpointCopy(CheckpointFolder(tmp_path), address)
    assert fix in caught.value.fix
    assert "secret" not in str(caught.value)


def test_the_copy_cannot_be_the_folder_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ("checkpoints", tmp_path / "checkpoints", f"file://{tmp_path}/x/../checkpoints"):
        with pytest.raises(InputError, match="would be the checkpoints"):
            writer_in(tmp_path / "checkpoints", address)
