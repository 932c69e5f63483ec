"""Peak memory of ``zoo convert``: a wide ResNet-50 with its heads (94 million parameters in the trunk).

    python benchmarks/convert.py

A file as SwAV's are published (``swav_RN50w2``: 516 MB, random values) is made in a temporary folder, as
torch wrote files when these were published (``legacy``) and as it does now (``zip``). Each conversion runs in
a process of its own, which has converted a tiny file first, so that what is imported late isn't counted. The
figure is how far the resident memory rises above where it was, pages of the file that is read included, as
a part of the file's size. Linux only.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import load_average, run_command, write_result

TARGET = 2.5  # of the file's size, at most
CASES = {"legacy": ("bundle", "torchvision", "detectron2", "transformers"), "zip": ("bundle",)}
SUFFIXES = {"torchvision": ".pth", "detectron2": ".pkl"}

_CHILD = """
import json, sys
from zoo.conversion import convert

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

tiny, file, layout, first, out = sys.argv[1:]
convert(tiny, to=layout, out=first, progress=False)
with open("/proc/self/clear_refs", "w") as handle:
    handle.write("5")                                 # the high-water mark starts from here
before = resident("VmRSS")
done = convert(file, to=layout, out=out, progress=False)
assert done.account.matched == 318
print(json.dumps(resident("VmHWM") - before))
"""


def _save(path: Path, planes: int, hidden: int, legacy: bool) -> None:
    import torch

    from zoo.models.factory import create_trunk
    from zoo.models.heads import projection_head

    trunk = create_trunk("resnet50", base_planes=planes).state_dict()
    for name, tensor in trunk.items():
        if name.endswith("running_mean"):
            tensor.normal_(0.0, 0.1)
    head = projection_head(32 * planes, hidden, 128).state_dict()
    state = {f"module.{name}": tensor for name, tensor in trunk.items()}
    state |= {f"module.projection_head.{name}": tensor for name, tensor in head.items()}
    state["module.prototypes.weight"] = torch.randn(3000, 128)
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)


def _measure(tiny: Path, file: Path, layout: str, home: Path) -> int:
    """Bytes by which a fresh process grows while it converts the file."""
    env = {"ZOO_HOME": str(home / "home"), "ZOO_CACHE": str(home / "cache")}
    with tempfile.TemporaryDirectory(dir=home) as place:
        outs = [str(Path(place, name + SUFFIXES.get(layout, ""))) for name in ("first", "second")]
        command = [sys.executable, "-c", _CHILD, str(tiny), str(file), layout, *outs]
        return int(json.loads(run_command(command, env=env).stdout))


def main() -> int:
    load = load_average()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tiny = home / "tiny.pth"
        _save(tiny, 16, 64, legacy=False)
        for container, layouts in CASES.items():
            file = home / "swav_RN50w2.pth.tar"
            _save(file, 128, 8192, legacy=container == "legacy")
            size = file.stat().st_size
            for layout in layouts:
                peak = _measure(tiny, file, layout, home)
                share = round(peak / size, 3)
                rows.append({"container": container, "layout": layout, "bytes": size, "peak_of_file": share})
                verdict = "met" if share < TARGET else "MISSED"
                print(
                    f"{container:<7} to {layout:<13} {peak / 1e6:6.0f} MB, {share:.2f} x the file  {verdict}",
                    flush=True,
                )
    met = all(row["peak_of_file"] < TARGET for row in rows)
    write_result("convert", {"load_before": load, "target": TARGET, "met": met, "cases": rows})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
