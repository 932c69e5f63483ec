"""Random numbers that are a pure function of a key: no generator, no history, no worker.

Every draw for a sample is keyed by (seed, stream, epoch, sample), so it comes out the same whatever
the number of workers or processes and wherever a run was interrupted. The functions use nothing but
BLAKE2b and 64-bit integer arithmetic, so they do not depend on the version of any library either.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

__all__ = ["keyed_key", "keyed_permutation", "keyed_seed", "keyed_uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keyed_key(seed: int, stream: str, *words: int) -> int:
    """A 64-bit key of a seed, a stream's name and any number of integers (each below 2**63 in size)."""
    packed = struct.pack(f"<{len(words) + 1}q", seed, *words)
    return int.from_bytes(hashlib.blake2b(packed + stream.encode(), digest_size=8).digest(), "little")


def keyed_seed(seed: int, stream: str, *words: int) -> int:
    """A seed for ``torch.manual_seed`` (below 2**63)."""
    return keyed_key(seed, stream, *words) >> 1


def keyed_uniforms(key: int, count: int) -> np.ndarray:
    """``count`` float64 values in [0, 1) (53 bits each): SplitMix64 started at ``key``."""
    return (_splitmix(key, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keyed_permutation(key: int, count: int) -> np.ndarray:
    """A permutation of ``range(count)`` as int64."""
    return np.argsort(_splitmix(key, count), kind="stable")


def _splitmix(key: int, count: int) -> np.ndarray:
    # Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    z = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
