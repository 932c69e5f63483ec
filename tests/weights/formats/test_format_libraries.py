"""Files of other libraries, with the keys of their own classes where those are installed (lightly), and
where not with those that follow from their public source:

- VISSL ``vissl/models/trunks/resnext.py``, ``heads/swav_prototypes_head.py``, ``heads/mlp.py``;
- solo-learn ``solo/methods/base.py``, ``mocov2plus.py``, ``byol.py``, ``swav.py``, ``dino.py``;
- DINO ``main_dino.py`` and ``vision_transformer.py`` (DINOHead); Barlow Twins ``main.py``;
- VICReg ``main_vicreg.py`` and ``resnet.py``; SimSiam ``simsiam/builder.py``;
- BYOL in PyTorch: networks of ``nn.Sequential`` children in ``online_network_state_dict``.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from lightly.models import ResNetGenerator
from lightly.models.modules import heads as lightly_heads
from lightly.utils.benchmarking import OnlineLinearClassifier
from torch import nn

from zoo.errors import InputError
from zoo.weights.formats import identify, read_model
from zoo.weights.formats.base import ForeignModel, Network

from .layouts import linear, namespace, norm, optimizer, save, small_backbone, with_prefix

State = dict[str, torch.Tensor]
FEATURES = 4 * 32  # of the narrow ResNet-50


def lightning(state: State, **hyperparameters: Any) -> dict[str, Any]:
    """What PyTorch Lightning saves around a module."""
    return {
        "epoch": 9,
        "global_step": 900,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 10}}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [optimizer([10])],
        "lr_schedulers": [{"last_epoch": 9}],
        "hparams_name": "kwargs",
        "hyper_parameters": hyperparameters,
    }


def mlp(prefix: str, widths: list[int], step: int, batchnorm: bool = True, bias: bool = True) -> State:
    """Linear layers at 0, ``step``, 2 ``step`` ..., each but the last followed by a norm."""
    state: State = {}
    for index, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        state |= linear(f"{prefix}.{index * step}", n_in, n_out, bias, seed=index)
        if batchnorm and index < len(widths) - 2:
            state |= norm(f"{prefix}.{index * step + 1}", n_out)
    return state


def groups(model: ForeignModel) -> dict[str, int]:
    """How many tensors of each kind were left out; each exactly once."""
    keys = Counter(key for group in model.account.dropped for key in group.keys)
    assert set(keys.values()) <= {1}
    return {group.what: len(group.keys) for group in model.account.dropped}


def check(model: ForeignModel, backbone: State, format: str, method: str) -> None:
    """The backbone is the given one, to the bit."""
    assert (model.format, model.method) == (format, method)
    assert model.trunk.keys() == backbone.keys()
    assert all(torch.equal(tensor, backbone[name]) for name, tensor in model.trunk.items())
    assert model.account.matched == len(backbone)
    assert all(group.expected for group in model.account.dropped), model.account.sentence()


# lightly: real classes


@pytest.fixture(scope="module")
def resnet18() -> Any:
    """torchvision's own, with statistics as after a training."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
    return network


def backbone_of(network: Any) -> State:
    return {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("fc.")}


def test_lightly_swav(resnet18: Any, tmp_path: Path) -> None:
    module = nn.Module()
    module.backbone = nn.Sequential(*list(resnet18.children())[:-1])
    module.projection_head = lightly_heads.SwaVProjectionHead(512, 64, 16)
    module.prototypes = lightly_heads.SwaVPrototypes(16, n_prototypes=30)
    state = module.state_dict()
    assert "backbone.4.0.conv1.weight" in state  # as people's files have it
    model = read_model(save(tmp_path / "last.ckpt", lightning(state, lr=0.5)))
    check(model, backbone_of(resnet18), "lightly", "swav")
    assert model.network == Network("resnet18")
    assert groups(model) == {
        "projection head": 8,
        "prototypes": 2,
        "training state": 1,
        "optimizer state": 1,
    }
    assert {"projection_head.0.weight", "projection_head.1.running_var", "projection_head.3.bias"} <= set(
        model.heads
    )
    assert model.heads["prototypes.weight"].shape == (30, 16)
    assert model.facts["hyper_parameters"] == {"lr": 0.5}
    assert model.account.prefix == "backbone."


def test_lightly_moco(resnet18: Any) -> None:
    module = nn.Module()
    module.backbone = nn.Sequential(*list(resnet18.children())[:-1])
    module.projection_head = lightly_heads.MoCoProjectionHead(512, 64, 16)
    module.backbone_momentum = copy.deepcopy(module.backbone)
    module.backbone_momentum[0].weight.data.zero_()
    module.projection_head_momentum = copy.deepcopy(module.projection_head)
    state = module.state_dict()
    check(identify(lightning(state), "last.ckpt"), backbone_of(resnet18), "lightly", "unknown")
    # Older versions of lightly save the loss's memory bank, too.
    state["criterion.memory_bank.bank"] = torch.zeros(16, 32)
    state["criterion.memory_bank.bank_ptr"] = torch.zeros(1, dtype=torch.int64)
    model = identify(lightning(state), "last.ckpt")
    check(model, backbone_of(resnet18), "lightly", "moco")
    assert not model.heads["momentum_encoder.conv1.weight"].any()
    assert model.heads["momentum_encoder.layer1.0.bn1.weight"].shape == (64,)
    assert "momentum_encoder.projection_head.0.weight" in model.heads
    assert model.heads["memory_bank.bank"].shape == (16, 32)
    assert groups(model)["queue"] == 2


def test_lightly_dino_prefers_the_teacher(resnet18: Any) -> None:
    module = nn.Module()
    module.student_backbone = nn.Sequential(*list(copy.deepcopy(resnet18).children())[:-1])
    module.student_backbone[0].weight.data.zero_()
    module.student_head = lightly_heads.DINOProjectionHead(512, 32, 16, 40)
    module.teacher_backbone = nn.Sequential(*list(resnet18.children())[:-1])
    module.teacher_head = lightly_heads.DINOProjectionHead(512, 32, 16, 40)
    model = identify(lightning(module.state_dict()), "last.ckpt")
    check(model, backbone_of(resnet18), "lightly", "dino")
    assert model.account.prefix == "teacher_backbone."
    teacher = module.teacher_head.state_dict()
    assert torch.equal(model.heads["projection_head.0.weight"], teacher["layers.0.weight"])
    assert any(name.startswith("projection_head.last_layer.") for name in model.heads)


def test_lightlys_benchmarks(resnet18: Any) -> None:
    """``backbone`` is what they evaluate, whatever else is there (BYOL's teacher here)."""
    network = copy.deepcopy(resnet18)
    network.fc = nn.Identity()
    module = nn.Module()
    module.backbone = network
    module.projection_head = lightly_heads.BYOLProjectionHead(512, 64, 16)
    module.prediction_head = lightly_heads.BYOLPredictionHead(16, 32, 16)
    module.teacher_backbone = copy.deepcopy(network)
    module.teacher_backbone.conv1.weight.data.zero_()
    module.teacher_projection_head = lightly_heads.BYOLProjectionHead(512, 64, 16)
    module.online_classifier = OnlineLinearClassifier(512, num_classes=5)
    model = identify(lightning(module.state_dict()), "last.ckpt")
    check(model, backbone_of(resnet18), "lightly", "byol")
    weight = module.online_classifier.classification_head.weight
    assert torch.equal(model.classifier["weight"], weight)
    assert {name.split(".")[0] for name in model.heads} == {
        "projection_head",
        "predictor",
        "momentum_encoder",
    }


@pytest.mark.parametrize("name, arch", [("resnet-18", "resnet18"), ("resnet-50", "resnet50")])
@pytest.mark.parametrize("sequence", [True, False])
def test_lightlys_own_resnet(name: str, arch: str, sequence: bool) -> None:
    network = ResNetGenerator(name, width=0.125)
    inside: Any = nn.Sequential(*list(network.children())[:-1]) if sequence else network
    state = {f"backbone.{key}": tensor for key, tensor in inside.state_dict().items()}
    model = identify({"state_dict": state}, "file")
    assert model.network == Network(arch, "small", base_planes=8)
    theirs = network.state_dict()
    assert torch.equal(model.trunk["layer2.0.downsample.0.weight"], theirs["layer2.0.shortcut.0.weight"])
    assert torch.equal(model.trunk["layer4.1.bn2.running_var"], theirs["layer4.1.bn2.running_var"])
    assert model.account.matched == len([key for key in theirs if not key.startswith("linear")])
    if not sequence:
        assert torch.equal(model.classifier["weight"], network.linear.weight)


def test_lightlys_smallest_is_named() -> None:
    with pytest.raises(InputError, match="lightly's resnet-9"):
        identify(ResNetGenerator("resnet-9").state_dict(), "file")


def test_byol_in_pytorch(resnet18: Any) -> None:
    """Two networks, each an ``encoder`` of children and a head with a spelling of its own."""
    encoder = nn.Sequential(*list(resnet18.children())[:-1]).state_dict()
    online = {**with_prefix("encoder.", encoder), **mlp("projetion.net", [512, 32, 8], 3)}
    value = {
        "online_network_state_dict": online,
        "target_network_state_dict": {key: torch.zeros_like(tensor) for key, tensor in online.items()},
        "optimizer_state_dict": optimizer([3]),
    }
    model = identify(value, "model.pth")
    check(model, backbone_of(resnet18), "lightly", "unknown")
    assert "'online_network_state_dict.encoder' was taken" in model.account.sentence()
    assert "projection_head.net.0.weight" in model.heads


# The others: by their public source


def test_vissl() -> None:
    backbone = small_backbone("resnet50")
    heads = {
        **mlp("0.projection_head", [FEATURES, 64, 16], 3),
        **linear("0.prototypes0", 16, 30, bias=False),
    }
    base_model = {
        "model": {"trunk": with_prefix("_feature_blocks.", backbone), "heads": heads},
        "meters": {"accuracy": {"value": torch.zeros(1)}},
    }
    value = {
        "phase_idx": 99,
        "iteration": 500,
        "classy_state_dict": {
            "train": True,
            "base_model": base_model,
            "optimizer": {"optim": optimizer([161])},
        },
        "loss": {"queue": torch.zeros(4, 16)},
    }
    model = identify(value, "model_final_checkpoint_phase99.torch")
    check(model, backbone, "vissl", "swav")
    assert model.account.prefix == "_feature_blocks."
    assert torch.equal(model.heads["prototypes.weight"], heads["0.prototypes0.weight"])
    assert torch.equal(model.heads["projection_head.3.bias"], heads["0.projection_head.3.bias"])
    assert model.facts["phase_idx"] == 99
    several = {**heads, **linear("0.prototypes1", 16, 20, bias=False)}
    base_model["model"]["heads"] = several
    assert "prototypes.prototypes1.weight" in identify(value, "file").heads


def test_vissls_stack_of_heads() -> None:
    backbone = small_backbone("resnet50")
    heads = {**linear("0.clf.0", FEATURES, 64), **linear("1.clf.0", 64, 16)}
    trunk = with_prefix("_feature_blocks.", backbone)
    value = {"classy_state_dict": {"base_model": {"model": {"trunk": trunk, "heads": heads}}}}
    model = identify(value, "simclr.torch")
    check(model, backbone, "vissl", "unknown")
    assert set(model.heads) == {f"projection_head.{key}" for key in heads}
    assert model.classifier == {}


def test_solo_learn_moco() -> None:
    backbone, momentum = small_backbone(seed=1), small_backbone(seed=2)
    state = {
        **with_prefix("backbone.", backbone),
        **linear("classifier", 32, 10),
        **with_prefix("momentum_backbone.", momentum),
        **mlp("projector", [32, 16, 8], 2, batchnorm=False),
        **mlp("momentum_projector", [32, 16, 8], 2, batchnorm=False),
        "queue": torch.zeros(2, 8, 64),
        "queue_ptr": torch.zeros(1, dtype=torch.int64),
    }
    model = identify(lightning(state), "solo.ckpt")
    check(model, backbone, "solo_learn", "moco")
    assert torch.equal(model.classifier["weight"], state["classifier.weight"])
    assert {"queue", "queue_ptr", "projection_head.2.bias"} <= set(model.heads)
    assert torch.equal(model.heads["momentum_encoder.conv1.weight"], momentum["conv1.weight"])
    assert "momentum_encoder.projection_head.0.weight" in model.heads
    assert groups(model)["momentum encoder"] == len(momentum) + 4


@pytest.mark.parametrize(
    "heads, method",
    [
        ({**mlp("projector", [32, 16, 8], 3)}, "unknown"),
        ({**mlp("projector", [32, 16, 8], 3), **mlp("predictor", [8, 16, 8], 3)}, "simsiam"),
        ({**mlp("projector", [32, 16, 8], 3), "prototypes.weight_v": torch.ones(30, 8)}, "swav"),
        ({**mlp("head.mlp", [32, 16, 8], 2, False), "head.last_layer.weight_v": torch.ones(40, 8)}, "dino"),
    ],
)
def test_solo_learns_other_methods(heads: State, method: str) -> None:
    backbone = small_backbone()
    state = {**with_prefix("backbone.", backbone), **linear("classifier", 32, 10), **heads}
    check(identify(lightning(state), "solo.ckpt"), backbone, "solo_learn", method)


def test_solo_learns_small_stem_pads_otherwise() -> None:
    backbone = small_backbone(stem="small")
    state = {
        **with_prefix("encoder.", backbone),
        **linear("classifier", 32, 10),
        **mlp("projector", [32, 8], 2),
    }
    model = identify(lightning(state), "solo.ckpt")
    check(model, backbone, "solo_learn", "unknown")
    assert model.network.stem == "small"
    assert "pads the 3x3 stem by 2" in model.account.sentence()


def test_dino(tmp_path: Path) -> None:
    teacher, student = small_backbone("resnet50", seed=1), small_backbone("resnet50", seed=2)
    head = {
        **mlp("module.head.mlp", [FEATURES, 32, 32, 8], 2, batchnorm=False),
        "module.head.last_layer.weight_g": torch.ones(64, 1),
        "module.head.last_layer.weight_v": torch.ones(64, 8),
    }
    value = {
        "student": {**with_prefix("module.backbone.", student), **head},
        "teacher": {**with_prefix("module.backbone.", teacher), **head},
        "optimizer": optimizer([161]),
        "epoch": 800,
        "args": namespace(arch="resnet50", lr=0.03),
        "dino_loss": {"center": torch.zeros(1, 64)},
    }
    model = read_model(save(tmp_path / "checkpoint.pth", value))
    check(model, teacher, "dino", "dino")
    assert model.account.prefix == "module.backbone."
    assert "'teacher.module.backbone' was taken, not 'student.module.backbone'" in model.account.sentence()
    assert groups(model) == {
        "other copy of the network": len(student) + 8,
        "projection head": 8,
        "optimizer state": 1,
        "loss state": 1,
    }
    assert {"projection_head.mlp.0.weight", "projection_head.last_layer.weight_v"} <= set(model.heads)
    assert model.facts["args"] == {"arch": "resnet50", "lr": 0.03}


def test_barlow_twins() -> None:
    backbone = small_backbone("resnet50")
    inside = {
        **with_prefix("backbone.", backbone),
        **mlp("projector", [FEATURES, 64, 64, 64], 3, bias=False),
        **norm("bn", 64, affine=False),
    }
    value = {"epoch": 1000, "model": with_prefix("module.", inside), "optimizer": optimizer([53, 106])}
    model = identify(value, "checkpoint.pth")
    check(model, backbone, "barlow_twins", "barlow_twins")
    assert {"projection_head.0.weight", "projection_norm.running_var"} <= set(model.heads)
    assert model.account.prefix == "module.backbone."


def test_vicreg() -> None:
    backbone = small_backbone("resnet50")
    projector = mlp("projector", [FEATURES, 64, 64, 64], 3)
    del projector["projector.6.bias"]
    inside = with_prefix("module.", {**with_prefix("backbone.", backbone), **projector})
    model = identify({"epoch": 300, "model": inside, "optimizer": optimizer([161])}, "model.pth")
    check(model, backbone, "vicreg", "vicreg")
    assert groups(model) == {"projection head": len(projector), "optimizer state": 1}


def test_simsiam() -> None:
    backbone = small_backbone("resnet50")
    fc = {
        **mlp("fc", [FEATURES, FEATURES, FEATURES, FEATURES], 3, bias=False),
        **norm("fc.7", FEATURES, affine=False),
        "fc.6.bias": torch.zeros(FEATURES),
    }
    inside = {**with_prefix("encoder.", {**backbone, **fc}), **mlp("predictor", [FEATURES, 32, FEATURES], 3)}
    value = {"epoch": 100, "arch": "resnet50", "state_dict": with_prefix("module.", inside)}
    model = identify({**value, "optimizer": optimizer([161, 6])}, "checkpoint_0099.pth.tar")
    check(model, backbone, "simsiam", "simsiam")
    assert {"projection_head.6.bias", "predictor.3.weight"} <= set(model.heads)
    assert model.classifier == {}


def test_moco_v3() -> None:
    backbone, momentum = small_backbone("resnet50", seed=1), small_backbone("resnet50", seed=2)
    fc = mlp("fc", [FEATURES, 64, 16], 3, bias=False)
    inside = {
        **with_prefix("base_encoder.", {**backbone, **fc}),
        **with_prefix("momentum_encoder.", {**momentum, **fc}),
        **mlp("predictor", [16, 64, 16], 3, bias=False),
    }
    model = identify({"state_dict": with_prefix("module.", inside)}, "r-50-100ep.pth.tar")
    check(model, backbone, "moco", "moco")
    assert model.facts["version"] == "v3"
    assert model.account.prefix == "module.base_encoder."


@pytest.mark.parametrize("fc", ["", "fc"])
def test_published_backbone_files_are_bare(fc: str) -> None:
    """DINO's, Barlow Twins' and VICReg's; nothing in them says whose they are."""
    backbone = small_backbone("resnet50")
    model = identify({**backbone, **(linear(fc, FEATURES, 10) if fc else {})}, "resnet50.pth")
    check(model, backbone, "torchvision", "unknown")
    assert bool(model.classifier) == bool(fc)
