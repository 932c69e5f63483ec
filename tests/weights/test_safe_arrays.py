"""Arrays and scalars of numpy come back, whichever numpy, protocol or Python wrote them."""

from __future__ import annotations

import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from zoo.errors import InputError
from zoo.weights.safe import look_at, read_content

from .hostile import archive, number, row, storage, tensor, torch_zip, whole
from .test_safe import LAYOUTS, same


@LAYOUTS
@pytest.mark.parametrize("core", ["core", "_core"])
def test_numpy_before_and_since_2(tmp_path, core, zipped):
    content = {"lr": np.float64(0.5), "mean": np.arange(3, dtype=np.float32), "w": torch.ones(2)}
    path = tmp_path / "x"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    ours = np.float64(0).__reduce__()[0].__module__.encode()
    theirs = f"numpy.{core}.multiarray".encode()
    if zipped:
        with zipfile.ZipFile(path) as file:
            entries = [(name, file.read(name)) for name in file.namelist()]
        renamed = [
            (name, data.replace(ours, theirs) if name.endswith(".pkl") else data) for name, data in entries
        ]
        path.write_bytes(archive(*renamed))
    else:
        path.write_bytes(path.read_bytes().replace(ours, theirs))
    assert f"numpy.{core}.multiarray.scalar" in look_at(path).globals
    same(read_content(path).value, content)


def arrays():
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "plain": plain,
        "fortran": np.asfortranarray(plain),
        "sliced": plain[:, ::2],
        "transposed": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        "big-endian": plain.astype(">f4"),
        "scalar": np.array(3.5),
        "empty": np.empty((0, 4), np.int64),
        "zeros": np.zeros(5000),
        "long": np.random.default_rng(0).standard_normal(300_000),
        "text": np.array(["a", "bc"]),
        "bytes": np.array([b"a", b"bc"]),
        "half": np.arange(3, dtype=np.float16),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "unsigned": np.arange(3, dtype=np.uint64),
    }


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_arrays_as_detectron2_has_them(tmp_path, protocol):
    content = {"model": arrays(), "__author__": "somebody", "matching_heuristics": True}
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    found = read_content(path)
    assert found.container == "numpy pickle" == look_at(path).kind
    same(found.value, content)


def test_pickles_of_python_2(tmp_path):
    """As Caffe2 and the first Detectron wrote them: byte strings everywhere, keys in Latin letters."""

    def string(raw):
        return b"U" + bytes([len(raw)]) + raw

    def array(values, code):
        raw = struct.pack(f"<{len(values)}{code[0]}", *values)
        kind = b"cnumpy\ndtype\n" + row(string(code[1]), b"K\x00", b"K\x01") + b"R"
        state = row(b"K\x03", string(b"<"), b"N", b"N", b"N", number(-1), number(-1), b"K\x00")
        start = b"cnumpy.core.multiarray\n_reconstruct\n" + row(
            b"cnumpy\nndarray\n", b"K\x00\x85", string(b"b")
        )
        content = row(b"K\x01", number(len(values)) + b"\x85", kind + state + b"b", b"I00\n", string(raw))
        return start + b"R" + content + b"b"

    blobs = string(b"blobs") + b"}" + string(b"w") + array([1.5, -2.0], ("f", b"f4")) + b"s"
    blobs += string(b"ascii") + array([0x41424344], ("i", b"i4")) + b"s"  # its bytes look like text
    data = whole(
        b"}", blobs, b"s", string(b"cfg"), b"S'it\\'s\\n\\x41'\n", b"s", string(b"raw"), string(b"\xe9"), b"s"
    )
    path = tmp_path / "model.pkl"
    path.write_bytes(data)
    value = read_content(path).value
    same(value["blobs"], {"w": np.array([1.5, -2], np.float32), "ascii": np.array([0x41424344], np.int32)})
    assert value["cfg"] == "it's\nA" and value["raw"] == b"\xe9"


@pytest.mark.parametrize("length", [10, 100, 50_000])
def test_quoted_data_of_python_2(tmp_path, length):
    """Protocol 0 wrote the data of arrays as they are written in programs."""
    numbers = np.arange(length, dtype="<u2")
    quoted = repr(numbers.tobytes())[1:].encode("ascii")
    kind = b"cnumpy\ndtype\n(S'u2'\nI0\nI1\ntR(I3\nS'<'\nNNNI-1\nI-1\nI0\ntb"
    start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    path = tmp_path / "model.pkl"
    path.write_bytes(start + b"(I1\n(I%d\nt%sI00\nS%s\ntb." % (length, kind, quoted))
    same(read_content(path).value, numbers)
    path.write_bytes(path.read_bytes().replace(b"\\x00", b"\\q00", 1))
    with pytest.raises(InputError):
        read_content(path)


def test_letters_and_flags_that_are_none_are_refused(tmp_path):
    """Python and torch take both at their word: the one raises when it is printed, the other miscounts."""
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps(np.array(["a"])).replace(b"a\0\0\0", b"a\0\xff\0"))
    with pytest.raises(InputError, match="no letter"):
        read_content(path)
    path.write_bytes(torch_zip(whole(tensor(storage(numel=4, kind="BoolStorage"))), r0=b"\0\1\2\0"))
    with pytest.raises(InputError, match="neither true nor false"):
        read_content(path)
    save_file({"a": torch.ones(3, dtype=torch.bool)}, path)
    path.write_bytes(path.read_bytes()[:-1] + b"\2")
    with pytest.raises(InputError, match="neither true nor false"):
        read_content(path)
    path.write_bytes(pickle.dumps(np.array([True, False])).replace(b"\1\0", b"\3\0"))
    with pytest.raises(InputError, match="neither true nor false"):
        read_content(path)
