"""Which number format a run gets where it is not told."""

from __future__ import annotations

import pytest
import torch

from zoo.engine import precision
from zoo.engine.precision import choose_precision


@pytest.mark.parametrize(
    ("amx", "avx512", "vendor", "name"),
    [
        (True, True, "vendor_id : GenuineIntel", "bfloat16"),
        (False, True, "vendor_id : GenuineIntel", "float32"),  # half the speed of float32
        (False, True, "vendor_id : AuthenticAMD", "bfloat16"),
        (False, False, "vendor_id : AuthenticAMD", "float32"),
    ],
)
def test_bfloat16_where_the_processor_is_fast_in_it(monkeypatch, amx, avx512, vendor, name):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(precision, "_vendor", lambda: vendor)
    assert choose_precision("auto", torch.device("cpu")).name == name
    assert choose_precision("float64", torch.device("cpu")).name == "float64"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_convolutions_get_channels_last_where_there_are_kernels_for_it(name):
    wanted = torch.contiguous_format if name == "float64" else torch.channels_last
    assert choose_precision(name, torch.device("cpu")).memory_format == wanted
