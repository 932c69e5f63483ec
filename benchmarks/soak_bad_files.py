"""Many epochs over a folder with damaged files: every one reported exactly, and nothing grows.

    python benchmarks/soak_bad_files.py [--minutes 30] [--seed 0]

A temporary folder of 400 made-up photographs in many formats, of which 20 (5 %) are damaged in ten ways, is
read by two data workers with ``skip_bad``. Of every batch, the samples delivered and the samples reported
are compared with what the keys say: each damaged image that the epoch's order wants is reported once, and so
is each damaged image that a draw for a substitute hits. Meanwhile the memory of all three processes, file
handles and entries in ``/dev/shm`` are sampled. Memory is what is resident and no file (``Anonymous``; a
fork's pages count in each process); the proportional set size of all together is shown beside it, which
also rises as forks write to pages that they shared. Ends with 1 if

- a batch differs from the expectation, or a damaged image is not met exactly once an epoch by the order;
- a process's memory grows: a line through the samples (median of all pairwise slopes) after the first fifth
  of the time may rise by 16 MB at most over the rest of it (100 bytes lost with each image would be several
  times that in half an hour; Python's table of strings may double meanwhile);
- the largest number of file handles of a process in the last third of the time is more than 8 above that in
  the third before it, or this process does not come back to what it had before;
- a worker, or an entry of ours in ``/dev/shm``, is left at the end.

Linux only.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from runner import load_average, write_result

from zoo.data.check import check_images
from zoo.data.folder import open_folder
from zoo.data.loader import Batch, EpochOrder, view_batches
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.keyed import keyed_key, keyed_uniforms

IMAGES, DAMAGED = 400, 20
BATCH, WORKERS = 20, 2
PLAN = ViewPlan((CropSpec(32, 0.3, 1.0),) * 2 + (CropSpec(16, 0.1, 0.3),) * 2)
GROWTH = 16.0  # MB that a process may gain after the first fifth of the time
HANDLES = 8
SAMPLES = 240  # of memory and handles, over the whole time


def photograph(dice: np.random.Generator) -> Image.Image:
    """Smooth colours with some grain."""
    height, width = (int(side) for side in dice.integers(60, 200, 2))
    coarse = Image.fromarray(dice.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = dice.integers(-8, 9, smooth.shape, dtype=np.int16)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str) -> tuple[bytes, str]:
    """(bytes, ending) of an image in one of ``KINDS``."""
    form, _, variant = kind.partition(" ")
    options: dict[str, Any] = {}
    if variant in ("L", "CMYK", "RGBA", "P", "1"):
        image = image.convert(variant)
    elif variant == "16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif variant == "turned":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    elif variant == "progressive":
        options["progressive"] = True
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue(), "jpg" if form == "JPEG" else form.lower()


KINDS = (
    *("JPEG", "JPEG L", "JPEG CMYK", "JPEG turned", "JPEG progressive"),
    *("PNG", "PNG L", "PNG RGBA", "PNG P", "PNG 16", "PNG 1"),
    *("WEBP", "GIF P", "TIFF", "BMP"),
)
HARMS = (
    "JPEG cut off",
    "JPEG's header only",
    "PNG cut off",
    "PNG with a wrong byte",
    "WEBP cut off",
    "garbage",
    "zeros",
    "nothing",
    "a web page",
    "gone",
)


def harm(path: Path, how: str, image: Image.Image, dice: np.random.Generator) -> None:
    """Write a damaged file (the endings are those of pictures, whatever is inside)."""
    form = how.partition(" ")[0].removesuffix("'s")
    whole = encoded(image, form)[0] if form in ("JPEG", "PNG", "WEBP") else b""
    if how.endswith("cut off"):
        path.write_bytes(whole[: len(whole) // 2])
    elif how.endswith("header only"):
        path.write_bytes(whole[:100])
    elif how.endswith("wrong byte"):
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    elif how == "garbage":
        path.write_bytes(dice.bytes(3000))
    elif how == "zeros":
        path.write_bytes(bytes(3000))
    elif how == "nothing":
        path.touch()
    elif how == "a web page":
        path.write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>", "utf-8")
    else:
        path.symlink_to("nowhere.jpg")


def make_folder(folder: Path, seed: int) -> set[str]:
    """Fill a folder; returns the names of the damaged files."""
    dice = np.random.default_rng(seed)
    broken = set(dice.choice(IMAGES, DAMAGED, replace=False).tolist())
    harms = itertools.cycle(HARMS)
    names = set()
    for number, kind in zip(range(IMAGES), itertools.cycle(KINDS)):
        image = photograph(dice)
        if number in broken:
            path = folder / f"{number:03d}.jpg"
            harm(path, next(harms), image, dice)
            names.add(path.name)
        else:
            data, ending = encoded(image, kind)
            (folder / f"{number:03d}.{ending}").write_bytes(data)
    return names


class Expectation:
    """What the keys say about each batch, and a count of what was met."""

    def __init__(self, order: EpochOrder, damaged: set[int]) -> None:
        self.order = order
        self.damaged = damaged
        self.problems: list[str] = []
        self.reports = self.substitute_hits = 0
        self._met: Counter[int] = Counter()

    def check(self, step: int, batch: Batch) -> None:
        epoch, position = divmod(step, self.order.batches)
        ids, bad = [], []
        for wanted in self.order.epoch(epoch)[position].tolist():
            sample, attempt = wanted, 0
            self._met[wanted] += wanted in self.damaged
            while sample in self.damaged:
                bad.append(sample)
                self.substitute_hits += attempt > 0
                draw = keyed_uniforms(keyed_key(self.order.seed, "substitute", epoch, wanted, attempt), 1)[0]
                sample, attempt = int(draw * self.order.samples), attempt + 1
            ids.append(sample)
        self.reports += len(bad)
        if batch.epoch != epoch or batch.ids.tolist() != ids or [left.sample for left in batch.bad] != bad:
            self.problems.append(f"step {step}: {[left.sample for left in batch.bad]} instead of {bad}")
        if position == self.order.batches - 1:
            if any(self._met[sample] != 1 for sample in self.damaged):
                self.problems.append(f"epoch {epoch}: met {dict(self._met)}")
            self._met.clear()


def memory(pid: int) -> tuple[float, float]:
    """(resident, proportional) MB of what is no file; the latter counts a page of n processes 1/n."""
    found: dict[str, float] = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        for name, value, *_ in map(str.split, itertools.islice(lines, 1, None)):
            found[name.rstrip(":")] = int(value) / 1024
    return found["Anonymous"], found["Pss_Anon"] + found["Pss_Shmem"]


def handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def entries(pids: list[int]) -> list[str]:
    """torch's files in shared memory that belong to these processes."""
    return [name for name in os.listdir("/dev/shm") if any(f"torch_{pid}_" in name for pid in pids)]


def slope(times: list[float], values: list[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs."""
    pairs = itertools.combinations(zip(times, values, strict=True), 2)
    return median((b - a) / (t - s) for (s, a), (t, b) in pairs)


def judge(samples: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Growth of memory and of handles, by process."""
    calm = [one for one in samples if one["seconds"] >= seconds / 5]
    out: dict[str, Any] = {}
    for place, name in enumerate(("parent", *(f"worker {n}" for n in range(WORKERS)))):
        resident = [one["megabytes"][place] for one in calm]
        rise = slope([one["seconds"] for one in calm], resident) * (seconds * 4 / 5)
        most = [
            max(one["handles"][place] for one in samples if low <= one["seconds"] / seconds <= high)
            for low, high in ((1 / 3, 2 / 3), (2 / 3, 1.1))
        ]
        out[name] = {
            "megabytes": {"median": round(median(resident), 1), "largest": round(max(resident), 1)},
            "rise_megabytes": round(rise, 2),
            "handles": {"middle third": most[0], "last third": most[1]},
            "met": rise <= GROWTH and most[1] <= most[0] + HANDLES,
        }
    return out


def soak(folder: Path, damaged_names: set[str], minutes: float, seed: int) -> dict[str, Any]:
    source = open_folder(folder)
    damaged = {index for index in range(len(source)) if Path(source.where(index)).name in damaged_names}
    found = {bad["sample"] for bad in check_images(source, workers=0).bad}
    if len(source) != IMAGES or found != damaged or len(damaged) != DAMAGED:
        raise SystemExit(f"the folder is not as planned: {sorted(found ^ damaged)} differ")
    order = EpochOrder(IMAGES, BATCH, seed)
    expectation = Expectation(order, damaged)
    gc.collect()
    handles_before = handles(os.getpid())
    batches = view_batches(
        source,
        PlannedViews(PLAN),
        order,
        first_step=0,
        last_step=10**12,
        workers=WORKERS,
        skip_bad=True,
    )
    samples: list[dict[str, Any]] = []
    pids: list[int] = []
    began = time.monotonic()
    end, every = 60 * minutes, max(1.0, 60 * minutes / SAMPLES)
    for step in itertools.count():
        expectation.check(step, next(batches))
        now = time.monotonic() - began
        if not pids:
            workers = [process.pid for process in multiprocessing.active_children()]
            pids = [os.getpid(), *(pid for pid in workers if pid is not None)]
        if now >= every * len(samples):
            amounts = [memory(pid) for pid in pids]
            samples.append(
                {
                    "seconds": round(now, 2),
                    "megabytes": [round(resident, 2) for resident, _ in amounts],
                    "proportional_megabytes": round(sum(share for _, share in amounts), 2),
                    "handles": [handles(pid) for pid in pids],
                    "shared_memory_entries": len(entries(pids)),
                }
            )
        if now >= end and (step + 1) % order.batches == 0:
            break
    seconds = time.monotonic() - began
    batches.close()  # type: ignore[attr-defined]
    gc.collect()
    return {
        "steps": step + 1,
        "epochs": (step + 1) // order.batches,
        "seconds": round(seconds, 1),
        "images_a_second": round((step + 1) * BATCH / seconds, 1),
        "reports": expectation.reports,
        "reports_of_substitutes": expectation.substitute_hits,
        "differences": expectation.problems,
        "processes": judge(samples, seconds),
        "handles_before_and_after": [handles_before, handles(os.getpid())],
        "workers_left": [process.pid for process in multiprocessing.active_children()],
        "shared_memory_entries_left": entries(pids),
        "samples": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.minutes < 0.25:
        parser.error("--minutes: at least 0.25, for enough samples")
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        damaged = make_folder(Path(folder), arguments.seed)
        result = soak(Path(folder), damaged, arguments.minutes, arguments.seed)
    before, after = result["handles_before_and_after"]
    first, *_, last = (one["proportional_megabytes"] for one in result["samples"])
    tidy = not result["workers_left"] and not result["shared_memory_entries_left"] and after <= before
    met = tidy and not result["differences"] and all(one["met"] for one in result["processes"].values())
    settings = {
        "images": IMAGES,
        "damaged": DAMAGED,
        "batch_size": BATCH,
        "workers": WORKERS,
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "growth_allowed_megabytes": GROWTH,
    }
    write_result("soak_bad_files", {"load_before": load, "settings": settings, **result, "met": met})
    print(
        f"{result['epochs']} epochs ({result['images_a_second']} images/s): {result['reports']} reports, of these "
        f"{result['reports_of_substitutes']} of substitutes; {len(result['differences'])} batches differ"
    )
    for difference in result["differences"][:10]:
        print(f"DIFFERENT: {difference}")
    for name, one in result["processes"].items():
        print(
            f"{name:<10} {one['megabytes']['median']:7.1f} MB, rise {one['rise_megabytes']:+.2f} MB (allowed "
            f"{GROWTH:g}), handles {one['handles']['middle third']} then {one['handles']['last third']} "
            f"{'met' if one['met'] else 'MISSED'}"
        )
    print(f"all together, what is shared counted once: {first:.1f} MB at the start, {last:.1f} MB at the end")
    left = f"{len(result['workers_left'])} workers, {len(result['shared_memory_entries_left'])} entries left"
    print(f"handles before and after: {before}, {after}; {left}: {'met' if tidy else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
