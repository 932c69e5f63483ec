"""Do the small recipes learn, and as well as with lightly's parts? kNN accuracy before and after training.

    python benchmarks/learning.py --data FOLDER [--recipes NAME ...] [--hours 2]

FOLDER holds ``train`` and ``val``, each with a folder for each class; the labels are used by the kNN classifier
alone (and by supervised training). Each trunk is judged twice: on ``val`` by its neighbours in ``train`` (500 images:
a standard error of 2.2 points), and on ``train`` by the other images there (5,000: 0.7). Every recipe is trained for every seed by ``zoo pretrain``'s own function; of the
recipes for 64 pixels (the default), SwAV, SimCLR and MoCo also with lightly's parts by the same settings
(``lightly_parts.py``). Finished runs are kept in ``results/learning_FOLDER.json``; run the same line again for what is
missing, or after an interruption. Accuracy
doesn't depend on how busy the machine is, ``seconds`` does: ``small_steps.py`` times both sides in turn.

Ends with 1 if a mean gain is below its target or below lightly's, with 75 if there is more to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lightly_parts import METHODS, LightlyRun
from runner import RESULTS, load_average, machine, write_result
from torch import nn

import zoo
from zoo.data.open import open_source
from zoo.engine.loop import Callback, Loop
from zoo.pretrain.config import Recipe
from zoo.pretrain.resolve import resolve
from zoo.probe.features import source_features
from zoo.probe.knn import knn_accuracy, knn_ranks

K, TEMPERATURE = 20, 0.07
SEEDS = {
    "swav_rn18_64px": tuple(range(6)),
    "simclr_rn18_64px": tuple(range(6)),
    "moco_v2_rn18_64px": tuple(range(6)),
    "deepclusterv2_rn18_64px": (0, 1, 2),
    "selav2_rn18_64px": (0,),
    "supervised_rn18_64px": (0,),
    "amdim_ndf64_64px": (0,),
    "swav_rn18_32px": (0,),
    "swav_rn18_128px": (0,),
}
# Points over the random trunk, mean of the seeds, at least.
TARGETS = {name: 8.0 for name, seeds in SEEDS.items() if len(seeds) > 1} | {"amdim_ndf64_64px": 6.0}
DEFAULT = [name for name in SEEDS if name.endswith("_64px")]
NOT_LIGHTLYS = ("shuffle_groups",)  # settings of a method that its parts don't have


class Judge:
    """kNN accuracy of a trunk: of validation images, and of each training image by the others."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.train, self.val = (open_source(str(data / split)) for split in ("train", "val"))
        if not self.train.classes or self.train.classes != self.val.classes:
            raise SystemExit(f"{data}: train and val need the same class folders")

    def __call__(self, trunk: nn.Module, recipe: Recipe) -> dict[str, float]:
        test = recipe.evaluation
        how = {"mean": recipe.views.mean, "std": recipe.views.std, "resize": test.resize, "crop": test.crop}
        (queries, wanted), (bank, labels) = (
            source_features(trunk, source, how) for source in (self.val, self.train)
        )
        classes = len(self.train.classes)
        ((_, _, ranks),) = knn_ranks(
            bank, labels, bank, labels, classes, [K], [TEMPERATURE], leave_one_out=True
        )
        return {
            "top1": knn_accuracy(queries, wanted, bank, labels, k=K, temperature=TEMPERATURE),
            "leave_one_out": float((ranks == 0).double().mean()),
        }


class _Watch(Callback):
    """Measures at the start and at the end, and stops the run when the time is spent."""

    def __init__(self, judge: Judge, recipe: Recipe, file: Path, ends_at: float) -> None:
        self.judge, self.recipe, self.file, self.ends_at = judge, recipe, file, ends_at
        self.points: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else []
        self._losses: list[float] = []

    def on_start(self, loop: Loop) -> None:
        self.points = [point for point in self.points if point["step"] <= loop.step]
        if not self.points:
            self._measure(0, loop)

    def on_step(self, record: Any) -> None:
        self._losses.append(record.loss)
        if time.monotonic() > self.ends_at:
            self.ends_at = float("inf")
            signal.raise_signal(signal.SIGTERM)  # the engine finishes the step, saves and leaves

    def on_epoch_end(self, epoch: int, loop: Loop) -> None:
        if loop.step >= loop.total_steps or epoch + 1 == self.recipe.epochs // 2:
            self._measure(epoch + 1, loop)

    def _measure(self, epoch: int, loop: Loop) -> None:
        scores = self.judge(loop.learner.trunk, self.recipe)  # type: ignore[attr-defined]
        recent = self._losses[-loop.steps_per_epoch :]
        self.points.append(
            {
                "epoch": epoch,
                "step": loop.step,
                **scores,
                "loss": mean(recent) if recent else None,
                "seconds": loop.elapsed,
            }
        )
        self.file.write_text(json.dumps(self.points), "utf-8")


def _train_ours(name: str, seed: int, judge: Judge, folder: Path, ends_at: float) -> dict[str, Any] | None:
    recipe = resolve(name).recipe
    folder.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(judge, recipe, folder.with_name(f"{folder.name}.points.json"), ends_at)
    if (folder / "run.json").exists():
        done = zoo.pretrain(resume=folder, callbacks=[watch], progress="quiet")
    else:
        watch.points.clear()
        done = zoo.pretrain(
            name,
            data=str(judge.data / "train"),
            out=folder,
            overrides={"seed": seed},
            callbacks=[watch],
            progress="quiet",
        )
    if done.exit_code:
        return None
    environment = json.loads((folder / "environment.json").read_text("utf-8"))
    return {
        "curve": watch.points,
        "precision": environment["precision"],
        "threads": environment["threads"],
    }


def _train_peer(name: str, seed: int, judge: Judge, folder: Path, ends_at: float) -> dict[str, Any] | None:
    recipe = resolve(name).recipe
    run = LightlyRun(recipe, judge.data / "train", seed, workers=1)
    state, notes = folder / "state.pt", folder / "points.json"
    folder.mkdir(parents=True, exist_ok=True)
    points: list[dict[str, Any]] = json.loads(notes.read_text("utf-8")) if notes.exists() else []
    if state.exists():
        run.restore(state)
    else:
        points = [
            {
                "epoch": 0,
                "step": 0,
                **judge(run.trunk, recipe),
                "loss": None,
                "seconds": 0.0,
            }
        ]
    seconds = points[-1]["seconds"]
    while run.epoch < recipe.epochs:
        if time.monotonic() > ends_at:
            return None
        began = time.monotonic()
        loss = run.train_epoch()
        seconds += time.monotonic() - began
        points = [points[0], *(p for p in points[1:] if p["epoch"] <= recipe.epochs // 2)]
        last = {
            "epoch": run.epoch,
            "step": run.epoch * len(run.loader),
            "top1": None,
            "loss": loss,
            "seconds": seconds,
        }
        if run.epoch in (recipe.epochs // 2, recipe.epochs):
            last |= judge(run.trunk, recipe)
        points.append(last)
        run.save(state)
        notes.write_text(json.dumps(points), "utf-8")
    return {
        "curve": [point for point in points if point["top1"] is not None],
        "precision": "float32",
        "threads": torch.get_num_threads(),  # and a data process
    }


def _jobs(recipes: list[str]) -> Iterator[tuple[str, str, int]]:
    """(side, recipe, seed): ours first, since a peer alone says nothing."""
    for side in ("ours", "lightly"):
        for name in recipes:
            if side == "ours" or (name in DEFAULT and resolve(name).recipe.method.name in METHODS):
                for seed in SEEDS[name]:
                    yield side, name, seed


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run's settings are today's; settings that there weren't then don't count."""
    return all(
        _same(value, now[key]) if isinstance(value, dict) and value else now.get(key) == value
        for key, value in before.items()
    )


def _that_count(side: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings that a side's numbers depend on."""
    if side == "ours":
        return recipe
    method = {name: value for name, value in recipe["method"].items() if name not in NOT_LIGHTLYS}
    return {**recipe, "method": method}


def _points(runs: dict[str, Any], side: str, name: str, metric: str, at: int) -> list[float]:
    """Percent of each seed, in their order; of the runs that have the metric."""
    curves = [runs[key]["curve"] for seed in SEEDS[name] if (key := f"{side} {name} {seed}") in runs]
    return [100 * curve[at][metric] for curve in curves if metric in curve[at]]


def _report(runs: dict[str, Any], recipes: list[str]) -> bool:
    """Print a row for each recipe and metric; whether all that is there is as good as it should be.

    What is wanted is of ``top1``, the accuracy on ``val``; ``leave_one_out`` stands beside it.
    """
    good = True
    print(f"{'recipe':<26} {'metric':<13} {'random':>7} {'ours':>7} {'gain':>6} {'lightly':>8}   each seed")
    for name in recipes:
        for metric in ("top1", "leave_one_out"):
            ours, start = (_points(runs, "ours", name, metric, at) for at in (-1, 0))
            if not ours:
                continue
            peer = _points(runs, "lightly", name, metric, -1)
            each, theirs = (", ".join(f"{value:.1f}" for value in side) for side in (ours, peer))
            gain = mean(ours) - mean(start)
            print(
                f"{name:<26} {metric:<13} {mean(start):>7.1f} {mean(ours):>7.1f} {gain:>+6.1f} "
                f"{f'{mean(peer):.1f}' if peer else '-':>8}   {each}{f' (lightly: {theirs})' if peer else ''}"
            )
            if metric == "top1":
                good &= gain >= TARGETS.get(name, 0.0) and (not peer or mean(ours) >= mean(peer))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/ and val/")
    parser.add_argument("--recipes", nargs="+", default=DEFAULT, choices=list(SEEDS))
    parser.add_argument("--hours", type=float, default=2.0, help="stop and save after this time")
    parser.add_argument("--out", type=Path, default=Path("runs") / "learning", help="where runs are kept")
    parser.add_argument("--side", choices=("ours", "lightly"), help="this one alone")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    ends_at = time.monotonic() + 3600 * options.hours
    judge = Judge(options.data)
    result = f"learning_{judge.data.name}"
    path = RESULTS / f"{result}.json"
    missing = 0
    for side, name, seed in _jobs(options.recipes):
        runs = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else {}
        key = f"{side} {name} {seed}"
        settings = resolve(name).recipe.model_copy(update={"seed": seed}).to_dict()
        if key in runs and _same(_that_count(side, runs[key]["recipe"]), settings):
            continue
        if time.monotonic() > ends_at or options.side not in (None, side):
            missing += 1
            continue
        load = load_average()
        train = _train_ours if side == "ours" else _train_peer
        found = train(name, seed, judge, options.out / side / f"{name}-{seed}", ends_at)
        if found is None:  # stopped, by a signal or by the clock
            missing += 1
            ends_at = 0.0
            continue
        now = {"load_before": load, "processor": machine()["processor"], **found, "recipe": settings}
        runs = (
            json.loads(path.read_text("utf-8"))["runs"] if path.exists() else {}
        )  # another one may write too
        write_result(
            result,
            {
                "data": {
                    "name": judge.data.name,
                    "train": len(judge.train),
                    "val": len(judge.val),
                    "classes": len(judge.train.classes),
                },
                "knn": {"k": K, "temperature": TEMPERATURE},
                "runs": {**runs, key: now},
            },
        )
        print(f"{key}: " + ", ".join(f"{100 * point['top1']:.1f}" for point in found["curve"]), flush=True)
    runs = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else {}
    good = _report(runs, options.recipes)
    if missing:
        print(f"{missing} runs are missing: run the same line again to go on")
        return 75
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
