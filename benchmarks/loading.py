"""Loading a published ResNet-50, against building one with random weights and filling it from a torch file.

python benchmarks/loading.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runner import Case, measure, run_command

TARGET_RECEIPT = 5.0
TARGET_FULL = 2.0
TARGET_MEMORY = 1.3  # of the file's size, at most

_MEMORY = """
import json, sys, torch, torchvision, zoo.loading

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

zoo.loading.load("random:resnet18", progress=False)   # whatever is imported late is imported now
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")                                   # the high-water mark starts from here
before = resident("VmRSS")
model = zoo.loading.load(sys.argv[1], progress=False)
with torch.no_grad():
    total = sum(float(p.sum()) for p in model.parameters())   # every page is really there
print(json.dumps(resident("VmHWM") - before))
"""


def _publish(home: Path) -> tuple[str, Path]:
    """A ResNet-50 in a local hub of its own, and the same values in a torch file."""
    import torch

    from zoo.models.factory import create_trunk
    from zoo.weights.bundle import Description, write_bundle
    from zoo.weights.hubs.local import LocalHub

    trunk = create_trunk("resnet50").state_dict()
    how = {"mean": [0.485, 0.456, 0.406], "std": [0.228, 0.224, 0.225], "resize": 256, "crop": 224}
    what = Description(
        arch="resnet50",
        stem="imagenet",
        base_planes=None,
        num_features=2048,
        method="swav",
        preprocessing={**how, "interpolation": "bilinear"},
        recipe={},
        data={},
        lineage={},
        versions={},
    )
    LocalHub().publish("bench/resnet50", lambda folder: write_bundle(folder, what, trunk, {}, "# bench\n"))
    plain = home / "plain.pth"
    torch.save(trunk, plain)
    return "bench/resnet50", plain


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["ZOO_HOME"] = str(home / "hub")
        os.environ["ZOO_CACHE"] = str(home / "cache")
        import torch
        from torchvision.models import resnet50

        from zoo.loading import load

        name, plain = _publish(home)

        def peer() -> None:
            model = resnet50()
            model.fc = torch.nn.Identity()
            model.load_state_dict(torch.load(plain, weights_only=True))

        cases = [
            Case(
                "load, hashes checked before (receipt)",
                ours=lambda: load(name, progress=False),
                peer=peer,
                target=TARGET_RECEIPT,
                pairs=7,
            ),
            Case(
                "load, every byte hashed",
                ours=lambda: load(name, progress=False, verify=True),
                peer=peer,
                target=TARGET_FULL,
                pairs=7,
            ),
        ]
        done = run_command([sys.executable, "-c", _MEMORY, name])
        size = plain.stat().st_size
        memory = json.loads(done.stdout) / size
        print(f"peak memory of loading: {memory:.2f} x the file's size (target: at most {TARGET_MEMORY})")
        met = measure("loading", cases, {"file_bytes": size, "peak_memory_of_file": round(memory, 3)})
    return 0 if met and memory <= TARGET_MEMORY else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"timed out: {error}") from None
