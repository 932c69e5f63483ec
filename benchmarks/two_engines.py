"""One model, data, schedule and seed through both engines of detection: the losses of the first iterations side by side.

python benchmarks/two_engines.py --voc FOLDER [--coco FOLDER] [--model MODEL] [--steps 10]

It needs detectron2 (``zoo transfer detect --engine detectron2`` says how to install it). Both train in float32 by the
published protocol, C4 on VOC and Mask R-CNN on COCO, two images a step, at the small schedule's sizes; whatever is drawn,
views, samples and new layers, follows from the seed in both. Losses are alike to rounding until rounding decides whether
one more region is a candidate: then others are drawn from the candidates. With large networks that is so in the second
iteration already; the proposal network's own losses, whose anchors don't depend on it, are alike to rounding there too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import load_average, write_result

PROPOSALS = ("loss_rpn_cls", "loss_rpn_loc")
FIRST, LAST = 1e-5, 5e-2
"""By how much of it a loss may differ: in the first iteration, and the proposals' in the second; in all."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voc", required=True, help="a folder in VOC's layout")
    parser.add_argument("--coco", help="a folder in COCO's layout")
    parser.add_argument("--model", default="random:resnet50", help="the trunk that is trained from")
    parser.add_argument("--steps", type=int, default=10, help="iterations that are compared")
    arguments = parser.parse_args()

    load = load_average()
    figures: dict[str, Any] = {}
    for head, data in (("c4", arguments.voc), ("mask-fpn", arguments.coco)):
        if data:
            figures[head] = compared(arguments.model, data, head, arguments.steps)
            show(head, figures[head])
    met = all(figure["met"] for figure in figures.values())
    found = {"model": arguments.model, "tolerance": {"first": FIRST, "last": LAST}, "figures": figures}
    write_result("two_engines", {"load_before": load, **found, "met": met})
    return 0 if met else 1


def compared(model: str, data: str, head: str, steps: int) -> dict[str, Any]:
    """Train both and put their metrics side by side."""
    from transfer.run import transfer

    settings = {"schedule": "24k" if head == "c4" else "1x", "method": "moco", "head": head, "steps": steps}
    settings |= {"batch_size": 2, "min_size": 240, "max_size": 480, "precision": "float32"}
    settings |= {"precise_batches": 0, "limit": 2 * steps}
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("torchvision", "detectron2"):
            out = Path(folder) / engine
            transfer("detect", model=model, dataset=data, settings={**settings, "engine": engine}, out=out)
            text = (out / "run-0" / "metrics.jsonl").read_text("utf-8")
            lines[engine] = [json.loads(line) for line in text.splitlines()]
    rows = [
        {
            "step": own["step"],
            "lr": {"torchvision": own["lr"], "detectron2": there["lr"]},
            **{
                name: {"torchvision": own[name], "detectron2": there[name]}
                for name in there
                if name == "loss" or name.startswith("loss_")
            },
            "difference": _apart(own, there, "loss"),
            "difference_of_proposals": max(_apart(own, there, name) for name in PROPOSALS),
        }
        for own, there in zip(lines["torchvision"], lines["detectron2"], strict=True)
    ]
    return {"rows": rows, "met": alike(rows)}


def alike(rows: list[dict[str, Any]]) -> bool:
    """Whether the iterations are within the tolerances."""
    close = [row["difference"] <= LAST for row in rows]
    close += [row["difference"] <= FIRST for row in rows[:1]]
    return all(close) and all(row["difference_of_proposals"] <= FIRST for row in rows[:2])


def _apart(own: dict[str, float], there: dict[str, float], name: str) -> float:
    return abs(own[name] - there[name]) / abs(own[name])


def show(head: str, figure: dict[str, Any]) -> None:
    print(f"{head}: {'step':>4} {'torchvision':>11} {'detectron2':>10} {'apart by':>9} {'proposals':>9}")
    for row in figure["rows"]:
        print(
            f"{'':{len(head) + 1}} {row['step']:>4} {row['loss']['torchvision']:>11.6f} "
            f"{row['loss']['detectron2']:>10.6f} {row['difference']:>9.1e} {row['difference_of_proposals']:>9.1e}"
        )
    verdict = "met" if figure["met"] else "MISSED"
    print(
        f"tolerance {FIRST:g} at first (the proposals' losses: twice), {LAST:g} for all: {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
