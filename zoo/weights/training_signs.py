"""What weights tell of their history: were they ever trained, wholly or in part, and are they sound?

Two kinds of evidence. Norms start at exact values (scale 1, shift 0, running mean 0, variance 1), which
the first step of training changes. Convolutions and linear layers start as independent random numbers: the
largest singular value of such a matrix lies at the edge of the law of Marchenko and Pastur (1967), give or
take a few widths of the law of Tracy and Widom (Johnstone 2001, "On the distribution of the largest
eigenvalue in principal components analysis", theorem 1.1); what training writes into it exceeds the edge by
tens or hundreds of widths. That needs no knowledge of the scale that a network was initialised with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models.factory import TRUNKS, create_trunk
from ..tensors import seeded
from .checks import all_finite
from .fill import STANDARD_PREPROCESSING
from .formats.base import Network

__all__ = ["SENTENCES", "Signs", "Stage", "edge_excess", "signs_of"]

# Verdict -> what it means.
SENTENCES = {
    "broken": "Some of its values are no finite numbers: it computes nothing.",
    "untrained": "It was never trained: its norms have their exact initial values and its weights are random "
    "numbers.",
    "only statistics": "It was never trained: its weights are random numbers. Images went through it, though: "
    "the norms' statistics have moved.",
    "no statistics": "Its weights were trained, but the norms' running statistics are those of a new network. "
    "They were lost (its features will be wrong then), or somebody folded them into scale and shift.",
    "partly untrained": "Parts of it were trained, and others are random as in a new network: most likely it was "
    "loaded only in part and saved again.",
    "hardly trained": "It was trained, but little: its weights have moved, and most layers still look like the "
    "random numbers of a new network. The training was short, or its learning rate small.",
    "trained": "It was trained.",
}

_LAYERS = (nn.Conv2d, nn.Linear)
_BEYOND = 5.0  # widths above the edge; a random matrix exceeds 2.02 once in a hundred times
_LIKE = 5.0  # standard errors
_ROWS = range(16, 1025)  # smaller matrices tell little, larger ones take long
_EXAMINED = 32
_DEAD = 1e-7  # of the largest weight of a layer
_STILL = 1e-12  # a running variance


@dataclass(frozen=True)
class Stage:
    """What is seen in one stage of a network.

    Args:
        name: ``stem``, ``layer1`` ...
        norms: those that are applied.
        initial_scales: those whose scale and shift are as at the start.
        initial_statistics: those whose running mean and variance are, or that have none.
        convolutions: their number, linear layers included.
        spread: their standard deviation, as a multiple of a new network's (the median).
        edge: the largest singular value, as a multiple of a random matrix's (the median); None: not examined.
        initial: everything is as in a new network.
    """

    name: str
    norms: int
    initial_scales: int
    initial_statistics: int
    convolutions: int
    spread: float
    edge: float | None
    initial: bool


@dataclass(frozen=True)
class Signs:
    """The evidence, and what follows from it.

    Args:
        verdict: a key of ``SENTENCES``.
        non_finite: names of tensors that hold NaN or infinity.
        norms: those that are applied; of them those with initial scales, with initial statistics (or none),
            and with scales that are all zero.
        batches: the largest counter of a norm: how many batches it has seen.
        convolutions: how many; of them those whose spread is a new network's, within the error of sampling.
        examined: matrices whose spectrum was looked at; ``beyond_edge`` of them are no random ones.
        zero_filters: filters of nothing but zeros.
        still_channels: channels whose running variance is zero.
        stages: from the images to the features.
    """

    verdict: str
    non_finite: list[str]
    norms: int
    initial_scales: int
    initial_statistics: int
    zero_scales: int
    batches: int
    convolutions: int
    like_new: int
    examined: int
    beyond_edge: int
    zero_filters: int
    still_channels: int
    stages: list[Stage]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


class _Norm(NamedTuple):
    stage: str
    scales: bool
    statistics: bool
    tracked: bool
    zero: bool
    still: int
    batches: int


class _Convolution(NamedTuple):
    stage: str
    spread: float
    like_new: bool
    edge: float | None
    beyond: bool
    zero_filters: int


def edge_excess(weight: torch.Tensor) -> tuple[float, float]:
    """How the largest singular value of a layer compares with that of random numbers of the same variance.

    Args:
        weight: (out, ...), taken as a matrix of ``out`` rows; finite, and not all zero.

    Returns:
        Its multiple of the edge, sigma (sqrt(p) + sqrt(n)), and by how many widths of the law of Tracy and
        Widom its square is above the edge's.
    """
    matrix = weight.detach().reshape(len(weight), -1).double()
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    p, n = (math.sqrt(size) for size in matrix.shape)
    largest = float(torch.linalg.eigvalsh(matrix @ matrix.T)[-1] / matrix.square().mean())
    edge, width = (p + n) ** 2, (p + n) * (1 / p + 1 / n) ** (1 / 3)
    return math.sqrt(largest / edge), (largest - edge) / width


def signs_of(trunk: Any, network: Network, how: Mapping[str, Any] = STANDARD_PREPROCESSING) -> Signs:
    """Look at a filled trunk.

    Args:
        trunk: of ``zoo.weights.fill.fill_trunk``.
        network: which it is: a new one of the same kind is made for comparison.
        how: its preprocessing.
    """
    non_finite = [name for name, tensor in trunk.state_dict().items() if not all_finite(tensor)]
    modules = dict(trunk.named_modules())
    scaled = {name: m for name, m in modules.items() if _is_norm(m) and _applied(name, modules)}
    norms = [_norm(_stage(name), module) for name, module in scaled.items()]
    weights = {name: m.weight.detach().float() for name, m in modules.items() if isinstance(m, _LAYERS)}
    new = _new(network, weights, how)
    fresh = {name: m.weight.detach() for name, m in new.named_modules() if isinstance(m, _LAYERS)}
    moved = {_stage(name) for name in _moved(trunk, new) if name.rpartition(".")[0] not in scaled}
    sound = {name for name in weights if f"{name}.weight" not in non_finite}
    chosen = _chosen({name: weights[name] for name in weights if name in sound})
    convolutions = [
        _convolution(_stage(name), weights[name], fresh[name], name in chosen)
        for name in weights
        if name in sound
    ]
    stages = [
        _summary(
            stage,
            [norm for norm in norms if norm.stage == stage],
            [convolution for convolution in convolutions if convolution.stage == stage],
            stage in moved,
        )
        for stage in dict.fromkeys(_stage(name) for name in weights)
    ]
    seen = [each for each in convolutions if each.edge is not None]
    counts = {
        "norms": len(norms),
        "initial_scales": sum(norm.scales for norm in norms),
        "initial_statistics": sum(norm.statistics for norm in norms),
        "zero_scales": sum(norm.zero for norm in norms),
        "batches": max((norm.batches for norm in norms), default=0),
        "convolutions": len(weights),
        "like_new": sum(each.like_new for each in convolutions),
        "examined": len(seen),
        "beyond_edge": sum(each.beyond for each in seen),
        "zero_filters": sum(each.zero_filters for each in convolutions),
        "still_channels": sum(norm.still for norm in norms),
    }
    tracked = any(norm.tracked for norm in norms)
    # In the zoo's own networks it is known which stages say something.
    judged = [stage for stage in stages if stage.norms or network.arch in TRUNKS]
    verdict = "broken" if non_finite else _verdict(counts, judged, tracked, bool(moved))
    return Signs(verdict=verdict, non_finite=non_finite, stages=stages, **counts)


def _verdict(counts: Mapping[str, int], judged: list[Stage], tracked: bool, moved: bool) -> str:
    new_statistics = counts["initial_statistics"] == counts["norms"]
    if counts["beyond_edge"] == 0 and counts["initial_scales"] == counts["norms"] and not moved:
        return "untrained" if new_statistics else "only statistics"
    if tracked and new_statistics:
        return "no statistics"
    if any(stage.initial for stage in judged):
        return "partly untrained"
    return "hardly trained" if 2 * counts["beyond_edge"] < counts["examined"] else "trained"


def _stage(name: str) -> str:
    first, *rest = name.split(".")
    if first in ("conv1", "bn1"):
        return "stem"
    if first.isdecimal():  # a sequence's layers are no stages
        return "layers"
    return f"{first}.{rest[0]}" if first == "layer_list" and rest else first


def _applied(name: str, modules: Mapping[str, Any]) -> bool:
    """AMDIM's encoder carries norms that it may not use."""
    return bool(getattr(modules[name.rpartition(".")[0]], "use_bn", True))


def _is_norm(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    return isinstance(module, kinds) and module.weight is not None and module.bias is not None


def _new(network: Network, weights: Mapping[str, torch.Tensor], how: Mapping[str, Any]) -> Any:
    known = network.arch in TRUNKS
    with seeded(0):
        return create_trunk(
            network.arch,
            stem=network.stem,
            base_planes=network.base_planes,
            options=network.options,
            channels=int(next(iter(weights.values())).shape[1]) if known else len(how["mean"]),
            size=int(how["crop"]),
        )


def _moved(trunk: nn.Module, new: nn.Module) -> list[str]:
    """Biases and the like that begin with one value throughout and have another one."""
    vectors = {name: p.detach() for name, p in new.named_parameters() if p.ndim == 1 and p.numel() > 1}
    begun = {name: value for name, value in vectors.items() if (value == value[0]).all()}
    return [
        name
        for name, p in trunk.named_parameters()
        if name in begun and not torch.equal(p.detach().to(begun[name].dtype), begun[name])
    ]


def _norm(stage: str, norm: Any) -> _Norm:
    scale, shift = norm.weight.detach().float(), norm.bias.detach().float()
    zero = not bool(scale.any())
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    count = getattr(norm, "num_batches_tracked", None)
    new, still, tracked = True, 0, mean is not None and variance is not None
    if mean is not None and variance is not None:
        new = not bool(mean.any()) and bool((variance.float() == 1).all())
        still = int((variance.float().abs() < _STILL).sum())
    return _Norm(
        stage=stage,
        scales=not bool(shift.any()) and (zero or bool((scale == 1).all())),  # some begin residuals with 0
        statistics=new,
        tracked=tracked,
        zero=zero,
        still=still,
        batches=0 if count is None else int(count),
    )


def _chosen(weights: Mapping[str, torch.Tensor]) -> set[str]:
    """Layers whose spectrum is worth the time, from all parts of the network."""
    rows = {name: min(len(weight), weight[0].numel()) for name, weight in weights.items() if weight.any()}
    names = [name for name in rows if rows[name] in _ROWS] or sorted(rows, key=lambda name: rows[name])[:1]
    return set(names[:: math.ceil(len(names) / _EXAMINED) or 1])


def _convolution(stage: str, weight: torch.Tensor, fresh: torch.Tensor, examine: bool) -> _Convolution:
    n, spread = weight.numel(), float(fresh.std())
    filters = weight.reshape(len(weight), -1).abs().amax(1)
    like_new, multiple = not bool(weight.any()), math.nan  # where a new network has zeros
    if spread > 0:
        peakedness = float(((fresh - fresh.mean()) / spread).pow(4).mean())
        multiple = float(weight.std()) / spread
        error = math.sqrt(max(peakedness - 1, 0.1) / (2 * n))  # of the quotient of two samples' deviations
        moved = abs(float(weight.mean() - fresh.mean())) / (spread * math.sqrt(2 / n))
        like_new = abs(multiple - 1) < _LIKE * error and moved < _LIKE
        examine = examine and peakedness < 20  # AMDIM's shortcuts begin near the identity, not at random
    edge, excess = edge_excess(weight) if examine else (None, 0.0)
    dead = int((filters <= _DEAD * float(filters.max())).sum())
    return _Convolution(stage, multiple, like_new, edge, excess > _BEYOND, dead)


def _summary(name: str, norms: list[_Norm], convolutions: list[_Convolution], moved: bool) -> Stage:
    edges = [each.edge for each in convolutions if each.edge is not None]
    spreads = [each.spread for each in convolutions if math.isfinite(each.spread)]
    scales = sum(norm.scales for norm in norms)
    return Stage(
        name=name,
        norms=len(norms),
        initial_scales=scales,
        initial_statistics=sum(norm.statistics for norm in norms),
        convolutions=len(convolutions),
        spread=median(spreads) if spreads else 0.0,
        edge=median(edges) if edges else None,
        initial=scales == len(norms)
        and not moved
        and not any(each.beyond for each in convolutions)
        and (bool(edges) or (bool(convolutions) and all(each.like_new for each in convolutions))),
    )
