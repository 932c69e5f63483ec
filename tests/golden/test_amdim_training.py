"""AMDIM's short training, encoder and both evaluators, against the reference's record of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.data.loader import Batch
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback, Loop, StepRecord
from zoo.engine.precision import Precision
from zoo.engine.signals import StopRequest
from zoo.models.factory import create_trunk
from zoo.optim.schedule import WarmupSteps
from zoo.pretrain.build import build_optimizer
from zoo.pretrain.config import OptimizerConfig
from zoo.pretrain.methods.amdim import AMDIM
from zoo.pretrain.methods.amdim_config import AMDIMConfig
from zoo.pretrain.methods.config_base import RunShape

from .cases import Case, case_ids, fill_rule, hash_signed, load

PARTS = {
    "encoder.module.": "trunk.",
    "evaluator.block_glb_lin.block_forward.2.": "classifier.",
    "evaluator.block_glb_mlp.block_forward.": "mlp_classifier.",
}
CLASSES = 10
CASES = case_ids("amdim_tiny_training")


def ours(key: str) -> str:
    """The method's name for a tensor of the reference's model."""
    reference, own = next(item for item in PARTS.items() if key.startswith(item[0]))
    return own + key.removeprefix(reference)


class AMDIMOfTheRecord(AMDIM):
    """The places of the case instead of drawn ones."""

    case: Case

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.case.inputs[f"loc5_x{view}_{self._step}"] for view in (1, 2)])


class Watch(Callback):
    def __init__(self) -> None:
        self.rows: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.rows.append(record)


def method_of(case: Case, start: Case) -> AMDIM:
    options = {key: start.args[key] for key in ("ndf", "n_rkhs", "n_depth", "encoder_size")}
    batch = case.args["batch"]
    shape = RunShape(2, batch, 1, 3, 1, classes=tuple(map(str, range(CLASSES))), sizes=(32,))
    trunk = create_trunk("amdim", options=options)
    method = AMDIMOfTheRecord(trunk, AMDIMConfig(classifiers=True), shape, WorldOfOne())
    method.case = case
    state = method.state_dict()
    for key in case.entry["summary_keys"]:
        state[ours(key)].copy_(fill_rule(key, state[ours(key)].shape, start.args["gain"]))
    for key, digest in start.entry["weight_digest"].items():
        assert float(state[ours(key)].double().sum()) == pytest.approx(digest["sum_float64"], rel=1e-9), key
    for module in method.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return method


def train(case: Case, start: Case, folder: Path, parts: int = 1) -> tuple[AMDIM, list[StepRecord]]:
    """Three updates by the engine's loop."""
    method = method_of(case, start)
    args: dict[str, Any] = case.args
    rate, adam = args["learning_rate"], args["adam"]
    config = OptimizerConfig(
        name="adam", lr=rate, betas=tuple(adam["betas"]), weight_decay=adam["weight_decay"]
    )
    schedule = WarmupSteps(rate, rate / 500, 500, (), 0.2)

    def batches(first: int) -> Iterator[Batch]:
        for step in range(first, 3):
            shape = (args["batch"], 3, 32, 32)
            x1 = hash_signed(f"amdim/train/x1_{step}", shape, 2.0)
            x2 = x1 + hash_signed(f"amdim/train/x2_{step}", shape, 1.0)
            yield Batch([torch.cat([x1, x2])], torch.arange(args["batch"]), case.inputs[f"labels{step}"], 0)

    watch = Watch()
    loop = Loop(
        learner=method,
        optimizer=build_optimizer(config, method.param_groups(False), torch.device("cpu")),
        lr_at=schedule.at,
        batches=batches,
        prepare=lambda batch: batch.views,
        precision=Precision("float32", torch.device("cpu")),
        steps_per_epoch=3,
        total_steps=3,
        checkpoints=CheckpointWriter(CheckpointFolder(folder), WorldOfOne()),
        callbacks=[watch],
        accumulate=parts,
    )
    loop.run(StopRequest())
    return method, watch.rows


@pytest.mark.parametrize("name", CASES)
def test_three_updates(shared: Path, name: str, tmp_path: Path) -> None:
    case = load(shared, name)
    method, rows = train(case, load(shared, "amdim_model_class_only"), tmp_path / "checkpoints")
    columns = [
        [row.logs[key] for key in ("1to5", "1to7", "5to5", "regularizer")]
        + [row.logs["linear_loss"] + row.logs["mlp_loss"]]
        for row in rows
    ]
    case.check("losses", columns, rtol=1e-4)
    assert [row.loss for row in rows] == pytest.approx([sum(line[:4]) for line in columns], rel=1e-6)
    assert [row.lr for row in rows] == pytest.approx([2e-4 * (step + 1) / 500 for step in range(3)])
    state = method.state_dict()
    for number, key in enumerate(case.entry["summary_keys"]):
        value = state[ours(key)].double()
        found = [float(value.sum()), float(value.square().sum().sqrt())]
        case.compare(key, found, case.outputs["summary_sum_l2"][number], atol=2e-4)
    for key in case.outputs:
        if key.startswith("final/"):
            case.check(key, state[ours(key.removeprefix("final/"))], atol=1e-6)
    # The record's names are all that there are.
    kept = {key for key in state if not key.endswith("num_batches_tracked")}
    assert {ours(key) for key in case.entry["summary_keys"]} == kept


@pytest.mark.parametrize("name", case_ids("amdim_model_class_only"))
@torch.no_grad()
def test_the_methods_classifiers_are_the_references(shared: Path, name: str) -> None:
    case = load(shared, name)
    training = load(shared, CASES[0])
    method = method_of(training, case).eval()
    features = method.embed(case.inputs["x"])
    case.check("rkhs_glb", features)
    case.check("logits_lin", method.classifier(features))
    case.check("logits_mlp", method.mlp_classifier(features))
