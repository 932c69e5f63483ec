"""A small set, a network without norms, and the loop's calls written out: for the tests of methods with a bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo.data.loader import Batch, EpochOrder
from zoo.engine.collectives import Collectives, WorldOfOne
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.methods.deepcluster_v2 import BankMethod, DeepClusterV2
from zoo.pretrain.methods.deepcluster_v2_config import DeepClusterV2Config
from zoo.pretrain.methods.sela_v2 import SeLaV2
from zoo.pretrain.methods.sela_v2_config import SeLaV2Config

SAMPLES, BATCH, STEPS, VIEWS = 27, 8, 3, 3  # three images of an epoch are left out
KINDS = ["deepcluster", "hard", "soft"]


class PlainTrunk(nn.Module):
    """Rows know nothing of one another, unless there is a norm; views may be of any size."""

    num_features = 6

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.bn = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.bn(self.linear(x.mean(dim=(2, 3)))))


def shape_of(world_size: int = 1, **sizes: Any) -> RunShape:
    given = {
        "views": VIEWS,
        "batch_size": BATCH,
        "world_size": world_size,
        "steps_per_epoch": STEPS,
        "epochs": 4,
        "samples": SAMPLES,
    }
    return RunShape(**{**given, **sizes})


def method_of(kind: str, world: Collectives | None = None, norm: bool = False, **settings: Any) -> BankMethod:
    """``deepcluster``, or SeLa-v2 with ``hard`` or ``soft`` codes; always the same weights."""
    torch.manual_seed(0)
    world = world or WorldOfOne()
    given = {"prototypes": (5, 4, 3), "hidden": 0, "dim": 4, **settings}
    shape = shape_of(world.world_size)
    if kind == "deepcluster":
        return DeepClusterV2(PlainTrunk(norm), DeepClusterV2Config(**given), shape, world).double()
    return SeLaV2(PlainTrunk(norm), SeLaV2Config(codes=kind, **given), shape, world).double()


def epoch_batches(epoch: int, world: Collectives | None = None) -> list[Batch]:
    """This process's batches of an epoch: two views of 3 x 3 pixels and a small one."""
    world = world or WorldOfOne()
    order = EpochOrder(SAMPLES, BATCH, 0, world.rank, world.world_size)
    out = []
    for ids in order.epoch(epoch):
        views = []
        for count, side in ((2, 3), (1, 2)):
            images = []
            for sample in ids:
                generator = torch.Generator().manual_seed(1000 * epoch + int(sample))
                base = torch.randn(
                    3, 1, 1, generator=torch.Generator().manual_seed(int(sample)), dtype=torch.float64
                )
                noise = torch.randn(count, 3, side, side, generator=generator, dtype=torch.float64)
                images.append(base + 0.3 * noise)
            views.append(torch.stack(images, dim=1).flatten(0, 1))
        out.append(Batch(views, torch.from_numpy(ids), torch.full((len(ids),), -1), epoch))
    return out


def begin(method: BankMethod, epoch: int, world: Collectives | None = None, parts: int = 1) -> None:
    """The start of an epoch as the loop makes it."""

    def batches() -> Iterator[tuple[list[torch.Tensor], Batch]]:
        for batch in epoch_batches(epoch, world):
            for part in [batch] if parts == 1 else batch.split(parts):
                yield part.views, part

    with torch.no_grad():
        method.on_epoch_start(epoch, batches)


def one_step(
    method: BankMethod,
    batch: Batch,
    step: int,
    parts: int = 1,
    before_update: Callable[[], None] = lambda: None,
    rate: float = 0.1,
) -> float:
    """A step as the loop makes it, with plain gradient descent; the loss of this process."""
    method.zero_grad()
    method.before_step(step, step // STEPS)
    shares = [batch] if parts == 1 else batch.split(parts)
    given: list[Any] = [None]
    if parts > 1:
        with torch.no_grad():
            given = method.first_pass([(lambda p=share: p.views, share) for share in shares])
    total = 0.0
    for share, known in zip(shares, given, strict=True):
        loss, _ = method.step(share.views, share, known)
        (loss / parts).backward()
        total += loss.item() / parts
    before_update()
    method.before_update(step)
    with torch.no_grad():
        for group in method.param_groups(exclude_one_dimensional=False):
            for parameter in group["params"]:
                parameter -= rate * parameter.grad
    method.after_step(step)
    return total
