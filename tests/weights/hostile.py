"""Makers of files that mean harm, and of pickles and archives put together by hand."""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
LEGACY_HEAD = MAGIC + pickle.dumps(1001, protocol=2) + pickle.dumps({"little_endian": True}, protocol=2)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def text(value: str) -> bytes:
    """The instruction that pushes a text (protocol 1)."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """The instruction that pushes a whole number."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def row(*values: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(values) + b"t"


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage", *more: bytes) -> bytes:
    """A reference to a storage; a legacy one has one value more."""
    return (
        row(text("storage"), f"ctorch\n{kind}\n".encode(), text(key), text("cpu"), number(numel), *more)
        + b"Q"
    )


def tensor(
    where: bytes, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), first: int = 0
) -> bytes:
    """A tensor over a storage."""
    shape = row(*map(number, size)), row(*map(number, stride))
    return REBUILD + row(where, number(first), *shape, b"\x89", b"ccollections\nOrderedDict\n)R") + b"R"


def whole(*instructions: bytes) -> bytes:
    """A pickle of protocol 2."""
    return b"\x80\x02" + b"".join(instructions) + b"."


def archive(*entries: tuple[str | zipfile.ZipInfo, bytes], packed: bool = False) -> bytes:
    """A ZIP archive."""
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as made:
        warnings.filterwarnings("ignore", "Duplicate name")
        for name, content in entries:
            made.writestr(name, content)
    return file.getvalue()


def torch_zip(content: bytes, **records: bytes) -> bytes:
    """A torch file of the zip layout; a record's name begins with a letter that is dropped: ``r0``."""
    data = [(f"model/data/{name[1:]}", record) for name, record in records.items()]
    return archive(
        ("model/data.pkl", content), ("model/version", b"3\n"), ("model/byteorder", b"little"), *data
    )


def torch_legacy(content: bytes, **records: tuple[int, bytes]) -> bytes:
    """A torch file of the legacy layout; a record is its number of elements and its bytes."""
    keys = pickle.dumps([name[1:] for name in records], protocol=2)
    data = b"".join(struct.pack("<q", numel) + record for numel, record in records.values())
    return LEGACY_HEAD + content + keys + data


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that make a file if Python's machine runs them, each in another way."""
    command = f"touch '{marker}'"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    short = b"\x8c" + bytes([len(command.encode())]) + command.encode()
    return {
        "os.system": whole(b"cos\nsystem\n", text(command), b"\x85R"),
        "posix.system": whole(b"cposix\nsystem\n", text(command), b"\x85R"),
        "eval": whole(b"cbuiltins\neval\n", text(code), b"\x85R"),
        "exec of Python 2": whole(b"c__builtin__\nexec\n", text(code), b"\x85R"),
        "names from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "names from the memo": (
            # "os" and "system" lie in the memo long before; between them are names that look inert
            b"\x80\x04\x8c\x06system\x94\x8c\x02os\x94\x8c\x0bOrderedDict\x94\x8c\x0bcollections\x940000"
            b"h\x01h\x00\x93" + short + b"\x85R."
        ),
        "a dotted name": b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93" + short + b"\x85R.",
        "an instance": b"(S" + repr(command).encode() + b"\nios\nsystem\n.",
        "an object": b"(cos\nsystem\n" + text(command) + b"o.",
        "text only": b"cos\nsystem\n(V" + command.encode() + b"\ntR.",
        "the result of a call": whole(
            b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n" + text("os") + b"\x85R",
            text("system"),
            b"tR",
            text(command),
            b"\x85R",
        ),
        "in front of good content": whole(b"cos\nsystem\n", text(command), b"\x85R0}"),
        "in a key": whole(b"}cos\nsystem\n", text(command), b"\x85RK\x01s"),
        "in an attribute": whole(
            b"ccollections\nOrderedDict\n)R}", text("_metadata"), b"cos\nsystem\n", text(command), b"\x85Rsb"
        ),
    }


GADGETS = (
    "torch.storage._load_from_bytes",
    "torch.load",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.jit.load",
    "torch.serialization.load",
    "torch._utils._import_dotted_name",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch.nn.modules.linear.Linear",
    "torchvision.models.resnet.ResNet",
    "torch.FloatTensor",
    "numpy.load",
    "numpy.fromfile",
    "numpy.lib.npyio.load",
    "numpy.core.records.fromfile",
    "collections.defaultdict",
    "functools.partial",
    "pathlib.PosixPath",
    "builtins.getattr",
    "builtins.open",
    "__builtin__.file",
    "__builtin__.apply",
    "subprocess.Popen",
    "operator.attrgetter",
    "runpy.run_path",
    "shutil.rmtree",
    "pickle.loads",
    "types.CodeType",
    "webbrowser.open",
    "zoo.weights.safe.read_content",
)
"""Names that real attacks and careless programs put into pickles."""


def lies() -> dict[str, bytes]:
    """Files without any code that claim, nest or hide something."""
    small = bytes(16)
    good = tensor(storage())
    link = zipfile.ZipInfo("model/data/0")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR(K\x01"
    kind = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tR"
    objects = b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR"
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return {
        "a storage longer than its record": torch_zip(whole(tensor(storage(numel=1 << 40))), r0=small),
        "a storage without a record": torch_zip(whole(good)),
        "a tensor longer than its storage": torch_zip(whole(tensor(storage(), size=(1 << 40,))), r0=small),
        "a tensor that ends behind its storage": torch_zip(whole(tensor(storage(), first=1)), r0=small),
        "a stride that leaves the storage": torch_zip(whole(tensor(storage(), (2,), (4,))), r0=small),
        "a negative stride": torch_zip(whole(tensor(storage(), (4,), (-1,), 3)), r0=small),
        "a negative size": torch_zip(whole(tensor(storage(), (-4,))), r0=small),
        "a petabyte of one number": torch_zip(whole(tensor(storage(), (1 << 50,), (0,))), r0=small),
        "sizes whose product overflows": torch_zip(
            whole(tensor(storage(), (1 << 32, 1 << 32), (0, 0))), r0=small
        ),
        "a legacy storage of petabytes": torch_legacy(
            whole(tensor(storage("0", 1 << 50, "FloatStorage", b"N"))), r0=(4, small)
        ),
        "a legacy storage without a record": torch_legacy(
            whole(tensor(storage("0", 4, "FloatStorage", b"N")))
        ),
        "a legacy record of petabytes": torch_legacy(
            whole(tensor(storage("0", 4, "FloatStorage", b"N"))), r0=(1 << 50, small)
        ),
        "a reference to something else": torch_zip(whole(row(text("module"), text("x")), b"Q"), r0=small),
        "a reference by a text": torch_zip(b"Pfile:///etc/passwd\n."),
        "a bare storage": torch_zip(whole(storage()), r0=small),
        "a way out of the archive": archive(("model/data.pkl", whole(b"}")), ("model/../../x", b"")),
        "an absolute name": archive(("model/data.pkl", whole(b"}")), ("/tmp/x", b"")),
        "a name of Windows": archive(("model/data.pkl", whole(b"}")), ("C:/x", b"")),
        "a link": archive(("model/data.pkl", whole(good)), (link, b"/etc/passwd")),
        "two entries of one name": archive(("model/data.pkl", whole(b"}")), ("model/data.pkl", whole(b"]"))),
        "a packed archive": archive(
            ("model/data.pkl", whole(good)), ("model/data/0", bytes(1 << 20)), packed=True
        ),
        "an encrypted entry": archive(("model/data.pkl", whole(b"}"))).replace(
            b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"
        ),
        "an archive without an end": archive(("model/data.pkl", whole(b"}")))[:-4],
        "an array of objects": whole(array, b"K\x01\x85", objects, b"\x89]K\x05atb"),
        "an array longer than its data": whole(array, number(1 << 50), b"\x85", kind, b"\x89C\x04aaaatb"),
        "an array that was never filled": whole(array[:-3], b")0"),
        "a dict in itself": whole(b"}q\x00", text("x"), b"h\x00s"),
        "a tuple in itself": whole(b"]q\x00h\x00\x85a"),
        "nesting without end": whole(b")" + b"\x85" * 5000),
        "a key that can't be hashed": whole(b"}]K\x01s"),
        "a key of nested tuples": whole(b"})" + b"\x85" * 50 + b"K\x01s"),
        "an extension": whole(b"\x82\x01"),
        "data out of band": b"\x80\x05\x97.",
        "an unknown protocol": b"\x80\x06N.",
        "an unknown instruction": whole(b"\xff"),
        "a value that isn't there": whole(b"h\x05"),
        "an empty stack": whole(b"0"),
        "fields of a list": whole(b"]}b"),
        "members of a tuple": whole(b")K\x01a"),
        "two pickles": whole(b"}") + whole(b"]"),
        "a header of petabytes": safetensors({}, length=1 << 50),
        "a header that is a list": safetensors(b"{]"),
        "tensors beyond the file": safetensors(
            {"a": {**entry, "data_offsets": [0, 1 << 50], "shape": [1 << 48]}}
        ),
        "a shape of petabytes": safetensors({"a": {**entry, "shape": [1 << 50]}}, small),
        "tensors that overlap": safetensors({"a": entry, "b": entry}, small),
        "a gap between tensors": safetensors({"a": {**entry, "data_offsets": [4, 20]}}, bytes(20)),
        "data of nobody": safetensors({"a": entry}, bytes(17)),
        "a negative offset": safetensors({"a": {**entry, "data_offsets": [-16, 0]}}, small),
        "an offset that is no number": safetensors({"a": {**entry, "data_offsets": [False, 16]}}, small),
        "a type that nobody knows": safetensors({"a": {**entry, "dtype": "X7"}}, small),
        "a name given twice": safetensors(b'{"a":{},"a":{}}'),
        "a header nested without end": safetensors(b'{"a":' + b"[" * 100_000),
    }


def bombs() -> dict[str, bytes]:
    """Files that are to take far more memory than their size."""
    laughs = b"]q\x00" + b"".join(b"(" + b"h\x00" * 9 + b"lq\x00" for _ in range(40))
    block = bytes(4 << 20)
    copies = (
        b"\x80\x04B" + struct.pack("<I", len(block)) + block + b"q\x00"
        b"("
        + (
            b"cnumpy._core.numeric\n_frombuffer\n(h\x00cnumpy\ndtype\n(X\x02\x00\x00\x00u1\x89\x88tR"
            b"J" + struct.pack("<i", len(block)) + b"\x85X\x01\x00\x00\x00CtR"
        )
        * 200
        + b"l."
    )
    return {
        "dicts": b"\x80\x02(" + b"}" * (1 << 20) + b"l.",
        "memo": b"\x80\x04N" + b"\x94" * (1 << 20) + b".",
        "a far place in the memo": whole(b"Nr\xff\xff\xff\x7f0"),
        "tuples": b"\x80\x02)" + b"\x85" * (1 << 18) + b".",
        "calls": b"\x80\x02ccollections\nOrderedDict\nq\x00(" + b"h\x00)R" * (1 << 18) + b"l.",
        "laughs": whole(laughs),
        "a long claim": whole(b"\x8e" + struct.pack("<Q", 1 << 40) + b"x"),
        "a long number": whole(b"\x8b" + struct.pack("<i", 1 << 30) + b"x"),
        "a wide text": b"\x80\x04X"
        + struct.pack("<I", (8 << 20) + 4)
        + b"a" * (8 << 20)
        + "🙂".encode()
        + b".",
        "copies of an array": copies,
        "a header of lists": safetensors(b'{"a":[' + b"[]," * (4 << 20) + b"[]]}"),
        "a directory of nothing": archive(*((f"m/{number}", b"") for number in range(60_000))),
        "a petabyte of one number": torch_zip(whole(tensor(storage(), (1 << 50,), (0,))), r0=bytes(16)),
        "a packed archive": archive(("m/data.pkl", whole(b"}")), ("m/data/0", bytes(256 << 20)), packed=True),
    }
