"""An epoch of a small recipe on a CPU, by the clock: ours against lightly's parts by the same settings.

    python benchmarks/small_steps.py --data FOLDER [--pairs 3]

FOLDER has a folder for each class. Each side trains one epoch from files on disk, all that it does included:
reading and distorting images, the step, starting up and, ours, a checkpoint. The same views, batch, network and
optimizer (``lightly_parts.py``). Each side lives in a process of its own, and trains when it is told to. Ours runs
as ``zoo pretrain`` does on this machine. lightly gets the number of data workers that it is fastest with here, and
threads that wait asleep if that helps it: spinning ones disturb its workers, sleeping ones slow small layers down.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runner import Case, measure
from sides import Side

TARGET = 1.7
RECIPES = ("swav_rn18_64px", "simclr_rn18_64px", "moco_v2_rn18_64px")
OTHERS = {"simclr_rn18_64px": {"views.size": [64]}}  # whole images, as lightly's own recipes have them
WAITING: tuple[dict[str, str], ...] = (
    {},
    {"OMP_WAIT_POLICY": "PASSIVE"},
)  # read when torch is first imported
PROBED = 15  # steps, by which lightly's workers are chosen


def _serve(data: Path) -> None:
    """Train an epoch, or some steps, at each line of input; for a process of its own."""
    import torch
    from lightly_parts import LightlyRun

    import zoo
    from zoo.pretrain.resolve import resolve

    logging.disable(logging.WARNING)  # one epoch is less than the recipes want, and they say so
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        name, given, workers, steps = json.loads(line)
        began = time.perf_counter()
        if workers is None:
            with tempfile.TemporaryDirectory() as scratch:
                zoo.pretrain(
                    name,
                    data=str(data),
                    out=Path(scratch) / "run",
                    overrides={**given, "epochs": 1, "schedule.warmup_epochs": 0},
                    progress="quiet",
                )
        elif steps is None:
            LightlyRun(resolve(name, given).recipe, data, 0, workers).train_epoch()
        else:
            endless = LightlyRun(resolve(name, given).recipe, data, 0, workers).steps()
            list(itertools.islice(endless, 5))
            began = time.perf_counter()
            list(itertools.islice(endless, steps))
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def _fastest(command: list[str]) -> tuple[int, dict[str, str]]:
    """Data workers and environment that lightly's steps are fastest with on this machine."""
    found = []
    for env in WAITING:
        with Side(command, env) as peer:
            for workers in (0, 1, 2):
                seconds = peer.ask([RECIPES[1], {}, workers, PROBED])["seconds"]
                found.append((seconds, workers, env))
                print(f"lightly, {PROBED} steps, {workers} workers {env or ''}: {seconds:.1f} s", flush=True)
    _, workers, env = min(found, key=lambda one: one[0])
    return workers, env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with a folder for each class")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.data)
        return 0
    command = [__file__, "--data", str(options.data), "--serve"]
    images = sum(1 for path in options.data.rglob("*") if path.is_file())
    workers, env = _fastest(command)
    with Side(command) as ours, Side(command, env) as peer:

        def case(name: str, given: dict[str, Any], target: float | None) -> Case:
            title = " ".join([name, *(f"{key} {value}" for key, value in given.items())])
            sides = (
                lambda: ours.ask([name, given, None, None]),
                lambda: peer.ask([name, given, workers, None]),
            )
            return Case(title, *sides, target, options.pairs, 0, images, "img/s")

        cases = [case(name, {}, TARGET) for name in RECIPES]
        cases += [case(name, given, None) for name, given in OTHERS.items()]
        settings = {"data": options.data.parent.name, "threads": ours.about["threads"]}
        settings["lightly"] = {"workers": workers, "environment": env}
        return 0 if measure("small_steps", cases, settings) else 1


if __name__ == "__main__":
    sys.exit(main())
