"""SwAV's loss with its Sinkhorn codes, forward and backward, against the plain formulation and lightly's.

    python benchmarks/swav_loss.py [--threads N] [--pairs 7]

Plain is what the paper prints: Sinkhorn on the transposed exponentials, then, for each assigning crop, the
log-softmax of every other view. Both sides get the same float32 scores and give the same loss and gradient
(checked first). While they are timed the process keeps freed memory, as a training process comes to do by
itself: what is timed is computing, not the system's handing out of pages. Peak memory: by how much the resident
memory of a fresh process grows at its peak in one forward and backward pass, the gradient of the scores included,
the scores themselves not. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from runner import Case, measure, run_command
from sides import resident

from zoo.engine.precision import processors
from zoo.heap import keep_freed_memory
from zoo.pretrain.losses.sinkhorn import sinkhorn
from zoo.pretrain.losses.swav import swapped_prediction_loss

__all__ = ["lightly_loss", "plain_loss", "plain_sinkhorn"]

VIEWS, PROTOTYPES, DIM = 8, 3000, 128
ASSIGN = (0, 1)
TEMPERATURE, EPSILON, ITERATIONS = 0.1, 0.05, 3
SMALL, LARGE, ALONE = 64, 512, 4096  # images; the last for Sinkhorn alone
TARGETS = {SMALL: 1.8, LARGE: 2.0}
TARGET_MEMORY = 0.5  # of the plain formulation's, at most

Loss = Callable[[torch.Tensor, int], torch.Tensor]


@torch.no_grad()
def plain_sinkhorn(scores: torch.Tensor) -> torch.Tensor:
    """The pseudo-code of the paper's appendix A.1: (B, K) scores to codes."""
    q = torch.exp(scores / EPSILON).T
    q /= q.sum()
    prototypes, samples = q.shape
    for _ in range(ITERATIONS):
        q /= q.sum(dim=1, keepdim=True) * prototypes
        q /= q.sum(dim=0, keepdim=True) * samples
    return (q * samples).T


def plain_loss(scores: torch.Tensor, batch: int) -> torch.Tensor:
    """Equation 2 summed pair by pair: a log-softmax of each other view for each assigning crop."""
    views = scores.split(batch)
    loss = scores.new_zeros(())
    for crop in ASSIGN:
        codes = plain_sinkhorn(views[crop].detach())
        for other, of_other in enumerate(views):
            if other != crop:
                fit = (codes * torch.log_softmax(of_other / TEMPERATURE, dim=1)).sum(dim=1).mean()
                loss = loss - fit / (len(views) - 1) / len(ASSIGN)
    return loss


def our_loss(scores: torch.Tensor, batch: int) -> torch.Tensor:
    """As ``zoo.pretrain.methods.swav.SwAV.step`` computes it."""
    assigned = (scores.detach()[crop * batch : (crop + 1) * batch] for crop in ASSIGN)
    codes = [sinkhorn(rows, EPSILON, ITERATIONS) for rows in assigned]
    return swapped_prediction_loss(scores, codes, ASSIGN, TEMPERATURE)


def lightly_loss() -> Loss | None:
    """lightly's SwaVLoss with its sinkhorn, or None where it is not installed."""
    try:
        from lightly.loss import SwaVLoss
    except ImportError:
        return None
    loss = SwaVLoss(TEMPERATURE, ITERATIONS, EPSILON)

    def compute(scores: torch.Tensor, batch: int) -> torch.Tensor:
        views = list(scores.split(batch))
        return loss(views[: len(ASSIGN)], views[len(ASSIGN) :]).squeeze()

    return compute


def make_scores(batch: int, views: int = VIEWS) -> torch.Tensor:
    """Cosine similarities of random directions, (views * batch, K)."""
    torch.manual_seed(0)
    rows, prototypes = torch.randn(views * batch, DIM), torch.randn(PROTOTYPES, DIM)
    unit = partial(torch.nn.functional.normalize, dim=1)
    return (unit(rows) @ unit(prototypes).T).requires_grad_()


def forward_backward(loss: Loss, scores: torch.Tensor, batch: int, times: int = 1) -> float:
    """The loss; ``scores.grad`` is its gradient."""
    for _ in range(times):
        scores.grad = None
        value = loss(scores, batch)
        value.backward()
    return value.item()


def _grown(name: str) -> int:
    """Bytes that resident memory grows by at the peak of a pass; for a process of its own."""
    loss = {"ours": our_loss, "plain": plain_loss, "lightly": lightly_loss()}[name]
    assert loss is not None
    forward_backward(loss, make_scores(2), 2)  # what is loaded at first use is loaded now
    scores = make_scores(LARGE)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the high-water mark starts from here
    before = resident("VmRSS")
    forward_backward(loss, scores, LARGE)
    return resident("VmHWM") - before


def _check(other: Loss) -> None:
    for batch in TARGETS:
        scores = make_scores(batch)
        ours = forward_backward(our_loss, scores, batch)
        gradient = scores.grad
        theirs = forward_backward(other, scores, batch)
        assert gradient is not None
        assert scores.grad is not None
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
        torch.testing.assert_close(gradient, scores.grad, rtol=1e-3, atol=1e-9)


def _case(batch: int, other: Loss, name: str, target: float | None, pairs: int) -> Case:
    times = max(1, 1024 // batch)
    scores = make_scores(batch)
    return Case(
        f"loss + Sinkhorn, {VIEWS}x{batch}x{PROTOTYPES}, ours / {name}",
        ours=lambda: forward_backward(our_loss, scores, batch, times),
        peer=lambda: forward_backward(other, scores, batch, times),
        target=target,
        pairs=pairs,
        amount=times * batch,
        unit="img/s",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=processors(), help="of torch")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs a case")
    parser.add_argument("--memory-of", choices=("ours", "plain", "lightly"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(_grown(options.memory_of)))
        return 0

    peers: dict[str, Loss] = {"plain": plain_loss}
    lightly = lightly_loss()
    if lightly is not None:
        peers["lightly"] = lightly
    else:
        print("not measured: lightly (not installed)")
    for other in peers.values():
        _check(other)

    command = [sys.executable, __file__, "--threads", str(options.threads), "--memory-of"]
    memory = {name: int(run_command([*command, name]).stdout) for name in ("ours", *peers)}
    share = memory["ours"] / memory["plain"]
    print(
        f"peak memory, {VIEWS}x{LARGE}x{PROTOTYPES}: {', '.join(f'{k} {v / 1e6:.0f} MB' for k, v in memory.items())}"
    )
    print(f"ours / plain: {share:.2f} (target: at most {TARGET_MEMORY})")

    cases = [
        _case(batch, other, name, TARGETS[batch] if name == "plain" else None, options.pairs)
        for name, other in peers.items()
        for batch in TARGETS
    ]
    keep_freed_memory()
    alone = make_scores(ALONE, views=1).detach()
    cases.append(
        Case(
            f"Sinkhorn alone, {ALONE}x{PROTOTYPES}",
            ours=lambda: sinkhorn(alone, EPSILON, ITERATIONS),
            peer=lambda: plain_sinkhorn(alone),
            pairs=options.pairs,
        )
    )
    extra = {"threads": options.threads, "peak_memory_bytes": memory, "peak_memory_ours_of_plain": share}
    met = measure("swav_loss", cases, extra)
    return 0 if met and share <= TARGET_MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
