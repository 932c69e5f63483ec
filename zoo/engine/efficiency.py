"""How well a run used its machine: images a second, where a step's time went, its share of the matrix peak."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from ..files import write_json
from ..products import row_products
from .loop import Loop, StepRecord
from .sections import KEEP, SECTIONS, WARM_UP, clock_of
from .trackers import Guarded

__all__ = ["EfficiencyReport", "ModuleCall", "ModuleCalls", "flops_of", "matrix_peak"]

SCHEMA = 1
LEAST_STEPS = 5

log = logging.getLogger("zoo")

T = TypeVar("T")

# They change no shape, and shapes are all that counts. Left in, they would take most of the time, and norms
# that average over processes would wait for the others.
_NOT_COUNTED = (_BatchNorm, nn.ReLU)


@dataclass(frozen=True)
class ModuleCall:
    """A call of a network: its module, the arguments (tensors described, not kept) and whether gradients flow."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool


@dataclass(frozen=True)
class _Shape:
    """What is kept of a tensor argument."""

    sizes: tuple[int, ...]
    floating: bool
    requires_grad: bool


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), value.is_floating_point(), value.requires_grad)
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value


class ModuleCalls:
    """Listens to which networks below a module are called: trunk, heads, a momentum encoder.

    Only outermost calls are noted, and nothing is computed. It is meant for one step.

    Args:
        root: its descendants are listened to, not itself.
    """

    def __init__(self, root: nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self._depth = 0
        self._hooks: list[Any] = []
        for module in itertools.islice(root.modules(), 1, None):
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            described = {key: _described(value) for key, value in kwargs.items()}
            call = ModuleCall(module, tuple(_described(args)), described, torch.is_grad_enabled())
            self.calls.append(call)
        self._depth += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1

    def stop(self) -> None:
        """Stop listening."""
        while self._hooks:
            self._hooks.pop().remove()


def flops_of(calls: Sequence[ModuleCall]) -> int:
    """Floating-point operations of the calls' convolutions and matrix products, forward and backward.

    A multiply-add counts as two. The backward pass of a layer costs as much again for the gradient of its
    weights and once more for that of its input; a network's first layer needs no gradient of the images.
    Norms, activations, pooling and whatever a loss computes outside of modules are not counted.

    The shapes alone are pushed through copies of the networks without values ("meta" tensors): this takes
    milliseconds for a layer, no memory, and leaves the networks as they are.
    """
    hollow: dict[int, nn.Module] = {}
    total = 0
    for call in calls:
        key = id(call.module)
        if key not in hollow:
            hollow[key] = _without_values(call.module)
        dtype = next((p.dtype for p in call.module.parameters() if p.is_floating_point()), torch.float32)
        args = [_filled(value, dtype) for value in call.args]
        kwargs = {name: _filled(value, dtype) for name, value in call.kwargs.items()}
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(call.gradients):
            outputs = _differentiable(hollow[key](*args, **kwargs))
            if call.gradients and outputs:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        total += int(counter.get_total_flops())
    return total


def _without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes only; the values are never copied."""
    known: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        shape = torch.empty_like(tensor, device="meta", requires_grad=False)
        known[id(tensor)] = (
            nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
        )
    hollow = copy.deepcopy(module, known).eval()
    for parent in list(hollow.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _NOT_COUNTED):
                setattr(parent, name, nn.Identity())
    return hollow


def _filled(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, _Shape):
        kind = dtype if value.floating else torch.int64
        return torch.empty(value.sizes, dtype=kind, device="meta", requires_grad=value.requires_grad)
    if isinstance(value, list):
        return [_filled(item, dtype) for item in value]
    return value


def _differentiable(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _differentiable(item)]
    return []


def matrix_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> float | None:
    """Floating-point operations a second of the fastest square matrix product that is found.

    Products grow until one takes 50 ms (5 ms on a GPU) or has 4096 (8192) rows; the best one counts. On a
    CPU with as many threads as torch uses now. A float32 product may use TF32 where convolutions do.

    Args:
        device: a CPU or a CUDA device; for others None, they can't be timed here.
        dtype: what the products are computed in.
        seconds: how long to try; the last product may run over.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    on_gpu = device.type == "cuda"
    enough, limit = (0.005, 8192) if on_gpu else (0.05, 4096)
    precision = torch.get_float32_matmul_precision()
    if on_gpu and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad():
            return _fastest_product(device, dtype, seconds, enough, limit)
    finally:
        torch.set_float32_matmul_precision(precision)


def _fastest_product(
    device: torch.device, dtype: torch.dtype, seconds: float, enough: float, limit: int
) -> float:
    generator = torch.Generator(device)  # the global one belongs to the run
    best, rows = 0.0, 512
    a = torch.rand(rows, rows, device=device, dtype=dtype, generator=generator)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        # Twice: the first product of its size may load or compile its kernel.
        took = min(_product_seconds(a) for _ in range(2))
        best = max(best, 2.0 * rows**3 / took)
        if took < enough and rows < limit:
            rows *= 2
            a = torch.rand(rows, rows, device=device, dtype=dtype, generator=generator)
    return best


def _product_seconds(a: torch.Tensor) -> float:
    clock = clock_of(a.device)
    first = clock.stamp()
    row_products(a, a)
    last = clock.stamp()
    clock.wait(last)
    return clock.seconds(first, last)


class EfficiencyReport(Guarded):
    """Writes ``efficiency.json`` when a session ends and logs its gist; a failure costs one warning.

    A session of fewer than five steps leaves no report. What is in the file (times in seconds, shares
    from 0 to 1, null where something can't be known):

    * ``device``, ``dtype``, ``threads`` (of the trainer, on a CPU), ``clock`` (``host``, or ``device``: the
      GPU's own time line, see ``zoo.engine.sections.DeviceClock``);
    * ``steps``: how many were measured: the newest 4096 of this session, without its first two;
    * ``images_per_second``: all images over all the measured steps' time; ``step_seconds`` and
      ``median_step_seconds``. What lies between steps is left out: ``between_steps_seconds`` tells what
      watchers, checkpoints, evaluations and the beginnings of epochs took from the third step of the session
      on;
    * ``sections``: of each section its ``share`` of the steps' time, mean ``seconds`` and
      ``median_seconds``;
    * ``flops_per_step``: ``flops_of`` the networks that were called in the session's first step;
    * ``peak_flops_per_second``: ``matrix_peak``, tried at the end; ``share_of_peak`` is what whole steps
      reached of it, ``share_of_peak_computing`` what forward, loss and backward alone reached.

    Each process counts its own work.

    Args:
        file: where the report goes.
    """

    def __init__(self, file: Path) -> None:
        super().__init__("The efficiency report")
        self._file = file
        self._learner: object = None
        self._listener: ModuleCalls | None = None
        self._images: deque[int] = deque(maxlen=KEEP)
        self._steps = 0
        self._between = 0.0

    def on_start(self, loop: Loop) -> None:
        self._learner = loop.learner

    def on_batch(self, batch: Any) -> None:
        # Not before: at the start of an epoch a learner may look at all of its images.
        if self._steps == 0:
            self.guard("starting", self._listen, self._learner)

    def _listen(self, learner: object) -> None:
        if isinstance(learner, nn.Module):
            self._listener = ModuleCalls(learner)

    def on_step(self, record: StepRecord) -> None:
        if self._listener is not None:
            self._listener.stop()
        self._steps += 1
        self._images.append(record.images)
        # Steps' times are taken away from the time between the second step's end and the session's.
        self._between = -time.perf_counter() if self._steps <= WARM_UP else self._between - record.step_time

    def on_end(self, loop: Loop) -> None:
        if self._steps >= LEAST_STEPS:
            self._between += time.perf_counter()
            self.guard("measuring", self._report, loop)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def _report(self, loop: Loop) -> None:
        precision, calls = loop.precision, self._listener.calls if self._listener else []
        rows = loop.sections.rows()
        report = {
            "schema": SCHEMA,
            "device": str(precision.device),
            "dtype": precision.name,
            "threads": torch.get_num_threads(),
            "clock": loop.sections.clock.name,
            **_times(rows, list(self._images)[-len(rows) :]),
            "between_steps_seconds": self._between,
            "flops_per_step": _if_possible("FLOPs", lambda: flops_of(calls) or None),
            "peak_flops_per_second": _if_possible(
                "matrix peak", lambda: matrix_peak(precision.device, getattr(torch, precision.name))
            ),
        }
        report |= _shares_of_peak(report)
        write_json(self._file, report)
        for line in _gist(report):
            log.info("%s", line)


def _if_possible(what: str, measure: Callable[[], T | None]) -> T | None:
    try:
        return measure()
    except Exception as error:  # out of memory, an operation without a "meta" form: the rest is worth telling
        log.info("efficiency: no %s (%s: %s)", what, type(error).__name__, str(error).partition("\n")[0])
        return None


def _times(rows: Sequence[Mapping[str, float]], images: Sequence[int]) -> dict[str, Any]:
    steps = [sum(row.values()) for row in rows]
    total = sum(steps)
    by_section = {name: [row[name] for row in rows] for name in SECTIONS}
    return {
        "steps": len(rows),
        "images_per_second": sum(images) / total,
        "step_seconds": total / len(rows),
        "median_step_seconds": median(steps),
        "sections": {
            name: {
                "share": sum(times) / total,
                "seconds": sum(times) / len(rows),
                "median_seconds": median(times),
            }
            for name, times in by_section.items()
        },
    }


def _shares_of_peak(report: Mapping[str, Any]) -> dict[str, float | None]:
    flops, peak = report["flops_per_step"], report["peak_flops_per_second"]
    if not flops or not peak:
        return {"share_of_peak": None, "share_of_peak_computing": None}
    computing = sum(report["sections"][name]["seconds"] for name in ("forward", "loss", "backward"))
    return {
        "share_of_peak": flops / report["step_seconds"] / peak,
        "share_of_peak_computing": flops / computing / peak,
    }


def _gist(report: Mapping[str, Any]) -> list[str]:
    """Two or three lines for people."""
    shares = {name: section["share"] for name, section in report["sections"].items()}
    if not shares["loss"]:  # the method does not mark where its loss begins
        del shares["loss"]
        shares = {"forward and loss" if name == "forward" else name: share for name, share in shares.items()}
    lines = [
        f"efficiency of {report['steps']} steps: {report['images_per_second']:.4g} images/s, "
        f"{1000 * report['step_seconds']:.4g} ms a step",
        "efficiency, time: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()),
    ]
    if report["share_of_peak"] is not None:
        reached = report["flops_per_step"] / report["step_seconds"]
        threads = report["threads"]
        on = f", {threads} thread{'s' * (threads > 1)}" if report["device"] == "cpu" else ""
        lines.append(
            f"efficiency, work: {reached / 1e9:.3g} GFLOP/s, {100 * report['share_of_peak']:.0f} % of the matrix "
            f"peak of {report['peak_flops_per_second'] / 1e9:.3g} ({report['dtype']}{on})"
        )
    return lines
