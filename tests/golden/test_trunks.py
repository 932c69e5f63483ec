"""Bare trunks and what stands on them in other projects, against the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.models.factory import create_trunk
from zoo.models.heads import MapClassifier, Prototypes, projection_head
from zoo.models.resnet import stage_features

from .cases import case_ids, fill_state, hash_signed, load


@pytest.mark.parametrize("name", case_ids("rn50_multiprototypes"))
@torch.no_grad()
def test_three_sets_of_prototypes(shared: Path, name: str) -> None:
    case = load(shared, name)
    args = case.args
    trunk = create_trunk("resnet50")
    head = projection_head(trunk.num_features, args["hidden_mlp"], args["output_dim"])
    sets = [Prototypes(args["output_dim"], count) for count in args["nmb_prototypes"]]
    prototypes = nn.ModuleDict({f"prototypes{index}": each for index, each in enumerate(sets)})
    model = nn.ModuleDict({"trunk": trunk, "projection_head": head, "prototypes": prototypes})
    fill_state(model, case)
    assert sum(p.numel() for p in model.parameters()) == case.entry["parameters"]
    model.eval()
    x = case.inputs["x"]
    case.check("feature_map_eval_mode", stage_features(trunk, x)["layer4"])
    case.check("pooled", trunk(x))
    embedding = F.normalize(head(trunk(x)), dim=1)
    case.check("embedding", embedding)
    for index, each in enumerate(sets):
        case.check(f"scores{index}", each(embedding))
    model.double()
    finer = {"rtol": 1e-9, "atol": 1e-12}
    case.check("pooled_float64", trunk(x.double()), **finer)
    case.check("embedding_float64", F.normalize(head(trunk(x.double())), dim=1), **finer)


@pytest.mark.parametrize("name", case_ids("moco_rn50_"))
@torch.no_grad()
def test_mocos_encoder(shared: Path, name: str) -> None:
    case = load(shared, name)
    trunk = create_trunk("resnet50")
    hidden = trunk.num_features if case.args["mlp"] else 0
    trunk.fc = projection_head(trunk.num_features, hidden, case.outputs["out"].shape[1], norm=False)
    fill_state(trunk, case)
    trunk.eval()
    x = load(shared, "moco_rn50_v1_encoder").inputs["x"]
    out = trunk(x)
    case.check("out", out)
    case.check("q", F.normalize(out, dim=1))
    trunk.fc = nn.Identity()
    case.check("pooled", trunk(x))


@pytest.mark.parametrize("name", case_ids("reglog_"))
@torch.no_grad()
def test_swavs_classifier_on_maps(shared: Path, name: str) -> None:
    case = load(shared, name)
    classes = case.outputs["logits"].shape[1]
    settings = {"reglog_avg": {}, "reglog_8192_bn": {"average": False, "norm": True}}[name]
    classifier = MapClassifier(2048, classes, **settings)
    assert list(classifier.state_dict()) == case.entry["state_dict_keys"]
    fill_state(classifier, case)
    maps = hash_signed(f"{name}/features", (2, 2048, 7, 7), 1.0)
    case.check("logits", classifier.eval()(maps))
