"""``zoo demo`` for several seeds: does the pretrained backbone beat the random one, and in what time?

    python benchmarks/demo_seeds.py [--seeds 0 1 2] [--fresh]

Seeds that are in the result already are kept if they were made with the same recipe; ``--fresh`` runs
all again. Ends with 1 if a gain is below 10 points or a demo takes more than 300 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from runner import RESULTS, load_average, run_command, write_result

from zoo.pretrain.resolve import resolve

RECIPE = "swav_tiny"
NAME = "demo_seeds"
MIN_GAIN = 10.0  # points
MAX_SECONDS = 300.0
ROWS = {"pixels": "raw pixels", "random": "random backbone", "pretrained": "pretrained"}


def _demo(seed: int) -> dict[str, Any]:
    """One demo as a user runs it, publishing into a home of its own.

    ``seconds`` is the whole command, imports and evaluation included.
    """
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        code = "from _zoo_entry import main; main()"
        command = [
            sys.executable,
            "-c",
            code,
            "demo",
            "--json",
            "--seed",
            str(seed),
            "--out",
            f"{folder}/run",
        ]
        began = time.perf_counter()
        report = json.loads(run_command(command, limit=1800, env={"ZOO_HOME": f"{folder}/home"}).stdout)
        seconds = time.perf_counter() - began
    rows = {row["features"]: row for row in report["rows"]}
    out: dict[str, Any] = {key: rows[name]["knn"] for key, name in ROWS.items()}
    linear = {key: rows[name].get("linear") for key, name in ROWS.items()}
    gain = 100 * (out["pretrained"] - out["random"])
    return {
        "seed": seed,
        **out,
        "linear": linear,
        "gain_points": gain,
        "seconds": seconds,
        "pretraining_seconds": report["pretrain_seconds"],
        "load_before": load,
        "met": gain >= MIN_GAIN and seconds <= MAX_SECONDS,
    }


def _kept(recipe: dict[str, Any]) -> dict[int, dict[str, Any]]:
    try:
        old = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {row["seed"]: row for row in old["seeds"]} if old.get("recipe") == recipe else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    arguments = parser.parse_args()
    recipe = resolve(RECIPE).recipe.to_dict()
    done = {} if arguments.fresh else _kept(recipe)
    print(f"{'seed':>4} {'pixels':>8} {'random':>8} {'pretrained':>10} {'gain':>7} {'seconds':>8}")
    for seed in arguments.seeds:
        if seed not in done:
            done[seed] = _demo(seed)
            rows = [done[key] for key in sorted(done)]
            limits = {"gain_points": MIN_GAIN, "seconds": MAX_SECONDS}
            write_result(NAME, {"target": limits, "recipe": recipe, "seeds": rows})
        row = done[seed]
        shown = " ".join(f"{100 * row[key]:{width}.1f}" for key, width in zip(ROWS, (8, 8, 10), strict=True))
        verdict = "met" if row["met"] else "MISSED"
        print(f"{seed:4d} {shown} {row['gain_points']:+7.1f} {row['seconds']:8.0f}  {verdict}", flush=True)
    return 0 if all(done[seed]["met"] for seed in arguments.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
