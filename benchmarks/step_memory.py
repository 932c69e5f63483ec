"""What each setting that saves memory saves: SwAV's step, ResNet-50, 2x224 + 6x96, on a CPU.

    python benchmarks/step_memory.py [--batch 16]

Each setting trains two steps in a process of its own. Counted is by how much the resident memory grew at its
peak, from before the network was built: weights, gradients, momentum, activations and workspaces. The words for
when memory runs out (``zoo/engine/memory.py``) quote these shares. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from runner import load_average, write_result
from sides import resident
from swav_step import make_views, our_step
from torch import nn

from zoo.heap import keep_freed_memory

BATCH = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "engine.accumulate 2": {"engine.accumulate": 2},
    "engine.accumulate 4": {"engine.accumulate": 4},
    "engine.activation_checkpointing": {"engine.activation_checkpointing": True},
    "all three (accumulate 4)": {
        "precision": "bfloat16",
        "engine.accumulate": 4,
        "engine.activation_checkpointing": True,
    },
    "half the batch": {"batch_size": 0.5},
    "2 x 224 alone": {
        "views.count": [2],
        "views.size": [224],
        "views.min_scale": [0.14],
        "views.max_scale": [1.0],
    },
}


def _serve(name: str, batch: int) -> None:
    """Train with one setting and print what it took as JSON; for a process of its own."""
    keep_freed_memory()
    with torch.no_grad():
        nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 8, 8))  # what is loaded at first use is loaded now
    options = {"precision": "float32", **SETTINGS[name]}
    batch = round(batch * options.pop("batch_size", 1))
    groups = tuple(zip(options.get("views.size", [224, 96]), options.get("views.count", [2, 6]), strict=True))
    views = make_views(batch, groups)
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = resident("VmRSS")
    step, _ = our_step(batch, views=views, options=options)
    step()
    step()
    print(json.dumps({"bytes": resident("VmHWM") - before}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=BATCH, help="images")
    parser.add_argument("--serve", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        logging.disable(logging.WARNING)  # the batch is smaller than the recipe's, and the recipe says so
        _serve(options.serve, options.batch)
        return 0
    load, rows = load_average(), {}
    for name in SETTINGS:
        command = [sys.executable, __file__, "--batch", str(options.batch), "--serve", name]
        rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        share = rows[name]["bytes"] / rows["float32"]["bytes"]
        print(f"{name:<34} {rows[name]['bytes'] / 1e9:6.2f} GB  {share:5.2f}", flush=True)
    write_result("step_memory", {"load_before": load, "batch": options.batch, "settings": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
