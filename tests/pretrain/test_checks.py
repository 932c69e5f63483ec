"""Every inconsistency of a recipe is said once, and none of packaged recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planned import IMAGENET, shape_of

from tiny import train
from zoo.pretrain.checks import beginning, inconsistencies
from zoo.pretrain.resolve import Resolved, list_recipes, resolve


def warnings(resolved: Resolved, images: int = 4096 * 400, **more: Any) -> list[str]:
    shards, workers = more.pop("shards", 0), more.pop("workers", 0)
    begun = more.pop("begun", False)
    return list(
        inconsistencies(resolved, shape_of(resolved, images=images, **more), shards, workers, begun=begun)
    )


@pytest.mark.parametrize(
    ("overrides", "more", "words"),
    [
        ({"method.prototypes": 1}, {}, ["prototypes 1", "nothing is learned"]),
        ({"method.freeze_prototypes_steps": 10**6}, {}, ["freeze_prototypes_steps", "never move"]),
        (
            {"method.queue_length": 4096, "method.queue_start_epoch": 900},
            {},
            ["queue_start_epoch 900", "never be used"],
        ),
        ({"method.queue_length": 5000}, {}, ["5000", "rounded down to 4096"]),
        ({"method.prototypes": 5000}, {}, ["5000", "4096 + queue 0"]),
        ({"views.size": [224, 100]}, {}, ["100", "divisible by 32", "96 or 128"]),
        ({"schedule.warmup_epochs": 800}, {}, ["warm-up", "320000 steps"]),
        ({"batch_size": 1024, "method.prototypes": 1000}, {}, ["4.8", "4 times", "1.2", "swav_rn50_800ep"]),
        ({"optimizer.lr": 0.5}, {}, ["0.5", "1/9.6", "4.8"]),
        ({}, {"shards": 3, "workers": 4}, ["3 shard(s)", "4 readers"]),
    ],
)
def test_each_inconsistency_is_said_once(overrides, more, words):
    assert warnings(resolve("swav_rn50_800ep")) == []
    (said,) = warnings(resolve("swav_rn50_800ep", overrides), **more)
    for word in words:
        assert word in said


def test_drops_beyond_the_end():
    (said,) = warnings(resolve("moco_v1_rn50_200ep", {"epochs": 130}))
    assert "[120, 160]" in said and "130 epochs" in said


def test_the_rate_of_ones_own_recipe_is_compared_with_what_it_extends(tmp_path: Path):
    def own(text: str) -> Resolved:
        path = tmp_path / "mine.yaml"
        path.write_text(text, "utf-8")
        return resolve(path)

    small = "batch_size: 512\nmethod: {prototypes: 500}\n"
    assert warnings(own(f"extends: swav_rn50_800ep\noptimizer: {{lr: 0.6}}\n{small}")) == []
    (said,) = warnings(own(f"extends: swav_rn50_800ep\n{small}"))
    assert "8 times" in said
    # Twice is not far; what extends nothing is compared with the method's own recipe.
    assert warnings(own(f"extends: swav_rn50_800ep\noptimizer: {{lr: 1.2}}\n{small}")) == []
    bare = "epochs: 10\nbatch_size: 4096\nmethod: {name: simclr}\n"
    assert warnings(own(f"{bare}optimizer: {{lr: 9.6}}\n")) == []
    (said,) = warnings(own(f"{bare}optimizer: {{lr: 9.7}}\n"))
    assert "2.02 times" in said and "simclr_rn50_400ep_2x224" in said


def test_adams_rate_has_no_linear_rule():
    assert warnings(resolve("swav_tiny", {"batch_size": 8, "method.prototypes": 8}), images=3600) == []


def test_adams_rate_is_compared_as_it_is():
    assert resolve("amdim_ndf64_64px").recipe.optimizer.lr == 2e-4
    for near in (2e-5, 2e-3):
        assert warnings(resolve("amdim_ndf64_64px", {"optimizer.lr": near}), images=3600) == []
    (said,) = warnings(resolve("amdim_ndf64_64px", {"optimizer.lr": 0.3}), images=3600)
    assert "1.5e+03 times that of amdim_ndf64_64px (0.0002)" in said and "adam " in said


def test_crops_of_other_stems_and_networks():
    plain = {"views.size": [48, 24], "method.prototypes": 64}
    assert len(warnings(resolve("swav_tiny", plain), images=3600)) == 1
    assert warnings(resolve("swav_tiny", {**plain, "trunk.stem": "small"}), images=3600) == []
    amdim = resolve("amdim_ndf128_cifar10", {"views.size": [32]})
    assert warnings(amdim, images=50_000) == []
    # Views of one's own are another size than the recipe says.
    assert len(warnings(resolve("swav_tiny"), images=3600, sizes=(40,))) == 1


def test_what_cant_change_any_more_is_not_said_again():
    resolved = resolve("swav_rn50_800ep", {"optimizer.lr": 0.5, "method.prototypes": 5000})
    assert len(warnings(resolved)) == 2
    (said,) = warnings(resolved, begun=True)
    assert "5000" in said


def test_a_run_begins_with_its_plan_in_a_line(images: Path, tmp_path: Path, caplog):
    caplog.set_level("INFO", "zoo")
    train(images, tmp_path / "run")
    (said,) = [text for text in caplog.messages if text.startswith("plan: ")]
    assert said.startswith("plan: 6 steps, 2 epochs of 3; a batch of 8; ")
    resolved = resolve("swav_tiny")
    shape = shape_of(resolved, images=3600, world_size=2)
    assert "a batch of 64, 32 in each of 2 processes; adamw at " in beginning(resolved.recipe, shape, 1)


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_packaged_recipes_are_consistent(name):
    resolved = resolve(name)
    images = {"_1b": 10**9, "_64px": 20_000, "cifar10": 50_000, "tiny": 3600}
    count = next((number for end, number in images.items() if name.endswith(end)), IMAGENET)
    said = warnings(resolved, count, world_size=2, sync_batchnorm=resolved.recipe.engine.sync_batchnorm)
    if name == "moco_v2_rn18_64px":  # on purpose, as its header says
        assert "keys are not shuffled" in said.pop()
    assert said == []


def test_a_run_says_how_many_warnings_there_are(images, tmp_path, caplog):
    caplog.set_level("INFO", "zoo")
    train(images, tmp_path / "run", epochs=1, method__prototypes=12, method__freeze_prototypes_steps=100)
    said = [record.getMessage() for record in caplog.records]
    assert (
        sum("(12)" in text for text in said)
        == sum("freeze_prototypes_steps 100" in text for text in said)
        == 1
    )
    assert any(text.startswith("3 warnings about this recipe in all") for text in said)  # and small crops
