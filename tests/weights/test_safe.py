"""Every good file of weights is read: what was saved comes back, as plain values."""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from zoo.errors import InputError
from zoo.weights.safe import Look, look_at, read_content

from .hostile import LEGACY_HEAD, archive, number, row, storage, tensor, text, torch_legacy, torch_zip, whole

LAYOUTS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *(
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
    ),
)


def saved(path, content, zipped=True, **options):
    torch.save(content, path, _use_new_zipfile_serialization=zipped, **options)
    return read_content(path)


def same(found, wanted):
    """Equal values of equal types; a dict is as good as an OrderedDict."""
    if isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype == wanted.dtype and not found.requires_grad
        assert found.shape == wanted.shape and found.stride() == wanted.stride()
        assert _bytes(found) == _bytes(wanted)
    elif isinstance(wanted, np.ndarray):
        assert type(found) is np.ndarray and found.dtype == wanted.dtype.newbyteorder("=")
        assert found.flags.writeable
        np.testing.assert_array_equal(found, wanted, strict=found.dtype == wanted.dtype)
    elif isinstance(wanted, dict):
        assert type(found) is dict and list(found) == list(wanted)
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple) and not isinstance(wanted, torch.Size):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, argparse.Namespace):
        assert type(found) is argparse.Namespace
        same(vars(found), vars(wanted))
    else:
        assert type(found) is type(wanted) and found == wanted


def _bytes(tensor_):
    return tensor_.detach().reshape(-1).contiguous().view(torch.uint8).tolist()


def training():
    """What a training script saves."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "arch": "resnet50",
        "args": argparse.Namespace(lr=0.1, path="x", sizes=[224, 96], device=torch.device("cuda:0")),
        "best": np.float64(71.25),
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": {**schedule.state_dict(), "milestones": {1: 1, 2: 1}},
        "rng": (torch.get_rng_state(), np.random.RandomState(0).get_state(), 2**100),
    }


@LAYOUTS
def test_a_training_checkpoint_comes_back(tmp_path, zipped):
    content = training()
    found = saved(tmp_path / "last.pth", content, zipped)
    assert found.container == ("torch zip" if zipped else "torch legacy")
    same(found.value, content)
    # torch reads the same, where it can
    torch.save(
        {"model": content["state_dict"]}, tmp_path / "model.pth", _use_new_zipfile_serialization=zipped
    )
    by_torch = torch.load(tmp_path / "model.pth", map_location="cpu", weights_only=True)
    same(read_content(tmp_path / "model.pth").value, by_torch)


def test_the_case_of_namespaces_and_scalars(tmp_path):
    value = saved(tmp_path / "x", {"args": argparse.Namespace(lr=1), "best": np.float64(3)}).value
    assert value["args"].lr == 1 and value["best"] == 3


def test_a_device_that_torch_does_not_know_is_text(tmp_path):
    path = tmp_path / "x"
    for index, name in ((b"", "abacus"), (b"K\x02", "abacus:2")):
        path.write_bytes(torch_zip(whole(b"ctorch\ndevice\n", row(text("abacus"), index), b"R")))
        assert read_content(path).value == name


@LAYOUTS
def test_plain_values_come_back(tmp_path, zipped):
    content = {
        "none": None,
        "yes": True,
        1: [-1, 2**40, -(2**70), 0.5, float("inf"), 1 + 2j],
        "text": "ü\u4e00\ud800 and a long one: " + "x" * 100_000,
        "bytes": [b"", b"\x00\xff", b"x" * 100_000],
        "tuple": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        ("a", 1): {"set": {1, 2}, "empty": set()},
        "dtype": torch.bfloat16,
        "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("hi")],
    }
    same(saved(tmp_path / "x", content, zipped).value, content)


def test_what_is_nearly_plain_comes_as_plain(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    attributed = torch.nn.Parameter(torch.ones(2))
    attributed.tag = "x"
    marked = torch.ones(2)
    marked.tag = "x"
    content = {
        "size": torch.Size([2, 3]),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(a=1),
        "frozen": frozenset({1}),
        "bytearray": bytearray(b"xy"),
        "parameters": [parameter, attributed, marked],
    }
    found = saved(tmp_path / "x", content).value
    assert found["size"] == (2, 3) and type(found["size"]) is tuple
    assert found["counter"] == {"a": 2, "b": 1} and type(found["counter"]) is dict
    assert type(found["ordered"]) is dict and found["frozen"] == {1} and found["bytearray"] == b"xy"
    for one in found["parameters"]:
        same(one, torch.ones(2))


@LAYOUTS
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_number(tmp_path, name, zipped):
    numbers = torch.tensor([0, 1, 2, 3, 1, 0]).to(getattr(torch, name))
    same(saved(tmp_path / "x", [numbers, numbers.reshape(2, 3).t()], zipped).value[0], numbers)
    if name != "complex128":  # safetensors has no such type
        try:
            save_file({"a": numbers}, tmp_path / "x.safetensors")
        except (KeyError, ValueError):
            pytest.skip("this safetensors doesn't know the type")
        found = read_content(tmp_path / "x.safetensors")
        assert found.container == "safetensors"
        same(found.value, {"a": numbers})


@LAYOUTS
def test_shapes_and_strides_come_back(tmp_path, zipped):
    base = torch.arange(24.0)
    content = {
        "scalar": torch.tensor(3),
        "empty": [torch.empty(0), torch.empty(0, 4), torch.empty(2, 0)],
        "transposed": base.reshape(4, 6).t(),
        "every second": base[::2],
        "behind": base[20:],
        "last": base[24:],
        "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
    }
    same(saved(tmp_path / "x", content, zipped).value, content)


@LAYOUTS
def test_views_share_memory_as_they_did(tmp_path, zipped):
    base = torch.arange(10.0)
    path = tmp_path / "x"
    torch.save({"base": base, "view": base[2:5], "again": base}, path, _use_new_zipfile_serialization=zipped)
    before = path.read_bytes()
    value = read_content(path).value
    assert value["again"] is value["base"]
    value["base"][3] = -1
    assert value["view"].tolist() == [2, -1, 4]
    assert value["view"].untyped_storage().nbytes() == 40
    assert path.read_bytes() == before
    assert read_content(path).value["base"][3] == 3


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_files_of_every_protocol(tmp_path, protocol):
    content = {"a": torch.arange(3), "n": np.arange(3.0), "args": argparse.Namespace(x={1, 2}, y=b"z")}
    same(saved(tmp_path / "x", content, pickle_protocol=protocol).value, content)


def test_tensors_as_the_first_torch_wrote_them(tmp_path):
    """_rebuild_tensor without hooks, and a legacy storage of which a part is meant."""
    part = row(text("part"), number(2), number(3))
    old = b"ctorch._utils\n_rebuild_tensor\n" + row(
        storage("0", 8, "FloatStorage", part), number(1), row(number(2)), row(number(1))
    )
    path = tmp_path / "x"
    path.write_bytes(torch_legacy(whole(old, b"R"), r0=(8, torch.arange(8.0).numpy().tobytes())))
    same(read_content(path).value, torch.tensor([3.0, 4.0]))
    far = old.replace(part, row(text("part"), number(5), number(3)))
    path.write_bytes(torch_legacy(whole(far, b"R"), r0=(8, bytes(32))))
    assert read_content(path).value.shape == (2,)
    further = old.replace(part, row(text("part"), number(6), number(3)))
    path.write_bytes(torch_legacy(whole(further, b"R"), r0=(8, bytes(32))))
    with pytest.raises(InputError, match="beyond the end"):
        read_content(path)


def test_files_of_a_big_endian_machine_are_refused(tmp_path):
    good = whole(tensor(storage(numel=1), (1,)))
    path = tmp_path / "x"
    entries = ("m/data.pkl", good), ("m/data/0", bytes(4))
    path.write_bytes(archive(*entries, ("m/byteorder", b"big")))
    with pytest.raises(InputError, match="big-endian"):
        read_content(path)
    path.write_bytes(archive(*entries))  # older torch did not say; it was little-endian
    same(read_content(path).value, torch.zeros(1))
    legacy = torch_legacy(whole(tensor(storage("0", 1, "FloatStorage", b"N"), (1,))), r0=(1, bytes(4)))
    path.write_bytes(legacy.replace(LEGACY_HEAD, LEGACY_HEAD.replace(b"\x88", b"\x89")))
    with pytest.raises(InputError, match="big-endian"):
        read_content(path)


def test_records_at_any_address_are_read(tmp_path):
    path = tmp_path / "x"
    for shift in range(4):
        name = "m" + "o" * shift
        data = torch.arange(4.0).numpy().tobytes()
        path.write_bytes(archive((f"{name}/data.pkl", whole(tensor(storage()))), (f"{name}/data/0", data)))
        same(read_content(path).value, torch.arange(4.0))


def test_the_name_of_the_file_does_not_matter(tmp_path):
    content = {"a": torch.ones(2)}
    for number_, suffix in enumerate(("", ".bin", ".safetensors", ".pkl", ".zip", ".tar")):
        assert saved(tmp_path / f"{number_}{suffix}", content).container == "torch zip"
    save_file(content, tmp_path / "x.pth")
    assert read_content(str(tmp_path / "x.pth")).container == "safetensors"
    (tmp_path / "link").symlink_to("x.pth")
    same(read_content(tmp_path / "link").value, content)


def test_the_hash_is_that_of_what_is_read(tmp_path):
    path = tmp_path / "x"
    torch.save({"a": torch.ones(1000)}, path)
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    value = read_content(path, sha256=good.upper()).value
    path.write_bytes(bytes(path.stat().st_size))  # in place: a mapping would show it
    same(value, {"a": torch.ones(1000)})
    with pytest.raises(InputError, match="SHA-256 is"):
        read_content(path, sha256=good)
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        read_content(path, sha256="abc")


@LAYOUTS
def test_with_a_hash_the_same_is_read(tmp_path, zipped):
    path, content = tmp_path / "x", training()
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    same(read_content(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest()).value, content)


def test_a_replaced_file_does_not_change_what_was_read(tmp_path):
    path = tmp_path / "x"
    value = saved(path, {"a": torch.ones(1000)}).value
    torch.save({"a": torch.zeros(1000)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    same(value, {"a": torch.ones(1000)})


OTHERS = {
    "an empty file": b"",
    "an HTML page": b"\n<!DOCTYPE html><html><body>Not found</body></html>",
    "an XML page": b"<?xml version='1.0'?><Error/>",
    "a JSON text": b'{"error": {"code": 404}}',
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a gzip file": b"\x1f\x8b\x08\x00" + bytes(20),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(20),
    "a NumPy array (.npy)": b"\x93NUMPY\x01\x00",
    "an ONNX model": b"\x08\x07\x12\x07pytorch",
    "a tar archive": b"storages".ljust(257, b"\0") + b"ustar\x0000" + bytes(300),
    "a ZIP archive": archive(("readme.txt", b"hello")),
    "a NumPy archive (.npz)": archive(("a.npy", b"\x93NUMPY"), packed=True),
    "a TorchScript archive": archive(
        ("m/data.pkl", whole(b"N")), ("m/code/x.py", b""), ("m/constants.pkl", b"")
    ),
    "a pickle": pickle.dumps(collections.defaultdict(list)),
    "a file of an unknown kind": b"hello, this is some text.",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_called_by_their_name(tmp_path, kind):
    path = tmp_path / "weights.pth"
    path.write_bytes(OTHERS[kind])
    look = look_at(path)
    assert (look.kind, look.size) == (kind, len(OTHERS[kind]))
    with pytest.raises(InputError) as caught:
        read_content(path)
    assert (caught.value.what, caught.value.fix) == (look.problem, look.fix) and look.fix


@pytest.mark.filterwarnings("ignore")  # torch's, about its own TorchScript
def test_a_real_torchscript_archive(tmp_path):
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    assert look_at(path).kind == "a TorchScript archive"
    with pytest.raises(InputError, match="TorchScript") as caught:
        read_content(path)
    assert "torch.jit.load" in caught.value.fix


def test_a_look_at_a_good_file(tmp_path):
    path = tmp_path / "x"
    torch.save({"a": torch.ones(2), "best": np.float64(1)}, path)
    look = look_at(path)
    assert (look.kind, look.size, look.refused, look.problem) == ("torch zip", path.stat().st_size, (), None)
    assert {"torch.FloatStorage", "torch._utils._rebuild_tensor_v2", "numpy.dtype"} <= set(look.globals)
    save_file({"a": torch.ones(2)}, path)
    assert look_at(path) == Look("safetensors", path.stat().st_size)


def test_large_archives_have_a_directory_of_64_bits(tmp_path):
    """The record is small, but written as those above 4 GB are."""
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w") as file:
        with file.open("m/data.pkl", "w", force_zip64=True) as entry:
            entry.write(whole(tensor(storage())))
        with file.open("m/data/0", "w", force_zip64=True) as entry:
            entry.write(torch.arange(4.0).numpy().tobytes())
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, length, offset, _ = struct.unpack("<4s4H2IH", data[end:])
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(data[:end] + record + locator + last)
    same(read_content(path).value, torch.arange(4.0))


@pytest.mark.skipif(sys.platform != "linux", reason="no list of mappings elsewhere")
def test_tensors_lie_in_the_file_until_they_are_used(tmp_path):
    path = tmp_path / "x"
    torch.save({"a": torch.zeros(1 << 20)}, path)
    value = read_content(path).value["a"]
    entry = next(
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))
    )
    start, stop = (int(part, 16) for part in entry.split()[0].split("-"))
    assert start <= value.data_ptr() < stop


def test_a_torch_zip_made_by_hand_is_like_a_real_one(tmp_path):
    """What the tests put together is read by torch, too: its refusals mean what they should."""
    path = tmp_path / "x"
    numbers = torch.arange(4.0).numpy().tobytes()
    legacy = whole(b"}", text("a"), tensor(storage("0", 4, "FloatStorage", b"N")), b"s")
    for data in (
        torch_zip(whole(b"}", text("a"), tensor(storage()), b"s"), r0=numbers),
        torch_legacy(legacy, r0=(4, numbers)),
    ):
        path.write_bytes(data)
        wanted = torch.load(path, weights_only=True)
        same(read_content(path).value, wanted)
