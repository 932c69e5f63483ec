"""Products of float32 matrices on CPUs, by the faster of the two libraries in torch."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch.nn import functional as F

__all__ = ["row_products"]

_FEW = 64
_CPUINFO = Path("/proc/cpuinfo")


def row_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each row of ``a`` times each row of ``b``: a @ b.T.

    torch hands products to MKL, which keeps to half of the vector width on processors that aren't Intel's
    (449 and 222 GFLOP/s on two cores of an AMD EPYC 9005). There the rows go as pixels of channels-last memory
    through a 1x1 convolution, oneDNN's, without a copy: the same sums in another order.

    Args:
        a: (M, F), contiguous.
        b: (N, F), contiguous, of the same type.

    Returns:
        (M, N), contiguous.
    """
    if a.dtype != torch.float32 or a.device.type != "cpu" or not _mkl_is_slow():
        return a @ b.T
    if len(a) < _FEW < len(b):  # few pixels of many channels would be five times as slow as few channels
        return row_products(b, a).T.contiguous()
    pixels = a[None, :, None].permute(0, 3, 1, 2)
    # One point has no dilation, but torch asks oneDNN for it on one thread too then.
    return F.conv2d(pixels, b[:, :, None, None], dilation=2).permute(0, 2, 3, 1)[0, :, 0]


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether this is an AVX-512 processor of another maker than Intel, as far as Linux tells."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return _CPUINFO.is_file() and "GenuineIntel" not in _CPUINFO.read_text("utf-8", "replace")
