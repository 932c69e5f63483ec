"""Sinkhorn codes against the reference, exact arithmetic and the plain formulation."""

from __future__ import annotations

from decimal import Decimal, localcontext
from pathlib import Path

import pytest
import torch

from zoo.pretrain.losses.sinkhorn import sinkhorn

from .cases import case_ids, load


# The two-process cases belong to the distributed tests.
@pytest.mark.parametrize("name", case_ids("sinkhorn_", without=["sinkhorn_mp2"]))
def test_codes_are_the_references(shared: Path, name: str) -> None:
    case = load(shared, name)
    codes = sinkhorn(case.inputs["scores"], case.args["epsilon"], case.args["sinkhorn_iterations"])
    assert codes.dtype == case.outputs["Q"].dtype
    case.check("Q", codes)


def exact_codes(scores: list[list[float]], epsilon: str, iterations: int) -> torch.Tensor:
    """The algorithm as it is printed, with numbers that neither overflow nor round visibly."""
    with localcontext() as context:
        context.prec = 80
        q = [[(Decimal(s) / Decimal(epsilon)).exp() for s in row] for row in scores]
        total = sum(sum(row) for row in q)
        q = [[value / total for value in row] for row in q]
        for _ in range(iterations):
            columns = [sum(column) * len(q[0]) for column in zip(*q, strict=True)]
            q = [[value / column for value, column in zip(row, columns, strict=True)] for row in q]
            q = [[value / (sum(row) * len(q)) for value in row] for row in q]
        return torch.tensor([[float(value * len(q)) for value in row] for row in q], dtype=torch.float64)


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 2e-3)])
def test_scores_that_overflow_an_exponential(iterations: int, dtype: torch.dtype, rtol: float) -> None:
    # exp(50 / 0.05) overflows even float64, and less the largest score the second row would be zeros.
    scores = [[50.0, 49.0], [0.0, 1.0]]
    codes = sinkhorn(torch.tensor(scores, dtype=dtype), 0.05, iterations)
    assert codes.isfinite().all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(2, dtype=dtype))
    torch.testing.assert_close(codes.double(), exact_codes(scores, "0.05", iterations), rtol=rtol, atol=1e-30)


def unit_scores(batch: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosine similarities of random directions in the plane: dense up to -1 and 1."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.rand(batch, 1, generator=generator) - torch.rand(1, count, generator=generator)
    return torch.cos(2 * torch.pi * turns.double()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_and_a_tiny_epsilon(dtype: torch.dtype) -> None:
    scores = unit_scores(64, 30, dtype)
    codes = sinkhorn(scores, 0.001, 3)
    assert codes.dtype == torch.float32
    assert codes.isfinite().all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(64))
    # The promotion comes before everything else: only float32's own rounding of 1000 is left.
    torch.testing.assert_close(codes.double(), sinkhorn(scores.double(), 0.001, 3), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("iterations", [0, 3])
def test_number_format(given: torch.dtype, returned: torch.dtype, iterations: int) -> None:
    assert sinkhorn(unit_scores(6, 4, given), 0.05, iterations).dtype == returned


def test_a_large_epsilon_gives_uniform_codes() -> None:
    codes = sinkhorn(unit_scores(16, 8, torch.float64), 1e6, 3)
    torch.testing.assert_close(codes, torch.full_like(codes, 1 / 8), rtol=1e-5, atol=0)


def plain_codes(scores: torch.Tensor, epsilon: float, iterations: int) -> torch.Tensor:
    """The algorithm as it is printed: exponentials, then sums of prototypes and samples in turn."""
    q = torch.exp(scores / epsilon)
    q = q / q.sum()
    batch, count = q.shape
    for _ in range(iterations):
        q = q / (q.sum(dim=0, keepdim=True) * count)
        q = q / (q.sum(dim=1, keepdim=True) * batch)
    return q * batch


@pytest.mark.parametrize("epsilon", [0.03, 0.05, 1.0])
@pytest.mark.parametrize("iterations", [0, 1, 3, 10])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (16, 8), (8, 40)])
def test_equals_the_plain_formulation(epsilon: float, iterations: int, shape: tuple[int, int]) -> None:
    scores = unit_scores(*shape, torch.float64)
    before = scores.clone()
    got, want = sinkhorn(scores, epsilon, iterations), plain_codes(scores, epsilon, iterations)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-30)
    assert torch.equal(scores, before)


def test_scores_get_no_gradient() -> None:
    assert not sinkhorn(unit_scores(6, 4, torch.float32).requires_grad_(), 0.05, 3).requires_grad
