"""The exchanges of two and four processes, and the gradient of gathered rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from golden.cases import case_ids, load
from zoo.engine.collectives import WorldOfOne
from zoo.errors import InputError
from zoo.pretrain.losses.sinkhorn import sinkhorn

from .bodies import info_nce
from .world import in_processes

Results = list[dict[str, Any]]


def test_sums_maxima_and_broadcasts(two: Results) -> None:
    for result in (process["exchanges"] for process in two):
        assert result["sum"].tolist() == [2.0, 1.0]
        assert result["sum of an integer"].item() == 3
        assert result["sum in place"].tolist() == [[1, 5], [9, 13], [17, 21]]
        assert result["max"].tolist() == [1.0, 0.0]
        assert result["broadcast"].tolist() == [0]
        assert result["broadcast from 1"].tolist() == [1.0, 1.0]


def test_gathered_rows_and_values_are_in_rank_order(two: Results) -> None:
    for result in (process["exchanges"] for process in two):
        assert result["gather"].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
        assert result["gather half"].tolist() == [0.5, 1.5]
        assert result["values"] == [
            {"rank": 0, "name": "", "pair": [1, None]},
            {"rank": 1, "name": "ä" * 300, "pair": [1, None]},
        ]
        assert result["nothing"] == [None, None]


def test_a_flag_on_one_process_reaches_all(two: Results) -> None:
    assert [process["exchanges"]["any"] for process in two] == [[True, False, True]] * 2


def test_a_sum_that_would_lose_a_gradient_is_refused(two: Results) -> None:
    assert all("use gather" in process["exchanges"]["refused"] for process in two)


def test_a_copied_network_keeps_its_world(two: Results) -> None:
    assert all(process["exchanges"]["the same world"] for process in two)


def test_contrastive_loss_of_two_times_four_rows_is_that_of_eight(
    two: Results, given_pairs: dict[str, Any]
) -> None:
    x, y, weight = (
        given_pairs["contrastive"][name].clone().requires_grad_() for name in ("x", "y", "weight")
    )
    loss = info_nce(WorldOfOne(), x, y, weight)
    loss.backward()
    exact = {"rtol": 0, "atol": 1e-14}
    for rank, result in enumerate(process["contrastive"] for process in two):
        mine = slice(4 * rank, 4 * rank + 4)
        torch.testing.assert_close(result["loss"], loss.detach(), **exact)
        torch.testing.assert_close(result["weight"], weight.grad, **exact)
        torch.testing.assert_close(result["x"], x.grad[mine], **exact)
        torch.testing.assert_close(result["y"], y.grad[mine], **exact)


def test_a_loss_that_every_process_computes_whole(two: Results, given_pairs: dict[str, Any]) -> None:
    weight = given_pairs["contrastive"]["weight"].clone().requires_grad_()
    embedded = torch.nn.functional.normalize(given_pairs["contrastive"]["x"] @ weight, dim=1)
    (embedded @ embedded.T).exp().sum(1).log().mean().backward()
    for process in two:
        torch.testing.assert_close(process["contrastive"]["whole loss"], weight.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("count", [2, 4])
def test_sinkhorn_of_several_processes_is_that_of_one(count: int, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue({2: "two", 4: "four"}[count])
    given = request.getfixturevalue({2: "given_pairs", 4: "given_fours"}[count])
    assert len(given["sinkhorn"]) >= 9
    for name, (scores, epsilon, iterations) in given["sinkhorn"].items():
        codes = torch.cat([process["sinkhorn"][name]["codes"] for process in results])
        alone = sinkhorn(scores, epsilon, iterations)
        torch.testing.assert_close(
            codes, alone, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", case_ids("sinkhorn_mp2_"))
def test_sinkhorn_of_two_processes_is_the_references(shared: Path, name: str, two: Results) -> None:
    case = load(shared, name)
    codes = [process["sinkhorn"][name]["codes"] for process in two]
    case.check("Q_rank0", codes[0])
    case.check("Q_rank1", codes[1])
    case.check("Q_single_process", torch.cat(codes))


def test_sinkhorn_exchanges_prototypes_and_no_samples(two: Results) -> None:
    for process in two:
        found = process["sinkhorn"]
        for iterations in (1, 3, 10):
            sizes = {found[f"{batch} of 12, {iterations} times"]["bytes"] for batch in (8, 64)}
            assert sizes == {(1 + iterations) * 12 * 8}  # 12 maxima, then 12 sums an iteration, float64


def test_a_split_world_speaks_among_itself(four: Results) -> None:
    for rank, process in enumerate(four):
        first = rank // 2 * 2
        assert process["gathered"].tolist() == [0, 1, 2, 3]
        half = process["half"]
        assert half["place"] == [rank % 2, 2, rank]
        assert half["sum"].tolist() == [2 * first + 1]
        assert half["from the second"].tolist() == [first + 1]
        assert half["values"] == [first, first + 1]


def test_a_world_of_one_changes_nothing() -> None:
    world = WorldOfOne()
    tensor = torch.ones(2, 3, requires_grad=True)
    for same in (world.sum_, world.max_, world.broadcast_, world.gather):
        assert same(tensor) is tensor
    assert world.gather_values({"a": (1, None)}) == [{"a": [1, None]}]
    assert (world.any(True), world.any(False), world.barrier()) == (True, False, None)
    assert world.split(1) is world
    with pytest.raises(InputError, match="groups of 2"):
        world.split(2)
    with pytest.raises(TypeError):
        world.gather_values(object())


def _fails(world: Any) -> None:
    raise LookupError(f"deliberately, in a world of {world.world_size}")


def test_a_process_that_fails_is_heard() -> None:
    with pytest.raises(AssertionError, match=r"(?s)process 0 failed:.*in _fails.*LookupError: deliberately"):
        in_processes(_fails, 1)


def test_a_process_that_hangs_is_killed() -> None:
    with pytest.raises(AssertionError, match=r"processes \[0, 1\] were not done"):
        in_processes(_fails, 2, timeout=0.1)
