"""Learning rates of every step against the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.optim.schedule import WarmupCosine

from .cases import case_ids, load


@pytest.mark.parametrize("name", case_ids("lr_swav"))
def test_every_step(shared: Path, name: str) -> None:
    case = load(shared, name)
    args = case.args
    steps = args["iterations_per_epoch"]
    schedule = WarmupCosine(
        base=args["base_lr"],
        final=args["final_lr"],
        start=args["start_warmup"],
        warmup_steps=args["warmup_epochs"] * steps,
        total_steps=args["epochs"] * steps,
    )
    case.check("lr", [schedule.at(step) for step in range(schedule.total_steps)])


@pytest.mark.parametrize("warmup", range(2, 60))
def test_the_peak_appears_twice_and_the_end_is_not_reached(warmup: int) -> None:
    schedule = WarmupCosine(base=0.7, final=0.0007, start=0.1, warmup_steps=warmup, total_steps=100)
    assert schedule.at(0) == 0.1
    assert schedule.at(warmup - 1) == schedule.at(warmup) == 0.7  # exactly: no rounding at the seam
    assert schedule.at(99) > 0.0007


def test_a_warm_up_of_one_step() -> None:
    schedule = WarmupCosine(base=4.8, final=0.0048, start=0.3, warmup_steps=1, total_steps=5)
    assert [schedule.at(0), schedule.at(1)] == [0.3, 4.8]
