"""Tensors and what keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.tensors import kept_buffers


def test_buffers_come_back_from_a_failure():
    norm = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with pytest.raises(RuntimeError, match="full"), kept_buffers(norm):
        norm(torch.randn(5, 3))
        assert norm.num_batches_tracked == 1
        raise RuntimeError("the disk is full")
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
