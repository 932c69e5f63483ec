"""Our reading of the published formula for weights and inputs."""

from __future__ import annotations

import pytest

from .cases import fill_rule, hash_signed, hash_uniform


def test_published_numbers() -> None:
    published = [0.043983291019685566, 0.1062762284418568, 0.07063024898525327]
    assert hash_uniform("input", 3).tolist() == published
    assert hash_signed("input", (3,), 2.0).tolist() == pytest.approx([2 * (2 * u - 1) for u in published])


def test_each_kind_of_entry_has_its_range() -> None:
    assert fill_rule("bn1.num_batches_tracked", (), 1.0).item() == 0
    for key, shape, low, high in (
        ("bn1.running_var", (4096,), 0.5, 1.5),
        ("bn1.running_mean", (4096,), -0.1, 0.1),
        ("fc.bias", (4096,), -0.1, 0.1),
        ("bn1.weight", (4096,), 0.9, 1.1),
        ("conv1.weight", (256, 3, 2, 2), -0.5, 0.5),
    ):
        values = fill_rule(key, shape, 1.0)
        assert values.shape == shape
        width = high - low
        assert low <= values.min() < low + 0.01 * width
        assert high - 0.01 * width < values.max() <= high
