"""One start of two processes and one of four, for all tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from golden.cases import case_ids, load, shared_folder

from .bodies import fours, pairs
from .norms import NORMS_OF_FOUR, NORMS_OF_TWO
from .world import in_processes

EPSILON = 0.05


def scores(batch: int, count: int) -> torch.Tensor:
    """Cosine-like similarities, float64; every other sample prefers the same few prototypes."""
    generator = torch.Generator().manual_seed(batch)
    values = 2 * torch.rand(batch, count, generator=generator, dtype=torch.float64) - 1
    values[::2, : count // 4] = 0.9
    return values


def sinkhorn_inputs(batches: tuple[int, ...]) -> dict[str, Any]:
    given: dict[str, Any] = {
        f"{batch} of {count}, {iterations} times": (scores(batch, count), EPSILON, iterations)
        for batch in batches
        for count in (12,)
        for iterations in (0, 1, 3, 10)
    }
    given["overflow"] = (100 * scores(batches[0], 12), EPSILON, 3)
    return given


@pytest.fixture(scope="session")
def given_pairs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = {
        "contrastive": {"x": draw(8, 6), "y": draw(8, 6), "weight": draw(6, 5)},
        "sinkhorn": sinkhorn_inputs((8, 64)),
        "norms": NORMS_OF_TWO,
        "images": draw(8, 3, 8, 8),
    }
    if (shared_folder() / "golden" / "index.json").is_file():
        for name in case_ids("sinkhorn_mp2_"):
            case = load(shared_folder(), name)
            arguments = (case.args["epsilon"], case.args["sinkhorn_iterations"])
            given["sinkhorn"][name] = (case.inputs["scores_all"], *arguments)
    return given


@pytest.fixture(scope="session")
def two(given_pairs: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two processes returned."""
    return in_processes(pairs, 2, given_pairs)


@pytest.fixture(scope="session")
def given_fours() -> dict[str, Any]:
    return {"sinkhorn": sinkhorn_inputs((8, 64)), "norms": NORMS_OF_FOUR}


@pytest.fixture(scope="session")
def four(given_fours: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of four processes returned."""
    return in_processes(fours, 4, given_fours)
