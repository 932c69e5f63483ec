"""AMDIM's costs against its equations written out term by term; number formats; Local DIM."""

from __future__ import annotations

import math

import pytest
import torch

from zoo.pretrain.losses.amdim import Maps, Mixing, amdim_costs, classifier_cost, matches

BATCH, DIM = 3, 4


def random_maps(seed: int, kinds: int = 1, batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Maps:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        drawn = 2.0 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    return Maps(draw(batch, kinds, DIM), draw(batch, DIM, 5, 5), draw(batch, DIM, 7, 7))


def copies(views: list[Maps]) -> list[Maps]:
    return [Maps(*(tensor.detach().clone().requires_grad_() for tensor in view)) for view in views]


def term_by_term(
    sources: torch.Tensor, targets: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 2 as it stands: -L of each positive (B, L), and the mean square of all raw scores."""
    batch, side = len(sources), targets.shape[-1]
    squares, terms = [], []

    def score(i: int, j: int, y: int, x: int) -> torch.Tensor:
        raw = sources[i] @ targets[j, :, y, x] / math.sqrt(DIM)
        squares.append(raw**2)
        return clip * torch.tanh(raw / clip)

    for i in range(batch):
        scores = {
            (j, y, x): score(i, j, y, x) for j in range(batch) for y in range(side) for x in range(side)
        }
        negatives = sum(value.exp() for (j, _, _), value in scores.items() if j != i)
        own = [value for (j, _, _), value in scores.items() if j == i]
        terms.append(torch.stack([(value.exp() / (value.exp() + negatives)).log() for value in own]))
    return torch.stack(terms), torch.stack(squares).mean()


def written_out(
    views: list[Maps], places: torch.Tensor, clip: float, weight: float
) -> dict[str, torch.Tensor]:
    turns = [(0, 1), (1, 0)] if len(views) == 2 else [(0, 0)]
    found = dict.fromkeys(("1to5", "1to7", "5to5", "regularizer"), torch.zeros((), dtype=torch.float64))
    for a, b in turns:
        five = torch.stack([views[a].five[i, :, place // 5, place % 5] for i, place in enumerate(places[a])])
        one = views[a].one[:, 0]
        for name, source, target in (
            ("1to5", one, views[b].five),
            ("1to7", one, views[b].seven),
            ("5to5", five, views[b].five),
        ):
            terms, square = term_by_term(source, target, clip)
            found[name] = found[name] - terms.mean() / len(turns)
            found["regularizer"] = found["regularizer"] + weight * square / len(turns)
    return found


@pytest.mark.parametrize("clip", [20.0, 1.5])
@pytest.mark.parametrize("count", [1, 2])
def test_costs_and_gradients_are_the_equations(count: int, clip: float) -> None:
    views = [random_maps(seed) for seed in range(count)]
    plain = copies(views)
    places = torch.tensor([[3, 24, 0], [7, 11, 19]])[:count]
    found = amdim_costs(views, places, clip=clip, regularizer=0.04)
    want = written_out(plain, places, clip, 0.04)
    assert list(found) == list(want)
    for name, cost in found.items():
        torch.testing.assert_close(cost, want[name], rtol=1e-12, atol=0, msg=name)
    weights = dict(zip(want, (1.0, 2.0, 3.0, 5.0), strict=True))  # a mistake in one can't hide in another
    torch.stack([weights[name] * cost for name, cost in found.items()]).sum().backward()
    torch.stack([weights[name] * cost for name, cost in want.items()]).sum().backward()
    for ours, theirs in zip(views, plain, strict=True):
        for name, mine, other in zip(Maps._fields, ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13, msg=name)


def test_local_dim_is_one_view_from_one_to_seven() -> None:
    view = random_maps(0)
    found = amdim_costs([view], torch.zeros(1, BATCH, dtype=torch.int64), ("1to7",))
    terms, square = term_by_term(view.one[:, 0], view.seven, 20.0)
    assert list(found) == ["1to7", "regularizer"]
    torch.testing.assert_close(found["1to7"], -terms.mean())
    torch.testing.assert_close(found["regularizer"], 0.05 * square)
    found["1to7"].backward()
    assert view.five.grad is None


def test_equal_scores_cost_the_logarithm_of_their_number() -> None:
    """One positive among it and the positions of the other images."""
    one, seven = torch.ones(4, 1, DIM), torch.ones(4, DIM, 7, 7)
    terms, squares = matches(one, seven, 20.0)
    assert terms.shape == (4, 1, 49)
    torch.testing.assert_close(terms, torch.full_like(terms, -math.log(1 + 3 * 49)))
    assert float(squares) == pytest.approx(DIM)


def test_several_antecedents_of_an_image_know_nothing_of_one_another() -> None:
    three, five = random_maps(1, kinds=3).one, random_maps(2).five
    together, squares = matches(three, five, 20.0)
    for number in range(3):
        alone, square = matches(three[:, number : number + 1], five, 20.0)
        torch.testing.assert_close(together[:, number], alone[:, 0])
        torch.testing.assert_close(squares[number], square[0])


def test_costs_with_mixtures_are_the_equations() -> None:
    """The antecedents of one position are mixed; what starts from the 5 x 5 map is not."""
    alpha, tau = 0.5, 3.0
    views = [random_maps(seed, 3) for seed in range(2)]
    plain = [Maps(*(tensor.detach().clone().requires_grad_() for tensor in view)) for view in views]
    places = torch.tensor([[3, 24, 0], [7, 11, 19]])
    found = amdim_costs(views, places, mixing=Mixing(alpha, tau))
    want = dict.fromkeys(("1to5", "1to7"), torch.zeros((), dtype=torch.float64))
    squares = torch.zeros((), dtype=torch.float64)
    for a, b in ((0, 1), (1, 0)):
        for name, target in (("1to5", plain[b].five), ("1to7", plain[b].seven)):
            each = [term_by_term(plain[a].one[:, kind], target, 20.0) for kind in range(3)]
            scores = torch.stack([terms for terms, _ in each], dim=1)
            q = (tau * scores.detach()).exp()
            q = q / q.sum(dim=1, keepdim=True)
            gained = (q * scores).sum(dim=1) - alpha * (q * q.log()).sum(dim=1)
            want[name] = want[name] - gained.mean() / 2
            squares = squares + 0.05 * torch.stack([square for _, square in each]).mean() / 2
    for name, cost in want.items():
        torch.testing.assert_close(found[name], cost, rtol=1e-12, atol=0, msg=name)
    plain_costs = amdim_costs([Maps(v.one[:, :1], v.five, v.seven) for v in views], places, ("5to5",))
    torch.testing.assert_close(found["5to5"], plain_costs["5to5"])
    torch.testing.assert_close(found["regularizer"], squares + plain_costs["regularizer"])
    (found["1to5"] + 2 * found["1to7"]).backward()
    (want["1to5"] + 2 * want["1to7"]).backward()
    for mine, other in zip(
        (t for view in views for t in view), (t for view in plain for t in view), strict=True
    ):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13)
    assert all(view.one.shape == (BATCH, 3, 4) for view in views)


@pytest.mark.parametrize("clip", [20.0, 1e4])
def test_huge_scores_stay_finite(clip: float) -> None:
    large = [30.0 * tensor.detach() for tensor in random_maps(0, dtype=torch.float32)]
    views = [Maps(*(tensor.requires_grad_() for tensor in large))] * 2
    found = amdim_costs(views, torch.zeros(2, BATCH, dtype=torch.int64), clip=clip)
    loss = torch.stack(list(found.values())).sum()
    loss.backward()
    assert loss.isfinite()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in views[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_maps_give_a_float32_loss_and_half_gradients(dtype: torch.dtype) -> None:
    half = [random_maps(seed, dtype=dtype) for seed in range(2)]
    full = [Maps(*(tensor.detach().float().requires_grad_() for tensor in view)) for view in half]
    places = torch.tensor([[3, 24, 0], [7, 11, 19]])
    losses = []
    for views in (half, full):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.stack(list(amdim_costs(views, places).values())).sum()
        assert loss.dtype == torch.float32
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    exact = amdim_costs([Maps(*(tensor.detach().double() for tensor in view)) for view in full], places)
    assert losses[1] == pytest.approx(float(torch.stack(list(exact.values())).sum()), rel=1e-6)
    for mine, other in zip(
        (t for view in half for t in view), (t for view in full for t in view), strict=True
    ):
        assert mine.grad is not None
        assert other.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad, other.grad.to(dtype), rtol=2e-2, atol=1e-4)


def test_one_product_for_each_consequent_map_and_direction() -> None:
    """1-to-5 and 5-to-5 share theirs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.__name__:
                sizes.append((tuple(args[0].shape), tuple(args[1].shape)))
            return function(*args, **(kwargs or {}))

    views = [random_maps(seed) for seed in range(2)]
    with Watch():
        amdim_costs(views, torch.zeros(2, BATCH, dtype=torch.int64))
    assert sizes == [((2 * BATCH, DIM), (DIM, BATCH * 25)), ((BATCH, DIM), (DIM, BATCH * 49))] * 2


def test_images_without_a_label_count_for_the_regularizer_alone() -> None:
    logits = torch.tensor([[1.0, -2.0], [30.0, 0.5], [0.25, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, -1, 1])
    clipped = 10 * torch.tanh(logits / 10)
    want = -(clipped.log_softmax(1)[0, 0] + clipped.log_softmax(1)[2, 1]) / 2 + 1e-3 * logits.square().mean()
    torch.testing.assert_close(classifier_cost(logits, labels), want)
    nobody = classifier_cost(logits, torch.full((3,), -1))
    torch.testing.assert_close(nobody, 1e-3 * logits.square().mean())
    # an average over a larger batch, of which these are a share
    torch.testing.assert_close(
        classifier_cost(logits, labels, 4.0), (want + 1e-3 * logits.square().mean()) / 2
    )
