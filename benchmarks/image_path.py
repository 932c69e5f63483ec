"""From image files to normalised batches of views: ours against the reference recipe and against lightly.

    python benchmarks/image_path.py --data FOLDER [--small FOLDER] [--medium FOLDER] [--pairs 7]

FOLDER holds full-size photographs, ``--small`` images of 32 and ``--medium`` of 64 pixels (all in
sub-folders or flat). A process and a thread each, in turn over the same files: what counts are
normalised float batches in the consumer's hands. Ours keeps freed memory, as a run on a CPU and all data workers
do; peers are as their users run them (``--peers-keep-freed`` gives them the same). The reference recipe is SwAV's
multi-crop written with torchvision's transforms on Pillow images, read as ``ImageFolder`` does; lightly's is its
``SwaVTransform`` (skipped where it is not installed), set to the same crops and strengths. Beside the ratio by the
clock stands that by processor time, for machines that are not idle. Then two data workers against one, and where the
time goes. Ends with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter, features
from runner import Case, load_average, measure
from sides import Side
from torchvision import transforms as T

from transfer.datasets import SubsetImages
from zoo.data.decode import open_image
from zoo.data.folder import open_folder
from zoo.data.loader import EpochOrder, view_batches
from zoo.data.source import ImageSource
from zoo.data.views.apply import apply_view, normalize
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import ViewPlan, shrink_for
from zoo.data.views.presets import find_preset
from zoo.heap import keep_freed_memory
from zoo.keyed import keyed_key

SMALL_FILES = 1024  # of the small images' folders
WORKER_EPOCHS = 12  # passes over the files that two workers and one are timed for
PASSES = 5  # over the files, for where the time goes
WORDS = {"swav": "2x224+6x96", "small-32": "small-32", "small-64": "small-64"}
STAGES = ("read", "header", "decode", "draw", "crop+resize+flip", "colour", "blur", "normalise")


class PillowBlur:
    """SwAV's: Pillow's Gaussian blur of a random radius."""

    def __init__(self, p: float, radius: tuple[float, float]) -> None:
        self.p = p
        self.radius = radius

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.p:
            return image
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(*self.radius)))


def reference_views(plan: ViewPlan) -> Callable[[Image.Image], list[torch.Tensor]]:
    """The multi-crop of SwAV's released code with a plan's numbers."""
    colors = [
        T.RandomApply([T.ColorJitter(*plan.jitter)], p=plan.jitter_p),
        T.RandomGrayscale(p=plan.gray_p),
        *([PillowBlur(plan.blur_p, plan.blur_radius)] if plan.blur_p else []),
    ]
    finish = [T.ToTensor(), T.Normalize(mean=plan.mean, std=plan.std)]
    views = [
        T.Compose(
            [
                T.RandomResizedCrop(crop.size, scale=(crop.min_scale, crop.max_scale)),
                T.RandomHorizontalFlip(p=plan.flip_p),
                *colors,
                *finish,
            ]
        )
        for crop in plan.crops
    ]
    return lambda image: [view(image) for view in views]


def lightly_views(plan: ViewPlan) -> Callable[[Image.Image], list[torch.Tensor]]:
    """lightly's transform with a plan's numbers."""
    from lightly.transforms import SwaVTransform

    firsts = [plan.crops[0], plan.crops[-1]]
    brightness, contrast, saturation, hue = plan.jitter
    transform = SwaVTransform(
        crop_sizes=tuple(size for size, _ in plan.groups),
        crop_counts=tuple(count for _, count in plan.groups),
        crop_min_scales=tuple(crop.min_scale for crop in firsts),
        crop_max_scales=tuple(crop.max_scale for crop in firsts),
        hf_prob=plan.flip_p,
        cj_prob=plan.jitter_p,
        cj_strength=1.0,
        cj_bright=brightness,
        cj_contrast=contrast,
        cj_sat=saturation,
        cj_hue=hue,
        random_gray_scale=plan.gray_p,
        gaussian_blur=plan.blur_p,
        sigmas=plan.blur_radius,
        normalize={"mean": list(plan.mean), "std": list(plan.std)},
    )
    return lambda image: list(transform(image))


class Stopwatch:
    """Adds up the processor time between its readings, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.start()

    def start(self) -> None:
        self._at = time.process_time()

    def stop(self, stage: str) -> None:
        now = time.process_time()
        self.seconds[stage] += now - self._at
        self._at = now


@dataclass
class Files:
    """Some files of a folder, a whole number of batches, and passes over them."""

    source: ImageSource
    batch_size: int
    _epoch: int = 0

    @classmethod
    def of(cls, folder: Path, batch_size: int, most: int | None = None) -> Files:
        images = open_folder(folder)
        count = min(len(images), most or len(images)) // batch_size * batch_size
        if count == 0:
            raise SystemExit(f"{folder}: fewer images than a batch of {batch_size}")
        return cls(SubsetImages(images, np.arange(count) * len(images) // count), batch_size)

    def __len__(self) -> int:
        return len(self.source)

    def ours(
        self,
        maker: PlannedViews,
        *,
        finish: bool = True,
        workers: int = 0,
        epochs: int = 1,
        watch: Stopwatch | None = None,
    ) -> None:
        """Make and drop the batches of whole passes, each with draws of its own."""
        order = EpochOrder(len(self), self.batch_size, 0)
        first = self._epoch * order.batches
        self._epoch += epochs
        last = first + epochs * order.batches
        plan, watch = maker.plan, watch or Stopwatch()
        for batch in view_batches(
            self.source, maker, order, first_step=first, last_step=last, workers=workers
        ):
            if finish:
                watch.start()
                _ = [normalize(views, plan.mean, plan.std) for views in batch.views]
                watch.stop("normalise")

    def peer(self, transform: Callable[[Image.Image], list[torch.Tensor]]) -> None:
        """The same with a transform of a Pillow image."""
        for first in range(0, len(self), self.batch_size):
            samples = []
            for index in range(first, first + self.batch_size):
                with open(self.source.where(index), "rb") as file:
                    samples.append(transform(Image.open(file).convert("RGB")))
            _ = [torch.stack(view) for view in zip(*samples, strict=True)]


PEERS = {"reference": reference_views, "lightly": lightly_views}


def serve(options: argparse.Namespace) -> None:
    """Make a peer's batches of all files at each line of input, and answer with the processor time."""
    files = Files.of(options.data, options.batch_size, options.most)
    transform = PEERS[options.serve](find_preset(options.preset).plan)
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        files.peer(transform)
        print(json.dumps({"cpu": time.process_time() - began}), flush=True)


@dataclass(frozen=True)
class PeerCase(Case):
    """A case whose peer is a process, and whose processor time is kept too."""

    command: Sequence[str] = ()
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})

    def run(self) -> dict[str, Any]:
        def mine() -> None:
            began = time.process_time()
            self.ours()
            self.cpu["ours"].append(time.process_time() - began)

        with Side(self.command) as peer:
            result = Case.run(
                replace(self, ours=mine, peer=lambda: self.cpu["peer"].append(peer.ask()["cpu"]))
            )
        for times in self.cpu.values():
            del times[: self.warmup]
        result["cpu_seconds"] = self.cpu
        result["cpu_speedup"] = self.cpu_speedup()
        return result

    def cpu_speedup(self) -> float:
        return median(peer / ours for ours, peer in zip(self.cpu["ours"], self.cpu["peer"], strict=True))


def time_image(path: str, key: int, maker: PlannedViews, watch: Stopwatch) -> None:
    """One image's way to its views, step by step; colours and blur include the steps before them."""
    watch.start()
    data = Path(path).read_bytes()
    watch.stop("read")
    picture = open_image(data)
    watch.stop("header")
    params = maker.params(picture.height, picture.width, key)
    watch.stop("draw")
    shrink = shrink_for(params) if picture.can_shrink else 1
    pixels = picture.pixels(shrink)
    watch.stop("decode")
    sharp = [replace(view, blur_radius=None) for view in params]
    plain = [replace(view, jitter=None, gray=False) for view in sharp]
    for stage, views in (("crop+resize+flip", plain), ("colour", sharp), ("blur", params)):
        watch.start()
        for view in views:
            apply_view(pixels, view, maker.plan, shrink)
        watch.stop(stage)


def breakdown(files: Files, plan: ViewPlan) -> dict[str, Any]:
    """Microseconds of processor time an image of each step, medians over some passes.

    Colours are what views without blur take more than views without both, blur is what whole views take more
    than that. Stacking, and the loader's own work, is what a whole pass takes beyond all steps.
    """
    maker = PlannedViews(plan)
    passes = []
    for epoch in range(PASSES + 1):
        watch = Stopwatch()
        for index in range(len(files)):
            time_image(files.source.where(index), keyed_key(0, "views", epoch, index), maker, watch)
        steps = watch.seconds
        steps["blur"] = steps["blur"] - steps["colour"] if plan.blur_p else 0.0
        steps["colour"] -= steps["crop+resize+flip"]
        began = time.process_time()
        files.ours(maker, watch=watch)
        total = time.process_time() - began
        passes.append({**steps, "stack and the rest": total - sum(steps.values()), "all": total})
    del passes[0]  # the first one warms up
    stages = [*STAGES, "stack and the rest", "all"]
    micro = {stage: 1e6 * median(one[stage] for one in passes) / len(files) for stage in stages}
    floor = micro["read"] + micro["header"] + micro["decode"]
    return {"microseconds_an_image": micro, "times_the_decoding_alone": micro["all"] / floor}


def show_breakdown(name: str, found: dict[str, Any]) -> None:
    micro = found["microseconds_an_image"]
    print(f"{name}: microseconds of processor time an image")
    for stage, value in micro.items():
        print(f"  {stage:<22} {value:8.0f}  {100 * value / micro['all']:5.1f} %")
    print(f"  {found['times_the_decoding_alone']:.2f} times reading and decoding alone")


def all_cases(options: argparse.Namespace, files: Files) -> Iterator[Case]:
    def against(peer: str, target: float, preset: str, data: Path, share: bool = False) -> PeerCase:
        """Ours with a preset against a peer's; ``share``: the worker's part alone, colours left to the device."""
        most = None if data == options.data else SMALL_FILES
        few = files if most is None else Files.of(data, options.batch_size, most)
        maker = PlannedViews(find_preset(preset).plan, colors=not share)
        words = ["--data", str(data), "--batch-size", str(options.batch_size), "--preset", preset]
        words += ["--most", str(most)] if most else []
        words += ["--peers-keep-freed"] if options.peers_keep_freed else []
        name = "worker's share, colours on device" if share else WORDS[preset]
        return PeerCase(
            f"{name} / {peer}",
            ours=lambda: few.ours(maker, finish=not share),
            peer=lambda: None,
            target=target,
            pairs=options.pairs,
            amount=len(few),
            unit="img/s",
            command=[__file__, *words, "--serve", peer],
        )

    yield against("reference", 4.5, "swav", options.data)
    if importlib.util.find_spec("lightly") is None:
        print("lightly is not installed: no comparison with it (pip install lightly)")
    else:
        yield against("lightly", 4.5, "swav", options.data)
    yield against("reference", 7.0, "swav", options.data, share=True)
    for folder, preset in ((options.small, "small-32"), (options.medium, "small-64")):
        if folder is not None:
            yield against("reference", 4.0, preset, folder)
    maker = PlannedViews(find_preset("swav").plan)
    yield Case(
        "two workers / one worker",
        ours=lambda: files.ours(maker, workers=2, epochs=options.worker_epochs),
        peer=lambda: files.ours(maker, workers=1, epochs=options.worker_epochs),
        target=1.7,
        pairs=options.worker_pairs,
        amount=len(files) * options.worker_epochs,
        unit="img/s",
    )


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"libjpeg-turbo of Pillow": features.version_feature("libjpeg_turbo")}
    for name in ("lightly", "pillow", "opencv-python-headless", "simplejpeg"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="full-size photographs")
    parser.add_argument("--small", type=Path, help="32-pixel images")
    parser.add_argument("--medium", type=Path, help="64-pixel images")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--worker-pairs", type=int, default=5)
    parser.add_argument("--worker-epochs", type=int, default=WORKER_EPOCHS)
    parser.add_argument("--peers-keep-freed", action="store_true", help="for the peers, too (mallopt)")
    parser.add_argument("--serve", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--preset", default="swav", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    if not arguments.serve or arguments.peers_keep_freed:
        keep_freed_memory()
    if arguments.serve:
        serve(arguments)
        return 0
    load = load_average()
    files = Files.of(arguments.data, arguments.batch_size)
    parts = {"swav": breakdown(files, find_preset("swav").plan)}
    for folder, preset in ((arguments.small, "small-32"), (arguments.medium, "small-64")):
        if folder is not None:
            few = Files.of(folder, arguments.batch_size, SMALL_FILES)
            parts[preset] = breakdown(few, find_preset(preset).plan)
    for name, found in parts.items():
        show_breakdown(name, found)
    cases = list(all_cases(arguments, files))
    settings = {
        "files": len(files),
        "batch_size": arguments.batch_size,
        "pairs": arguments.pairs,
        "worker_pairs": arguments.worker_pairs,
        "peers_keep_freed": arguments.peers_keep_freed,
        "versions": versions(),
        "load_at_start": load,
        "where_the_time_goes": parts,
    }
    met = measure("image_path", cases, settings)
    print("the same by processor time:")
    for case in cases:
        if isinstance(case, PeerCase):
            print(f"  {case.name:<46} {case.cpu_speedup():6.2f}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
