"""Settings that don't fit the run are said before anything is trained."""

from __future__ import annotations

import logging

import pytest

from tiny import TINY, image_folder, train
from zoo.errors import InputError
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.swav_config import SwAVConfig
from zoo.pretrain.resolve import resolve

SHAPE = RunShape(views=3, batch_size=16, world_size=1, steps_per_epoch=5, epochs=2)


def warnings(shape=SHAPE, **settings):
    return list(SwAVConfig(**{"prototypes": 16, "freeze_prototypes_steps": 0, **settings}).check(shape))


def test_fitting_settings_are_quiet():
    assert warnings() == []
    assert warnings(queue_length=32, queue_start_epoch=1, prototypes=48, freeze_prototypes_steps=9) == []


def test_more_prototypes_than_samples_names_both_numbers():
    (text,) = warnings(prototypes=1500)
    assert "1500" in text and "16" in text
    (text,) = warnings(prototypes=1500, queue_length=64, queue_start_epoch=0)
    assert "1500" in text and "80" in text and "64" in text


def test_a_freeze_beyond_the_end():
    (text,) = warnings(freeze_prototypes_steps=5005)
    assert "5005" in text and "10 steps" in text and "never move" in text
    assert warnings(freeze_prototypes_steps=10) != []
    assert warnings(freeze_prototypes_steps=5005, learn_prototypes=False) == []


def test_a_queue_that_starts_beyond_the_end():
    (text,) = warnings(queue_length=16, queue_start_epoch=15)
    assert "queue_start_epoch 15" in text and "2 epochs" in text
    assert warnings(queue_length=0, queue_start_epoch=15) == []


def test_the_queue_is_rounded_down_to_the_batch_and_said():
    (text,) = warnings(queue_length=40, queue_start_epoch=0)
    assert "40" in text and "32" in text
    assert SwAVConfig(queue_length=40).rounded_queue(SHAPE) == 32
    texts = warnings(queue_length=10, queue_start_epoch=0)
    assert len(texts) == 1 and "no queue" in texts[0]


def test_codes_from_a_view_that_is_not_there():
    with pytest.raises(InputError, match="view 3") as caught:
        warnings(crops_for_assign=(0, 3))
    assert "crops_for_assign" in caught.value.where
    with pytest.raises(InputError, match="two views"):
        warnings(RunShape(1, 16, 1, 5, 2), crops_for_assign=(0,))


def test_the_released_small_batch_recipe_on_a_small_set_warns_of_both_thresholds():
    recipe = resolve("swav_rn50_bs256", {"epochs": 5}).recipe
    texts = "\n".join(recipe.method.check(RunShape(8, 256, 1, 2, 5)))
    assert "5005" in texts and "queue_start_epoch 15" in texts
    assert "more prototypes" not in texts  # 3,000 fit into 256 + 3,840


def test_warnings_reach_the_log_of_a_run(tmp_path, images, caplog):
    with caplog.at_level(logging.WARNING, logger="zoo"):
        train(images, tmp_path / "run", epochs=1, method__prototypes=12, method__freeze_prototypes_steps=100)
    assert "(12)" in caplog.text and "8" in caplog.text
    assert "freeze_prototypes_steps 100" in caplog.text


def test_a_batch_larger_than_the_set_names_both_numbers(tmp_path):
    data = image_folder(tmp_path / "images", 5)
    with pytest.raises(
        InputError, match=rf"batch \({TINY['batch_size']}\) is larger than the set \(5 images\)"
    ):
        train(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
