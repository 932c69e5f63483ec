"""Images from tar shards: against the same images in a folder, and against the webdataset package's reader.

    python benchmarks/shards.py [--images 4000] [--samples 100000000] [--only-index]

Speed: JPEGs of 256 x 256 pixels, cut from scikit-image's photographs, lie in a folder and in shards that
`zoo data shard` makes of it, all in the page cache. Ours reads them in the order of an epoch (shuffled in
windows of shards) and decodes each. Peers: the same code on the folder in its shuffled order; and
webdataset's reader with its shuffling, whose bytes are decoded by the same function. One process each. The
rows "not decoded" end with the JPEG's header.

Index: made-up shards of 10,000 samples each (sparse files) with a real index go through the code that opens
any set. Told are the time to open it, what the process then holds (its own memory, and with all of the mapped
index touched), and the time from nothing to the first batch of the step where ten million samples are done:
the images of that batch are really in the files. Ends with 1 if a target is missed. Linux only.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from runner import Case, measure, run_command

from zoo.data.builtin import _FILES, _data_folder
from zoo.data.decode import decode_image, open_image
from zoo.data.folder import open_folder
from zoo.data.open import open_source
from zoo.data.shards.index import _COLUMNS, _TYPES, INDEX, ShardIndex
from zoo.data.shards.order import order_of
from zoo.data.shards.write import _header, write_shards
from zoo.data.source import ImageSource

TARGET_SPEED = 1.0
TARGET_INDEX_GB, TARGET_OPEN, TARGET_RESUME = 1.0, 30.0, 2.0
SIDE, SEED, BATCH = 256, 0, 256
PER_SHARD, SLOT = 10_000, 4  # of a made-up shard: samples, and blocks that each has
RESUMED = 10_000_000

_OPENING = """
import json, sys, time
import numpy as np
from zoo.data.open import open_source
from zoo.data.shards.order import order_of
from zoo.data.loader import view_batches
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan

def memory(field):
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024 / 1e9

pattern, batch, seed, step = sys.argv[1], *map(int, sys.argv[2:])
before = {field: memory(field) for field in ("Rss:", "Pss_Anon:")}
began = time.perf_counter()
source = open_source(pattern)
opened = time.perf_counter()
order = order_of(source, batch, seed)
maker = PlannedViews(ViewPlan((CropSpec(8, 0.5, 1.0),)))
first = next(view_batches(source, maker, order, first_step=step, last_step=step + 1, workers=0))
resumed = time.perf_counter()
own = memory("Pss_Anon:") - before["Pss_Anon:"]
touched = int(source._index.starts.sum(dtype=np.int64)) + int(source._index.labels.sum(dtype=np.int64))
print(json.dumps({
    "samples": len(source), "open_seconds": opened - began, "first_batch_seconds": resumed - began,
    "ids": first.ids.tolist()[:5], "own_gb": own, "all_gb": memory("Rss:") - before["Rss:"],
}))
"""


def _pictures(folder: Path, count: int) -> Path:
    """JPEGs that are cut out of photographs, in ten folders."""
    photos = [np.asarray(Image.open(_data_folder() / name).convert("RGB")) for name in _FILES]
    photos = [photo for photo in photos if min(photo.shape[:2]) > SIDE]
    draw = np.random.default_rng(0)
    for number in range(count):
        photo = photos[number % len(photos)]
        top, left = (int(draw.integers(0, side - SIDE)) for side in photo.shape[:2])
        path = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo[top : top + SIDE, left : left + SIDE]).save(path, quality=90)
    return folder


def _epoch(source: ImageSource, decode: bool) -> Callable[[], None]:
    """Reads an epoch of a source; another one at each call."""
    numbers = iter(range(10**6))
    order = order_of(source, BATCH, SEED)

    def run() -> None:
        for row in order.rows(next(numbers), 0, order.batches):
            for sample in row.tolist():
                picture = source.open(sample)  # type: ignore[attr-defined]
                if decode:
                    picture.pixels()

    return run


def _webdataset(shards: Path, count: int, decode: bool) -> Callable[[], None]:
    import webdataset

    urls = sorted(map(str, shards.glob("*.tar")))

    def run() -> None:
        found = webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000)
        for number, sample in enumerate(found, 1):
            int(sample["cls"])
            decode_image(sample["jpg"]) if decode else open_image(sample["jpg"])
            if number == count:
                return

    return run


def _cases(home: Path, count: int) -> list[Case]:
    folder = _pictures(home / "folder", count)
    write_shards(open_folder(folder), home / "shards", size=8_000_000)
    files, shards = open_source(str(folder)), open_source(str(home / "shards"))
    used = count // BATCH * BATCH
    print(f"{count} JPEGs, {len(list((home / 'shards').glob('*.tar')))} shards")
    cases = []
    for decode, what in ((True, "decoded"), (False, "not decoded")):
        ours = _epoch(shards, decode)
        target = TARGET_SPEED if decode else None
        shared: dict[str, Any] = {"target": target, "pairs": 7, "amount": used, "unit": "img/s"}
        cases.append(Case(f"shards / folder, {what}", ours, _epoch(files, decode), **shared))
        cases.append(
            Case(f"shards / webdataset, {what}", ours, _webdataset(home / "shards", used, decode), **shared)
        )
    return cases


def _made_up(home: Path, samples: int) -> str:
    """Sparse shards with an index; the images of one batch are in them. Returns their pattern."""
    shards = samples // PER_SHARD
    size = PER_SHARD * SLOT * 512 + 1024
    home.mkdir()
    names = [f"{shard:05d}.tar" for shard in range(shards)]
    for name in names:
        with open(home / name, "wb") as file:
            file.truncate(size)
    values = {"sizes": size, "changed": 0, "counts": PER_SHARD, "unlabelled": 0, "digests": 1}
    columns = {key: np.full(shards, values[key], _TYPES[kind]) for key, kind in _COLUMNS.items()}
    starts = np.tile(np.arange(PER_SHARD, dtype=np.uint32) * SLOT, shards)
    labels = np.tile(np.arange(PER_SHARD, dtype=np.int32) % 1000, shards)
    classes = tuple(f"class{number}" for number in range(1000))
    ShardIndex(names, columns, starts, labels, classes, named=True).save(home / INDEX)
    pattern = f"{home}/{{00000..{shards - 1:05d}}}.tar"
    (row,) = order_of(open_source(pattern), BATCH, SEED).rows(0, _step(samples), _step(samples) + 1)
    out = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(out, "PNG")
    content = _header("a.png", len(out.getvalue())) + out.getvalue()
    for sample in row.tolist():
        with open(home / names[sample // PER_SHARD], "r+b") as file:
            file.seek(sample % PER_SHARD * SLOT * 512)
            file.write(content)
    return pattern


def _step(samples: int) -> int:
    return min(RESUMED, samples // 2) // BATCH


def _index(home: Path, samples: int) -> dict[str, Any]:
    pattern = _made_up(home, samples)
    words = [pattern, str(BATCH), str(SEED), str(_step(samples))]
    # The first run pays for bringing Python's modules and the index into the page cache.
    found = [json.loads(run_command([sys.executable, "-c", _OPENING, *words]).stdout) for _ in range(3)][-1]
    found["index_file_gb"] = (home / INDEX).stat().st_size / 1e9
    found["resumed_at_sample"] = _step(samples) * BATCH
    return found


def _show(found: dict[str, Any]) -> bool:
    rows = [
        ("memory, with all of the index touched", found["all_gb"], TARGET_INDEX_GB, "GB"),
        ("of it the process's own", found["own_gb"], None, "GB"),
        ("opening", found["open_seconds"], TARGET_OPEN, "s"),
        (
            f"opening, and the batch at sample {found['resumed_at_sample']:,}",
            found["first_batch_seconds"],
            TARGET_RESUME,
            "s",
        ),
    ]
    print(f"an index of {found['samples']:,} samples ({found['index_file_gb']:.2f} GB)")
    for name, value, target, unit in rows:
        verdict = "" if target is None else f"at most {target:g} {'met' if value < target else 'MISSED'}"
        print(f"{name:<60} {value:8.3f} {unit}  {verdict}".rstrip())
    return all(target is None or value < target for _, value, target, _ in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=4_000)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--only-index", action="store_true", help="no comparison of speeds, no result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["ZOO_CACHE"] = str(home / "cache")
        index = _index(home / "made-up", arguments.samples)
        met = _show(index)
        if arguments.only_index:
            print(json.dumps(index))
            return 0 if met else 1
        began = time.perf_counter()
        cases = _cases(home, arguments.images)
        settings = {"images": arguments.images, "side": SIDE, "prepared_seconds": time.perf_counter() - began}
        met = measure("shards", cases, {**settings, "index": index}) and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
