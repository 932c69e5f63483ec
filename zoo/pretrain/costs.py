"""What a training step costs, counted without computing it: operations, memory, what processes exchange.

The step's own code runs on tensors that have shapes and no values (torch's fake tensors), as one of any number
of processes, for devices that this machine may not have. It takes seconds and no memory to speak of.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..data.loader import Batch
from ..models.recompute import recompute_blocks
from .build import build_method
from .config import OptimizerConfig, Recipe
from .methods.base import Method
from .methods.config_base import RunShape

__all__ = ["CropCost", "Exchange", "StepCosts", "count_step"]

# Tensors of the parameters' size that an optimizer keeps.
_MOMENTS = {"lars": 1, "sgd": 1, "adam": 2, "adamw": 2}
_HALF = 2  # bytes of a number in a half type
_TOLD = 120  # bytes that a checkpoint's file says of each tensor, about
_GENERATOR = 5056  # bytes of the state of torch's generator


@dataclass(frozen=True)
class CropCost:
    """Views of one size: ``flops`` of the trunk's forward pass over one of them, ``share`` of all views' cost."""

    size: int
    count: int
    flops: float
    share: float


@dataclass(frozen=True)
class Exchange:
    """A collective: ``payload`` is the bytes of the tensor that each process passes.

    ``kind``: ``reduce`` (everybody gets the sum) or ``gather`` (everybody gets all rows). ``of``:
    ``gradients``, ``batchnorm``, ``method`` or ``engine``.
    """

    kind: str
    of: str
    payload: int


@dataclass(frozen=True)
class StepCosts:
    """A step of one process. Bytes are of tensors: what allocators and libraries need comes on top.

    Args:
        images: of this process, in all parts of its batch.
        parameters: of each part of the method.
        trained: parameters that the optimizer moves.
        flops: of convolutions and matrix products, forward and backward; a multiply-add is two.
        crops: for each size of views.
        weights: bytes of all parameters.
        kept: bytes of buffers, queues, banks and tables.
        optimizer: bytes of its moments.
        average: bytes of the running average.
        step: bytes that a step needs beside all these at its peak, views included.
        an_image: by how many bytes ``step`` grows with an image.
        least: bytes of the gradients, and of what the optimizer needs beside them.
        exchanges: all that is said to other processes.
        checkpoint: bytes of a checkpoint, without what each process adds.
        checkpoint_each: bytes that each process adds to it.
    """

    images: int
    parameters: dict[str, int]
    trained: int
    flops: float
    crops: tuple[CropCost, ...]
    weights: int
    kept: int
    optimizer: int
    average: int
    step: int
    an_image: float
    least: int
    exchanges: tuple[Exchange, ...]
    checkpoint: int
    checkpoint_each: int

    @property
    def memory(self) -> int:
        """Bytes of tensors at the peak of a step."""
        return self.weights + self.kept + self.optimizer + self.average + self.step

    def memory_with(self, images: float) -> float:
        """The same if a process had so many images, and all else were as it is."""
        return self.memory - self.step + max(self.least, self.step + (images - self.images) * self.an_image)


def count_step(recipe: Recipe, shape: RunShape, half: bool) -> StepCosts:
    """What a step of the recipe costs in a run of this shape.

    Args:
        recipe: what is trained.
        shape: the run's sizes.
        half: whether forward passes compute in a half type.

    Raises:
        InputError: a method or a trunk that refuses the recipe.
        RuntimeError: or another error, where a foreign network asks for values that are not there.
    """
    parts = recipe.engine.accumulate
    images = shape.batch_size // (shape.world_size * parts)
    master = torch.float64 if recipe.precision == "float64" else torch.float32
    batch = Batch([], torch.arange(images), torch.zeros(images, dtype=torch.int64), 0)
    groups = recipe.views.plan().groups
    world = _ImaginedWorld(shape.world_size)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with torch.device("meta"):  # copies of networks can be made there, as they can't of fake tensors
        method = build_method(recipe, shape, world).to(master)
    with FakeTensorMode(allow_non_fake_inputs=True), _Ledger() as ledger:
        _bring_to_cpu(method)
        if recipe.engine.activation_checkpointing:
            recompute_blocks(method.trunk)
        method.train()
        method.rehearse()
        built = ledger.live
        sizes = _sizes(method, recipe, half)

        def views() -> list[torch.Tensor]:
            channels = recipe.data.channels
            return [torch.empty(count * images, channels, size, size, dtype=master) for size, count in groups]

        if shape.sync_batchnorm:
            _listen_to_norms(method, world)
        world.said.clear()
        method.before_step(0, 0)
        given: list[Any] = [None]
        with autocast:
            if parts > 1:
                with torch.no_grad():
                    given = method.first_pass([(views, batch)] * parts)
            once, ledger.flops = ledger.flops, 0
            first_pass, world.said = world.said, []
            mine = views()  # they stay until the next step, as in training
            loss, _ = method.step(mine, batch, given[0])
        loss.backward()
        del loss, given
        step, flops = ledger.peak - built, once + parts * ledger.flops
        said = (*first_pass, *world.said * parts)
        with autocast:
            crops = _crops(method.trunk, groups, mine, ledger)
        local = _bytes(method.local_state())
    an_image = max(0, step - sizes["copies"]) / (images * parts)
    if parts > 1:
        step += sizes["gradients"]  # of the first part, while the next ones are computed
    return StepCosts(
        images=images * parts,
        parameters=_by_part(method),
        trained=sizes["trained"],
        flops=float(flops),
        crops=crops,
        weights=sizes["weights"],
        kept=built - sizes["weights"],
        optimizer=sizes["optimizer"],
        average=sizes["average"],
        step=max(step, sizes["least"]),
        an_image=an_image,
        least=sizes["least"],
        exchanges=(
            *said,
            Exchange("reduce", "gradients", sizes["gradients"]),
            *[Exchange("reduce", "engine", 4)] * 2,  # the loss, and whether a stop was asked for
        ),
        checkpoint=sizes["checkpoint"],
        checkpoint_each=local + _GENERATOR,
    )


class _Ledger(TorchDispatchMode):
    """Counts the bytes of living tensors and the operations of what runs below it.

    Tensors that have values (images' numbers, orders that a key draws) are computed with as always; what asks
    a tensor without values for one is told zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((*args, *kwargs.values()))
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if given[0].is_floating_point() else 0
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        for tensor in _tensors(out):
            self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _bring_to_cpu(method: Method) -> None:
    """Put fake tensors in the place of those on the meta device, which autocast doesn't know."""
    done: dict[torch.Tensor, torch.Tensor] = {}
    for module in method.modules():
        held: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in done:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype)
                    learns = isinstance(tensor, nn.Parameter)
                    done[tensor] = nn.Parameter(new, tensor.requires_grad) if learns else new
                tensors[name] = done[tensor]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class _ImaginedWorld:
    """The first of any number of processes; it writes down what would be said. See ``Collectives``."""

    rank = 0
    local_rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.said: list[Exchange] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _ImaginedWorld:
        return self  # a copied network talks to the same processes

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.said.append(Exchange("reduce", "method", tensor.nbytes))
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.sum_(tensor)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.sum_(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.said.append(Exchange("gather", "method", tensor.nbytes))
        everyone = tensor.repeat(self.world_size, *(1,) * (tensor.dim() - 1))
        if everyone.requires_grad:
            everyone.register_hook(self._sum_gradient)
        return everyone

    def _sum_gradient(self, gradient: torch.Tensor) -> None:
        self.said.append(Exchange("reduce", "method", gradient.nbytes))

    def gather_values(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        pass

    def split(self, size: int) -> _ImaginedWorld:
        return _ImaginedWorld(size)


def _listen_to_norms(method: Method, world: _ImaginedWorld) -> None:
    """Note what synchronised norms say: mean, variance and count forward, two sums backward, in float32."""

    def said(norm: Any, given: Any) -> None:
        world.said.append(Exchange("gather", "batchnorm", 4 * (2 * norm.num_features + 1)))
        if torch.is_grad_enabled():
            world.said.append(Exchange("reduce", "batchnorm", 4 * 2 * norm.num_features))

    for norm in method.modules():
        if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d):
            norm.register_forward_pre_hook(said)


def _crops(
    trunk: nn.Module, groups: Sequence[tuple[int, int]], views: Sequence[torch.Tensor], ledger: _Ledger
) -> tuple[CropCost, ...]:
    flops = []
    with torch.no_grad():
        for group in views:
            ledger.flops = 0
            trunk(group)
            flops.append(ledger.flops / len(group))
    each = [one * count for one, (_, count) in zip(flops, groups, strict=True)]
    total = sum(each) or 1
    return tuple(
        CropCost(size, count, one, all_of_them / total)
        for (size, count), one, all_of_them in zip(groups, flops, each, strict=True)
    )


def _sizes(method: Method, recipe: Recipe, half: bool) -> dict[str, int]:
    """Numbers and bytes that follow from the method's parameters alone."""
    config = recipe.optimizer
    groups = method.param_groups(config.exclude_one_dimensional)
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    optimizer = gradients * _moments(config)
    average = 0 if recipe.engine.ema_decay is None else _bytes(method.trunk.state_dict())
    state = method.state_dict()
    told = len(state) + len(trained) * _moments(config)
    return {
        "trained": sum(p.numel() for p in trained),
        "gradients": gradients,
        "weights": sum(p.nbytes for p in method.parameters()),
        "optimizer": optimizer,
        "average": average,
        # LARS makes all updates before it applies them.
        "least": gradients * (2 if config.name == "lars" else 1),
        # Autocast keeps what it has cast of the weights until the forward pass is over, and backward needs it.
        "copies": sum(_HALF * p.numel() for p in trained if p.dim() > 1) if half else 0,
        "checkpoint": _bytes(state) + optimizer + average + told * _TOLD,
    }


def _moments(config: OptimizerConfig) -> int:
    return 0 if config.name == "sgd" and not config.momentum else _MOMENTS[config.name]


def _by_part(method: Method) -> dict[str, int]:
    found = {name: sum(p.numel() for p in child.parameters()) for name, child in method.named_children()}
    return {name: count for name, count in found.items() if count}


def _bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values: Iterable[Any] = state.values() if isinstance(state, dict) else state
    return sum(map(_bytes, values)) if isinstance(state, dict | list | tuple) else 0
