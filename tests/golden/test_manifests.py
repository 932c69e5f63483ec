"""Keys, shapes and parameter counts of other projects' files; on the meta device, without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.models.factory import create_trunk
from zoo.models.heads import Prototypes, feature_classifier, projection_head

DTYPES = {torch.float32: "F32", torch.int64: "I64"}


def manifest(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "golden" / "manifests" / f"{name}.json").read_text("utf-8"))  # type: ignore[no-any-return]


def layout(module: nn.Module, prefix: str = "") -> dict[str, str]:
    """Key -> type and shape, as the manifests write it."""
    return {
        prefix + key: f"{DTYPES[value.dtype]} {','.join(map(str, value.shape))}"
        for key, value in module.state_dict().items()
    }


def starting(entries: dict[str, str], prefix: str) -> list[tuple[str, str]]:
    return [(key, value) for key, value in entries.items() if key.startswith(prefix)]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "amdim_c10_32_ndf128_rkhs1024_rd3",
        "amdim_stl10_64_ndf128_rkhs1024_rd3",
        "amdim_in128_ndf192_rkhs1536_rd8",
        "amdim_in128_ndf256_rkhs2048_rd10",
        "amdim_in128_ndf320_rkhs2560_rd10",
    ],
)
def test_amdim(shared: Path, name: str) -> None:
    file = manifest(shared, name)
    given = file["wrapper"]["hyperparams"]
    options = {key: given[key] for key in ("encoder_size", "ndf", "n_rkhs", "n_depth", "use_bn")}
    with torch.device("meta"):
        trunk = create_trunk("amdim", options=options)
        mlp = feature_classifier(trunk.num_features, given["n_classes"], hidden=1024, dropout=0.2)
        linear = feature_classifier(trunk.num_features, given["n_classes"])
    entries = file["state_dict"]
    assert list(layout(trunk, "encoder.module.").items()) == starting(entries, "encoder.")
    evaluators = {
        **layout(mlp, "evaluator.block_glb_mlp.block_forward."),
        **layout(linear, "evaluator.block_glb_lin.block_forward."),
    }
    assert list(evaluators.items()) == starting(entries, "evaluator.")
    assert trunk.num_features == file["feature_dim"]
    assert count(trunk) == file["encoder_parameters"]
    without = count(trunk) - count(trunk.rkhs_block_5) - count(trunk.rkhs_block_7)
    assert without == file["parameters_without_rkhs_blocks"]
    masks = 25 * 5 * 5  # g2l_loss.masks_r5, the loss's own
    assert count(trunk) + count(mlp) + count(linear) + masks == file["total_parameters"]


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("swav_rn50_hub", "resnet50"),
        ("swav_rn50w2_hub", "resnet50w2"),
        ("swav_rn50w4_hub", "resnet50w4"),
        ("swav_rn50w5_hub", "resnet50w5"),
        ("deepclusterv2_rn50_hub", "resnet50"),
        ("selav2_rn50_hub", "resnet50"),
    ],
)
def test_swav_and_its_relatives(shared: Path, name: str, arch: str) -> None:
    file = manifest(shared, name)
    entries = file["state_dict"]
    hidden = int(entries["module.projection_head.0.bias"].split()[1])
    norm = "module.projection_head.1.running_mean" in entries
    assert norm is (arch != "resnet50w5")
    counts = file["constructor"]["nmb_prototypes"]
    dim = file["embedding_dim"]
    with torch.device("meta"):
        trunk = create_trunk(arch)
        head = projection_head(trunk.num_features, hidden, dim, norm=norm)
        if isinstance(counts, int):
            prototypes: nn.Module = Prototypes(dim, counts)
        else:
            sets = {f"prototypes{index}": Prototypes(dim, each) for index, each in enumerate(counts)}
            prototypes = nn.ModuleDict(sets)
    ours = {
        **layout(trunk, "module."),
        **layout(head, "module.projection_head."),
        **layout(prototypes, "module.prototypes."),
    }
    assert list(ours.items()) == list(entries.items())
    assert trunk.num_features == file["feature_dim"]
    assert count(trunk) == file["parameters_backbone"]
    assert count(trunk) + count(head) + count(prototypes) == file["parameters_total"]


@pytest.mark.parametrize(("name", "hidden"), [("moco_v1_rn50", 0), ("moco_v2_rn50", 2048)])
def test_moco(shared: Path, name: str, hidden: int) -> None:
    entries = manifest(shared, name)["state_dict"]
    with torch.device("meta"):
        trunk = create_trunk("resnet50")
        trunk.fc = projection_head(trunk.num_features, hidden, 128, norm=False)
    for encoder in ("module.encoder_q.", "module.encoder_k."):
        assert list(layout(trunk, encoder).items()) == starting(entries, encoder)
