"""SwAV's training step, ResNet-50, 2x224 + 6x96: as a run makes it, against the same step written plainly.

    python benchmarks/swav_step.py [--batch 8] [--pairs 5] [--threads N]

Ours is the step of ``zoo pretrain --recipe swav_rn50_800ep``: session, loop, LARS and all, in bfloat16 with
channels-last, from uint8 views. Plain is float32 in torch's default memory format: torchvision's ResNet-50, the
paper's Sinkhorn and a log-softmax for each pair of views, LARS parameter by parameter, from views that are
normalised already. Each side lives in a process of its own and steps when it is told to, in turn with the
other; between the pairs this process probes the bfloat16 matrix peak. Both begin with the same weights and
views, and their first losses are compared.

Peak memory: by how much a side's resident memory grew at its peak over all its steps, counted from before
its network was built, with everything imported: weights, gradients, momentum, activations and workspaces.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runner import load_average, write_result
from swav_loss import ASSIGN, PROTOTYPES, plain_loss, resident
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50

from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.engine.efficiency import ModuleCalls, flops_of, matrix_peak
from zoo.engine.precision import choose_device, processors
from zoo.heap import keep_freed_memory
from zoo.keyed import keyed_seed
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunFolder
from zoo.pretrain.session import Session
from zoo.tensors import seeded

__all__ = ["PlainLARS", "PlainNetwork", "PlainStep", "Side", "Step", "make_views", "normalized", "our_step"]

RECIPE = "swav_rn50_800ep"
GROUPS = ((224, 2), (96, 6))  # side, views
STEP = 1000  # prototypes move, the learning rate is that of the warm-up
WARMUP = 2
TARGET = 2.7
TARGET_MEMORY = 0.65  # of the plain step's, at most

Step = Callable[[], float]


def make_views(batch: int, groups: tuple[tuple[int, int], ...] = GROUPS) -> list[torch.Tensor]:
    """Random pixels as data workers hand them over: uint8 in channels-last memory, crop-major."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(count * batch, side, side, 3) for side, count in groups]
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
        for shape in shapes
    ]


def our_step(
    batch: int,
    device: str = "cpu",
    views: list[torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: str = RECIPE,
) -> tuple[Step, Session]:
    """A function that trains on one batch as a run does and gives the loss; nothing is written."""
    given = {"device": device, "data.workers": 0, "batch_size": batch, "data.sources": ["builtin:photos"]}
    resolved = resolve(recipe, options={**given, **(options or {})})
    session = Session(resolved, choose_device(device), WorldOfOne())
    loop = session._loop(RunFolder(Path("unused")), [])
    loop.learner.train()
    loop.step = STEP
    ids = torch.arange(batch)
    made = Batch(make_views(batch) if views is None else views, ids, torch.full_like(ids, -1), epoch=0)

    def step() -> float:
        return loop._one_step(made, epoch=loop.step // loop.steps_per_epoch)[0]

    return step, session


class PlainNetwork(nn.Module):
    """Trunk, head and prototypes in the simplest words, initialised as the recipe's are."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with seeded(keyed_seed(seed, "init")):
            self.trunk = resnet50()
            self.trunk.fc = nn.Identity()
            self.head = nn.Sequential(
                nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.ReLU(inplace=True), nn.Linear(2048, 128)
            )
            self.prototypes = nn.Linear(128, PROTOTYPES, bias=False)

    @torch.no_grad()
    def normalize(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Normalised views to scores, (V * B, K)."""
        features = torch.cat([self.trunk(group) for group in views])
        return self.prototypes(F.normalize(self.head(features), dim=1))  # type: ignore[no-any-return]

    def loss(self, scores: torch.Tensor, batch: int) -> torch.Tensor:
        return plain_loss(scores, batch)


class PlainLARS(torch.optim.SGD):
    """Each gradient, its decay included, times the ratio of norms, parameter by parameter; then SGD."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.decay = 1e-6

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            p_norm, g_norm = parameter.norm(), gradient.norm()
            if p_norm != 0 and g_norm != 0:
                rate = 0.001 * p_norm / (g_norm + self.decay * p_norm + 1e-8)
                gradient.add_(parameter, alpha=self.decay).mul_(rate)
        super().step()


class PlainStep:
    """A training step in the simplest words.

    Args:
        network: has ``normalize``, ``forward`` and ``loss`` as ``PlainNetwork`` does.
        optimizer: over its parameters.
        views: normalised, where the network is.
        batch: images.
        half: what to autocast to, if to anything.
    """

    def __init__(
        self,
        network: Any,
        optimizer: torch.optim.Optimizer,
        views: list[torch.Tensor],
        batch: int,
        half: torch.dtype | None = None,
    ) -> None:
        self.network = network.train()
        self.optimizer = optimizer
        self.views = views
        self.batch = batch
        self.device = views[0].device.type
        self.half = half
        self.scaler = torch.amp.GradScaler(self.device, enabled=half is torch.float16)

    def __call__(self) -> float:
        self.network.normalize()
        with torch.autocast(self.device, dtype=self.half, enabled=self.half is not None):
            loss = self.network.loss(self.network(self.views).float(), self.batch)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def normalized(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """The recipe's normalisation, in torch's default memory format."""
    plan = resolve(RECIPE).recipe.views.plan()
    mean, std = (torch.tensor(v, device=views[0].device).view(3, 1, 1) for v in (plan.mean, plan.std))
    return [((view / 255.0 - mean) / std).contiguous() for view in views]


def _serve(side: str, batch: int) -> None:
    """Build one side and step at each line of input, answering with JSON; for a process of its own."""
    with torch.no_grad():
        nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 8, 8))  # what is loaded at first use is loaded now
    views = make_views(batch)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the high-water mark starts from here
    before = resident("VmRSS")
    about: dict[str, Any] = {}
    if side == "ours":
        keep_freed_memory()  # as a run on a CPU does
        step, session = our_step(batch, views=views)
        calls = ModuleCalls(session.method)
        about["first_loss"] = step()
        calls.stop()
        about["precision"] = session.precision.name
        about["flops"] = flops_of(calls.calls)
    else:
        network = PlainNetwork()
        step = PlainStep(network, PlainLARS(network.parameters(), lr=0.3), normalized(views), batch)
        about["first_loss"] = step()
    for _ in range(WARMUP - 1):
        step()
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        step()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        grown = resident("VmHWM") - before
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "memory": grown}), flush=True)


class Side:
    """A process that steps when it is told to: ``script --serve SIDE``, see ``_serve``."""

    def __init__(self, side: str, batch: int, threads: int, script: str = __file__) -> None:
        self._command = [sys.executable, script, "--serve", side, "--batch", str(batch)]
        self._command += ["--threads", str(threads)]

    def __enter__(self) -> Side:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]


def _measure(batch: int, pairs: int, threads: int) -> dict[str, Any]:
    rows, peaks, full_peaks = [], [], []
    with Side("ours", batch, threads) as ours, Side("plain", batch, threads) as plain:
        losses = [side.about["first_loss"] for side in (ours, plain)]
        if not math.isclose(*losses, abs_tol=0.05):
            raise RuntimeError(f"not the same step: the first losses are {losses}")
        for index in range(pairs):
            order = [("ours", ours), ("plain", plain)]
            rows.append({name: side.step() for name, side in (order if index % 2 == 0 else order[::-1])})
            peaks.append(matrix_peak(torch.device("cpu"), torch.bfloat16) or math.nan)
            full_peaks.append(matrix_peak(torch.device("cpu"), torch.float32) or math.nan)
        flops, precision = ours.about["flops"], ours.about["precision"]
    peak = median(peaks if precision == "bfloat16" else full_peaks)
    rates = {name: batch / median(row[name]["seconds"] for row in rows) for name in ("ours", "plain")}
    ratios = [row["plain"]["seconds"] / row["ours"]["seconds"] for row in rows]
    memory = {name: rows[-1][name]["memory"] for name in ("ours", "plain")}
    return {
        "precision": precision,
        "pairs": rows,
        "first_losses": losses,
        "images_per_second": rates,
        "speedup": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "speedup_by_processor_time": median(row["plain"]["cpu"] / row["ours"]["cpu"] for row in rows),
        "flops_per_image": flops / batch,
        "matrix_peaks": peaks,
        "float32_matrix_peaks": full_peaks,
        "share_of_peak": flops / batch * rates["ours"] / peak,
        "peak_memory_bytes": memory,
        "memory_of_plain": memory["ours"] / memory["plain"],
    }


def _verdict(target: float, met: bool, promised: bool) -> str:
    if not promised:
        return f"no target (that of {target} is for bfloat16)"
    return f"target {target}: {'met' if met else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="images")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs")
    parser.add_argument("--threads", type=int, default=processors(), help="of torch")
    parser.add_argument("--serve", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        logging.disable(logging.WARNING)  # the batch is smaller than the recipe's, and the recipe says so
        _serve(options.serve, options.batch)
        return 0
    load = load_average()
    found = _measure(options.batch, options.pairs, options.threads)
    rates, ratio, memory = found["images_per_second"], found["speedup"], found["peak_memory_bytes"]
    # On a processor that is no faster in bfloat16 a run computes in float32, and nothing was promised.
    promised = found["precision"] == "bfloat16"
    fast = ratio["median"] >= TARGET or not promised
    small = found["memory_of_plain"] <= TARGET_MEMORY or not promised
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"
    print(f"img/s: ours {rates['ours']:.3g}, plain {rates['plain']:.3g}, {options.threads} threads")
    print(f"computed in {found['precision']}, as a run would here")
    print(f"x as fast: {spread}, {_verdict(TARGET, fast, promised)}")
    print(f"by processor time: {found['speedup_by_processor_time']:.2f}")
    half, full = (median(found[key]) / 1e9 for key in ("matrix_peaks", "float32_matrix_peaks"))
    print(
        f"{found['flops_per_image'] / 1e9:.3g} GFLOP an image; matrix peak {half:.3g} GFLOP/s in bfloat16, "
        f"{full:.3g} in float32, reached {100 * found['share_of_peak']:.0f} %"
    )
    print(
        f"peak memory: ours {memory['ours'] / 1e9:.2f} GB, plain {memory['plain'] / 1e9:.2f} GB, "
        f"{found['memory_of_plain']:.2f} of it, {_verdict(TARGET_MEMORY, small, promised)}"
    )
    targets = {"speedup": TARGET, "memory_of_plain": TARGET_MEMORY}
    settings = {"recipe": RECIPE, "batch": options.batch, "threads": options.threads, "assign": list(ASSIGN)}
    write_result("swav_step", {"load_before": load, **settings, "targets": targets, **found})
    return 0 if fast and small else 1


if __name__ == "__main__":
    sys.exit(main())
