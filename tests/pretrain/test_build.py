"""What a recipe's trunk can't be is told by the key that the user set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny import train
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


@pytest.mark.parametrize("count", [10**15, 10**30])  # beyond every memory, and beyond torch's own numbers
@pytest.mark.parametrize("key", ["prototypes", "queue_length"])
def test_heads_larger_than_the_memory_are_bad_input(
    images: Path, tmp_path: Path, key: str, count: int
) -> None:
    with pytest.raises(InputError, match="larger than the memory") as caught:
        train(images, tmp_path / "run", method__queue_start_epoch=0, **{f"method__{key}": count})
    assert "method" in str(caught.value.fix) and not (tmp_path / "run").exists()
