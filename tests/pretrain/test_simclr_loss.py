"""NT-Xent with several positives, against the equation written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from zoo.pretrain.losses.nt_xent import nt_xent, survey

BATCH, DIM = 5, 7


def unit_rows(views: int, seed: int = 0, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(views * batch, DIM, generator=generator, dtype=torch.float64), dim=1)


def pair_by_pair(rows: torch.Tensor, views: int, temperature: float, batch: int = BATCH) -> torch.Tensor:
    """SwAV's eq. 7 as it stands."""
    count = len(rows)
    loss = rows.new_zeros(())
    for i in range(count):
        negatives = sum(
            (rows[i] @ rows[j] / temperature).exp() for j in range(count) if j % batch != i % batch
        )
        for p in range(count):
            if p % batch == i % batch and p != i:
                positive = (rows[i] @ rows[p] / temperature).exp()
                loss = loss - (positive / (positive + negatives)).log()
    return loss / count / (views - 1)


@pytest.mark.parametrize("views", [2, 3, 6])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_loss_and_gradient_are_the_equations(views: int, temperature: float) -> None:
    rows, plain = (unit_rows(views).requires_grad_() for _ in range(2))
    loss, want = nt_xent(rows, views, temperature), pair_by_pair(plain, views, temperature)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    (3 * loss**2).backward()  # a gradient of the loss that isn't 1
    (3 * want**2).backward()
    torch.testing.assert_close(rows.grad, plain.grad, rtol=1e-11, atol=1e-14)
    assert torch.equal(rows.detach(), unit_rows(views))


def test_two_views_are_the_usual_cross_entropy() -> None:
    """SimCLR's own form: each row's other view is the right one among all rows but itself."""
    rows, plain = (unit_rows(2).requires_grad_() for _ in range(2))
    loss = nt_xent(rows, 2, 0.5)
    logits = (plain @ plain.T / 0.5).masked_fill(torch.eye(2 * BATCH, dtype=torch.bool), -math.inf)
    want = F.cross_entropy(logits, torch.arange(2 * BATCH).roll(BATCH))
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    loss.backward()
    want.backward()
    torch.testing.assert_close(rows.grad, plain.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_add_up_to_the_whole_batch(parts: int) -> None:
    views, batch = 4, 6
    rows, cut = (unit_rows(views, batch=batch).requires_grad_() for _ in range(2))
    loss = nt_xent(rows, views, 0.1)
    loss.backward()
    shares = [share.flatten(0, 1) for share in cut.unflatten(0, (views, batch)).chunk(parts, dim=1)]
    found = survey([share.detach() for share in shares], views, 0.1)
    total = 0.0
    for share, whole in zip(shares, found, strict=True):
        part = nt_xent(share, views, 0.1, whole=whole)
        (part / parts).backward(retain_graph=True)
        total += part.item() / parts
    assert total == pytest.approx(loss.item(), rel=1e-14)
    torch.testing.assert_close(cut.grad, rows.grad, rtol=1e-12, atol=1e-15)


def test_without_a_gradient_the_loss_is_the_same() -> None:
    rows = unit_rows(3)
    loss = nt_xent(rows, 3, 0.1)
    assert not loss.requires_grad
    assert torch.equal(loss, nt_xent(rows.clone().requires_grad_(), 3, 0.1).detach())


def test_scores_beyond_the_range_of_exponentials() -> None:
    rows = unit_rows(3).requires_grad_()
    loss = nt_xent(rows, 3, 1e-5)  # scores up to 1e5
    loss.backward()
    assert loss.isfinite()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()
    scores = rows.detach() @ rows.detach().T / 1e-5
    own = torch.arange(15)[:, None] % BATCH == torch.arange(15) % BATCH
    hardest = scores.masked_fill(own, -math.inf).amax(dim=1, keepdim=True)
    margins = (hardest - scores).clamp_min(0).masked_fill(~own | torch.eye(15, dtype=torch.bool), 0)
    assert loss.item() == pytest.approx(margins.sum().item() / 15 / 2, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_embeddings_give_a_float32_loss_and_a_half_gradient(dtype: torch.dtype) -> None:
    half = unit_rows(3).to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    for rows in (half, full):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nt_xent(rows, 3, 0.1)
        assert loss.dtype == torch.float32
        loss.backward()
    assert half.grad is not None
    assert full.grad is not None
    assert half.grad.dtype == dtype
    assert torch.equal(half.grad, full.grad.to(dtype))
    # autocast did not reach the products
    exact = nt_xent(full.detach().double(), 3, 0.1)
    assert nt_xent(full.detach(), 3, 0.1).item() == pytest.approx(exact.item(), rel=1e-5)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_nothing_as_large_as_pairs_times_views_is_made() -> None:
    """Memory: a few matrices of a block's rows times all rows, and nothing with views as a further side."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    views, batch = 8, 16
    rows = unit_rows(views, batch=batch).requires_grad_()
    with Watch():
        nt_xent(rows, views, 0.1).backward()
    assert largest == (views * batch) ** 2
