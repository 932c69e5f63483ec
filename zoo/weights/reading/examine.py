"""What a file is, by its bytes, and where its parts lie; nothing is built of them yet."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from .dense import claim_of
from .inert import INERT
from .layouts import Tensor, read_directory, read_header
from .notes import AGAIN, RESAVE, Allowance, Buffer, Name, Pairs, odd, shown
from .pickles import Pickle, read_pickle

__all__ = ["Found", "examine"]

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # torch's: the first pickle of the legacy layout
_VERSION = 1001  # the second one
_UNPACK = "unpack it and name the file of weights that was in it"
_NAME = "name a file of weights: safetensors, a torch checkpoint or a pickle of numpy arrays"
# First bytes (a pattern) -> what the file is, and what helps.
_OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (rb"version https://git-lfs", "a Git LFS pointer", "fetch the file that it stands for: git lfs pull"),
    (rb"\s*(?i:<!doctype html|<html)", "an HTML page", "download the file itself, not the page about it"),
    (rb"\s*<\?xml", "an XML page", "look into it: it may be a server's error message"),
    (rb"\s*[{[]\s*[\"{[\]}]", "a JSON text", "name a file of weights; an index lists several of them"),
    (rb"\x1f\x8b", "a gzip file", "unpack it: gunzip"),
    (rb"BZh\d1AY", "a bzip2 file", "unpack it: bunzip2"),
    (rb"\xfd7zXZ", "an xz file", "unpack it: unxz"),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it: unzstd"),
    (rb"7z\xbc\xaf|Rar!", "a packed archive", _UNPACK),
    (
        rb"(?s:.{257}ustar)",
        "a tar archive",
        f"{_UNPACK}; if torch before 0.2 wrote it: load and save it with 0.4",
    ),
    (
        rb"\x93NUMPY",
        "a NumPy array (.npy)",
        "save several arrays with their names as safetensors or a pickle",
    ),
    (rb"\x89HDF", "an HDF5 file", "read it with h5py or Keras and save its arrays as safetensors"),
    (rb"GGUF|ggml|lmgg", "a GGUF model", _NAME),
    (rb"\x08[\x01-\x20][\x12\x1a\x22]", "an ONNX model", "name the torch file it was exported from"),
    (rb"(?s:....TFL3)", "a TensorFlow Lite model", _NAME),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "a picture or sound", _NAME),
    (rb"%PDF|\x7fELF|MZ|#!", "a document or program", _NAME),
)
# Names in an archive (a pattern) -> what it is, and what helps.
_ARCHIVES: tuple[tuple[str, str, str], ...] = (
    (
        r"[^/]+/(constants\.pkl|code/.*)",
        "a TorchScript archive",
        "where you trust it: torch.save(torch.jit.load(path).state_dict(), 'weights.pth')",
    ),
    (r"[^/]+/\.data/(extern_modules|python_version)", "a torch package", RESAVE),
    (r".*\.npy", "a NumPy archive (.npz)", "save its arrays as safetensors or as a pickle"),
)
# Names that are refused -> what is behind them.
_REASONS = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without numbers",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a special class",
    "torch.storage._load_from_bytes": "a torch file inside a pickle",
}


@dataclass
class Found:
    """What is known of a file so far; also after an error it tells what was seen until then.

    Args:
        kind: ``safetensors``, ``torch zip``, ``torch legacy``, ``numpy pickle``, or what it is instead.
        names: what its pickles mention.
        note: of the content, for ``zoo.weights.reading.inert``.
        spans: key of a storage -> where its bytes start and end.
        tensors: of a safetensors file.
    """

    kind: str = "a file of an unknown kind"
    names: dict[str, Name] = field(default_factory=dict)
    note: Any = None
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def refused(self) -> list[str]:
        """The names that are not inert."""
        return [name for name in self.names if name not in INERT]


def examine(data: Buffer, found: Found, allowance: Allowance) -> None:
    """Find out what a file is, and fill ``found`` on the way.

    Args:
        data: the whole file.
        found: a new one.
        allowance: what may be used of memory.

    Raises:
        InputError: it is no file of weights, or damaged, or it asks for more than plain data.
    """
    head = bytes(data[:512])
    if not head:
        found.kind = "an empty file"
        raise InputError("This is an empty file.", fix=AGAIN)
    # safetensors begin with a number of 8 bytes; as letters it would be far too large.
    described = head[8:9] == b"{" and not re.match(rb"[\s -~]{8}", head)
    for pattern, kind, fix in _OTHERS:
        if not described and re.match(pattern, head):
            found.kind = kind
            raise InputError(f"This is {kind}, no file of weights.", fix=fix)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        _examine_zip(data, found, allowance)
    elif described:
        found.kind = "safetensors"
        found.tensors = read_header(data)
    else:
        _examine_pickle(data, found, allowance)


def _examine_pickle(data: Buffer, found: Found, allowance: Allowance) -> None:
    # From protocol 2 on a pickle says that it is one; before, it begins with some instruction.
    says_so = re.match(rb"\x80[\x00-\x05]", data[:2])
    may_be = re.match(rb"[(\])}cIKLMNSVUXJFG]", data[:1]) and data[len(data) - 1 :] == b"."
    if not says_so and not may_be:
        raise InputError(f"This is {found.kind}.", fix=_NAME)
    try:
        first = read_pickle(data, 0, len(data), found.names, allowance)
    except InputError:
        if not says_so and not found.names:
            raise InputError(f"This is {found.kind}.", fix=_NAME) from None
        found.kind = "a pickle"
        _refuse(found)
        raise
    if first.value == _MAGIC_NUMBER:
        found.kind = "torch legacy"
        _examine_legacy(data, first.end, found, allowance)
        return
    found.kind = "a pickle"
    _refuse(found)
    if first.stored or first.end != len(data):
        raise InputError("This is a pickle that needs other data besides it.", fix=RESAVE)
    found.kind = "numpy pickle"
    found.note = first.value


def _examine_legacy(data: Buffer, at: int, found: Found, allowance: Allowance) -> None:
    """torch's layout before 1.6: pickles (magic number, version, machine, content, keys), then storages."""
    pickles = []
    try:
        for _ in range(4):
            pickles.append(read_pickle(data, at, len(data), found.names, allowance))
            at = pickles[-1].end
    finally:
        _refuse(found)
    version, machine, content, keys = pickles
    if version.value != _VERSION or not isinstance(machine.value, Pairs) or not isinstance(keys.value, list):
        raise odd("The file begins like one of torch, but goes on in another way.")
    if ("little_endian", True) not in machine.value:
        raise _big()
    sizes: dict[str, int] = {}
    for claim in map(claim_of, content.stored):
        sizes.setdefault(claim.key, claim.dtype.itemsize)
    for key in keys.value:
        if type(key) is not str or key not in sizes or key in found.spans:
            raise odd("The file's list of storages doesn't fit its content.")
        numel = int.from_bytes(data[at : at + 8], "little")
        start, at = at + 8, at + 8 + numel * sizes[key]
        if at > len(data):
            raise InputError("The file ends in the middle of a tensor.", fix=AGAIN)
        found.spans[key] = start, at
    _settle(content, found)


def _examine_zip(data: Buffer, found: Found, allowance: Allowance) -> None:
    found.kind = "a damaged ZIP archive"
    entries = read_directory(data)
    names = {entry.name for entry in entries}
    found.kind = "a ZIP archive"
    for pattern, kind, fix in _ARCHIVES:
        if any(re.fullmatch(pattern, name) for name in names):
            found.kind = kind
            raise InputError(f"This is {kind}, no file of weights.", fix=fix)
    folders = [match[1] for name in names if (match := re.fullmatch(r"([^/]+/)data\.pkl", name))]
    if len(folders) != 1:
        raise InputError("This is a ZIP archive without a torch checkpoint.", fix=_UNPACK)
    found.kind = "torch zip"
    spans = {entry.name: entry.span(data) for entry in entries}
    if len(names) < len(entries):
        raise odd("The archive has two entries of one name.")
    if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(sorted(spans.values()))):
        raise odd("The entries of the archive overlap.")
    (folder,) = folders
    try:
        content = read_pickle(data, *spans[f"{folder}data.pkl"], found.names, allowance)
    finally:
        _refuse(found)
    start, stop = spans.get(f"{folder}byteorder", (0, 0))
    if data[start:stop] not in (b"", b"little"):
        raise _big()
    prefix = f"{folder}data/"
    found.spans = {name.removeprefix(prefix): span for name, span in spans.items() if name.startswith(prefix)}
    _settle(content, found)


def _settle(content: Pickle, found: Found) -> None:
    """Every storage that the content refers to is there, and as long as the content says."""
    for claim in map(claim_of, content.stored):
        if claim.key not in found.spans:
            raise InputError(f"The file lacks the storage {shown(claim.key)}.", fix=AGAIN)
        start, stop = found.spans[claim.key]
        if stop - start != claim.numel * claim.dtype.itemsize:
            raise odd(f"The storage {shown(claim.key)} in the file is not as long as the file says.")
    found.note = content.value


def _refuse(found: Found) -> None:
    """Stop if a pickle mentions something that is not inert."""
    refused = found.refused()
    if not refused:
        return
    listed = [
        f"{shown(name)} ({_REASONS[name]})" if name in _REASONS else shown(name) for name in refused[:8]
    ]
    more = f" and {len(refused) - 8} more" if len(refused) > 8 else ""
    network = any(name.startswith("torch.nn.modules.") for name in refused)
    what = "a whole network, not only its tensors" if network else "more than plain data"
    raise InputError(
        f"The file holds {what}; it asks for {', '.join(listed)}{more}. Nothing in it was run.", fix=RESAVE
    )


def _big() -> InputError:
    return InputError(
        "The file was written on a big-endian machine.", fix="load and save it with torch on a usual one"
    )
