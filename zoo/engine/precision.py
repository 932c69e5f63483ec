"""Devices and number formats."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..heap import keep_freed_memory
from .collectives import Collectives

__all__ = [
    "Precision",
    "choose_device",
    "choose_precision",
    "compute_threads",
    "processors",
    "shared_precision",
]

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """``auto`` (a GPU if there is one, then Apple's, then the CPU) or a torch device name.

    Raises:
        InputError: a device this machine doesn't have.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()  # meta holds nothing to bring back
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"The device can't be used ({reason}).", where=f"device: {name}", fix="use cpu or auto"
        ) from None
    return device


def _has_fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
            return True
        # Intel's processors that were left without their matrix units (AMX), as in many virtual machines,
        # reach half the speed of float32 with the AVX-512 instructions; AMD's are up to twice as fast.
        return getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() and "Intel" not in _vendor()
    return False


def _vendor() -> str:
    """Who made the processor, as it says itself. Measuring instead would decide otherwise on a busy day."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith("vendor_id")), "")
    except OSError:
        return platform.processor()


@dataclass(frozen=True)
class Precision:
    """How the trunk computes. Losses and codes are float32 at least, whatever this says."""

    name: str
    device: torch.device

    @property
    def master_dtype(self) -> torch.dtype:
        """What parameters are stored in."""
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """What convolutions and linear layers compute in."""
        return _HALF.get(self.name, self.master_dtype)

    @property
    def memory_format(self) -> torch.memory_format:
        """Channels-last: convolutions are faster with it; float64 has no kernels for it."""
        if self.name != "float64":
            return torch.channels_last
        return torch.contiguous_format

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context that forward passes run in."""
        if self.name in _HALF:
            return torch.autocast(self.device.type, dtype=_HALF[self.name])
        return contextlib.nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling, which only float16 needs."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "float16")


def choose_precision(name: str, device: torch.device) -> Precision:
    """``auto``: bfloat16 where the hardware is fast in it, float16 on other GPUs, else float32."""
    if name == "auto":
        fallback = "float16" if device.type == "cuda" else "float32"
        name = "bfloat16" if _has_fast_bfloat16(device) else fallback
    return Precision(name, device)


def shared_precision(name: str, device: torch.device, world: Collectives) -> Precision:
    """As ``choose_precision``, the first process's choice in all processes."""
    return choose_precision(world.gather_values(choose_precision(name, device).name)[0], device)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def compute_threads(device: torch.device, workers: int) -> Iterator[int]:
    """On a CPU, leave a processor to each data worker while the context lasts; yields the thread count.

    The process also begins to keep freed memory (``zoo.heap``).

    oneDNN's threads wait for one another by spinning: with fewer processors than busy threads a step
    takes not twice but a hundred times as long.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(max(1, min(before, processors() - workers)))  # a user's own limit holds
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
