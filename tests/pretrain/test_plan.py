"""A plan: beside the paper's runs, its errors, its times and what failures cost."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from planned import GRADIENTS, IMAGENET, tiny

from zoo.errors import InputError
from zoo.pretrain.costs import Exchange
from zoo.pretrain.forecast import ON_TOP, Machines
from zoo.pretrain.plan import make_plan
from zoo.pretrain.published import PAPERS
from zoo.pretrain.resolve import resolve
from zoo.pretrain.scaling import DEVICES, communication, lost_work
from zoo.pretrain.trial import try_steps


def test_the_plan_of_swavs_longest_run_on_64_v100s_beside_the_papers():
    found = make_plan(resolve("swav_rn50_800ep"), Machines(devices=64, kind="v100", failures=0.001))
    assert found["published"] and found["warnings"] == []
    assert found["steps"]["an_epoch"] == 312 and found["steps"]["total"] == 249_600
    assert found["steps"]["images_each"] == 64
    assert found["images"]["count"] == IMAGENET
    paper = found["paper"]
    assert (paper["hours"], paper["memory"]) == (6.25, 12.8)
    assert paper["planned_hours"] == pytest.approx(6.25, rel=0.02)  # by calibration
    assert ON_TOP * paper["planned_tensors"] / 2**30 == pytest.approx(12.8, rel=0.05)
    assert found["time"]["run_seconds"] == pytest.approx(8 * 6.25 * 3600, rel=0.02)
    assert found["exchanged"]["by"]["gradients"]["bytes"] == GRADIENTS
    assert found["checkpoints"]["bytes"] == pytest.approx(2 * GRADIENTS, rel=0.01)
    assert found["checkpoints"]["on_disk"] == 3 * found["checkpoints"]["bytes"]
    assert [row["devices"] for row in found["scaling"]] == [2**power for power in range(11)]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("name", "hours", "memory"),
    [
        ("swav_rn50_400ep_2x160_4x96", 0.3, 0.15),  # the farthest
        ("simclr_rn50_400ep_2x224", 0.15, 0.1),
        ("swav_rn50_bs256", 0.15, None),
    ],
)
def test_the_papers_other_rows_come_out_of_the_same_assumption(name, hours, memory):
    paper = PAPERS[name]
    found = make_plan(resolve(name), Machines(devices=paper.devices, kind="v100"))["paper"]
    assert found["planned_hours"] == pytest.approx(paper.hours, rel=hours)
    if memory is not None:
        assert ON_TOP * found["planned_tensors"] / 2**30 == pytest.approx(paper.memory, rel=memory)


def test_a_network_that_wants_to_see_values_is_not_counted_but_planned(tmp_path, monkeypatch):
    (tmp_path / "looks_closely.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(3, 4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.conv(x).mean((2, 3))[x.detach().numpy().shape[0] * [0]]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ZOO_OWN_TRUNKS", "looks_closely:Net")
    resolved = tiny(trunk__arch="looks_closely:Net", trunk__base_planes=None)
    found = make_plan(resolved, Machines(devices=2, kind="cpu", img_s=100), images=96)
    assert "can't be counted" in found["uncounted"]
    assert found["memory"] is None and found["checkpoints"] is None
    assert found["time"]["images_per_second"] == pytest.approx(200)


# --- bad input ---


@pytest.mark.parametrize(
    ("name", "overrides", "machines", "images", "what"),
    [
        ("swav_rn50_800ep", {}, Machines(devices=3), None, "can't be shared equally by 3"),
        ("swav_rn50_800ep", {}, Machines(kind="v1000"), None, "no device kind"),
        ("swav_rn50_800ep", {}, Machines(devices=1), 100, r"larger than the set \(100 images\)"),
        ("swav_rn50_800ep", {"method.crops_for_assign": [9]}, Machines(kind="h200"), None, "view 9"),
        (
            "moco_v2_rn50_200ep",
            {"method.dictionary": "memory_bank", "method.shuffle_groups": 1},
            Machines(kind="h200"),
            10**9,
            "1000000000 keys of 128 numbers",
        ),
        (
            "deepclusterv2_rn50_800ep",
            {},
            Machines(kind="v100", devices=8),
            10**9,
            "memory bank of 1000000000",
        ),
        ("swav_rn18_64px", {}, Machines(), None, "how many images"),
    ],
)
def test_what_cant_be_is_refused(name, overrides, machines, images, what):
    with pytest.raises(InputError, match=what):
        make_plan(resolve(name, overrides), machines, images)


def test_a_device_that_is_too_small_is_warned_of():
    found = make_plan(tiny(batch_size=4096, views__size=[224, 96]), Machines(kind="v100"), images=10**6)
    assert any("v100 has 16.0 GB" in text for text in found["warnings"])


# --- time ---


def test_communication_by_hand():
    alone = communication([Exchange("reduce", "gradients", 10**8)], 1, 1e9, 1e9, 1.0)
    assert (alone.sent, alone.exposed) == (0.0, 0.0)
    eight = communication([Exchange("gather", "method", 1000)], 8, 1e9, 1.0, 0.0)
    assert eight.sent == 7000 and eight.seconds == pytest.approx(7e-6 + 7e-6 + 7 * 0.6e-6)
    # Two machines: the slower way counts, and each is entered once.
    sixteen = communication([Exchange("reduce", "method", 1000)], 16, 1e9, 1e6, 0.0)
    assert sixteen.sent == pytest.approx(2 * 15 / 16 * 1000)
    assert sixteen.exposed == pytest.approx(sixteen.sent / 1e6 + 7e-6 + 2 * (7 * 0.6e-6 + 5e-6))
    # Gradients hide behind the backward pass, but for the last bucket; slow ones don't.
    gradients = [Exchange("reduce", "gradients", 4 * 25 * 2**20)]
    hidden = communication(gradients, 8, 1e9, 1e9, 100.0)
    assert hidden.exposed == pytest.approx(hidden.seconds / 4)
    slow = communication(gradients, 8, 1e6, 1e6, 3.0)
    assert slow.exposed == pytest.approx(slow.seconds - 2.0)


def test_lost_work_by_hand():
    found = lost_work(100, 0.01, 3600, 300, 10)
    assert found.between == 86400
    assert found.lost == pytest.approx((1800 + 300) / 86400)
    assert found.saving == pytest.approx(10 / 3600)
    assert found.best_interval == pytest.approx(math.sqrt(2 * 10 * 86400))
    assert lost_work(8, 0.0, 3600, 300, 10).lost == 0
    assert lost_work(10**6, 10, 3600, 300, 10).lost == 1


def test_given_images_a_second_decide():
    found = make_plan(tiny(batch_size=64), Machines(4, "v100", img_s=50.0, failures=0.5), images=6400)
    time = found["time"]
    assert time["from"] == "given" and time["of_one_device"] == pytest.approx(50)
    assert time["step_seconds"] * (1 - time["communication_share"]) == pytest.approx(16 / 50)
    assert time["epoch_seconds"] == pytest.approx(100 * time["step_seconds"])
    failures = found["failures"]
    assert failures["seconds_between"] == 86400 / 2
    interval = found["checkpoints"]["every_steps"] * time["step_seconds"]
    assert failures["lost_share"] == pytest.approx((interval / 2 + 300) / 43200)
    assert failures["run_seconds"] > time["run_seconds"]
    possible = [row["devices"] for row in found["scaling"] if row["impossible"] is None]
    assert possible == [1, 2, 4, 8, 16, 32]
    one, *_ = found["scaling"]
    assert one["communication_share"] == 0 and one["images_per_second"] == pytest.approx(50)


def test_a_device_of_which_nothing_is_known_has_no_time():
    found = make_plan(tiny(), Machines(1, "cpu"), images=96)
    assert found["time"]["step_seconds"] is None and "--probe" in found["time"]["why"]
    assert found["memory"]["tensors"] > 0
    assert all(row["run_seconds"] is None for row in found["scaling"])


def test_every_kind_of_device_has_sensible_figures():
    for kind in DEVICES.values():
        assert kind.single < kind.half and 0 < kind.half_share < kind.single_share < 0.5
        assert kind.speed("bfloat16") == (kind.half, kind.half_share) and kind.speed("float64") is None


@pytest.mark.parametrize("name", ["swav_tiny", "deepclusterv2_rn50_800ep"])
def test_a_trial_trains_for_real(name, images, monkeypatch, caplog):
    own: dict[str, Any] = {"data__sources": [str(images)]}
    if name != "swav_tiny":
        own |= {
            "trunk__arch": "resnet18",
            "method__freeze_prototypes_steps": None,
            "views__min_scale": [0.2, 0.05],
            "views__max_scale": [1.0, 0.2],
        }
    resolved = tiny(name, **own)
    trial = try_steps(resolved, 1)
    assert trial.steps == 4 and trial.images == 8 and trial.images_per_second > 0
    assert trial.data == (str(images) if name == "swav_tiny" else "builtin:photos")
    assert caplog.text == ""
    found = make_plan(resolved, Machines(2), images=96, trial=trial)
    assert found["time"]["from"] == "measured"
    assert found["time"]["of_one_device"] == pytest.approx(trial.images_per_second)
    assert found["trial"]["images"] == 8
