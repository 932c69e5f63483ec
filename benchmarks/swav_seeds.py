"""Does SwAV begin to learn for every seed? Its loss after 3 epochs of 2x64 + 4x32 views, against ln K.

    python benchmarks/swav_seeds.py --data FOLDER [--hours 2]

At a loss of ln K the codes say nothing: a run that stays there has not begun. Batch 128 and 200 prototypes, with the
settings of ``swav_rn18_64px``, of whose 20 epochs the first three are trained, for ten seeds. The loss is the mean
of the third epoch. Finished seeds are kept in ``results/swav_seeds.json``; run the same line again for the others.

Ends with 1 if a seed has not begun, with 75 if there is more to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from runner import RESULTS, load_average, write_result

import zoo
from zoo.engine.loop import Callback, Loop
from zoo.pretrain.resolve import resolve

RECIPE = "swav_rn18_64px"
GIVEN: dict[str, Any] = {
    "views.size": [64, 32],
    "views.count": [2, 4],
    "views.min_scale": [0.3, 0.1],
    "views.max_scale": [1.0, 0.3],
    "method.prototypes": 200,
    "engine.views_apart": False,
}
SEEDS, EPOCHS = range(10), 3
BELOW = 0.3  # ln K minus the loss, at least


class _Begun(Callback):
    """Keeps each epoch's mean loss, and stops after some."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._losses: list[float] = []

    def on_step(self, record: Any) -> None:
        self._losses.append(record.loss)

    def on_epoch_end(self, epoch: int, loop: Loop) -> None:
        self.epochs.append(mean(self._losses))
        self._losses.clear()
        if epoch + 1 == EPOCHS:
            signal.raise_signal(signal.SIGTERM)  # the engine saves and leaves


def _train(data: Path, seed: int) -> dict[str, Any]:
    seen, began = _Begun(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        zoo.pretrain(
            RECIPE,
            data=str(data),
            out=Path(scratch) / "run",
            overrides={**GIVEN, "seed": seed},
            callbacks=[seen],
            progress="quiet",
        )
    if len(seen.epochs) < EPOCHS:
        raise KeyboardInterrupt
    return {"losses": seen.epochs, "seconds": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of images")
    parser.add_argument("--hours", type=float, default=2.0, help="begin no seed after this time")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    settings = resolve(RECIPE, GIVEN).recipe.to_dict()
    ends_at = time.monotonic() + 3600 * options.hours
    path = RESULTS / "swav_seeds.json"
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    runs = before["runs"] if before.get("recipe") == settings else {}
    chance = math.log(settings["method"]["prototypes"])
    for seed in SEEDS:
        if str(seed) in runs or time.monotonic() > ends_at:
            continue
        load = load_average()
        runs[str(seed)] = {**_train(options.data, seed), "load_before": load}
        write_result(
            "swav_seeds", {"chance": chance, "target_below": BELOW, "runs": runs, "recipe": settings}
        )
        shown = ", ".join(f"{loss:.2f}" for loss in runs[str(seed)]["losses"])
        print(f"seed {seed}: {shown}; ln K is {chance:.2f}", flush=True)
    lasts = [run["losses"][-1] for run in runs.values()]
    if len(lasts) < len(SEEDS):
        print(f"{len(SEEDS) - len(lasts)} seeds are missing: run the same line again to go on")
        return 75
    begun = sum(chance - last >= BELOW for last in lasts)
    print(f"{begun} of {len(lasts)} seeds are {BELOW} below ln K; the worst by {chance - max(lasts):.2f}")
    return 0 if begun == len(lasts) else 1


if __name__ == "__main__":
    sys.exit(main())
