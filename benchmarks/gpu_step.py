"""SwAV's training step with a ResNet-50 on a GPU: ours, a plain loop with autocast, and lightly's parts.

    python benchmarks/gpu_step.py [--batches 32 64 128 256] [--compile off on] [--pairs 5]
    python benchmarks/gpu_step.py --device cpu --tiny      whether the script works, anywhere

2x224 + 6x96. Ours is the step of ``zoo pretrain --recipe swav_rn50_800ep``, in the number format that the
device computes fast in. The plain loop autocasts to the same format: torchvision's network in torch's default
memory format, a log-softmax for each pair of views, LARS parameter by parameter (``swav_step.py``). The third
has lightly's SwaVProjectionHead, SwaVPrototypes, SwaVLoss and LARS around the same trunk. All views lie on the
device; the peers' are normalised already, ours are uint8 and normalised in the step. With ``compile`` every
side's trunk goes through torch.compile. Peak memory is torch's count of a side's own allocations at its
highest. A side that runs out of memory is said to, and its batch is skipped.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from runner import Case, load_average, write_result
from sides import Step
from swav_loss import PROTOTYPES, lightly_loss
from swav_step import GROUPS, PlainLARS, PlainNetwork, PlainStep, make_views, normalized, our_step

from zoo.engine.precision import choose_precision
from zoo.errors import RunError

TARGET = 1.3
STEPS = 10  # in a timed call
TINY = ((64, 2), (32, 2))  # side, views


class LightlyNetwork(PlainNetwork):
    """lightly's head, prototypes and loss around the same trunk."""

    def __init__(self) -> None:
        from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes

        super().__init__()
        self.head = SwaVProjectionHead(2048, 2048, 128)
        self.prototypes = SwaVPrototypes(128, PROTOTYPES)
        self._loss = lightly_loss()

    def normalize(self) -> None:
        self.prototypes.normalize()

    def loss(self, scores: torch.Tensor, batch: int) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(scores, batch)


def _plain(views: list[torch.Tensor], batch: int, half: torch.dtype, compiled: bool) -> Step:
    network = PlainNetwork().to(views[0].device)
    if compiled:
        network.trunk.compile()
    return PlainStep(network, PlainLARS(network.parameters(), lr=0.3), normalized(views), batch, half)


def _lightly(views: list[torch.Tensor], batch: int, half: torch.dtype, compiled: bool) -> Step:
    from lightly.utils.lars import LARS

    network = LightlyNetwork().to(views[0].device)
    if compiled:
        network.trunk.compile()
    optimizer = LARS(network.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-6)
    return PlainStep(network, optimizer, normalized(views), batch, half)


class _Device:
    """What the measuring needs to know of a device."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.on_gpu = self.device.type == "cuda"

    def allocated(self, peak: bool = False) -> int:
        """Bytes; 0 where torch does not count."""
        if not self.on_gpu:
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def repeat(self, step: Step, times: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                step()
            if self.on_gpu:
                torch.cuda.synchronize()

        return work

    def built(self, build: Callable[[], Step], warmup: int) -> tuple[Step, int]:
        """A side after its first steps, and the bytes that it holds at its peak."""
        before = self.allocated()
        step = build()
        for _ in range(warmup):
            step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
        return step, self.allocated(peak=True) - before


def _peers() -> dict[str, Callable[..., Step]]:
    peers: dict[str, Callable[..., Step]] = {"plain": _plain}
    if lightly_loss() is None:
        print("not measured: lightly (not installed)")
    else:
        peers["lightly"] = _lightly
    return peers


def _compare(
    on: _Device, batch: int, compiled: bool, name: str, peer: Callable[..., Step], options: Any
) -> dict[str, Any]:
    """One comparison; both sides are built, measured and let go of."""
    precision = choose_precision("bfloat16" if options.tiny else "auto", on.device)
    half = getattr(torch, precision.name)
    views = [v.to(on.device) for v in make_views(batch, TINY if options.tiny else GROUPS)]
    sizes = {"views.size": [side for side, _ in TINY], "views.count": [count for _, count in TINY]}
    ours_given = {"precision": precision.name, "engine.compile": compiled, **(sizes if options.tiny else {})}
    warmup, times = (1, 1) if options.tiny else (3, STEPS)
    ours, our_memory = on.built(lambda: our_step(batch, str(on.device), views, ours_given)[0], warmup)
    theirs, their_memory = on.built(lambda: peer(views, batch, half, compiled), warmup)
    case = Case(
        f"batch {batch}, ours / {name}" + (", compiled" if compiled else ""),
        ours=on.repeat(ours, times),
        peer=on.repeat(theirs, times),
        target=None if compiled or options.tiny else TARGET,
        pairs=options.pairs,
        amount=batch * times,
        unit="img/s",
    )
    return {
        **case.run(),
        "batch": batch,
        "compiled": compiled,
        "peer": name,
        "precision": precision.name,
        "peak_bytes": {"ours": our_memory, "peer": their_memory},
    }


def _show(row: dict[str, Any]) -> None:
    if "out_of_memory" in row:
        print(f"{row['name']:<34} out of memory", flush=True)
        return
    rate, ratio, memory = row["rate"], row["speedup"], row["peak_bytes"]
    verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
    shown = f"{memory['ours'] / 1e9:.2f} {memory['peer'] / 1e9:.2f} GB" if memory["ours"] else ""
    print(
        f"{row['name']:<34} {rate['ours']:>8.4g} {rate['peer']:>8.4g} img/s  "
        f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})  {shown}  {verdict}".rstrip(),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256], help="images")
    parser.add_argument("--compile", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs a row")
    parser.add_argument(
        "--tiny", action="store_true", help="two images of 64 and 32 pixels, one pair; no result"
    )
    options = parser.parse_args()
    if options.tiny:
        options.batches, options.compile, options.pairs = [2], ["off"], 1
    elif not torch.cuda.is_available():
        print("not measured: no GPU")
        return 0
    on = _Device(options.device)
    logging.disable(logging.WARNING)  # the batch is smaller than the recipe's, and the recipe says so
    rows = []
    for compiled in (word == "on" for word in options.compile):
        for batch in options.batches:
            for name, peer in _peers().items():
                try:
                    row = _compare(on, batch, compiled, name, peer, options)
                except (torch.OutOfMemoryError, RunError) as error:
                    if isinstance(error, RunError) and not isinstance(
                        error.__cause__, torch.OutOfMemoryError
                    ):
                        raise
                    row = {"name": f"batch {batch}, ours / {name}", "out_of_memory": True}
                rows.append(row)
                _show(row)
                if on.on_gpu:
                    torch.cuda.empty_cache()
    if options.tiny:
        print("the script works; nothing is measured at this size")
        return 0
    gpu = torch.cuda.get_device_name(on.device)
    write_result("gpu_step", {"load_before": load_average(), "gpu": gpu, "rows": rows})
    return 0 if all(row.get("met") is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
