"""An epoch of a small recipe on a CPU, by the clock: ours against lightly's parts by the same settings.

    python benchmarks/small_steps.py --data FOLDER [--pairs 3]

FOLDER has a folder for each class. Each side trains one epoch from files on disk, all that it does included:
reading and distorting images, the step, starting up and, ours, a checkpoint. The same views, batch, network and
optimizer (``lightly_parts.py``). lightly gets the number of data workers that it is fastest with here, and waiting
threads that don't spin, without which its workers and its step disturb each other. Ours runs as ``zoo pretrain``
does on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # read when torch is first imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
from lightly_parts import LightlyRun
from runner import Case, measure

import zoo
from zoo.pretrain.resolve import resolve

TARGET = 1.7
RECIPES = ("swav_rn18_64px", "simclr_rn18_64px", "moco_v2_rn18_64px")
OTHERS = {"simclr_rn18_64px": {"views.size": [64]}}  # whole images, as lightly's own recipes have them


def _fastest_workers(data: Path) -> int:
    """Data workers that lightly's steps are fastest with on this machine."""
    seconds = {}
    for workers in (0, 1, 2):
        steps = LightlyRun(resolve(RECIPES[1]).recipe, data, 0, workers).steps()
        for _ in itertools.islice(steps, 5):
            pass
        began = time.perf_counter()
        for _ in itertools.islice(steps, 15):
            pass
        seconds[workers] = time.perf_counter() - began
    print("lightly, 15 steps: " + ", ".join(f"{n} workers {s:.1f} s" for n, s in seconds.items()), flush=True)
    return min(seconds, key=lambda workers: seconds[workers])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with a folder for each class")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # one epoch is less than the recipes want, and they say so
    workers = _fastest_workers(options.data)
    scratch = tempfile.TemporaryDirectory()
    number = itertools.count()

    def case(name: str, given: dict[str, object], target: float | None) -> Case:
        recipe = resolve(name, given).recipe

        def ours() -> None:
            zoo.pretrain(
                name,
                data=str(options.data),
                out=Path(scratch.name) / str(next(number)),
                overrides={**given, "epochs": 1, "schedule.warmup_epochs": 0},
                progress="quiet",
            )

        title = f"{recipe.method.name}, {recipe.views.count[0]}x{recipe.views.size[0]}"
        images = sum(1 for path in options.data.rglob("*") if path.is_file())
        peer = lambda: LightlyRun(recipe, options.data, 0, workers).train_epoch()  # noqa: E731
        return Case(title, ours, peer, target, options.pairs, 0, images, "img/s")

    cases = [case(name, {}, TARGET) for name in RECIPES]
    cases += [case(name, given, None) for name, given in OTHERS.items()]
    good = measure(
        "small_steps",
        cases,
        {"data": options.data.parent.name, "workers": workers, "threads": torch.get_num_threads()},
    )
    scratch.cleanup()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
