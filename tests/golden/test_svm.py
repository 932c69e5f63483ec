"""VOC07's SVM protocol and its average precision against the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transfer.detect.scores import average_precision
from transfer.svm.config import SvmConfig
from transfer.svm.protocol import train_classes
from zoo.probe.average_precision import _curve, area_average_precision
from zoo.probe.svm import unit_length

from .detection_cases import detection_ids, load_detection

CASES = detection_ids("voc07_svm")
PROTOCOL = [name for name in CASES if name != "svm_average_precision"]


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_protocol(shared: Path, name: str) -> None:
    case = load_detection(shared, name)
    config = SvmConfig()
    assert list(config.costs) == case.args["costs"] and config.folds == 3
    assert (config.positive_weight, config.negative_weight) == (2, 1)
    features = unit_length(case.inputs["train_features"])
    case.check("train_normalized", features)
    asked = unit_length(case.inputs["test_features"])
    case.check("test_normalized_first5", asked[:5])
    # The reference calls difficult -1 and absent 0; both are negatives in training.
    trained = train_classes(features, case.inputs["train_targets"].T == 1, config.costs)
    case.check("chosen_cost", trained.costs)
    case.check("crossval_ap", trained.crossval)
    truth = case.inputs["test_targets"].T
    precision = area_average_precision(trained.scores(asked), truth == 1, truth != -1)
    case.check("test_ap", precision)
    case.check("mAP", precision.mean())
    assert trained.gap < 1e-6


def test_where_the_references_machines_converge_the_folds_are_equal(shared: Path) -> None:
    """Costs up to 1: the tolerances of the whole table are for costs at which LIBLINEAR gives up."""
    for name in PROTOCOL:
        case = load_detection(shared, name)
        trained = train_classes(
            unit_length(case.inputs["train_features"]), case.inputs["train_targets"].T == 1, (0.01, 0.1, 1.0)
        )
        case.compare("crossval_ap", trained.crossval, case.outputs["crossval_ap"][:, :3], atol=1e-9, rtol=0)


def test_average_precision(shared: Path) -> None:
    case = load_detection(shared, "svm_average_precision")
    scores, positive = case.inputs["scores"], case.inputs["targets"] == 1
    case.check("ap", area_average_precision(scores, positive))
    hits, ends, precision = _curve(scores, positive, None)
    assert torch.equal(ends, torch.arange(len(scores)))  # no two scores are equal
    case.check("precision", precision)
    case.check("recall", hits.cumsum(0).double() / hits.sum())
    # The detectors' average precision is the same, of what is ranked.
    for kind, eleven in (("area", False), ("11-point", True)):
        recall = hits.cumsum(0).double() / hits.sum()
        want = average_precision(recall.numpy(), precision.numpy(), kind)
        assert float(area_average_precision(scores, positive, eleven_points=eleven)) == pytest.approx(want)
