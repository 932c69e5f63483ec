"""The training step of ``swav_tiny``: bfloat16 with channels-last against float32.

    python benchmarks/tiny_precision.py

Both sides are the run's own method, optimizer and loop, built from the recipe, on the same batches
(made beforehand: views are not timed).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from runner import Case, measure

from zoo.engine.collectives import WorldOfOne
from zoo.engine.precision import choose_device, choose_precision, processors
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunFolder
from zoo.pretrain.session import Session

RECIPE = "swav_tiny"
BATCHES = 4
STEP = 40  # after the prototypes' freeze, at nearly the full learning rate
TARGET = 1.0


def _session(precision: str) -> Session:
    resolved = resolve(RECIPE, options={"precision": precision, "device": "cpu", "data.workers": 0})
    return Session(resolved, choose_device("cpu"), WorldOfOne())


def _steps(precision: str, batches: list, threads: int) -> Callable[[], None]:
    """A function that trains on all batches once; nothing is written."""
    session = _session(precision)
    loop = session._loop(RunFolder(Path("unused")), [])
    loop.step = STEP
    loop.learner.train()

    def train() -> None:
        torch.set_num_threads(threads)
        for batch in batches:
            loop._one_step(batch, epoch=0)

    return train


def main() -> int:
    device = choose_device("cpu")
    if choose_precision("auto", device).name != "bfloat16":
        print("not measured: this processor is no faster in bfloat16")
        return 0
    session = _session("float32")
    batches = list(
        itertools.islice(
            session.images.batches(0, BATCHES, device),
            BATCHES,
        )
    )
    images = sum(batch.size for batch in batches)
    cases = [
        Case(
            f"{RECIPE} step, bfloat16 / float32, {threads} thread{'s' if threads > 1 else ''}",
            ours=_steps("bfloat16", batches, threads),
            peer=_steps("float32", batches, threads),
            target=TARGET,
            amount=images,
            unit="img/s",
        )
        for threads in sorted({1, processors()})
    ]
    settings = {"recipe": resolve(RECIPE).recipe.to_dict(), "images_a_call": images}
    return 0 if measure("tiny_precision", cases, settings) else 1


if __name__ == "__main__":
    sys.exit(main())
