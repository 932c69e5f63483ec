"""Two proofs that transfer works: detection over-fits 8 images, and pretraining helps semi-supervised learning.

python benchmarks/transfer_proof.py --model ORG/NAME
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import load_average, write_result

AP50_TARGET = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model pretrained by swav_tiny, e.g. demo/swav_tiny")
    parser.add_argument("--steps", type=int, default=300, help="updates of the detector")
    arguments = parser.parse_args()

    from transfer.run import transfer

    load = load_average()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        def judge(recipe: str, model: str, **more: Any) -> dict[str, Any]:
            out = Path(folder) / f"{recipe}-{len(figures)}"
            result = transfer(recipe, model=model, out=out, **more)
            kept = {key: result[key] for key in ("model", "metrics", "protocol", "seconds")}
            figures[f"{recipe} {model}"] = kept
            print(f"{recipe} {model}: {kept['metrics']} in {kept['seconds']:.0f} s", flush=True)
            return kept

        size = {"resize": 48, "crop": 48}
        pretrained = judge("semisup", arguments.model, dataset="builtin:photos", **size)
        untrained = judge("semisup", "random:resnet18@0", dataset="builtin:photos", **size)
        settings = {
            "limit": 8,
            "test_on_train": True,
            "steps": arguments.steps,
            "min_size": 192,
            "lr": 0.01,
        }
        detection = judge("detect", arguments.model, dataset="builtin:photos-voc", settings=settings)
    ap50 = detection["metrics"]["AP50"]
    gain = pretrained["metrics"]["top1"] - untrained["metrics"]["top1"]
    met = ap50 >= AP50_TARGET and gain > 0
    print(
        f"AP50 on 8 over-fitted images {ap50:.3f} (target {AP50_TARGET}); semisup gain {100 * gain:+.1f} points"
    )
    write_result("transfer_proof", {"load_before": load, "figures": figures, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
