"""Training with lightly's parts, by the settings of one of our recipes: the peer of the learning benchmarks.

lightly's views, head, loss (and queue) for SwAV, SimCLR and MoCo around torchvision's ResNet-18, with torch's
AdamW, in a plain loop, float32, as its documentation shows it. The recipe gives crops, colours, batch, rates and
epochs. What lightly has no setting for stays as it has it: its MoCo shuffles no BatchNorm groups.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from zoo.optim.schedule import WarmupCosine
from zoo.pretrain.config import Recipe

__all__ = ["METHODS", "LightlyRun"]

METHODS = ("swav", "simclr", "moco")


def _views(recipe: Recipe) -> Any:
    """lightly's transform of the method; views of one size, the method's only kind of crop."""
    from lightly.transforms import SimCLRTransform, SwaVTransform

    views = recipe.views
    brightness, contrast, saturation, hue = views.jitter
    shared: dict[str, Any] = {
        "cj_prob": views.jitter_p,
        "cj_strength": 1.0,
        "cj_bright": brightness,
        "cj_contrast": contrast,
        "cj_sat": saturation,
        "cj_hue": hue,
        "random_gray_scale": views.gray_p,
        "gaussian_blur": views.blur_p,
        "sigmas": views.blur_radius,
        "hf_prob": views.flip_p,
        "normalize": {"mean": list(views.mean), "std": list(views.std)},
    }
    if recipe.method.name == "swav" or len(views.size) > 1:
        return SwaVTransform(
            crop_sizes=views.size,  # type: ignore[arg-type]
            crop_counts=views.count,  # type: ignore[arg-type]
            crop_min_scales=views.min_scale,  # type: ignore[arg-type]
            crop_max_scales=views.max_scale,  # type: ignore[arg-type]
            **shared,
        )
    if views.count != (2,) or views.max_scale != (1.0,):
        raise ValueError("lightly's SimCLR has two views of up to the whole image")
    return SimCLRTransform(input_size=views.size[0], min_scale=views.min_scale[0], **shared)


class _SwAV(nn.Module):
    def __init__(self, trunk: nn.Module, method: Any) -> None:
        from lightly.loss import SwaVLoss
        from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes

        super().__init__()
        self.trunk = trunk
        self.head = SwaVProjectionHead(512, method.hidden, method.dim)
        self.prototypes = SwaVPrototypes(
            method.dim, method.prototypes, n_steps_frozen_prototypes=method.freeze_prototypes_steps
        )
        self.loss = SwaVLoss(method.temperature, method.sinkhorn_iterations, method.epsilon)

    def forward(self, views: list[torch.Tensor], step: int) -> torch.Tensor:
        self.prototypes.normalize()
        scores = []
        for view in views:
            embeddings = nn.functional.normalize(self.head(self.trunk(view)), dim=1)
            scores.append(self.prototypes(embeddings, step))
        return self.loss(scores[:2], scores[2:])  # type: ignore[no-any-return]


class _SimCLR(nn.Module):
    def __init__(self, trunk: nn.Module, method: Any) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__()
        self.trunk = trunk
        self.head = SimCLRProjectionHead(512, method.hidden, method.dim)
        self.loss = NTXentLoss(method.temperature)

    def forward(self, views: list[torch.Tensor], step: int) -> torch.Tensor:
        one, two = (self.head(self.trunk(view)) for view in views)
        return self.loss(one, two)  # type: ignore[no-any-return]


class _MoCo(nn.Module):
    def __init__(self, trunk: nn.Module, method: Any) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import MoCoProjectionHead

        super().__init__()
        self.trunk = trunk
        self.head = MoCoProjectionHead(512, method.hidden, method.dim)
        self.key_trunk, self.key_head = copy.deepcopy(trunk), copy.deepcopy(self.head)
        for parameter in (*self.key_trunk.parameters(), *self.key_head.parameters()):
            parameter.requires_grad_(False)
        self.loss = NTXentLoss(method.temperature, memory_bank_size=(method.negatives, method.dim))
        self.momentum = method.momentum

    def forward(self, views: list[torch.Tensor], step: int) -> torch.Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(self.trunk, self.key_trunk, self.momentum)
        update_momentum(self.head, self.key_head, self.momentum)
        with torch.no_grad():
            keys = self.key_head(self.key_trunk(views[1]))
        return self.loss(self.head(self.trunk(views[0])), keys)  # type: ignore[no-any-return]


_NETWORKS: dict[str, Callable[..., nn.Module]] = {"swav": _SwAV, "simclr": _SimCLR, "moco": _MoCo}


class LightlyRun:
    """One training; ``state`` after an epoch is all that the rest of it depends on.

    Args:
        recipe: of ours, with one of ``METHODS``, ``resnet18`` and AdamW.
        images: the training images, a folder for each class.
        seed: of weights and views.
        workers: data processes.
    """

    def __init__(self, recipe: Recipe, images: Path, seed: int, workers: int) -> None:
        method, optimizer = recipe.method, recipe.optimizer
        if method.name not in METHODS or recipe.trunk.arch != "resnet18" or optimizer.name != "adamw":
            raise ValueError("the peer trains SwAV, SimCLR or MoCo with a ResNet-18 and AdamW")
        self.recipe, self.seed = recipe, seed
        torch.manual_seed(seed)
        trunk = resnet18()
        trunk.fc = nn.Identity()  # type: ignore[assignment]
        self.loader = DataLoader(
            ImageFolder(str(images), transform=_views(recipe)),
            batch_size=recipe.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        batches = len(self.loader)
        self.network = _NETWORKS[method.name](trunk, method)
        learning = [p for p in self.network.parameters() if p.requires_grad]
        plain = [p for p in learning if p.ndim <= 1 and optimizer.exclude_one_dimensional]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in learning if all(p is not other for other in plain)]},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        schedule = recipe.schedule
        warmup = round(schedule.warmup_epochs * batches)
        self.rate = WarmupCosine(
            optimizer.lr, schedule.final_lr, schedule.start_lr, warmup, recipe.epochs * batches
        )
        self.epoch = 0

    @property
    def trunk(self) -> nn.Module:
        return self.network.trunk  # type: ignore[return-value]

    def train_epoch(self) -> float:
        """Train one epoch; its mean loss. Draws depend on (seed, epoch) alone."""
        torch.manual_seed(1000 * self.seed + self.epoch)
        self.network.train()
        losses = []
        for number, (views, *_) in enumerate(self.loader):
            losses.append(self._step(views, self.epoch * len(self.loader) + number))
        self.epoch += 1
        return sum(losses) / len(losses)

    def _step(self, views: list[torch.Tensor], step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.at(step)
        loss = self.network(views, step)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()  # type: ignore[no-any-return]

    def steps(self) -> Iterator[None]:
        """Endless steps, for timing."""
        step = 0
        while True:
            for views, *_ in self.loader:
                self._step(views, step)
                step += 1
                yield

    def save(self, path: Path) -> None:
        """Write everything, whole or not at all."""
        temporary = path.with_name(f".{path.name}.tmp")
        state = {
            "epoch": self.epoch,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, temporary)
        os.replace(temporary, path)

    def restore(self, path: Path) -> None:
        """Take ``save``'s file back."""
        state = torch.load(path, weights_only=True)
        self.epoch = state["epoch"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
