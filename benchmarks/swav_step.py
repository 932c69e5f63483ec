"""SwAV's training step, ResNet-50, 2x224 + 6x96: as a run makes it, against the same step written plainly.

    python benchmarks/swav_step.py [--batch 8] [--pairs 5] [--threads N]

Ours is the step of ``zoo pretrain --recipe swav_rn50_800ep``: session, loop, LARS and all, in bfloat16 with
channels-last, from uint8 views. Plain is float32 in torch's default memory format: torchvision's ResNet-50, the
paper's Sinkhorn and a log-softmax for each pair of views, LARS parameter by parameter, from views that are
normalised already. Each side lives in a process of its own and steps when it is told to, in turn with the
other; between the pairs this process probes the bfloat16 matrix peak. Both begin with the same weights and
views, and their first losses are compared.

Peak memory: see ``sides.py``. Linux only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sides import Step, arguments, compare, conclude, serve
from swav_loss import ASSIGN, PROTOTYPES, plain_loss
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50

from zoo.data.loader import Batch
from zoo.engine.collectives import WorldOfOne
from zoo.engine.efficiency import ModuleCalls, flops_of, matrix_peak
from zoo.engine.precision import choose_device
from zoo.heap import keep_freed_memory
from zoo.keyed import keyed_seed
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunFolder
from zoo.pretrain.session import Session
from zoo.tensors import seeded

__all__ = ["PlainLARS", "PlainNetwork", "PlainStep", "make_views", "normalized", "our_step"]

RECIPE = "swav_rn50_800ep"
GROUPS = ((224, 2), (96, 6))  # side, views
STEP = 1000  # prototypes move, the learning rate is that of the warm-up
WARMUP = 2
TARGETS = (2.7, 0.65)  # times as fast as the plain step, and the share of its memory, at most


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


def normalized(views: list[torch.Tensor], recipe: str = RECIPE) -> list[torch.Tensor]:
    """The recipe's normalisation, in torch's default memory format."""
    plan = resolve(recipe).recipe.views.plan()
    mean, std = (torch.tensor(v, device=views[0].device).view(3, 1, 1) for v in (plan.mean, plan.std))
    return [((view / 255.0 - mean) / std).contiguous() for view in views]


def _build(side: str, batch: int, about: dict[str, Any]) -> Step:
    views = make_views(batch)
    if side == "plain":
        network = PlainNetwork()
        return PlainStep(network, PlainLARS(network.parameters(), lr=0.3), normalized(views), batch)
    keep_freed_memory()  # as a run on a CPU does
    step, session = our_step(batch, views=views)
    calls = ModuleCalls(session.method)
    about["first_loss"] = step()
    calls.stop()
    about |= {"precision": session.precision.name, "flops": flops_of(calls.calls)}
    return step


def _measure(batch: int, pairs: int, threads: int) -> dict[str, Any]:
    peaks: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}

    def probe() -> None:
        for dtype, found in peaks.items():
            found.append(matrix_peak(torch.device("cpu"), dtype) or math.nan)

    alike = partial(math.isclose, abs_tol=0.05)
    found, about = compare(__file__, batch, threads, pairs, alike, probe)
    here = torch.bfloat16 if found["precision"] == "bfloat16" else torch.float32
    flops = about["flops"] / batch
    return {
        **found,
        "flops_per_image": flops,
        "matrix_peaks": peaks[torch.bfloat16],
        "float32_matrix_peaks": peaks[torch.float32],
        "share_of_peak": flops * found["images_per_second"]["ours"] / median(peaks[here]),
    }


def main() -> int:
    options = arguments(__doc__, batch=8, pairs=5)
    if options.serve:
        serve(partial(_build, options.serve, options.batch), WARMUP)
        return 0
    found = _measure(options.batch, options.pairs, options.threads)
    half, full = (median(found[key]) / 1e9 for key in ("matrix_peaks", "float32_matrix_peaks"))
    print(
        f"{found['flops_per_image'] / 1e9:.3g} GFLOP an image; matrix peak {half:.3g} GFLOP/s in bfloat16, "
        f"{full:.3g} in float32, reached {100 * found['share_of_peak']:.0f} %"
    )
    settings = {"recipe": RECIPE, "batch": options.batch, "threads": options.threads, "assign": list(ASSIGN)}
    # On a processor that is no faster in bfloat16 a run computes in float32, and nothing was promised.
    return conclude("swav_step", found, settings, TARGETS, promised=found["precision"] == "bfloat16")


if __name__ == "__main__":
    sys.exit(main())
