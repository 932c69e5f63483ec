"""The efficiency report: sections that add up, FLOPs that are true, a report that harms no run."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tiny import StopAfter, assert_same_state, go_on, image_folder, train
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.engine.efficiency import EfficiencyReport, ModuleCalls, flops_of, matrix_peak
from zoo.engine.loop import Callback, Loop
from zoo.engine.precision import Precision
from zoo.engine.sections import SECTIONS, DeviceClock, HostClock, SectionTimer, clock_of, mark
from zoo.engine.signals import StopRequest
from zoo.models.factory import create_trunk
from zoo.models.small_maps import use_matrix_products

CPU = torch.device("cpu")


class Ticks:
    """A clock on which every stamp comes one second after the one before."""

    name = "ticks"

    def __init__(self) -> None:
        self.now = 0

    def stamp(self) -> int:
        self.now += 1
        return self.now

    def passed(self, stamp: int) -> bool:
        return True

    def wait(self, stamp: int) -> None:
        return

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)


class LateTicks(Ticks):
    """A device that reaches a stamp only when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = 0

    def passed(self, stamp: int) -> bool:
        return stamp <= self.reached

    def wait(self, stamp: int) -> None:
        self.reached = max(self.reached, stamp)

    def seconds(self, first: int, last: int) -> float:
        assert last <= self.reached, "read before the device was there"
        return super().seconds(first, last)


def one_step(timer: SectionTimer, *names: str) -> None:
    timer.begin()
    for name in names:
        timer.mark(name)
    timer.end()


# --- sections -------------------------------------------------------------------------------------


def test_sections_last_until_the_next_mark_and_add_up():
    timer = SectionTimer(Ticks(), warm_up=0)
    one_step(timer, "forward", "loss", "forward", "backward")
    timer.begin()  # waits for data that does not come
    (row,) = timer.rows()
    assert tuple(row) == SECTIONS
    assert {name: seconds for name, seconds in row.items() if seconds} == {
        "data": 1.0,
        "forward": 2.0,
        "loss": 1.0,
        "backward": 1.0,
    }


def test_the_first_steps_and_very_old_ones_are_left_out():
    timer = SectionTimer(Ticks(), keep=3, warm_up=2)
    for step in range(7):
        one_step(timer, *["forward"] * step)
    assert [row["forward"] for row in timer.rows()] == [4.0, 5.0, 6.0]


def test_a_late_device_is_read_when_it_is_there_and_waited_for_only_at_the_end():
    clock = LateTicks()
    timer = SectionTimer(clock, warm_up=0)
    one_step(timer, "forward")
    one_step(timer, "backward")
    clock.wait(3)  # the device has done the first step
    one_step(timer, "optimizer")
    assert clock.reached == 3
    assert [row["forward"] + 2 * row["backward"] + 4 * row["optimizer"] for row in timer.rows()] == [1, 2, 4]
    assert clock.reached == 9


def test_marks_reach_the_active_timer_alone():
    timer = SectionTimer(Ticks(), warm_up=0)
    mark("loss")
    with timer.active():
        timer.begin()
        mark("loss")
        timer.end()
    mark("loss")
    (row,) = timer.rows()
    assert (row["data"], row["loss"]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="'losses' is none of data, prepare"):
        mark("losses")


def test_a_gpu_has_its_own_clock():
    assert isinstance(clock_of(CPU), HostClock)
    assert isinstance(clock_of(torch.device("cuda", 0)), DeviceClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_time_counts_what_the_device_does():
    device = torch.device("cuda")
    a = torch.rand(4096, 4096, device=device)
    torch.mm(a, a)
    timer = SectionTimer(clock_of(device), warm_up=0)
    timer.begin()
    timer.mark("forward")
    for _ in range(20):
        torch.mm(a, a)
    timer.mark("other")
    timer.end()
    (row,) = timer.rows()
    assert row["forward"] > 10 * (row["data"] + row["other"]) > 0


class Learner(nn.Module):
    """One weight that is trained, with every hook that the loop calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def step(
        self, views: torch.Tensor, batch: Any, given: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        out = self.layer(views)
        mark("loss")
        return out.square().mean(), {}

    def on_epoch_start(self, epoch: int, batches: Any) -> None: ...
    def before_step(self, step: int, epoch: int) -> None: ...
    def before_update(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def local_state(self) -> dict[str, Any]:
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None: ...


def test_the_loop_goes_through_all_sections(tmp_path):
    learner = Learner()
    batch = SimpleNamespace(ids=[0, 1], pixels=torch.ones(2, 2))
    loop = Loop(
        learner=learner,
        optimizer=torch.optim.SGD(learner.parameters(), lr=0.1),
        lr_at=lambda step: 0.1,
        batches=lambda first: iter([batch] * 4),
        prepare=lambda batch: batch.pixels,
        precision=Precision("float32", CPU),
        steps_per_epoch=2,
        total_steps=4,
        checkpoints=CheckpointWriter(CheckpointFolder(tmp_path), WorldOfOne()),
    )
    loop.sections = SectionTimer(Ticks())
    loop.run(StopRequest())
    once = {"data": 1, "prepare": 1, "forward": 1, "loss": 1, "backward": 1, "optimizer": 1}
    # other: until the batch is prepared, before the optimizer, after it
    assert loop.sections.rows() == [{**once, "other": 3}] * 2


# --- FLOPs ----------------------------------------------------------------------------------------


def counted(work: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("arch", "stem", "sides"), [("resnet18", "small", (32, 16)), ("resnet50", "imagenet", (64, 32))]
)
def test_flops_are_those_of_the_real_passes(arch, stem, sides):
    trunk = create_trunk(arch, stem=stem, base_planes=8)
    use_matrix_products(trunk)  # small maps cost less than a convolution
    views = [torch.rand(2, 3, side, side) for side in sides]
    calls = ModuleCalls(nn.ModuleList([trunk]))
    real = counted(lambda: sum(trunk(view).sum() for view in views).backward())
    calls.stop()
    assert len(calls.calls) == 2
    assert flops_of(calls.calls) == real


def test_flops_of_heads_and_of_networks_without_gradients():
    root = nn.ModuleDict({"trunk": nn.Conv2d(3, 4, 3, padding=1), "heads": nn.ModuleList([nn.Linear(4, 5)])})
    root["copy"] = copy.deepcopy(root["trunk"])
    images = torch.rand(2, 3, 6, 6)
    calls = ModuleCalls(root)
    pooled = root["trunk"](images).mean(dim=(2, 3))
    root["heads"][0](pooled)
    with torch.no_grad():
        root["copy"](input=images)
    calls.stop()
    root["heads"][0](pooled)  # nobody listens any more
    conv, linear = 2 * (2 * 6 * 6) * 4 * (3 * 3 * 3), 2 * 2 * 4 * 5
    assert [call.gradients for call in calls.calls] == [True, True, False]
    # forward + weights; forward + weights + input; forward
    assert flops_of(calls.calls) == 2 * conv + 3 * linear + conv


def test_counting_leaves_the_network_alone():
    trunk = create_trunk("resnet18", stem="small", base_planes=8)
    before = copy.deepcopy(trunk.state_dict())
    calls = ModuleCalls(nn.ModuleList([trunk.eval()]))
    with torch.no_grad():
        trunk(torch.rand(1, 3, 16, 16))
    calls.stop()
    assert flops_of(calls.calls) > 0
    after = trunk.state_dict()
    assert all(torch.equal(value, after[key]) and value.device == CPU for key, value in before.items())
    assert all(parameter.grad is None for parameter in trunk.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trunk.modules())


def test_the_matrix_peak_draws_from_no_shared_generator():
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    peak = matrix_peak(CPU, torch.float32, seconds=0.02)
    assert peak is not None and peak > 1e8  # a tenth of a GFLOP/s: any processor does more
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_float32_matmul_precision() == precision
    assert matrix_peak(torch.device("mps"), torch.float32) is None


# --- the report -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def reported(images, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(images, run, callbacks=(EfficiencyReport(run / "efficiency.json"),))
    return run


def test_a_run_leaves_a_report(reported):
    report = json.loads((reported / "efficiency.json").read_text("utf-8"))
    assert (report["schema"], report["device"], report["dtype"], report["clock"]) == (
        1,
        "cpu",
        "float32",
        "host",
    )
    assert (report["threads"], report["steps"]) == (1, 4)  # six steps, two of them to warm up
    assert report["images_per_second"] == pytest.approx(8 / report["step_seconds"])
    sections = report["sections"]
    assert tuple(sections) == SECTIONS
    assert sum(section["share"] for section in sections.values()) == pytest.approx(1)
    assert sum(section["seconds"] for section in sections.values()) == pytest.approx(report["step_seconds"])
    for name in ("data", "prepare", "forward", "backward", "optimizer", "other"):
        assert 0 < sections[name]["median_seconds"] < report["median_step_seconds"]
    assert report["between_steps_seconds"] > 0
    rate = report["flops_per_step"] / report["peak_flops_per_second"]
    assert report["share_of_peak"] == pytest.approx(rate / report["step_seconds"])
    computing = sum(sections[name]["seconds"] for name in ("forward", "loss", "backward"))
    assert report["share_of_peak_computing"] == pytest.approx(rate / computing)


def test_its_flops_are_those_of_the_whole_method(reported, images, tmp_path):
    method = train(images, tmp_path / "run", epochs=1).method
    views = [torch.rand(16, 3, 16, 16), torch.rand(8, 3, 8, 8)]  # two crops of 16 pixels, one of 8, batch 8
    real = counted(lambda: method(views)[1].sum().backward())
    report = json.loads((reported / "efficiency.json").read_text("utf-8"))
    assert report["flops_per_step"] == real


def test_it_changes_nothing_in_the_run(reported, images, tmp_path):
    assert_same_state(reported, train(images, tmp_path / "run").path)


def test_its_gist_is_logged(images, tmp_path, caplog):
    caplog.set_level(logging.INFO, "zoo")
    train(images, tmp_path / "run")  # a run makes its report by itself
    said = [record.getMessage() for record in caplog.records if "efficiency" in record.getMessage()]
    assert len(said) == 3
    assert "efficiency of 4 steps: " in said[0] and " images/s, " in said[0]
    assert "data " in said[1] and "backward " in said[1]
    assert "% of the matrix peak of " in said[2]


def test_a_short_session_says_nothing(images, tmp_path):
    run = tmp_path / "run"
    train(images, run, callbacks=(EfficiencyReport(run / "efficiency.json"), StopAfter(4)))
    go_on(run, callbacks=(EfficiencyReport(run / "efficiency.json"),))
    assert not (run / "efficiency.json").exists()


def test_a_report_that_fails_stops_no_run(images, tmp_path, caplog):
    report = EfficiencyReport(tmp_path / "no such folder" / "efficiency.json")
    # A stem for crops this small, or the run would warn of them.
    assert train(images, tmp_path / "run", callbacks=(report,), trunk__stem="small").exit_code == 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("The efficiency report failed while measuring (FileNotFoundError")


class Unknown(Callback):
    """Makes the FLOPs impossible to count: a call that no network of the run would accept."""

    def __init__(self, report: EfficiencyReport) -> None:
        self.report = report

    def on_end(self, loop: Loop) -> None:
        calls = self.report._listener.calls
        calls[:] = [type(calls[0])(nn.Linear(3, 3), ("no tensor",), {}, True)]


def test_without_flops_the_rest_is_told(images, tmp_path, caplog):
    caplog.set_level(logging.INFO, "zoo")
    report = EfficiencyReport(tmp_path / "efficiency.json")
    train(images, tmp_path / "run", callbacks=(Unknown(report), report))
    written = json.loads((tmp_path / "efficiency.json").read_text("utf-8"))
    assert written["flops_per_step"] is None and written["share_of_peak"] is None
    assert written["images_per_second"] > 0 and written["peak_flops_per_second"] > 0
    assert any("efficiency: no FLOPs (" in record.getMessage() for record in caplog.records)
