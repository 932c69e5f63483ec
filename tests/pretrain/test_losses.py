"""SwAV's loss and codes beyond the golden cases: gradients pair by pair, number formats, extreme scores."""

from __future__ import annotations

import pytest
import torch

from zoo.pretrain.losses.sinkhorn import harden, sinkhorn
from zoo.pretrain.losses.swav import swapped_prediction_loss

BATCH, VIEWS, COUNT = 5, 4, 7


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_codes(assign: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.softmax(draw(BATCH, COUNT, seed=10 + crop), dim=1) for crop in assign]


def pair_by_pair(
    scores: torch.Tensor, codes: list[torch.Tensor], assign: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """Equation 2 as it is printed, averaged as the reference does."""
    losses = [
        -(q * torch.log_softmax(scores.unflatten(0, (-1, BATCH))[view] / temperature, dim=1)).sum(1).mean()
        for crop, q in zip(assign, codes, strict=True)
        for view in range(VIEWS)
        if view != crop
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("assign", [(0, 1), (1,), (2, 0, 3), (0, 1, 2, 3)])
def test_the_gradient_is_that_of_the_loss_pair_by_pair(assign: tuple[int, ...]) -> None:
    codes = some_codes(assign)
    scores, plain = (draw(VIEWS * BATCH, COUNT).requires_grad_() for _ in range(2))
    loss = swapped_prediction_loss(scores, codes, assign, 0.1)
    want = pair_by_pair(plain, codes, assign, 0.1)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    (3 * loss**2).backward()  # a gradient of the loss that isn't 1
    (3 * want**2).backward()
    torch.testing.assert_close(scores.grad, plain.grad, rtol=1e-11, atol=1e-14)
    assert torch.equal(scores.detach(), draw(VIEWS * BATCH, COUNT))
    assert all(map(torch.equal, codes, some_codes(assign)))


def test_without_a_gradient_the_loss_is_the_same() -> None:
    codes, scores = some_codes((0, 1)), draw(VIEWS * BATCH, COUNT)
    loss = swapped_prediction_loss(scores, codes, (0, 1), 0.1)
    assert not loss.requires_grad
    assert torch.equal(loss, swapped_prediction_loss(scores.requires_grad_(), codes, (0, 1), 0.1).detach())


def test_scores_beyond_the_range_of_exponentials() -> None:
    scores = (1e4 * draw(VIEWS * BATCH, COUNT)).requires_grad_()
    loss = swapped_prediction_loss(scores, some_codes((0, 1)), (0, 1), 0.1)
    loss.backward()
    torch.testing.assert_close(
        loss, pair_by_pair(scores, some_codes((0, 1)), (0, 1), 0.1), rtol=1e-12, atol=0
    )
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_scores_give_a_float32_loss_and_a_half_gradient(dtype: torch.dtype) -> None:
    half = draw(VIEWS * BATCH, COUNT).to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    codes = [q.float() for q in some_codes((0, 1))]
    for scores in (half, full):
        loss = swapped_prediction_loss(scores, codes, (0, 1), 0.1)
        assert loss.dtype == torch.float32
        loss.backward()
    assert half.grad is not None
    assert full.grad is not None
    assert half.grad.dtype == dtype
    assert torch.equal(half.grad, full.grad.to(dtype))


@pytest.mark.parametrize("of_codes", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_scores", [torch.float64, torch.float32, torch.bfloat16])
def test_codes_may_be_of_another_type_than_scores(of_scores: torch.dtype, of_codes: torch.dtype) -> None:
    codes = [harden(q).to(of_codes) for q in some_codes((2, 0))]  # rows that sum to 1 in any type
    scores = draw(VIEWS * BATCH, COUNT).to(of_scores).requires_grad_()
    plain = scores.detach().double().requires_grad_()
    want = pair_by_pair(plain, [q.double() for q in codes], (2, 0), 0.1)
    want.backward()
    loss = swapped_prediction_loss(scores, codes, (2, 0), 0.1)
    loss.backward()
    assert loss.dtype == (torch.float64 if of_scores == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    assert plain.grad is not None
    torch.testing.assert_close(scores.grad, plain.grad.to(of_scores), rtol=1e-2, atol=1e-6)


def test_a_second_backward_pass_is_refused() -> None:
    scores = draw(VIEWS * BATCH, COUNT).requires_grad_()
    loss = swapped_prediction_loss(scores, some_codes((0, 1)), (0, 1), 0.1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def codes_by_logarithms(scores: torch.Tensor, epsilon: float, iterations: int) -> torch.Tensor:
    """Sinkhorn with nothing but log-sum-exps, in float64."""
    logits = scores.double() / epsilon
    f = torch.zeros(1, scores.shape[1], dtype=torch.float64)
    g = torch.zeros(scores.shape[0], 1, dtype=torch.float64)
    for iteration in range(iterations):
        if iteration > 0:
            g = -torch.logsumexp(logits + f, dim=1, keepdim=True)
        f = -torch.logsumexp(logits + g, dim=0, keepdim=True)
    return torch.softmax(logits + f, dim=1)


@pytest.mark.parametrize("iterations", [1, 3, 4, 60])
@pytest.mark.parametrize("kind", ["wide", "offsets", "one serves all", "one is liked by all"])
def test_codes_of_extreme_scores(kind: str, iterations: int) -> None:
    scores = 30.0 * draw(57, 58)
    if kind == "offsets":  # of samples and prototypes: the codes don't depend on the latter
        scores = scores + 100.0 * draw(57, 1, seed=1) + 100.0 * draw(1, 58, seed=2)
    elif kind == "one serves all":  # each iteration moves the scalings further apart, without end
        scores[1:, 1:] -= 1000.0
    elif kind == "one is liked by all":
        scores[:, 0] += 500.0
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 5e-3)):
        given = scores.to(dtype)
        codes = sinkhorn(given, 0.05, iterations)
        assert codes.isfinite().all()
        torch.testing.assert_close(
            codes.double(), codes_by_logarithms(given, 0.05, iterations), rtol=0, atol=atol
        )


def test_autocast_does_not_reach_the_codes() -> None:
    scores = (0.3 * draw(16, 40)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        codes = sinkhorn(scores, 0.05, 3)
    assert torch.equal(codes, sinkhorn(scores, 0.05, 3))
