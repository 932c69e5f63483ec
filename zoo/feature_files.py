"""Features in a file: safetensors, npz or parquet, the same bytes for the same features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import InputError
from .files import disk_errors, sha256_of, whole_file, write_json
from .tensors import write_safetensors

__all__ = ["FORMATS", "check_format", "manifest_path", "write_features"]

FORMATS = (".safetensors", ".npz", ".parquet")
_ROWS = 1 << 14  # of a row group


def check_format(path: Path) -> None:
    """Before the long work: an ending that is known, pyarrow where it is needed, a folder to write to.

    Raises:
        InputError: which of them is missing.
    """
    if path.suffix not in FORMATS:
        raise InputError("Features are written as .safetensors, .npz or .parquet.", where=path)
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise InputError(
                "Parquet files are written with pyarrow, which is not installed.",
                where=path,
                fix="pip install 'vision-model-zoo[parquet]', or write .safetensors",
            ) from None
    if not path.parent.is_dir():
        raise InputError("The folder to write to isn't there.", where=path.parent, fix="make it first")
    if path.is_dir():
        raise InputError("This is a folder, not a file to write.", where=path)


def manifest_path(path: Path) -> Path:
    """Where the manifest of a file of features lies: beside it, ``NAME.json``."""
    return path.with_name(f"{path.name}.json")


def write_features(path: Path, found: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
    """Write features, then their manifest with the file's SHA-256; a safetensors file also holds it inside.

    Args:
        path: whose ending says the format.
        found: ``ids``, ``labels`` and ``features``.
        manifest: what the features depend on.

    Raises:
        RunError: what the disk said; the file is as it was before.
    """
    with disk_errors("Writing the features", path):
        with whole_file(path) as temporary:
            if path.suffix == ".npz":
                with open(temporary, "wb") as file:
                    np.savez(file, **{name: tensor.numpy() for name, tensor in found.items()})  # type: ignore[arg-type]
            elif path.suffix == ".parquet":
                _write_parquet(temporary, found, manifest)
            else:
                write_safetensors(temporary, dict(found), {"zoo": json.dumps(manifest, sort_keys=True)})
            digest = sha256_of(temporary)
        write_json(manifest_path(path), {**manifest, "sha256": digest})


def _write_parquet(path: Path, found: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
    """One row an image: its id, its label, and its features as a list of fixed length."""
    import pyarrow
    from pyarrow import parquet

    kind = pyarrow.from_numpy_dtype(found["features"].numpy().dtype)
    schema = pyarrow.schema(
        [
            ("ids", pyarrow.int64()),
            ("labels", pyarrow.int64()),
            ("features", pyarrow.list_(kind, found["features"].shape[1])),
        ],
        metadata={"zoo": json.dumps(manifest, sort_keys=True)},
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, len(found["ids"]), _ROWS):
            ids, labels, features = (
                found[name][start : start + _ROWS].numpy() for name in ("ids", "labels", "features")
            )
            lists = pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(features.reshape(-1)), features.shape[1]
            )
            rows = [pyarrow.array(ids), pyarrow.array(labels), lists]
            writer.write_table(pyarrow.Table.from_arrays(rows, schema=schema))
