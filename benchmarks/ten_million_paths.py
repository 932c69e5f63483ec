"""What ten million image paths cost, in memory over all processes, and how fast a folder is opened.

    python benchmarks/ten_million_paths.py [--paths 10000000] [--files 200000] [--workers 8]

Memory: made-up paths like ImageNet's (1,000 classes, about 45 bytes each) go through the code that packs
those of a real folder. Then 8 forked processes touch 100,000 random paths and labels each, as data workers
do, while the parent holds the order of an epoch. Counted are the proportional set sizes (a page shared by
n processes counts 1/n in each) of all nine, and the peak of the parent while it packs and while it makes
the order. What such processes take without any paths (Python and torch) is measured first: the difference
is what the paths cost. It is taken of anonymous memory: the pages of library files are shared with whatever
else runs on the machine. Ends with 1 if it reaches 1.5 GB anywhere. Linux only.

Speed: a real folder of empty files, against torchvision's ImageFolder; and the memory while it is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runner import Case, measure, run_command
from torchvision.datasets import ImageFolder

from zoo.data.folder import FileImages, _label, _pack, open_folder
from zoo.data.loader import EpochOrder

TARGET = 1.5  # GB over all processes, beyond what they take without paths
CLASSES = 1000
TOUCHED = 100_000
BATCH = 256

_OPENING = """
import json, sys
from pathlib import Path
from zoo.data.folder import open_folder

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

open_folder(Path(sys.argv[1]))      # all code has run once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")                 # the high-water mark starts from here
before = resident("VmRSS")
source = open_folder(Path(sys.argv[2]))
peak = (resident("VmHWM") - before) / len(source)
text = sum(len(source.where(index)) - len(sys.argv[2]) - 1 for index in range(len(source))) / len(source)
print(json.dumps({"files": len(source), "text_bytes_a_path": text, "peak_bytes_a_path": peak}))
"""


def _made_up(count: int) -> Iterator[bytes]:
    """Sorted relative paths, 45 bytes each: ``n01440764/train_n01440764_00000012_large.JPEG``."""
    for kind in range(CLASSES):
        synset = b"n%08d" % (1_440_764 + 11_003 * kind)
        for number in range(kind * count // CLASSES, (kind + 1) * count // CLASSES):
            yield b"%s/train_%s_%08d_large.JPEG" % (synset, synset, number)


def _source(count: int) -> FileImages:
    root = Path("/data")
    paths, runs = _pack(_made_up(count))
    classes, labels = _label(runs, None, root)
    return FileImages("made up", root, paths, labels, classes)


def _kilobytes(file: str, field: str) -> int:
    with open(file, encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _proportional(pids: list[int]) -> dict[str, float]:
    """GB of several processes, all and anonymous; what they share counts once."""
    return {
        name: sum(_kilobytes(f"/proc/{pid}/smaps_rollup", field) for pid in pids) * 1024 / 1e9
        for name, field in (("all", "Pss:"), ("anonymous", "Pss_Anon:"))
    }


def _peak(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What a call returns, its time, and the GB resident in this process before and at its peak."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark starts from here
    before = _kilobytes("/proc/self/status", "VmRSS")
    began = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - began
    peak = _kilobytes("/proc/self/status", "VmHWM")
    return value, {"before": before * 1024 / 1e9, "peak": peak * 1024 / 1e9, "seconds": seconds}


def _with_children(workers: int, work: Callable[[int], object], during: Callable[[], Any]) -> Any:
    """Fork processes that work and stay; call ``during``; returns its value and GB before and after it."""
    ready_out, ready_in = os.pipe()
    stay_out, stay_in = os.pipe()
    pids = []
    for number in range(workers):
        pid = os.fork()
        if pid == 0:
            os.close(stay_in)
            try:
                work(number)
                os.write(ready_in, b"+")
                os.read(stay_out, 1)  # returns when the parent closes its end
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(ready_in)
    for _ in pids:
        if os.read(ready_out, 1) != b"+":
            raise RuntimeError("a child failed")
    before = _proportional([os.getpid(), *pids])
    value = during()
    after = _proportional([os.getpid(), *pids])
    for end in (stay_in, stay_out, ready_out):
        os.close(end)
    for pid in pids:
        os.waitpid(pid, 0)
    return value, before, after


def _memory(count: int, workers: int) -> dict[str, Any]:
    _, bare, _ = _with_children(workers, lambda number: None, lambda: None)
    source, packing = _peak(lambda: _source(count))

    def touch(number: int) -> None:
        draw = random.Random(number)
        for _ in range(TOUCHED):
            index = draw.randrange(len(source))
            kind = source.classes[source.label(index)]
            if f"/{kind}/" not in source.where(index):
                raise RuntimeError(f"path and label {index} don't belong together")

    def order() -> tuple[Any, dict[str, float]]:
        return _peak(lambda: EpochOrder(count, BATCH, 0).epoch(0))

    (_order, ordering), reading, training = _with_children(workers, touch, order)
    making = ordering["peak"] - ordering["before"]
    paths = {
        "parent while packing": packing["peak"] - packing["before"],
        "reading": reading["anonymous"] - bare["anonymous"],
        "reading, order held": training["anonymous"] - bare["anonymous"],
        "reading, order being made": reading["anonymous"] - bare["anonymous"] + making,
    }
    everything = {
        "parent while packing": packing["peak"],
        "reading": reading["all"],
        "reading, order held": training["all"],
        "reading, order being made": reading["all"] + making,
    }
    return {
        "text_bytes_a_path": sum(map(len, _made_up(count))) / count,
        "packed_bytes_a_path": paths["reading"] * 1e9 / count,
        "packing_seconds": packing["seconds"],
        "ordering_seconds": ordering["seconds"],
        "no_paths_gb": bare,
        "paths_gb": paths,
        "everything_gb": everything,
    }


def _files(root: Path, count: int, classes: int) -> Path:
    for kind in range(classes):
        folder = root / f"n{1_440_764 + 11_003 * kind:08d}"
        folder.mkdir(parents=True)
        for number in range(kind * count // classes, (kind + 1) * count // classes):
            (folder / f"train_{folder.name}_{number:08d}_large.jpg").touch()
    return root


def _opening(root: Path, warm: Path) -> dict[str, Any]:
    """Memory while a real folder is opened by a process of its own."""
    return json.loads(run_command([sys.executable, "-c", _OPENING, str(warm), str(root)]).stdout)


def _show(paths: int, workers: int, memory: dict[str, Any]) -> None:
    print(f"{paths:,} paths of {memory['text_bytes_a_path']:.1f} bytes; 1 + {workers} processes, GB")
    print(f"{'':<44} {'paths':>8} {'with all':>8} {'target':>8}")
    print(f"{'no paths':<44} {0:8.3f} {memory['no_paths_gb']['all']:8.3f}")
    for name, amount in memory["paths_gb"].items():
        verdict = "met" if amount < TARGET else "MISSED"
        print(f"{name:<44} {amount:8.3f} {memory['everything_gb'][name]:8.3f} {TARGET:8g} {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--paths", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    memory = _memory(arguments.paths, arguments.workers)
    _show(arguments.paths, arguments.workers, memory)
    with tempfile.TemporaryDirectory() as folder:
        root = _files(Path(folder) / "nested", arguments.files, CLASSES)
        flat = _files(Path(folder) / "flat", arguments.files, 1)
        warm = _files(Path(folder) / "warm", 1, 1)
        opening = {place.name: _opening(place, warm) for place in (root, flat)}
        for name, found in opening.items():
            peak, text = found["peak_bytes_a_path"], found["text_bytes_a_path"]
            print(f"{name + ' folder, peak while it is opened':<44} {peak:6.1f} bytes a path of {text:.0f}")
        case = Case(
            f"open a folder of {arguments.files:,} / ImageFolder",
            ours=lambda: open_folder(root),
            peer=lambda: ImageFolder(root),
            amount=arguments.files,
            unit="files/s",
        )
        settings = {"paths": arguments.paths, "workers": arguments.workers, "target_gb": TARGET}
        measure("ten_million_paths", [case], {**settings, "memory": memory, "opening": opening})
    return 0 if all(amount < TARGET for amount in memory["paths_gb"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
