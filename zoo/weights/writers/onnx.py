"""The trunk as an ONNX graph: images to pooled features, any number of images at once."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from pathlib import Path

import torch

from ...errors import InputError
from .base import Source, Writer

__all__ = ["Onnx"]

_LIMIT = 2**31 - 2**24  # bytes: what a message of protobuf holds, less some for the graph


class Onnx(Writer):
    """Input ``images`` (N, C, S, S), normalised; output ``features`` (N, F). S is the crop's side."""

    name = "onnx"
    suffix = ".onnx"

    def ready(self) -> None:
        """torch's exporter needs two packages that are an extra."""
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(
                f"ONNX files need {' and '.join(missing)}, not installed here.",
                where="--to onnx",
                fix="pip install 'vision-model-zoo[onnx]'",
            )

    def refusal(self, source: Source) -> str | None:
        """One file holds 2 GB at most."""
        size = sum(tensor.nbytes for tensor in source.model.trunk.values())
        return (
            f"one file holds 2 GB at most, and its weights take {size / 1e9:.1f}" if size > _LIMIT else None
        )

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """The file, weights and all."""
        side = int(source.what.preprocessing["crop"])
        dtype = next(source.trunk.parameters()).dtype
        images = torch.zeros(2, source.channels, side, side, dtype=dtype)
        # Standard output belongs to the command's own data.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                source.trunk,
                (images,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["features"],
                verbose=False,
            )
            assert program is not None
            program.save(place, external_data=False)
        return (f"images are {source.channels} x {side} x {side}, normalised; any number of them at once",)
