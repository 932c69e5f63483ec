"""Where colours and blur are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny import half_jpeg, image_folder
from zoo.data.folder import open_folder
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.pretrain.placement import choose_augment_place, seconds_an_image

PLAN = ViewPlan((CropSpec(16, 0.3, 1.0), CropSpec(16, 0.3, 1.0), CropSpec(8, 0.1, 0.3)))
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measuring_needs_no_whole_folder_and_leaves_the_trunk_as_it_was(tmp_path, dtype):
    image_folder(tmp_path, count=8, classes=0)
    half_jpeg(tmp_path / "000.jpg")
    trunk = create_trunk("resnet18", base_planes=8).to(dtype)
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    random_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    costs = seconds_an_image(open_folder(tmp_path), PLAN, trunk, CPU, workers=2)
    assert all(cost > 0 for cost in costs)
    assert trunk.training
    assert all(torch.equal(before[key], value) for key, value in trunk.state_dict().items())
    assert torch.equal(random_state[0], torch.get_rng_state())
    assert (random_state[1] == np.random.get_state()[1]).all()


def test_nothing_readable_is_an_error(tmp_path):
    half_jpeg(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="None of the images"):
        seconds_an_image(open_folder(tmp_path), PLAN, create_trunk("resnet18", base_planes=8), CPU, 1)


def test_what_was_asked_for_is_done_and_a_cpu_needs_no_measuring(tmp_path):
    nowhere = open_folder(image_folder(tmp_path, count=2, classes=0))
    for wanted, place in (("worker", "worker"), ("device", "device"), ("auto", "worker")):
        assert choose_augment_place(wanted, nowhere, PLAN, None, CPU, 1) == place
