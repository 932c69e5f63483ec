"""Does SwAV learn from a folder of images? kNN accuracy before training and after each epoch.

    python benchmarks/learning.py --data FOLDER

FOLDER holds ``train`` and ``val``, each with a folder for each class. The labels are used by the kNN
classifier alone. Run the same line again to go on after an interruption or a spent ``--hours``.
The random backbone's accuracy depends on the draw by several points, so a few of them are measured.
Ends with 1 if the last accuracy is not above all of theirs, with 75 if it has to go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from runner import load_average, write_result
from torch import nn

import zoo
from zoo.data.open import open_source
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback, Loop
from zoo.pretrain.config import Recipe
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.resolve import parse_assignments, resolve
from zoo.pretrain.session import build_method
from zoo.probe.features import source_features
from zoo.probe.knn import knn_accuracy

HERE = Path(__file__).resolve().parent
K, TEMPERATURE = 20, 0.07


class KnnCurve(Callback):
    """Measures the trunk at the start and after each epoch, and stops the run when its time is spent.

    The curve is kept beside the run, a line a measurement; on a resume what lies beyond the step that
    the run goes on from is dropped, since it will be measured again.
    """

    def __init__(self, data: Path, file: Path, side: int, norms: tuple[Any, Any], hours: float) -> None:
        train, val = (open_source(str(data / split)) for split in ("train", "val"))
        if not train.classes or train.classes != val.classes:
            raise SystemExit(f"{data}: train and val need the same class folders")
        self.classes = len(train.classes)
        self.train, self.val = train, val
        self.how = {"mean": norms[0], "std": norms[1], "resize": side, "crop": side}
        self.file = file
        self.points: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._budget = 3600 * hours
        self._ends_at = float("inf")

    def accuracy(self, trunk: nn.Module) -> float:
        """Top-1 of the validation images by their neighbours among the training images."""
        (queries, wanted), (bank, labels) = (
            source_features(trunk, source, self.how) for source in (self.val, self.train)
        )
        return knn_accuracy(queries, wanted, bank, labels, k=K, temperature=TEMPERATURE)

    def on_start(self, loop: Loop) -> None:
        if self.file.exists():
            points = [json.loads(line) for line in self.file.read_text("utf-8").splitlines()]
            self.points = [point for point in points if point["step"] <= loop.step]
            self.file.write_text("".join(json.dumps(point) + "\n" for point in self.points), "utf-8")
        if not self.points:
            self._measure(0, loop)
        self._ends_at = time.monotonic() + self._budget

    def on_step(self, record: Any) -> None:
        self._losses.append(record.loss)
        if time.monotonic() > self._ends_at:
            self._ends_at = float("inf")
            signal.raise_signal(signal.SIGTERM)  # the engine finishes the step, saves and leaves

    def on_epoch_end(self, epoch: int, loop: Loop) -> None:
        if all(point["step"] != loop.step for point in self.points):
            self._measure(epoch + 1, loop)

    def _measure(self, epoch: int, loop: Loop) -> None:
        top1 = self.accuracy(loop.learner.trunk)  # type: ignore[attr-defined]
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        point = {"epoch": epoch, "step": loop.step, "top1": top1, "loss": loss, "seconds": loop.elapsed}
        self.points.append(point)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        mean_loss = "" if loss is None else f"  mean loss {loss:.3f}"
        print(
            f"epoch {epoch:3d}  kNN {100 * top1:5.1f} %{mean_loss}  {loop.elapsed:6.0f} s of training",
            flush=True,
        )


def _random_trunks(recipe: Recipe, curve: KnnCurve, count: int) -> list[float]:
    """Accuracy of untrained trunks, drawn with the seeds after the run's own."""
    shape = RunShape(
        views=sum(recipe.views.count), batch_size=recipe.batch_size, world_size=1, steps_per_epoch=1, epochs=1
    )
    seeds = range(recipe.seed + 1, recipe.seed + 1 + count)
    return [
        curve.accuracy(build_method(recipe.model_copy(update={"seed": seed}), shape, WorldOfOne()).trunk)
        for seed in seeds
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/ and val/")
    parser.add_argument("--recipe", default=str(HERE / "recipes" / "swav_tinyimagenet.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for zoo pretrain")
    parser.add_argument("--side", type=int, default=64, help="pixels of the images that kNN sees")
    parser.add_argument("--random", type=int, default=4, help="further random backbones to measure")
    parser.add_argument("--hours", type=float, default=1.0, help="stop and save after this time")
    parser.add_argument("--name", help="of the result; the data folder's name by default")
    parser.add_argument("--out", type=Path, help="the run's folder; runs/learning_NAME by default")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    name = f"learning_{arguments.name or arguments.data.resolve().name}"
    out = arguments.out or Path("runs") / name
    overrides = parse_assignments(arguments.set)
    recipe = resolve(arguments.recipe, overrides).recipe
    load = load_average()
    curve = KnnCurve(
        arguments.data,
        out.with_name(f"{out.name}.curve.jsonl"),
        arguments.side,
        (recipe.views.mean, recipe.views.std),
        arguments.hours,
    )
    pixels = curve.accuracy(nn.Flatten())
    print(f"raw pixels kNN {100 * pixels:5.1f} % ({curve.classes} classes)", flush=True)
    others = _random_trunks(recipe, curve, arguments.random)
    print("random backbones kNN " + ", ".join(f"{100 * top1:.1f}" for top1 in others), flush=True)
    if (out / "run.json").exists():
        result = zoo.pretrain(resume=out, callbacks=[curve], progress="lines")
        recipe = resolve(out / "recipe.yaml").recipe
    else:
        curve.file.unlink(missing_ok=True)
        result = zoo.pretrain(
            arguments.recipe,
            data=str(arguments.data / "train"),
            out=out,
            overrides=overrides,
            callbacks=[curve],
            progress="lines",
        )
    first, last = curve.points[0]["top1"], curve.points[-1]["top1"]
    randoms = [first, *others]
    settings = recipe.to_dict()
    settings["data"].pop("sources")  # a path of this machine
    write_result(
        name,
        {
            "load_before": load,
            "finished": result.exit_code == 0,
            "images": {"train": len(curve.train), "val": len(curve.val), "classes": curve.classes},
            "knn": {"k": K, "temperature": TEMPERATURE, "side": arguments.side},
            "pixels": pixels,
            "random": randoms,  # the run's own start first
            "pretrained": last,
            "gain_points": 100 * (last - first),
            "gain_over_mean_random_points": 100 * (last - sum(randoms) / len(randoms)),
            "curve": curve.points,
            "recipe": settings,
        },
    )
    if result.exit_code:
        print("not finished: run the same line again to go on")
        return result.exit_code
    risen = last > max(randoms)
    print(
        f"random {100 * first:.1f} % (all: {100 * min(randoms):.1f} to {100 * max(randoms):.1f}), now "
        f"{100 * last:.1f} %: {'above' if risen else 'NOT above'} every random backbone"
    )
    return 0 if risen else 1


if __name__ == "__main__":
    sys.exit(main())
