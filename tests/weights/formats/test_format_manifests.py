"""Every published layout: keys and wrappers as written down, narrow with real values and at full width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.weights.fill import fill_trunk
from zoo.weights.formats import identify, read_classifier, read_model
from zoo.weights.formats.base import ForeignModel, Network

from .layouts import DIVISOR, published_state, save, wrapped


class Expected(NamedTuple):
    """What a manifest's file is: its format, method, network, prefix and what is dropped."""

    format: str
    method: str
    network: Network
    prefix: str
    dropped: Mapping[str, int]
    std: float = 0.228


def _amdim(size: int, ndf: int, n_rkhs: int, depth: int) -> Expected:
    options = {"encoder_size": size, "ndf": ndf, "n_rkhs": n_rkhs, "n_depth": depth, "use_bn": False}
    # A linear classifier, and an MLP of two layers (the first without bias) with a norm between them.
    dropped = {"classifier": 10, "loss state": 1}
    return Expected("amdim", "amdim", Network("amdim", options=options), "encoder.module.", dropped, 0.229)


_R50 = Network("resnet50")
_HEAD = {"projection head": 9}
_MOCO_V1 = {"queue": 2, "projection head": 2, "momentum encoder": 320, "optimizer state": 1}
_MOCO_V2 = {"queue": 2, "projection head": 4, "momentum encoder": 322, "optimizer state": 1}
CASES = {
    "swav_rn50_hub": Expected("swav", "swav", _R50, "module.", {**_HEAD, "prototypes": 1}),
    "swav_rn50w2_hub": Expected("swav", "swav", Network("resnet50w2"), "module.", {**_HEAD, "prototypes": 1}),
    "swav_rn50w4_hub": Expected("swav", "swav", Network("resnet50w4"), "module.", {**_HEAD, "prototypes": 1}),
    "swav_rn50w5_hub": Expected(
        "swav", "swav", Network("resnet50w5"), "module.", {"projection head": 4, "prototypes": 1}
    ),
    "swav_rn50_training_checkpoint": Expected(
        "swav", "swav", _R50, "module.", {**_HEAD, "prototypes": 1, "optimizer state": 1}
    ),
    "deepclusterv2_rn50_hub": Expected("swav", "deepcluster_v2", _R50, "module.", {**_HEAD, "prototypes": 3}),
    "selav2_rn50_hub": Expected("swav", "deepcluster_v2", _R50, "module.", {**_HEAD, "prototypes": 3}),
    "swav_eval_semisup": Expected(
        "swav_semisup", "swav", _R50, "module.", {"classifier": 2, "optimizer state": 1}
    ),
    "moco_v1_rn50": Expected("moco", "moco", _R50, "module.encoder_q.", _MOCO_V1, 0.229),
    "moco_v2_rn50": Expected("moco", "moco", _R50, "module.encoder_q.", _MOCO_V2, 0.229),
    "moco_lincls_rn50": Expected(
        "moco_lincls",
        "moco",
        _R50,
        "module.",
        {"classifier": 2, "optimizer state": 1, "training state": 1},
        0.229,
    ),
    "detectron2_map_moco_v1_rn50": Expected("detectron2", "moco", _R50, "", {"projection head": 2}, 0.229),
    "detectron2_map_moco_v2_rn50": Expected("detectron2", "moco", _R50, "", {"projection head": 4}, 0.229),
    "amdim_c10_32_ndf128_rkhs1024_rd3": _amdim(32, 128, 1024, 3),
    "amdim_stl10_64_ndf128_rkhs1024_rd3": _amdim(64, 128, 1024, 3),
    "amdim_in128_ndf192_rkhs1536_rd8": _amdim(128, 192, 1536, 8),
    "amdim_in128_ndf256_rkhs2048_rd10": _amdim(128, 256, 2048, 10),
    "amdim_in128_ndf320_rkhs2560_rd10": _amdim(128, 320, 2560, 10),
}
LINEAR = "swav_eval_linear"


def test_all_manifests_have_their_case(shared: Path) -> None:
    listed = {path.stem for path in (shared / "golden" / "manifests").glob("*.json")}
    assert listed == {*CASES, LINEAR}


def _narrow(network: Network) -> Network:
    """The network that the published one becomes when its channels are divided."""
    if network.arch == "amdim":
        options = {**network.options}
        options.update(ndf=options["ndf"] // DIVISOR, n_rkhs=options["n_rkhs"] // DIVISOR)
        return Network("amdim", options=options)
    base = {"resnet50w2": 128, "resnet50w4": 256, "resnet50w5": 320}.get(network.arch, 64)
    return Network("resnet50", base_planes=base // DIVISOR)


def _ours(name: str, key: str) -> tuple[str, str]:
    """Where a key of a manifest's file belongs, and its name there: worked out by other rules."""
    if name.startswith("detectron2"):
        return _from_detectron2(key)
    key = key.removeprefix("module.")
    if name.startswith("moco_v"):
        if key.startswith("queue"):
            return "heads", key
        encoder, _, rest = key.partition(".")
        rest = rest.replace("fc", "projection_head")
        if encoder == "encoder_k":
            return "heads", f"momentum_encoder.{rest}"
        return ("heads" if rest.startswith("projection_head") else "trunk"), rest
    if name.startswith("amdim"):
        if key.startswith("encoder.module."):
            return "trunk", key.removeprefix("encoder.module.")
        if key.startswith("evaluator.block_glb_lin.block_forward.2."):
            return "classifier", key.rpartition(".")[2]
        mlp = key.replace("evaluator.block_glb_mlp.block_forward.", "mlp_classifier.")
        return ("heads" if key.startswith("evaluator") else "nowhere"), mlp
    single = {"moco_lincls_rn50": "fc.", "swav_eval_semisup": "projection_head."}.get(name)
    if single and key.startswith(single):
        return "classifier", key.removeprefix(single)
    return ("heads" if key.startswith(("projection_head", "prototypes")) else "trunk"), key


def _from_detectron2(key: str) -> tuple[str, str]:
    place, *rest = key.split(".")
    if place == "stem":
        if rest[0] == "fc":
            return "heads", ".".join(["projection_head", *rest[1:]])
        return "trunk", (f"bn1.{rest[2]}" if rest[1] == "norm" else "conv1.weight")
    block, layer, *last = rest
    stage = f"layer{int(place[3]) - 1}.{block}"
    if layer == "shortcut":
        return "trunk", f"{stage}.downsample." + (f"1.{last[1]}" if last[0] == "norm" else "0.weight")
    return "trunk", (f"{stage}.bn{layer[4]}.{last[1]}" if last[0] == "norm" else f"{stage}.{layer}.weight")


def _check(name: str, model: ForeignModel, state: Mapping[str, torch.Tensor]) -> None:
    expected = CASES[name]
    found: dict[str, Mapping[str, torch.Tensor]] = {
        "trunk": model.trunk,
        "heads": model.heads,
        "classifier": model.classifier,
    }
    counts: Counter[str] = Counter()
    for key, tensor in state.items():
        part, ours = _ours(name, key)
        counts[part] += 1
        if part != "nowhere":
            assert found[part][ours].shape == tensor.shape, key
            if not tensor.is_meta:
                assert torch.equal(found[part][ours], tensor), key
                assert found[part][ours].dtype == tensor.dtype, key
    assert {part: len(tensors) for part, tensors in found.items()} == {part: counts[part] for part in found}
    assert (model.format, model.method) == (expected.format, expected.method)
    assert model.account.matched == counts["trunk"]
    assert model.account.prefix == expected.prefix
    assert {group.what: len(group.keys) for group in model.account.dropped} == expected.dropped
    assert all(group.expected for group in model.account.dropped)
    keys = [key for group in model.account.dropped for key in group.keys]
    assert len(keys) == len(set(keys))
    assert {key for key in keys if "momentum_buffer" not in key and key != "best_acc1"} == {
        key for key in state if _ours(name, key)[0] != "trunk"
    }
    if expected.format != "amdim":
        assert model.preprocessing["std"] == [expected.std, 0.224, 0.225]
        assert (model.preprocessing["resize"], model.preprocessing["crop"]) == (256, 224)


@pytest.mark.parametrize("name", CASES)
def test_a_narrow_file_is_read_back(shared: Path, tmp_path: Path, name: str) -> None:
    state = published_state(shared, name, narrow=True)
    value = wrapped(name, state)
    containers = ["pickle"] if name.startswith("detectron2") else ["zip", "legacy"]
    for container in containers:
        model = read_model(save(tmp_path / f"{container}.pth", value, container))
        _check(name, model, state)
        assert model.network == _narrow(CASES[name].network)
        assert model.account.sentence().startswith(
            f"{len(model.trunk)} of {len(model.trunk)} backbone tensors"
        )
        assert model.facts.get("epoch") == value.get("epoch")
    trunk = create_trunk(
        model.network.arch,
        stem=model.network.stem,
        base_planes=model.network.base_planes,
        options=model.network.options,
    )
    trunk.load_state_dict(model.trunk)


@pytest.mark.parametrize("name", CASES)
def test_the_network_at_full_width(shared: Path, name: str) -> None:
    state = published_state(shared, name, narrow=False)
    value: Any = {"model": state} if name.startswith("detectron2") else wrapped(name, state)
    if name.startswith("detectron2"):
        value["__author__"] = "MOCO"
    model = identify(value, name)
    _check(name, model, state)
    assert model.network == CASES[name].network
    with torch.device("meta"):
        trunk = create_trunk(model.network.arch, stem=model.network.stem, options=model.network.options)
    wanted = {key: tuple(tensor.shape) for key, tensor in trunk.state_dict().items()}
    assert {key: tuple(tensor.shape) for key, tensor in model.trunk.items()} == wanted
    assert list(model.trunk) == list(wanted)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("amdim")])
def test_amdims_encoders_at_full_width_give_three_maps(shared: Path, name: str) -> None:
    model = identify(wrapped(name, published_state(shared, name, narrow=False)), name)
    trunk = fill_trunk(create_trunk, model.network, model.trunk, name).eval()
    size, dim = trunk.options["encoder_size"], trunk.options["n_rkhs"]
    images = torch.zeros(2, 3, size, size, device="meta")
    assert [tuple(found.shape) for found in trunk.maps(images)] == [
        (2, dim, side, side) for side in (1, 5, 7)
    ]
    assert tuple(trunk(images).shape) == (2, dim)


def test_what_the_wrappers_say(shared: Path, tmp_path: Path) -> None:
    facts = {}
    for name in ("moco_v2_rn50", "moco_lincls_rn50", "swav_eval_semisup", "amdim_c10_32_ndf128_rkhs1024_rd3"):
        value = wrapped(name, published_state(shared, name, narrow=True))
        facts[name] = read_model(save(tmp_path / name, value)).facts
    bare = wrapped("swav_rn50_hub", published_state(shared, "swav_rn50_hub", narrow=True))
    assert identify(bare, "hub").facts == {}
    assert facts["moco_v2_rn50"] == {"epoch": 100, "arch": "resnet50", "version": "v2"}
    assert facts["moco_lincls_rn50"]["best_acc1"] == 67.5
    assert facts["swav_eval_semisup"]["best_acc"] == [70.25, 89.5]
    amdim = facts["amdim_c10_32_ndf128_rkhs1024_rd3"]
    assert amdim["hyperparams"]["tclip"] == 20.0
    assert amdim["cursor"]["info_step"] == 40


@pytest.mark.parametrize(
    "name, preprocessing",
    [
        ("amdim_c10_32_ndf128_rkhs1024_rd3", (125.3 / 255, 63.0 / 255, 32, 32)),
        ("amdim_stl10_64_ndf128_rkhs1024_rd3", (0.43, 0.27, 70, 64)),
        ("amdim_in128_ndf256_rkhs2048_rd10", (0.485, 0.229, 146, 128)),
    ],
)
def test_amdims_images(shared: Path, name: str, preprocessing: tuple[float, ...]) -> None:
    how = identify(wrapped(name, published_state(shared, name, narrow=False)), name).preprocessing
    assert (how["mean"][0], how["std"][0], how["resize"], how["crop"]) == preprocessing
    assert how["interpolation"] == "bicubic"


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_the_linear_evaluations_classifier(shared: Path, tmp_path: Path, container: str) -> None:
    state = published_state(shared, LINEAR, narrow=True)
    path = save(tmp_path / "linear.pth.tar", wrapped(LINEAR, state), container)
    found = read_classifier(path)
    assert torch.equal(found.weight, state["module.linear.weight"])
    assert torch.equal(found.bias, state["module.linear.bias"])
    assert (found.num_classes, found.num_features) == (1000, 2048 // DIVISOR)
    assert found.facts == {"epoch": 100, "best_acc": 75.25}
    with pytest.raises(
        InputError, match=r"linear classifier alone \(1000 classes on 128 features\)"
    ) as caught:
        read_model(path)
    assert caught.value.where == str(path)


def test_a_classifier_on_its_backbone_can_be_had_alone(shared: Path, tmp_path: Path) -> None:
    state = published_state(shared, "moco_lincls_rn50", narrow=True)
    path = save(tmp_path / "lincls.pth.tar", wrapped("moco_lincls_rn50", state))
    assert torch.equal(read_classifier(path).weight, state["module.fc.weight"])
    state = published_state(shared, "swav_rn50_hub", narrow=True)
    path = save(tmp_path / "hub.pth.tar", wrapped("swav_rn50_hub", state))
    with pytest.raises(InputError, match="no classifier"):
        read_classifier(path)


def test_a_classifier_on_a_map_is_refused(shared: Path, tmp_path: Path) -> None:
    """SwAV's own variant without global pooling: a BatchNorm before the linear layer."""
    state = published_state(shared, LINEAR, narrow=True)
    norm = {"weight", "bias", "running_mean", "running_var"}
    state.update({f"module.bn.{part}": torch.ones(128) for part in norm})
    path = save(tmp_path / "linear.pth.tar", wrapped(LINEAR, state))
    with pytest.raises(InputError, match="BatchNorm before it"):
        read_classifier(path)
