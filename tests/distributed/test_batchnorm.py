"""BatchNorm of several processes against torch's on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo.engine.collectives import WorldOfOne
from zoo.engine.sync_batchnorm import synchronize_batchnorm

from .bodies import norm_step, trained
from .norms import NORMS_OF_FOUR, NORMS_OF_TWO

Results = list[dict[str, Any]]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def whole(case: dict[str, Any], rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    """torch's layer in float64 on all rows at once."""
    layer = getattr(nn, case["kind"])(case["x"].shape[1], **case["options"])
    layer.load_state_dict(case["state"])
    return norm_step(layer.double(), case["x"][rows].double(), case["gradient"][rows].double())


def joined(results: Results, case: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """The processes' rows put together, and their parameters' gradients summed."""
    parts = [process["norms"][name] for process in results]
    tracked = "state/running_mean" in parts[0]
    # Each process's output is its training rows, then its evaluated ones.
    halves = [part["output"].chunk(2) if tracked else (part["output"],) for part in parts]
    out = {"output": torch.cat([half for position in zip(*halves, strict=True) for half in position])}
    out["x"] = torch.cat([part["x"] for part in parts])
    for key in ("weight", "bias"):
        if key in parts[0]:
            out[key] = sum(part[key] for part in parts)
    for key, value in parts[0].items():
        if key.startswith("state/"):
            assert all(torch.equal(value, part[key]) for part in parts)
            out[key] = value
    return out


@pytest.mark.parametrize(
    "name", [name for name, case in NORMS_OF_TWO.items() if case["x"].dtype == torch.float64]
)
def test_two_processes_are_one(name: str, two: Results) -> None:
    got, want = joined(two, NORMS_OF_TWO[name], name), whole(NORMS_OF_TWO[name])
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key], value.to(got[key].dtype), **EXACT, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_statistics_far_from_zero_lose_no_digits(two: Results) -> None:
    # E[x^2] - E[x]^2 would be off by more than the variance itself: 1e8 has steps of 8 in float32.
    for name in ("float32", "float32 far from 0"):
        got, want = joined(two, NORMS_OF_TWO[name], name), whole(NORMS_OF_TWO[name])
        for key in ("x", "weight", "bias", "state/running_var"):
            torch.testing.assert_close(got[key].double(), want[key].double(), rtol=2e-5, atol=2e-5)
        trained = slice(0, len(NORMS_OF_TWO[name]["x"]))
        torch.testing.assert_close(
            got["output"][trained].double(), want["output"][trained], rtol=2e-6, atol=2e-6
        )


def test_half_types_are_computed_in_float32(two: Results) -> None:
    case = NORMS_OF_TWO["bfloat16"]
    got, want = joined(two, case, "bfloat16"), whole(case)
    assert got["output"].dtype == got["x"].dtype == torch.bfloat16
    assert got["weight"].dtype == got["state/running_var"].dtype == torch.float32
    torch.testing.assert_close(got["output"], want["output"].bfloat16(), rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(got["weight"].double(), want["weight"], rtol=1e-4, atol=1e-4)
    # The first step's input, x / 2 + 1, is rounded to bfloat16 in the processes only.
    torch.testing.assert_close(
        got["state/running_var"].double(), want["state/running_var"], rtol=1e-3, atol=0
    )


def test_four_processes_share_one_batch(four: Results) -> None:
    got, want = joined(four, NORMS_OF_FOUR["all"], "all"), whole(NORMS_OF_FOUR["all"])
    for key, value in want.items():
        torch.testing.assert_close(got[key], value.to(got[key].dtype), **EXACT)


def test_groups_of_two_among_four(four: Results) -> None:
    case = NORMS_OF_FOUR["groups of two"]
    for first in (0, 2):
        rows = slice(case["rows"][first][0], case["rows"][first + 1][1])
        got, want = joined(four[first : first + 2], case, "groups of two"), whole(case, rows)
        for key, value in want.items():
            torch.testing.assert_close(got[key], value.to(got[key].dtype), **EXACT)


def test_a_step_of_two_processes_is_that_of_one(two: Results, given_pairs: dict[str, Any]) -> None:
    want = trained(WorldOfOne(), given_pairs["images"])
    assert len(want) == 19
    for process in two:
        for name, value in want.items():
            torch.testing.assert_close(process["trained"][name], value, **EXACT)


def test_what_conversion_keeps(two: Results) -> None:
    for result in (process["layers"] for process in two):
        assert result["same"]
        assert result["tensors kept"]
        assert result["one layer"]
        assert result["kinds"] == ["AllReduceBatchNorm", "_Special", "AllReduceBatchNorm"]
        assert result["options"] == [0.1, None, True, False]
        assert result["hooked"]
        assert result["channels last"]
        assert result["whole"] == "AllReduceBatchNorm"
        assert result["groups of one"] == "BatchNorm1d"


def test_one_notice_from_all_processes(two: Results) -> None:
    (note,) = [note for process in two for note in process["layers"]["notes"]]
    assert "SyncBatchNorm needs GPUs" in note


def test_a_single_value_is_refused_by_all(two: Results) -> None:
    assert all("several values" in process["layers"]["one value"] for process in two)


def test_on_gpus_it_is_torchs_own_with_its_group(four: Results) -> None:
    for rank, result in enumerate(process["gpu layer"] for process in four):
        assert result["kind"] == "SyncBatchNorm"
        assert result["group"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["keys"] == ["running_mean", "running_var", "num_batches_tracked"]
        assert result["options"] == [0.1, False, False]


def test_one_process_keeps_its_layers() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3))
    layer = network[0]
    assert synchronize_batchnorm(network, WorldOfOne(), group_size=8) is network
    assert network[0] is layer
