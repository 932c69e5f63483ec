"""Published numbers through files in the published layouts: read, loaded, computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from golden.cases import case_ids, fill_rule, load
from zoo.engine.checkpoint import CheckpointFolder
from zoo.models.factory import create_trunk
from zoo.weights.formats import read_model
from zoo.weights.formats.base import ForeignModel
from zoo.weights.formats.resnets import Plan

from ..published import small_run
from .layouts import linear, optimizer, save, with_prefix

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def resnet50() -> State:
    """The full-size network that the ResNet cases share."""
    shapes = Plan("bottleneck", (3, 4, 6, 3)).shapes()
    return {key: fill_rule(key, shape, 1.0) for key, shape in shapes.items()}


def built(model: ForeignModel) -> Any:
    """The network of a model, with its weights."""
    network = model.network
    trunk = create_trunk(
        network.arch, stem=network.stem, base_planes=network.base_planes, options=network.options
    )
    trunk.load_state_dict(model.trunk)
    return trunk.eval()


@torch.no_grad()
def test_swavs_hub_file(shared: Path, tmp_path: Path, resnet50: State) -> None:
    case = load(shared, "rn50_torchvision_hub")
    head = {**linear("projection_head.0", 2048, 8), **linear("prototypes", 8, 6, bias=False)}
    path = save(tmp_path / "swav_800ep_pretrain.pth.tar", with_prefix("module.", {**resnet50, **head}))
    case.check("pooled", built(read_model(path))(case.inputs["x"]))


@pytest.mark.parametrize("version", ["v1", "v2"])
@torch.no_grad()
def test_mocos_checkpoint(shared: Path, tmp_path: Path, resnet50: State, version: str) -> None:
    case = load(shared, f"moco_rn50_{version}_encoder")
    images = load(shared, "moco_rn50_v1_encoder").inputs["x"]
    shapes = {"fc": (128, 2048)} if version == "v1" else {"fc.0": (2048, 2048), "fc.2": (128, 2048)}
    fc = {
        f"{name}.{part}": fill_rule(f"{name}.{part}", shape[:ndim], 1.0)
        for name, shape in shapes.items()
        for part, ndim in (("weight", 2), ("bias", 1))
    }
    state = {
        "queue": torch.zeros(128, 16),
        "queue_ptr": torch.zeros(1, dtype=torch.int64),
        **with_prefix("encoder_q.", {**resnet50, **fc}),
        "encoder_k.conv1.weight": torch.zeros(64, 3, 7, 7),
    }
    value = {
        "epoch": 200,
        "arch": "resnet50",
        "state_dict": with_prefix("module.", state),
        "optimizer": optimizer([320]),
    }
    model = read_model(save(tmp_path / "checkpoint_0199.pth.tar", value))
    pooled = built(model)(images)
    case.check("pooled", pooled)
    head = {name.removeprefix("projection_head."): tensor for name, tensor in model.heads.items()}
    if version == "v1":
        out = F.linear(pooled, head["weight"], head["bias"])
    else:
        out = F.linear(
            F.linear(pooled, head["0.weight"], head["0.bias"]).relu(), head["2.weight"], head["2.bias"]
        )
    case.check("out", out)
    case.check("q", F.normalize(out, dim=1))


@pytest.mark.parametrize("name", case_ids("amdim_encoder"))
@pytest.mark.parametrize("prefix", ["encoder.module.", "encoder.", ""])
@torch.no_grad()
def test_amdims_checkpoint(shared: Path, tmp_path: Path, name: str, prefix: str) -> None:
    case = load(shared, name)
    names = ("encoder_size", "ndf", "n_rkhs", "n_depth", "use_bn")
    options = {option: case.args[option] for option in names}
    shapes = create_trunk("amdim", options=options).state_dict()
    state = {key: fill_rule(key, tensor.shape, case.args["gain"]) for key, tensor in shapes.items()}
    value = {
        "model": {**with_prefix(prefix, state), "g2l_loss.masks_r5": torch.zeros(25, 1, 5, 5).byte()},
        "hyperparams": {**options, "n_classes": 10, "tclip": 20.0},
        "cursor": {"info_epoch": 1},
    }
    model = read_model(save(tmp_path / "amdim_cpt.pth", value))
    assert model.network.options == options
    trunk = built(model)
    for output, got in zip(("r1", "r5", "r7"), trunk.maps(case.inputs["x"]), strict=True):
        case.check(output, got)
    case.check("r1", trunk(case.inputs["x"])[:, :, None, None])


def test_amdim_in_half_precision(shared: Path, tmp_path: Path) -> None:
    """apex may have left convolutions in float16."""
    options = {"encoder_size": 32, "ndf": 8, "n_rkhs": 32, "n_depth": 2, "use_bn": False}
    state = create_trunk("amdim", options=options).state_dict()
    half = {key: tensor.half() if tensor.ndim == 4 else tensor for key, tensor in state.items()}
    model = read_model(save(tmp_path / "amdim.pth", {"model": with_prefix("encoder.module.", half)}))
    assert model.network.options == options
    assert {tensor.dtype for tensor in model.trunk.values()} == {torch.float32, torch.int64}
    assert "float16 were made float32" in model.account.sentence()
    assert "use_bn is not in the file" in model.account.sentence()


def test_the_tensors_count_where_hyperparams_differ(tmp_path: Path) -> None:
    options = {"encoder_size": 64, "ndf": 4, "n_rkhs": 32, "n_depth": 1, "use_bn": True}
    state = create_trunk("amdim", options=options).state_dict()
    value = {"model": with_prefix("encoder.", state), "hyperparams": {**options, "ndf": 5}}
    model = read_model(save(tmp_path / "amdim.pth", value))
    assert model.network.options == options
    assert "hyperparams say ndf 5, the tensors 4" in model.account.sentence()


def test_a_runs_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = small_run(tmp_path_factory)
    checkpoint, problems = CheckpointFolder(run / "checkpoints").newest()
    assert checkpoint is not None, problems
    learner = checkpoint.shared["learner"]
    model = read_model(checkpoint.path / "global.safetensors")
    assert (model.format, model.method) == ("zoo_run", "swav")
    assert model.account.prefix == "trunk."
    for name, tensor in {**with_prefix("trunk.", model.trunk), **model.heads}.items():
        assert torch.equal(learner[name], tensor), name
    assert len(learner) == len(model.trunk) + len(model.heads)
    assert model.preprocessing["std"][0] == 0.228
    assert {group.what for group in model.account.dropped} == {
        "projection head",
        "prototypes",
        "optimizer state",
    }


def test_a_runs_average_is_what_it_is_after() -> None:
    from zoo.weights.formats import identify

    from .layouts import small_backbone

    trained, average = small_backbone(seed=1), small_backbone(seed=2)
    flat = {
        **with_prefix("learner/trunk.", trained),
        **linear("learner/prototypes", 8, 4, bias=False),
        **with_prefix("average/", average),
        "optimizer/state/0/momentum_buffer": torch.zeros(2),
    }
    model = identify(flat, "global.safetensors")
    assert torch.equal(model.trunk["conv1.weight"], average["conv1.weight"])
    assert "'average' was taken, not 'learner.trunk'" in model.account.sentence()
    assert "prototypes.weight" in model.heads


def test_a_bundles_weights(resnet18: Path) -> None:
    from safetensors.torch import load_file

    path = resnet18 / "model.safetensors"
    model = read_model(path)
    assert (model.format, model.network.arch) == ("torchvision", "resnet18")
    weights = load_file(path)
    assert model.trunk.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.trunk.items())
