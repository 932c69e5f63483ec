"""What a recipe's trunk can't be is told by the key that the user set."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.errors import InputError
from zoo.pretrain.build import build_trunk
from zoo.pretrain.resolve import resolve

AMDIM = "amdim_ndf64_64px"  # ndf 64 and 64 pixels: n_rkhs is 512 or more


@pytest.mark.parametrize(
    ("recipe", "key", "bad", "good"),
    [
        (AMDIM, "trunk.options.n_rkhs", 511, 512),
        (AMDIM, "trunk.options.n_rkhs", None, 512),
        (AMDIM, "trunk.options.encoder_size", 48, 64),
        (AMDIM, "trunk.stem", "small", "imagenet"),
        ("swav_tiny", "trunk.base_planes", 1, 8),
        ("swav_tiny", "trunk.options.ndf", 64, None),
    ],
)
def test_a_trunk_that_can_not_be_is_told_by_its_key(recipe: str, key: str, bad: Any, good: Any) -> None:
    arch = {} if recipe == AMDIM else {"trunk.arch": "resnext101_32x8d", "trunk.stem": "imagenet"}
    with pytest.raises(InputError) as caught:
        build_trunk(resolve(recipe, {**arch, key: bad}).recipe)
    assert caught.value.where == key
    if good is not None:
        build_trunk(resolve(recipe, {**arch, key: good}).recipe)


def test_an_unknown_trunk_is_told_by_its_name() -> None:
    with pytest.raises(InputError) as caught:
        build_trunk(resolve("swav_tiny", {"trunk.arch": "resnet51"}).recipe)
    assert caught.value.where == "resnet51"
