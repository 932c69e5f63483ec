"""Tensors on disk (safetensors, with errors that the zoo understands) and tensors from a seed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import InputError

__all__ = ["kept_buffers", "read_safetensors", "seeded", "standalone", "write_safetensors"]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws on the CPU come from ``seed``; afterwards the caller's generator is where it was.

    ``torch.manual_seed`` would reseed every device's generator and leave it so.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def kept_buffers(network: nn.Module) -> Iterator[None]:
    """Whatever happens to a network's buffers meanwhile, they are what they were afterwards."""
    # Whether they were written to can't be told: BatchNorm doesn't count its own writing as a version.
    kept = [(buffer, buffer.clone()) for buffer in network.buffers() if not is_lazy(buffer)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def standalone(tensor: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU, in order, in memory that holds nothing else; copied only if need be.

    What is saved of a view is all of the memory that it lies in: a file that was read may lie there.
    """
    tensor = tensor.detach().to("cpu").contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a new file, readable by everyone (safetensors itself makes it private).

    Args:
        path: the file.
        tensors: by name.
        metadata: a single key of the file's header; by default that these are torch's tensors.

    Raises:
        OSError: what the disk said; safetensors hides it in an exception of its own.
    """
    try:
        # One metadata key only: with several the bytes would differ from save to save.
        save_file(tensors, path, metadata=metadata or {"format": "pt"})
    except SafetensorError as error:
        match = re.search(r"(?:os error|Os \{ code:) (\d+)", str(error))  # two generations of the message
        if match:
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise
    path.chmod(0o644)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a file.

    Raises:
        InputError: not a safetensors file, or a damaged one.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"This is not a whole safetensors file ({error}).", where=path) from None
    except OSError as error:
        raise InputError(f"The file can't be read ({error.strerror or error}).", where=path) from None
