"""Features of a ResNet-50 at 224 px on a CPU, ``zoo.extract`` against plain float32 code.

    python benchmarks/features.py [--pairs 5] [--images 256] [--batch 64]

Plain is what anybody writes: torchvision's transform image by image, batches in the usual memory order, the network
in eval mode. Ours has the same pictures, which lie in memory, so that no disk and no decoder is timed. Where the
processor is fast in bfloat16 (``auto`` in ``zoo.engine.precision``), extraction takes it and has the target; elsewhere
it takes the exact way, and bfloat16 is timed to see what it would be. Either way the features are held against plain's.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":  # read when torch is first imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy as np
import torch
from PIL import Image
from runner import Case, measure
from torch import nn
from torch.nn import functional as F
from torchvision import transforms
from torchvision.models.resnet import Bottleneck

import zoo
from zoo.engine.precision import Precision, choose_precision
from zoo.extraction import _prepared
from zoo.probe.features import source_features

TARGET, COSINE = 2.5, 0.999
_SIDE = 256  # of the pictures, in pixels


class Pictures:
    """Smooth coloured pictures in memory, each drawn from its number."""

    name, classes = "made", ()

    def __init__(self, count: int) -> None:
        self._pixels = [self._made(index) for index in range(count)]

    @staticmethod
    def _made(index: int) -> np.ndarray:
        coarse = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return np.asarray(Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, index: int) -> np.ndarray:
        return self._pixels[index]

    def label(self, index: int) -> int:
        return -1

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "made", "count": len(self)}


def settled(model: Any, pictures: Pictures) -> None:
    """Make random weights as well-behaved as trained ones: BatchNorm's statistics of pictures, small branches.

    A random ResNet-50 with whole branches is chaotic: rounding its weights alone to bfloat16 leaves a cosine of
    0.993 (builtin:photos). The time doesn't depend on the values.
    """
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.constant_(module.bn3.weight, 0.25)
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # a plain average
            module.reset_running_stats()
    model.train()
    with torch.no_grad():
        model(torch.stack([model.transforms()(Image.fromarray(pictures.read(i))) for i in range(8)]))
    model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    pictures = Pictures(max(8, options.images))
    model = zoo.load("random:resnet50", progress=False)
    settled(model, pictures)
    how = model.zoo_info["preprocessing"]
    transform = transforms.Compose(
        [
            transforms.Resize(how["resize"]),
            transforms.CenterCrop(how["crop"]),
            transforms.ToTensor(),
            transforms.Normalize(how["mean"], how["std"]),
        ]
    )
    cpu = torch.device("cpu")
    auto = choose_precision("auto", cpu).name

    def plain() -> torch.Tensor:
        out = []
        with torch.no_grad():
            for start in range(0, len(pictures), options.batch):
                rows = range(start, min(start + options.batch, len(pictures)))
                out.append(model(torch.stack([transform(Image.fromarray(pictures.read(i))) for i in rows])))
        return torch.cat(out)

    def half() -> torch.Tensor:
        if auto == "bfloat16":
            return zoo.extract(model, pictures, batch_size=options.batch)["features"]
        network, mode = _prepared(model, Precision("bfloat16", cpu))
        return source_features(network, pictures, how, options.batch, mode=mode)[0]

    def exact() -> torch.Tensor:
        return zoo.extract(model, pictures, batch_size=options.batch, exact=True)["features"]

    expected = plain()
    cosines = {
        name: float(F.cosine_similarity(call(), expected).min())
        for name, call in (("bfloat16", half), ("exact", exact))
    }
    print("least cosine to plain's features: " + ", ".join(f"{k} {v:.6f}" for k, v in cosines.items()))
    close = min(cosines.values()) > COSINE
    what = f"{len(pictures)} images, batch {options.batch}"
    target = TARGET if auto == "bfloat16" else None
    if target is None:
        print("this processor isn't fast in bfloat16: auto takes the exact way, and there is no target")
    more = {"pairs": options.pairs, "warmup": 0, "amount": len(pictures), "unit": "img/s"}
    cases = [
        Case(f"bfloat16, folded: {what}", half, plain, target, **more),
        Case(f"exact: {what}", exact, plain, **more),
    ]
    facts = {"auto": auto, "least_cosine": cosines, "threads": torch.get_num_threads(), "side": how["crop"]}
    good = measure("features", cases, facts)
    return 0 if good and close else 1


if __name__ == "__main__":
    sys.exit(main())
