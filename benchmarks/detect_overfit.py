"""Detection learns: it over-fits a few images, and a pretrained trunk helps on images it has not seen.

python benchmarks/detect_overfit.py --voc FOLDER --coco FOLDER [--model MODEL] [--steps 600] [--full]

1. Faster R-CNN C4, small schedule, on 8 images of VOC: AP50 on them of at least 0.9.
2. Mask R-CNN on 4 images of COCO: AP50 of boxes and masks on them of at least 0.9.
3. With --full: training on VOC's trainval from a random trunk and from MODEL, AP50 on its test set side by side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import load_average, write_result

TARGET = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voc", required=True, help="a folder in VOC's layout")
    parser.add_argument("--coco", help="a folder in COCO's layout")
    parser.add_argument("--model", default="random:resnet18", help="the trunk that is trained from")
    parser.add_argument("--steps", type=int, default=600, help="updates of each over-fitting")
    parser.add_argument("--full", action="store_true", help="also train on all images (hours)")
    arguments = parser.parse_args()

    from transfer.run import transfer

    load = load_average()
    figures: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory() as folder:

        def judge(name: str, model: str, data: str, **settings: Any) -> dict[str, Any]:
            chosen = {"schedule": "small", **settings}
            out = Path(folder) / name.replace(" ", "-")
            result = transfer("detect", model=model, dataset=data, settings=chosen, out=out)
            kept = {key: result[key] for key in ("model", "metrics", "protocol", "seconds")}
            figures[name] = kept
            print(f"{name}: {kept['metrics']} in {kept['seconds']:.0f} s", flush=True)
            return dict(kept["metrics"])

        few = {"test_on_train": True, "steps": arguments.steps, "lr": 0.005}
        found = judge("8 images of VOC", arguments.model, arguments.voc, limit=8, head="c4", **few)
        met &= found["AP50"] >= TARGET
        if arguments.coco:
            found = judge(
                "4 images of COCO", arguments.model, arguments.coco, limit=4, head="mask-fpn", **few
            )
            met &= min(found["AP50"], found["mask_AP50"]) >= TARGET
        if arguments.full:
            for name, model in (("random", "random:resnet18"), ("pretrained", arguments.model)):
                judge(f"trainval from {name}", model, arguments.voc, head="c4")
    write_result("detect_overfit", {"load_before": load, "figures": figures, "target": TARGET, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
