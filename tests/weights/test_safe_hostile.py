"""Files that mean harm: no code runs, nothing is written, memory stays low, and one clear error comes."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import socket
import subprocess
import sys

import pytest
import torch

from tiny import ROOT
from zoo.errors import InputError
from zoo.weights.safe import look_at, read_content

from .hostile import GADGETS, attacks, bombs, lies, storage, tensor, text, torch_legacy, torch_zip, whole

ATTACKS = list(attacks(ROOT / "x"))
LIES = list(lies())
CONTAINERS = {"zip": torch_zip, "legacy": torch_legacy, "pickle": lambda content: content}


def refusal(tmp_path, data: bytes, name: str = "weights.pth") -> InputError:
    """The one error that a file gives, by both doors."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_content(path)
    assert caught.value.where == str(path) and caught.value.fix
    assert caught.value.what.isprintable()
    look = look_at(path)
    assert look.size == len(data)
    if look.problem:
        assert look.problem == caught.value.what
    return caught.value


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attacks_are_real(tmp_path, name):
    marker = tmp_path / "marker"
    pickle.loads(attacks(marker)[name])
    assert marker.exists()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_code_runs(tmp_path, monkeypatch, name, container):
    # The switch that makes torch.load run everything unless it is told otherwise.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "marker"
    error = refusal(tmp_path, CONTAINERS[container](attacks(marker)[name]))
    assert not marker.exists()
    assert "Nothing in it was run" in error.what and "torch.save(model.state_dict()" in error.fix
    look = look_at(tmp_path / "weights.pth")
    assert look.refused and set(look.refused) <= set(look.globals)
    assert all(name in error.what for name in look.refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights.pth"]


@pytest.mark.parametrize("name", GADGETS)
def test_no_name_but_the_inert_ones(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    call = whole(f"c{module}\n{attribute}\n".encode(), text("x"), b"\x85R")
    for container in CONTAINERS.values():
        assert name in refusal(tmp_path, container(call)).what
    assert look_at(tmp_path / "weights.pth").refused == (name,)


def test_what_others_have_allowed_in_this_process_is_refused(tmp_path):
    data = torch_zip(whole(b"cpathlib\nPosixPath\n", text("x"), b"\x85R"))
    import pathlib

    with torch.serialization.safe_globals([pathlib.PosixPath, (pathlib.PosixPath, "pathlib.PosixPath")]):
        assert "pathlib.PosixPath" in refusal(tmp_path, data).what
        assert pathlib.PosixPath in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("name", LIES)
def test_lies_are_found_out(tmp_path, name):
    refusal(tmp_path, lies()[name])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_network_is_refused_with_what_it_is(tmp_path, zipped):
    path = tmp_path / "model.pth"
    torch.save(torch.nn.Linear(2, 2), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match="a whole network") as caught:
        read_content(path)
    assert "torch.nn.modules.linear.Linear" in caught.value.what


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantised tensor"),
        (lambda: torch.empty(3, device="meta"), "a tensor without numbers"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(2).untyped_storage(), "bare storage"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's, about prototypes
def test_tensors_that_are_not_plain_are_refused_by_name(tmp_path, make, word):
    path = tmp_path / "odd.pth"
    torch.save({"x": make()}, path)
    with pytest.raises(InputError, match=word):
        read_content(path)


def test_names_are_seen_as_pickletools_sees_them(tmp_path):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"x": torch.nn.Linear(2, 2), "y": pickle.PickleError}, protocol=2))
    seen = [
        argument.replace(" ", ".")
        for code, argument, _ in pickletools.genops(path.read_bytes())
        if code.name == "GLOBAL"
    ]
    assert look_at(path).globals == tuple(dict.fromkeys(seen))


def test_control_characters_of_names_are_not_printed(tmp_path):
    data = whole(b"cos\x1b[2J\x1b]0;x\x07\nsystem\xc2\x9b\n)R")
    error = refusal(tmp_path, data)
    assert "\\x1b[2J" in error.what
    assert all(name.isprintable() for name in look_at(tmp_path / "weights.pth").globals)


def test_every_beginning_of_a_file_is_refused(tmp_path):
    content = {"a": torch.arange(40.0), "b": {"c": [1, 2.5, "x"]}}
    torch.save(content, tmp_path / "zip")
    torch.save(content, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": torch.arange(40.0).numpy()}, protocol=4))
    for name in ("zip", "legacy", "pickle"):
        data = (tmp_path / name).read_bytes()
        assert read_content(tmp_path / name)
        for end in range(0, len(data) - 1, 7):
            refusal(tmp_path, data[:end])


def test_many_keys_with_one_hash_take_no_time(tmp_path):
    prime = 2**61 - 1
    keys = b"".join(b"\x8a\x20" + (prime * number).to_bytes(32, "little") + b"N" for number in range(50_000))
    assert "key" in refusal(tmp_path, whole(b"}(" + keys + b"u")).what
    pairs = b"".join(b"J" + number.to_bytes(4, "little") + b"\x85N" for number in range(2000))
    assert "key" in refusal(tmp_path, whole(b"}(" + pairs + b"u")).what


def test_pipes_sockets_devices_and_folders(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 100 letters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path in (tmp_path / "pipe", tmp_path / "socket", os.devnull, tmp_path):
            for read in (read_content, look_at):
                with pytest.raises(InputError, match=r"pipe, socket or device|folder"):
                    read(path)
    for read in (read_content, look_at):
        with pytest.raises(InputError, match="No such file"):
            read(tmp_path / "nothing")


MEASURE = """
import gc, os, resource, sys
from pathlib import Path
import torch
from zoo.errors import InputError
from zoo.weights.safe import read_content

torch.set_num_threads(1)
gc.freeze()  # the children needn't look through what is imported
for path in [None, *map(Path, sys.argv[1:])]:
    child = os.fork()  # its peak begins at what the parent takes
    if not child:
        try:
            if path:
                read_content(path)
                print("read", end=" ")
        except InputError as error:
            print("refused", end=" ")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are in other units elsewhere")
def test_no_bomb_takes_more_than_64_megabytes_and_twice_its_size(tmp_path):
    paths = []
    for name, data in bombs().items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    baseline, *peaks = done.stdout.splitlines()
    assert len(peaks) == len(paths) and not done.stderr
    took = {}
    for path, line in zip(paths, peaks, strict=True):
        word, peak = line.split()
        assert word == "refused", path.name
        took[path.name] = int(peak) - int(baseline) - 2 * path.stat().st_size
    assert {name: size for name, size in took.items() if size > 64 << 20} == {}
    assert max(took.values()) > 16 << 20  # the measure measures


def test_tensors_within_one_storage_still_have_to_fit(tmp_path):
    fits = tensor(storage(numel=4), (2, 2), (2, 1))
    (tmp_path / "fits").write_bytes(torch_zip(whole(fits), r0=bytes(16)))
    assert read_content(tmp_path / "fits").value.shape == (2, 2)
    for size, stride, first in (((2, 2), (3, 1), 0), ((5,), (1,), 0), ((1,), (1,), 4), ((0,), (1,), 5)):
        refusal(tmp_path, torch_zip(whole(tensor(storage(), size, stride, first)), r0=bytes(16)))


def test_an_index_is_called_what_it_is(tmp_path):
    index = json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}).encode()
    assert "a JSON text" in refusal(tmp_path, index, "model.safetensors.index.json").what
