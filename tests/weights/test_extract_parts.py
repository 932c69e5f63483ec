"""``zoo extract`` in parts: killed, resumed, by several processes, in every format and type."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zoo
from tiny import ROOT, image_folder, save_image
from zoo.data.open import open_source
from zoo.errors import InputError, RunError
from zoo.extraction_parts import Parts, part_length
from zoo.extraction_processes import run_processes
from zoo.files import read_json
from zoo.weights.reference import parse_reference

from .published import assert_clear, publish

# Exact: where half types are fast, the first images are read twice to see what they do.
HOW = {"batch_size": 4, "exact": True}


@pytest.fixture
def images(tmp_path):
    publish()
    return image_folder(tmp_path / "images", 40, 2, 40)


KILLED = """
    import os, signal, sys
    import zoo
    from zoo.data.open import open_source

    class Deadly:
        def __init__(self, source):
            self.source, self.name, self.classes = source, source.name, source.classes
        def __len__(self):
            return len(self.source)
        def read(self, index):
            if index == 21:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.source.read(index)
        def label(self, index):
            return self.source.label(index)
        def where(self, index):
            return self.source.where(index)
        def fingerprint(self):
            return self.source.fingerprint()

    zoo.extract("me/small", Deadly(open_source(sys.argv[1])), out=sys.argv[2], batch_size=4, exact=True)
"""


class Counted:
    """A source that counts what is read of it."""

    def __init__(self, spec):
        self.source = open_source(str(spec))
        self.name, self.classes = self.source.name, self.source.classes
        self.label, self.where = self.source.label, self.source.where
        self.fingerprint = self.source.fingerprint
        self.read_of = []

    def __len__(self):
        return len(self.source)

    def read(self, index):
        self.read_of.append(index)
        return self.source.read(index)


def stop_at(source, index):
    """Ctrl-C when this image is read."""
    read = source.read

    def stopping(wanted):
        if wanted == index:
            raise KeyboardInterrupt
        return read(wanted)

    source.read = stopping
    return source


def interrupted(images, out, **how):
    with pytest.raises(KeyboardInterrupt):
        zoo.extract("me/small", stop_at(Counted(images), 21), out=out, **HOW, **how)
    return out.with_name(f".{out.name}.parts")


def bytes_of(path):
    return path.read_bytes(), path.with_name(f"{path.name}.json").read_bytes()


def test_parts_are_whole_batches_and_few():
    assert [part_length(count, 64) for count in (1, 64, 400, 5000, 10**6)] == [64, 64, 64, 192, 1024]
    assert part_length(40, 4) == 4 and part_length(10**6, 1000) == 2000


def test_killed_and_called_again_it_writes_the_same_bytes(images, tmp_path):
    (tmp_path / "one").mkdir()
    out, other = tmp_path / "f.safetensors", tmp_path / "one" / "f.safetensors"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), str(images), str(out)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    folder = tmp_path / ".f.safetensors.parts"
    assert not out.exists() and len(list(folder.glob("part-*"))) == 5
    rest = Counted(images)
    found = zoo.extract("me/small", rest, out=out, **HOW)
    assert sorted(rest.read_of) == list(range(20, 40))  # what was done is not done again
    zoo.extract("me/small", str(images), out=other, **HOW)
    assert bytes_of(out) == bytes_of(other)
    assert torch.equal(found["features"], zoo.extract("me/small", str(images), **HOW)["features"])
    assert not folder.exists()


def test_two_processes_write_what_one_writes_and_go_on_where_one_stopped(images, tmp_path, command):
    out, other = tmp_path / "f.npz", tmp_path / "g.npz"
    interrupted(images, out)
    words = ("extract", "me/small", images, "--batch-size", 4, "--exact")
    assert command(*words, "-o", out, "--processes", 2)[0] == 0
    code, said, err = command(*words, "-o", other, "--json", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(said) == {
        "schema": 1,
        "path": str(other),
        "manifest": f"{other}.json",
        "images": 40,
        "width": 64,
    }
    assert bytes_of(out) == bytes_of(other)
    assert not list(tmp_path.glob(".*"))


def test_what_fails_in_a_process_is_said_in_words_and_ends_the_others(tmp_path):
    """Work that imports no torch, so that processes start at once; the other one would sleep for minutes."""
    for work, kind, words in [
        (partial(parse_reference, "nope:x:y"), InputError, "nope"),
        (partial(read_json, tmp_path / "no.json"), RunError, "A process failed .FileNotFoundError"),
        (partial(os._exit, 3), RunError, "A process ended with 3"),
        (partial(os.abort), RunError, f"ended by signal {int(signal.SIGABRT)}"),
    ]:
        began = time.monotonic()
        with pytest.raises(kind, match=words):
            run_processes([work, partial(time.sleep, 300)])
        assert time.monotonic() - began < 120
        assert not multiprocessing.active_children()


def test_parts_of_other_weights_images_or_settings_are_refused_by_name(images, tmp_path):
    out = tmp_path / "f.safetensors"
    folder = interrupted(images, out)
    before = sorted(path.name for path in folder.iterdir())
    how = {"out": out, **HOW}
    model = zoo.load("me/small", progress=False)
    with torch.no_grad():
        model.layer4[1].bn2.bias[0] += 1
    for call, named in [
        (lambda: zoo.extract(model, str(images), **how), "something else: weights"),
        (lambda: zoo.extract("me/small", str(images), **how, dtype="float16"), "else: dtype"),
        (lambda: zoo.extract("me/small", str(images / "class0"), **how), "images"),
        (lambda: zoo.extract("me/small", str(images), out=out, batch_size=8, exact=True), "batch size"),
    ]:
        with pytest.raises(InputError, match=named) as caught:
            call()
        assert caught.value.where == str(folder) and "delete that folder" in caught.value.fix
    assert sorted(path.name for path in folder.iterdir()) == before and not out.exists()
    # Painted over: the same name and the same number of bytes.
    path = images / "class0" / "000.png"
    path.write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"images \(or files that were touched\)"):
        zoo.extract("me/small", str(images), **how)


def test_another_network_of_the_same_weights_is_refused(images, tmp_path):
    out = tmp_path / "f.npz"
    interrupted(images, out)
    model = zoo.load("me/small", progress=False)
    model.maxpool = torch.nn.AvgPool2d(3, stride=2, padding=1)
    with pytest.raises(InputError, match="something else: network"):
        zoo.extract(model, str(images), out=out, **HOW)


def test_a_damaged_part_or_one_of_other_weights_is_made_anew(images, tmp_path):
    out, other = tmp_path / "f.npz", tmp_path / "g.npz"
    folder = interrupted(images, out)
    zoo.extract("me/small", str(images), out=other, **HOW)
    paths = sorted(folder.glob("part-*"))
    damaged = bytearray(paths[0].read_bytes())
    damaged[-10] ^= 1
    paths[0].write_bytes(damaged)
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    paths[2].unlink()
    foreign = Parts(folder, hashlib.sha256(b"other").hexdigest(), 40, 4)
    foreign.write(3, torch.zeros(4, 64))
    (folder / "plan.json").write_text("{")
    rest = Counted(images)
    zoo.extract("me/small", rest, out=out, **HOW)
    assert sorted(rest.read_of) == [*range(16), *range(20, 40)]
    assert bytes_of(out) == bytes_of(other)


def test_two_calls_for_one_file_are_refused(images, tmp_path):
    out = tmp_path / "f.npz"
    folder = interrupted(images, out)
    with open(folder / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="Another call is writing"):
            zoo.extract("me/small", str(images), out=out, **HOW)
    zoo.extract("me/small", str(images), out=out, **HOW)
    assert out.exists()


def test_float16_holds_the_rounded_features_and_says_when_it_cannot(images, tmp_path):
    full = zoo.extract("me/small", str(images), out=tmp_path / "full.safetensors")["features"]
    for suffix in ("safetensors", "npz"):
        path = tmp_path / f"half.{suffix}"
        found = zoo.extract("me/small", str(images), out=path, dtype="float16")["features"]
        assert found.dtype == torch.float16 and torch.equal(found, full.half())
    assert torch.equal(load_file(tmp_path / "half.safetensors")["features"], full.half())
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "half.npz")["features"]), full.half())
    model = zoo.load("me/small", progress=False)
    with torch.no_grad():
        model.layer4[1].bn2.bias += 1e5
    with pytest.raises(RunError, match="too large for float16"):
        zoo.extract(model, str(images), out=tmp_path / "large.npz", dtype="float16")
    assert not list(tmp_path.glob("*large*")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet(images, tmp_path, dtype):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "f.parquet"
    found = zoo.extract("me/small", str(images), out=out, dtype=dtype)
    table = parquet.read_table(out)
    features = table["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(40, 64)
    assert features.dtype == dtype and np.array_equal(features, found["features"].numpy())
    assert table["labels"].to_pylist() == found["labels"].tolist()
    assert table["ids"].to_pylist() == list(range(40))
    assert json.loads(table.schema.metadata[b"zoo"])["count"] == 40
    before = bytes_of(out)
    zoo.extract("me/small", str(images), out=out, dtype=dtype)
    assert bytes_of(out) == before


def test_the_manifest_says_what_the_features_are(images, tmp_path):
    out = tmp_path / "f.safetensors"
    zoo.extract("me/small", str(images), out=out, dtype="float16", exact=True)
    manifest = json.loads((tmp_path / "f.safetensors.json").read_text("utf-8"))
    info = zoo.load("me/small", progress=False).zoo_info
    assert manifest["weights_sha256"] == info["weights_sha256"] and manifest["arch"] == "resnet18"
    assert manifest["transform"] == info["preprocessing"]
    assert manifest["images"] == open_source(str(images)).fingerprint()
    assert (manifest["count"], manifest["width"], manifest["dtype"]) == (40, 64, "float16")
    assert (manifest["precision"], manifest["schema"]) == ("float32", 1)
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    with safe_open(out, "pt") as file:
        inside = json.loads(file.metadata()["zoo"])
    assert {**inside, "sha256": manifest["sha256"]} == manifest
    assert str(tmp_path) not in json.dumps(manifest) and "files" not in manifest


def test_a_full_disk_leaves_the_old_file_and_the_next_call_goes_on(images, tmp_path, monkeypatch):
    out = tmp_path / "f.npz"
    out.write_bytes(b"old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", full)
        with pytest.raises(RunError, match="No space left") as caught:
            zoo.extract("me/small", str(images), out=out, **HOW)
    assert caught.value.where == str(out) and "free some space" in caught.value.fix
    assert out.read_bytes() == b"old" and not list(tmp_path.glob("*.tmp"))
    rest = Counted(images)
    zoo.extract("me/small", rest, out=out, **HOW)
    assert rest.read_of == [] and len(np.load(out)["features"]) == 40


def test_bad_words_on_the_command_line(images, tmp_path, command):
    save_image(tmp_path / "dir.npz" / "one.png", 0)
    words = ("extract", "me/small", images)
    assert_clear(command(*words, "-o", tmp_path / "f.csv"), "f.csv")
    assert_clear(command(*words, "-o", tmp_path / "no" / "f.npz"), "no")
    assert_clear(command(*words, "-o", tmp_path / "dir.npz"), "dir.npz")
    assert_clear(command(*words, "-o", tmp_path / "f.npz", "--dtype", "float61"), "did you mean float16")
    model = zoo.load("me/small", progress=False)
    with pytest.raises(InputError, match="each loads the model by its reference"):
        zoo.extract(model, str(images), out=tmp_path / "f.npz", processes=2)
    model.zoo_info = {**model.zoo_info, "preprocessing": None}
    with pytest.raises(InputError, match="how images are prepared"):
        zoo.extract(model, str(images), out=tmp_path / "f.npz")
    assert not list(tmp_path.glob(".*"))
