"""What a training step of one method costs against another's: ResNet-50, as the papers' recipes have it.

    python benchmarks/methods.py [--batch 8] [--rounds 5]

SwAV with 2x160 + 4x96 against MoCo v2 and SimCLR with 2x224: the SwAV paper (table 4 and its text) gives 1.4
times MoCo v2's time and 1.2 times SimCLR's. Each step is that of ``zoo pretrain`` from uint8 views, all in one
process, in turn; the median of a round's ratios counts. Views are random pixels: what making them costs is in
``image_path.py``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from statistics import median

import torch
from runner import load_average, write_result
from swav_step import make_views, our_step

from zoo.heap import keep_freed_memory
from zoo.pretrain.resolve import resolve

SWAV = "swav_rn50_400ep_2x160_4x96"
OTHERS = {"moco_v2_rn50_200ep": 1.4, "simclr_rn50_400ep_2x224": 1.2}  # recipe, the paper's ratio
# On one processor the groups of shuffled BatchNorm would be encoded one after the other; GPUs do it at once.
OPTIONS = {"moco_v2_rn50_200ep": {"method.shuffle_groups": 1}}
WARMUP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="images")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the batch is smaller than the recipes', and they say so
    keep_freed_memory()  # as a run on a CPU does
    load, steps, precision = load_average(), {}, ""
    for recipe in (SWAV, *OTHERS):
        views = resolve(recipe).recipe.views
        groups = tuple(zip(views.size, views.count, strict=True))
        steps[recipe], session = our_step(
            options.batch,
            views=make_views(options.batch, groups),
            options=OPTIONS.get(recipe),
            recipe=recipe,
        )
        precision = session.precision.name
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    seconds: dict[str, list[float]] = {recipe: [] for recipe in steps}
    for turn in range(options.rounds):
        order = list(steps) if turn % 2 == 0 else list(steps)[::-1]
        for recipe in order:
            began = time.perf_counter()
            steps[recipe]()
            seconds[recipe].append(time.perf_counter() - began)
    print(f"{precision}, {torch.get_num_threads()} threads, batch {options.batch}")
    found = {}
    for recipe, paper in OTHERS.items():
        ratios = [a / b for a, b in zip(seconds[SWAV], seconds[recipe], strict=True)]
        found[recipe] = {"median": median(ratios), "min": min(ratios), "max": max(ratios), "paper": paper}
        print(
            f"{SWAV} / {recipe}: {median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}), the paper: {paper}"
        )
    write_result(
        "methods",
        {
            "load_before": load,
            "batch": options.batch,
            "precision": precision,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "swav_over": found,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
