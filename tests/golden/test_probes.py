"""Linear probes, kNN and the evaluations' schedules against the reference's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from transfer.config import cosine, steps_down
from transfer.linear.config import LinearConfig
from transfer.semisup.config import SemisupConfig
from zoo.models.heads import MapClassifier
from zoo.probe.knn import knn_ranks, knn_scores, nearest
from zoo.probe.linear import FINAL, Head, LinearHeads

from .cases import Case, fill_rule, hash_signed, hash_uniform, load


def _entry(shared: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    index = json.loads((shared / "golden" / "index_detection.json").read_text("utf-8"))
    (entry,) = (case for case in index["cases"] if case["id"] == name)
    tensors = load_file(shared / "golden" / entry["file"])
    return entry, {
        key.split("/", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{name}/")
    }


# --- schedules ---


def test_the_linear_protocols_cosine(shared: Path) -> None:
    case = load(shared, "lr_eval_linear_cosine")
    config = LinearConfig(protocol="swav")
    assert (config.lr, config.epochs) == ((case.args["lr"],), case.args["epochs"])
    case.check("lr", [config.lr[0] * factor for factor in config.factors()])


def test_the_semisupervised_steps(shared: Path) -> None:
    case = load(shared, "lr_eval_semisup_step")
    config = SemisupConfig(protocol="swav").settled(128_000, 0.1)
    assert (config.lr, config.epochs) == (case.args["lr"], case.args["epochs"])
    case.check("lr", [config.lr * factor for factor in config.factors()])


def test_rates_drop_after_the_epoch_that_is_named() -> None:
    assert steps_down(5, (2, 4), 0.1) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert cosine(2) == pytest.approx([1.0, 0.5])


# --- linear ---


@pytest.mark.parametrize(("name", "prefix"), [("probe_moco_sgd", "probe"), ("probe_swav_sgd", "probe2")])
@pytest.mark.parametrize("others", [0, 3])
def test_steps_of_a_probe(shared: Path, name: str, prefix: str, others: int) -> None:
    """Alone, and among heads that are none of its business."""
    entry, tensors = _entry(shared, name)
    args, tolerance = entry["args"], entry["tolerance"]
    x = hash_signed(f"{prefix}/x", [3, 16, 32], 1.5).double()
    labels = tensors["in/labels"]
    mine = Head(args["lr"], args["weight_decay"])
    rest = [Head(100.0, 0.1), Head(1e30, 1.0), Head(0.1, 0.0, norm="batch")][:others]
    heads = LinearHeads({FINAL: 32}, 10, [*rest[:2], mine, *rest[2:]], seed=0, dtype=torch.float64)
    place = heads.heads.index(mine)
    heads.start_from(hash_signed(f"{prefix}/weight", [10, 32], 0.02).double(), torch.zeros(10).double())
    losses = [heads.step(x[step], labels[step])[place] for step in range(3)]
    weight, bias = heads.parameters(place)
    for got, output in ((torch.stack(losses), "losses"), (weight, "weight"), (bias, "bias")):
        torch.testing.assert_close(got, tensors[f"out/{output}"], **tolerance)
    ranks = heads.ranks(x[0], labels[0])[place]
    for top in (1, 5):
        got = 100 * (ranks < top).double().mean()
        torch.testing.assert_close(got, tensors[f"out/acc{top}_batch0_percent"], **tolerance)


@pytest.mark.parametrize(("name", "average"), [("reglog_avg", True), ("reglog_8192_bn", False)])
def test_swavs_classifier(shared: Path, name: str, average: bool) -> None:
    case: Case = load(shared, name)
    maps = hash_signed(f"{name}/features", (2, 2048, 7, 7), 1.0)
    classes = case.outputs["logits"].shape[1]
    module = MapClassifier(2048, classes, average=average, norm=not average).eval()
    assert sorted(module.state_dict()) == sorted(case.entry["state_dict_keys"])
    state = {key: fill_rule(key, value.shape, 1.0) for key, value in module.state_dict().items()}
    module.load_state_dict(state)
    with torch.no_grad():
        case.check("logits", module(maps))
    if average:  # what the linear recipe trains is the same function of the pooled maps
        heads = LinearHeads({FINAL: 2048}, classes, [Head(1.0, 0.0)], seed=0)
        heads.start_from(state["linear.weight"], state["linear.bias"])
        case.check("logits", heads.logits(maps.mean(dim=(2, 3)))[0])


# --- nearest neighbours ---


@pytest.mark.parametrize("name", ["knn_plain", "knn_duplicates"])
@pytest.mark.parametrize("k", [5, 20])
def test_neighbours(shared: Path, name: str, k: int) -> None:
    entry, tensors = _entry(shared, name)
    classes, expected = entry["args"]["classes"], entry["args"]["expected"][f"k{k}"]
    queries, bank = tensors["in/query"], tensors["in/train"]
    known, truth = tensors["in/train_labels"], tensors["in/query_labels"]
    tied = next(value for key, value in expected.items() if key.startswith("ambiguous"))
    clear = torch.tensor([row for row in range(len(queries)) if row not in tied])
    tolerance = entry["tolerance"]["per_output"]
    scores = knn_scores(queries, bank, known, classes, k).double()
    want = tensors[f"out/k{k}_scores_div_exp_inv_T"]
    torch.testing.assert_close(scores[clear], want[clear], **tolerance[f"k{k}_scores_div_exp_inv_T"])
    assert torch.equal(scores.argmax(dim=1)[clear], tensors[f"out/k{k}_prediction"][clear])
    cosines, where = nearest(queries, bank, k)
    kth = tensors[f"out/k{k}_kth_similarity"]
    torch.testing.assert_close(cosines[:, -1].double(), kth, **tolerance[f"k{k}_kth_similarity"])
    neighbours = tensors[f"out/k{k}_neighbours_sorted"]
    if len(neighbours):  # sorted by row number
        assert torch.equal(where.sort(dim=1).values[clear], neighbours[clear])
    ((_, _, ranks),) = knn_ranks(queries, truth, bank, known, classes, [k], [0.07])
    if not tied:
        assert 100 * float((ranks < 1).double().mean()) == pytest.approx(expected["own_float64_top1_percent"])
    # The reference ranks classes without votes, too: ours can only be fewer.
    assert 100 * float((ranks < 5).double().mean()) <= expected["own_float64_top5_percent"] + 1e-9


def test_the_formula_is_the_indexs() -> None:
    assert hash_uniform("input", 1)[0] == pytest.approx(0.043983291019685566, abs=1e-15)
