"""A file's content in parts: the copies of a backbone that are in it, and everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import InputError
from ..reading.notes import shown
from .others import looks_like
from .resnets import Fit, fit, in_backbone
from .tables import Item, items_of, split_branch

__all__ = ["TRAINING", "Backbone", "Layout"]

# First parts of names that belong to the training, not to a model: what their tensors are.
TRAINING = {
    **dict.fromkeys(("optimizer", "optimizers", "optimizer_state", "optimizer_states"), "optimizer state"),
    **dict.fromkeys(("optimizer_state_dict", "optim", "opt"), "optimizer state"),
    **dict.fromkeys(("scheduler", "schedulers", "lr_scheduler", "lr_schedulers"), "training state"),
    **dict.fromkeys(
        ("amp", "amp_state", "amp_scaler", "scaler", "fp16_scaler", "grad_scaler"), "training state"
    ),
    **dict.fromkeys(("loops", "callbacks", "meters", "n_averaged", "args"), "training state"),
    **dict.fromkeys(("epoch", "step", "global_step", "elapsed", "torch_rng", "rng_state"), "training state"),
    **dict.fromkeys(("best_acc", "best_acc1", "best_acc5", "best_prec1", "best_loss"), "training state"),
    **dict.fromkeys(("acc1", "acc5", "loss"), "training state"),
    **dict.fromkeys(("dino_loss", "g2l_loss", "loss_fn", "loss_func", "criterion"), "loss state"),
}


def _same(name: str) -> str:
    # lightly's own ResNet and many for small images say shortcut.
    return re.sub(r"^(layer\d+\.\d+)\.shortcut\.", r"\1.downsample.", name)


def _children(name: str, first: int) -> str:
    """Names of ``nn.Sequential(*network.children())``, whose first stage is child ``first``."""
    number, _, rest = name.partition(".")
    if number in ("0", "1"):
        return ("conv1." if number == "0" else "bn1.") + rest
    if number.isdecimal() and first <= int(number) < first + 4:
        return _same(f"layer{int(number) - first + 1}.{rest}")
    return name


def _detectron2(name: str) -> str:
    name = name.removeprefix("stem.")
    name = re.sub(r"^res([2-5])\.", lambda match: f"layer{int(match[1]) - 1}.", name)
    name = re.sub(r"(^|\.)conv(\d)\.norm\.", r"\1bn\2.", name)
    return re.sub(r"\.shortcut\.(norm\.)?", lambda m: ".downsample." + ("1." if m[1] else "0."), name)


# name -> (how a name that only it has looks, from its names to torchvision's); the first that fits counts
_DIALECTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "torchvision": (r"layer[1-4]\.\d+\.((conv|bn)\d|downsample|shortcut)\.|conv1\.weight$|bn1\.", _same),
    "children of torchvision's network": (r"[67]\.\d+\.conv\d\.weight", lambda name: _children(name, 4)),
    "children of lightly's network": (r"[2-5]\.\d+\.conv\d\.weight", lambda name: _children(name, 2)),
    "detectron2": (r"res[2-5]\.\d+\.conv\d\.weight|stem\.conv1\.weight", _detectron2),
}
_ORDER = (
    "an average or teacher, then the plain network, then a teacher beside it, then a student or query, "
    "then a momentum copy"
)


@dataclass(frozen=True)
class Backbone:
    """One copy of a ResNet in a file, whole or not.

    Args:
        path: the dicts around its tensors.
        prefix: what stands before their names.
        dialect: whose names they have.
        branches: what the wrappers say that it is: ``teacher``, ``momentum`` ...; empty for the plain one.
        rank: which of several is taken: the lowest.
        items: its tensors, by torchvision's names.
        fit: the network that they are.
    """

    path: tuple[str, ...]
    prefix: str
    dialect: str
    branches: frozenset[str]
    rank: int
    items: dict[str, Item]
    fit: Fit

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        whole = ".".join((*self.path, self.prefix)).rstrip(".")
        return repr(shown(whole)) if whole else "the top"


class Layout:
    """What a file's content consists of.

    Args:
        value: plain nested data with tensors.
        where: the file, for messages.
    """

    def __init__(self, value: Any, where: object) -> None:
        self.value = value
        self.where = where
        self.items = items_of(value)
        self.keys = frozenset(map(str, value)) if isinstance(value, Mapping) else frozenset()
        self._dialects: dict[tuple[tuple[str, ...], str], str] = {}
        for home, items in self._homes().items():
            for dialect, (mark, _) in _DIALECTS.items():
                if any(re.match(mark, item.name) for item in items):
                    self._dialects[home] = dialect
                    break

    def _homes(self) -> dict[tuple[tuple[str, ...], str], list[Item]]:
        homes: dict[tuple[tuple[str, ...], str], list[Item]] = {}
        for item in self.items:
            homes.setdefault((item.path, item.prefix), []).append(item)
        return homes

    def our_name(self, item: Item) -> str:
        """An item's name with torchvision's names for the parts of a ResNet."""
        dialect = self._dialects.get((item.path, item.prefix))
        return item.name if dialect is None else _DIALECTS[dialect][1](item.name)

    @cached_property
    def backbones(self) -> list[Backbone]:
        """The ResNets in the file, in its order."""
        found = []
        homes = self._homes()
        for home, dialect in self._dialects.items():
            named = {self.our_name(item): item for item in homes[home]}
            items = {name: item for name, item in named.items() if in_backbone(name)}
            branches, rank = _branches(next(iter(items.values())).wrappers)
            fitted = fit({name: item.tensor for name, item in items.items()})
            found.append(Backbone(*home, dialect, branches, rank, items, fitted))
        return found

    @cached_property
    def components(self) -> frozenset[str]:
        """Every wrapper around a tensor that is no part of the training state."""
        return frozenset(part for item in self.model_items for part in item.wrappers)

    @cached_property
    def heads(self) -> frozenset[str]:
        """The first parts of the names of all tensors that aren't a backbone's or the training's."""
        return frozenset(
            head_of(self.our_name(item))
            for item in self.model_items
            if not ((item.path, item.prefix) in self._dialects and in_backbone(self.our_name(item)))
        )

    @cached_property
    def model_items(self) -> list[Item]:
        """The tensors that are no part of the training state."""
        return [item for item in self.items if head_of(item.name) not in TRAINING]

    def names(self, head: str) -> list[str]:
        """The names, after the head's own, of all tensors of a head."""
        named = [self.our_name(item) for item in self.model_items]
        return [tail_of(name) for name in named if head_of(name) == head]

    def choose(self) -> tuple[Backbone, tuple[str, ...]]:
        """The backbone that is meant, and how it was chosen if there are several.

        Raises:
            InputError: no whole backbone of the zoo's is in the file.
        """
        whole = [each for each in self.backbones if each.fit.network is not None]
        if not whole:
            raise self.refusal()
        taken = min(whole, key=lambda each: each.rank)  # the first of the lowest
        notes = []
        others = [each.place for each in whole if each is not taken]
        if others:
            listed = ", ".join(others)
            notes.append(
                f"{len(whole)} whole backbones are in the file: the one under {taken.place} was taken, not "
                f"{listed} (the order is: {_ORDER})"
            )
        notes += [
            f"what is under {each.place} is no whole backbone ({each.fit.found.matched} of {each.fit.found.total} tensors)"
            for each in self.backbones
            if each.fit.network is None and each.rank < taken.rank
        ]
        return taken, tuple(notes)

    def refusal(self) -> InputError:
        """Why no backbone can be read from this."""
        other = looks_like(item.label for item in self.model_items)
        partial = sorted(self.backbones, key=lambda each: (-each.fit.found.matched, each.rank))
        if other is not None:
            return InputError(
                f"This looks like {other}, which the zoo has no trunk for.",
                where=self.where,
                fix="use weights of a ResNet, a ResNeXt or AMDIM's encoder",
            )
        if partial:
            return partial[0].fit.problem(self.where)
        if not self.items:
            return InputError(
                f"There are no named tensors in the file, only {_kind(self.value)}.", where=self.where
            )
        if not self.model_items or _is_optimizer(self.value):
            return InputError(
                f"The file holds the state of a training and no network ({len(self.items)} tensors).",
                where=self.where,
                fix="use the file with the model's weights",
            )
        return self._unknown_wrapper() or InputError(
            f"None of the file's {len(self.items)} tensors is one of a backbone that the zoo knows; "
            f"the first is {shown(self.items[0].label)}.",
            where=self.where,
            fix="use weights of a ResNet, a ResNeXt or AMDIM's encoder",
        )

    def _unknown_wrapper(self) -> InputError | None:
        """Somebody's own wrapper is not guessed away: it may as well be around another network."""
        for stem in self.model_items:
            match = re.fullmatch(r"(.+\.)conv1\.weight", stem.name)
            if match is None or ".layer" in f".{stem.name}":
                continue
            start = match[1]
            said = repr(shown(start))
            inside = {
                item.name.removeprefix(start): item.tensor
                for item in self.model_items
                if item.name.startswith(start)
            }
            found = fit({name: tensor for name, tensor in inside.items() if in_backbone(name)})
            return InputError(
                f"None of the {found.found.total} tensors of a backbone is under a known prefix; {found.found.matched} "
                f"would be under {said}, which is none that people wrap backbones in.",
                where=self.where,
                fix=f"if it is the backbone, take {said} off the keys and save them again",
            )
        return None


# VISSL numbers its heads; lightly's loss holds the queue.
_OUTSIDE_A_HEAD = re.compile(r"^(heads\.\d+|criterion(?=\.memory_bank))\.")


def head_of(name: str) -> str:
    """The first part of a name that says which head it belongs to."""
    return _OUTSIDE_A_HEAD.sub("", name).partition(".")[0]


def tail_of(name: str) -> str:
    """What follows ``head_of`` in a name."""
    return _OUTSIDE_A_HEAD.sub("", name).partition(".")[2]


def _branches(wrappers: Iterable[str]) -> tuple[frozenset[str], int]:
    ranks = {"average": 0, "student": 3, "momentum": 4}
    found = [split_branch(part) for part in wrappers]
    named = [(branch, 0 if not base else 2) for branch, base in found if branch is not None]
    rank = max((ranks.get(branch, teacher) for branch, teacher in named), default=1)
    return frozenset(branch for branch, _ in named), rank


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {len(value)} other things" if value else "an empty dict"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} things"
    return f"a {type(value).__name__}"


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= set(map(str, value))
