"""AMDIM's encoder and evaluators against the reference's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.models.amdim import AMDIMEncoder
from zoo.models.factory import create_trunk
from zoo.models.heads import feature_classifier
from zoo.models.resnet import stage_features

from .cases import Case, case_ids, fill_state, load

FIELDS = ("encoder_size", "ndf", "n_rkhs", "n_depth", "use_bn")
ENCODERS = case_ids("amdim_encoder")


def encoder(case: Case) -> AMDIMEncoder:
    """The case's encoder, filled by the formula."""
    trunk = create_trunk("amdim", options={key: case.args[key] for key in FIELDS})
    assert isinstance(trunk, AMDIMEncoder)
    fill_state(trunk, case)
    return trunk


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_the_three_maps(shared: Path, name: str) -> None:
    case = load(shared, name)
    trunk = encoder(case).eval()
    for key, got in zip(("r1", "r5", "r7"), trunk.maps(case.inputs["x"]), strict=True):
        case.check(key, got)
    case.compare("r1", trunk(case.inputs["x"]), case.outputs["r1"].flatten(1))


@pytest.mark.parametrize("name", ENCODERS)
def test_the_three_maps_in_training_and_what_the_norms_remember(shared: Path, name: str) -> None:
    case = load(shared, name)
    trunk = encoder(case).train()
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    seen: list[torch.Tensor] = []
    norm = trunk.rkhs_block_5.bn_out.bn
    norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    for key, got in zip(("train_r1", "train_r5", "train_r7"), trunk.maps(case.inputs["x"]), strict=True):
        case.check(key, got)
        assert got.requires_grad
    (batch,) = seen
    moved = {
        "running_mean": 0.9 * before["rkhs_block_5.bn_out.bn.running_mean"] + 0.1 * batch.mean(dim=(0, 2, 3)),
        "running_var": 0.9 * before["rkhs_block_5.bn_out.bn.running_var"] + 0.1 * batch.var(dim=(0, 2, 3)),
    }
    for key, expected in moved.items():
        torch.testing.assert_close(getattr(norm, key), expected)
        # The case's record of them holds the values from before the pass, not from after it; that they do
        # move in the reference, too, is in the record of its short training (amdim_tiny_training).
        case.check(f"after/rkhs_block_5.bn_out.{key}", before[f"rkhs_block_5.bn_out.bn.{key}"])
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_every_layer(shared: Path, name: str) -> None:
    case = load(shared, name)
    trunk = encoder(case).eval()
    x = case.inputs["x"]
    sides: dict[str, int] = {}
    by_layer = []
    for (index, shape, mean, std), layer in zip(
        case.entry["activation_index_shape_mean_std"], trunk.layer_list, strict=True
    ):
        x = layer(x)
        by_layer.append(x)
        assert list(x.shape[1:]) == shape, index
        assert float(x.mean()) == pytest.approx(mean, rel=1e-3, abs=1e-5), index
        assert float(x.std()) == pytest.approx(std, rel=1e-3), index
        sides[str(x.shape[-1])] = index
    assert {side: sides[side] for side in case.entry["dim2layer"]} == case.entry["dim2layer"]

    maps = stage_features(trunk, case.inputs["x"])
    assert [name for name, _, _ in trunk.feature_info] == list(maps)
    assert [channels for _, channels, _ in trunk.feature_info] == [m.shape[1] for m in maps.values()]
    for side, index in case.entry["dim2layer"].items():
        (top,) = [m for m in maps.values() if m.shape[-1] == int(side)]
        assert torch.equal(top, by_layer[index]), side


@pytest.mark.parametrize("name", ENCODERS)
def test_a_fresh_encoder_counts_no_batches_and_applies_the_norms_that_the_reference_applies(
    shared: Path, name: str
) -> None:
    """The reference counts its constructor's trial run: that tells which norms it applies."""
    case = load(shared, name)
    trunk = create_trunk("amdim", options={key: case.args[key] for key in FIELDS})
    counters = [key for key in trunk.state_dict() if key.endswith("num_batches_tracked")]
    assert all(int(trunk.state_dict()[key]) == 0 for key in counters)
    trunk(case.inputs["x"])
    counted = {key for key in counters if int(trunk.state_dict()[key])}
    assert counted == set(case.entry["fresh_model_nonzero_num_batches_tracked"])


@pytest.mark.parametrize("name", case_ids("amdim_model_class_only"))
@torch.no_grad()
def test_both_evaluators(shared: Path, name: str) -> None:
    case = load(shared, name)
    args: dict[str, Any] = case.args
    options = {key: args[key] for key in FIELDS if key in args}
    trunk = create_trunk("amdim", options=options)
    mlp = feature_classifier(args["n_rkhs"], args["n_classes"], hidden=1024, dropout=0.2)
    linear = feature_classifier(args["n_rkhs"], args["n_classes"])

    def under(*names: str, module: nn.Module) -> nn.Module:
        for part in reversed(names):
            module = nn.ModuleDict({part: module})
        return module

    evaluators = nn.ModuleDict(
        {
            "block_glb_mlp": under("block_forward", module=mlp),
            "block_glb_lin": under("block_forward", module=linear),
        }
    )
    whole = nn.ModuleDict({"encoder": under("module", module=trunk), "evaluator": evaluators})
    fill_state(whole, case)
    whole.eval()
    features = trunk(case.inputs["x"])
    case.check("rkhs_glb", features)
    case.check("logits_mlp", mlp(features))
    case.check("logits_lin", linear(features))
    case.check("logits_lin", linear(trunk.maps(case.inputs["x"])[0]))
