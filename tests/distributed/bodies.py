"""What the processes of the tests do. All of it in one start: that is what takes the time."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.engine.collectives import Collectives, TorchWorld
from zoo.engine.sync_batchnorm import AllReduceBatchNorm, _converted, synchronize_batchnorm
from zoo.errors import InputError
from zoo.pretrain.losses.sinkhorn import sinkhorn

from .world import rows_of

__all__ = ["fours", "info_nce", "norm_step", "pairs", "trained"]


def pairs(world: Collectives, given: dict[str, Any]) -> dict[str, Any]:
    """All that two processes do."""
    return {
        "exchanges": exchanges(world),
        "contrastive": contrastive(world, given["contrastive"]),
        "sinkhorn": sinkhorns(world, given["sinkhorn"]),
        "norms": {name: norms(world, case) for name, case in given["norms"].items()},
        "layers": layers(world),
        "trained": trained(world, given["images"]),
    }


def fours(world: Collectives, given: dict[str, Any]) -> dict[str, Any]:
    """All that four processes do."""
    half = world.split(2)
    with contextlib.suppress(InputError):
        synchronize_batchnorm(nn.BatchNorm1d(3), world, 3)
        raise AssertionError("four processes in groups of three")
    return {
        "sinkhorn": sinkhorns(world, given["sinkhorn"]),
        "gathered": world.gather(torch.tensor([world.rank])),
        "half": {
            "place": [half.rank, half.world_size, half.local_rank],
            "sum": half.sum_(torch.tensor([world.rank])),
            "from the second": half.broadcast_(torch.tensor([world.rank]), 1),
            "values": half.gather_values(world.rank),
        },
        "norms": {name: norms(world, case) for name, case in given["norms"].items()},
        "gpu layer": gpu_layer(world),
    }


def exchanges(world: Collectives) -> dict[str, Any]:
    rank = world.rank
    with_gaps = torch.arange(12.0).reshape(3, 4)[:, ::2] + rank
    parameter = nn.Parameter(torch.full((2,), float(rank)))
    refused = ""
    try:
        world.sum_(parameter)
    except ValueError as error:
        refused = str(error)
    return {
        "sum": world.sum_(torch.tensor([1.0, float(rank)])),
        "sum of an integer": world.sum_(torch.tensor(rank + 1)),
        "sum in place": _changed(with_gaps, world.sum_),
        "max": world.max_(torch.tensor([float(rank), -float(rank)], dtype=torch.float64)),
        "broadcast": world.broadcast_(torch.tensor([rank])),
        "broadcast from 1": world.broadcast_(parameter, 1).detach(),
        "gather": world.gather(torch.tensor([[rank, 1], [rank, 2]])),
        "gather half": world.gather(torch.tensor([0.5 + rank], dtype=torch.bfloat16)),
        "values": world.gather_values({"rank": rank, "name": "ä" * 300 * rank, "pair": (1, None)}),
        "nothing": world.gather_values(None),
        "any": [world.any(rank == 1), world.any(False), world.any(True)],
        "refused": refused,
        "the same world": copy.deepcopy(nn.ModuleList([AllReduceBatchNorm(2, world)]))[0].world is world,
    }


def _changed(tensor: torch.Tensor, change: Any) -> torch.Tensor:
    change(tensor)
    return tensor


def info_nce(world: Collectives, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mean over this process's rows; the negatives are everybody's."""
    keys = world.gather(F.normalize(y @ weight, dim=1))
    logits = F.normalize(x @ weight, dim=1) @ keys.T / 0.2
    own = torch.arange(len(x)) + world.rank * len(x)
    return F.cross_entropy(logits, own)


def contrastive(world: Collectives, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = given["weight"].clone().requires_grad_()
    x, y = (rows_of(world, given[name]).clone().requires_grad_() for name in ("x", "y"))
    loss = info_nce(world, x, y, weight)
    loss.backward()
    # The other convention: everybody computes the whole loss.
    again = given["weight"].clone().requires_grad_()
    embedded = F.normalize(rows_of(world, given["x"]) @ again, dim=1)
    everyone = world.gather(embedded)
    (everyone @ everyone.T).exp().sum(1).log().mean().backward()
    return {
        "loss": world.sum_(loss.detach().clone()) / world.world_size,
        "weight": world.sum_(weight.grad) / world.world_size,
        "x": x.grad / world.world_size,
        "y": y.grad / world.world_size,
        "whole loss": world.sum_(again.grad) / world.world_size,
    }


def sinkhorns(world: Collectives, given: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (scores, epsilon, iterations) in given.items():
        before = world.bytes_exchanged
        codes = sinkhorn(rows_of(world, scores), epsilon, iterations, world)
        out[name] = {"codes": codes, "bytes": world.bytes_exchanged - before}
    return out


def norm_step(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two training steps (their statistics add up) and an evaluation: the second step's results."""
    layer.train()
    layer(x / 2 + 1)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(x)
    output.backward(gradient)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    state = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    if state.keys() & {"running_mean"}:
        output = torch.cat((output, layer.eval()(x)))
    return {
        "output": output.detach(),
        "x": x.grad,
        **grads,
        **{f"state/{name}": v for name, v in state.items()},
    }


def norms(world: Collectives, case: dict[str, Any]) -> dict[str, Any]:
    """``case``: the kind of layer, its options, and the whole input and gradient with each process's rows."""
    layer = getattr(nn, case["kind"])(case["x"].shape[1], **case["options"]).to(case["dtype"])
    layer.load_state_dict(case["state"])
    mine = slice(*case["rows"][world.rank])
    network = nn.Sequential(layer)
    new = synchronize_batchnorm(network, world, case.get("group_size"))
    assert new is network and isinstance(network[0], AllReduceBatchNorm)
    return norm_step(network[0], case["x"][mine], case["gradient"][mine])


class _Special(nn.BatchNorm2d):
    pass


def layers(world: Collectives) -> dict[str, Any]:
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zoo")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    shared = nn.BatchNorm2d(3, eps=0.1, momentum=None)
    network = nn.ModuleDict(
        {
            "inner": nn.Sequential(nn.Conv2d(3, 3, 1), shared),
            "again": shared,
            "special": _Special(3),
            "frozen": nn.BatchNorm1d(3, affine=False, track_running_stats=False).eval(),
        }
    )
    network.twice = network["special"]
    network.also = shared
    weight, before = shared.weight, {k: v.data_ptr() for k, v in network.state_dict().items()}
    shared.register_forward_hook(lambda module, given, output: output * 2)
    same = synchronize_batchnorm(network, world)
    after = {k: v.data_ptr() for k, v in network.state_dict().items()}
    synchronize_batchnorm(network, world)  # changes nothing, and says nothing
    logger.removeHandler(handler)
    inner = network["inner"][1]
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    inner.weight.grad = None
    output = inner(image)
    output.sum().backward()
    small = AllReduceBatchNorm(1, world)
    try:
        small(torch.ones(1 if world.rank == 0 else 0, 1))
        one_value = ""
    except ValueError as error:
        one_value = str(error)
    return {
        "notes": notes,
        "same": same is network,
        "tensors kept": before == after and inner.weight is weight,
        "one layer": inner is network["again"] and inner is network.also,
        "kinds": [type(m).__name__ for m in (inner, network["special"], network["frozen"])],
        "options": [inner.eps, inner.momentum, inner.training, network["frozen"].training],
        "hooked": bool((output.amax() > 2.0).item()),
        "channels last": output.is_contiguous(memory_format=torch.channels_last)
        and image.grad.is_contiguous(memory_format=torch.channels_last),
        "whole": synchronize_batchnorm(nn.BatchNorm1d(2), world).__class__.__name__,
        "groups of one": type(synchronize_batchnorm(nn.BatchNorm1d(2), world, 1)).__name__,
        "one value": one_value,
    }


def trained(world: Collectives, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """A step of a small network with everything that is shared: BatchNorm, negatives, gradients by DDP."""
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 16, 6),
        nn.BatchNorm1d(6),
    ).double()
    synchronize_batchnorm(network, world)
    trained = network
    if world.world_size > 1:
        trained = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.001)
    x = trained(rows_of(world, images))
    info_nce(world, x, x.flip(1), torch.eye(6, dtype=torch.float64)).backward()
    grads = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {**grads, **dict(network.named_buffers())}


def gpu_layer(world: Collectives) -> dict[str, Any]:
    """What a GPU would get, as far as it can be had without one."""
    layer = nn.BatchNorm2d(3, eps=0.1, affine=False).eval()
    half = world.split(2)
    new = _converted(layer, half, True, {})
    assert isinstance(half, TorchWorld)
    return {
        "kind": type(new).__name__,
        "group": torch.distributed.get_process_group_ranks(new.process_group),
        "keys": list(new.state_dict()),
        "options": [new.eps, new.affine, new.training],
    }
