"""detectron2's layout: names, values, and features that are the trunk's, or no file."""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torchvision.models import resnet50

from golden.cases import fill_rule, hash_signed
from zoo.conversion import convert
from zoo.errors import InputError, RunError
from zoo.models.factory import create_trunk
from zoo.models.resnet import stage_features
from zoo.weights.fill import STANDARD_PREPROCESSING
from zoo.weights.formats import read_model
from zoo.weights.writers.detectron2 import (
    STAGES,
    detectron2_arrays,
    detectron2_features,
    detectron2_key,
    feature_check,
)

from ..formats.layouts import manifest, save, with_prefix
from ..published import describe, weights_of
from .sources import backbone

COUNTER = "num_batches_tracked"


def filled(arch: str, **arguments: object) -> torch.nn.Module:
    """A narrow trunk with statistics like those of a trained one."""
    trunk = create_trunk(arch, **{"base_planes": 8, **arguments}).eval()
    trunk.load_state_dict(
        {key: fill_rule(key, value.shape, 1.0) for key, value in trunk.state_dict().items()}
    )
    return trunk


# --- names ---


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_names_of_mocos_script(shared: Path, version: str) -> None:
    """All of its names but those that nothing uses: the head's and the norms' counters."""
    listed = manifest(shared, f"detectron2_map_moco_{version}_rn50")["state_dict"]
    theirs = {old.removeprefix("module.encoder_q."): new for old, new in listed.items()}
    used = {old: new for old, new in theirs.items() if not new.startswith("stem.fc.") and COUNTER not in new}
    assert len(used) == 265
    assert {old: detectron2_key(old) for old in used} == used
    with torch.device("meta"):
        trunk = create_trunk("resnet50").state_dict()
    assert {name for name in trunk if COUNTER not in name} == set(used)


# --- features ---


@torch.no_grad()
def test_detectron2s_own_features(shared: Path) -> None:
    """What detectron2 computed from MoCo's conversion of a ResNet-50 filled by the formula."""
    index = json.loads((shared / "golden" / "index_detection.json").read_text(encoding="utf-8"))
    (case,) = (case for case in index["cases"] if case["family"] == "weight_conversion")
    golden = load_file(shared / "golden" / case["file"])
    network = resnet50().eval()
    state = {key: fill_rule(key, value.shape, 1.0) for key, value in network.state_dict().items()}
    network.load_state_dict(state)
    arrays = detectron2_arrays({name: value for name, value in state.items() if not name.startswith("fc.")})
    assert len(arrays) == 265
    x = hash_signed("convert/x", [1, 3, 96, 128], 2.0)
    maps, ours = detectron2_features(arrays, x), stage_features(network, x)
    corners = 0
    for stage in ("stem", *STAGES):
        want, tolerance = golden[f"{case['id']}/out/{stage}_corner"], case["tolerance"]["per_output"]
        close = tolerance[f"{stage}_corner"]
        got = maps[stage][:, :6, :3, :3].double()
        assert ((got - want).abs() <= close["atol"] + close["rtol"] * want.abs()).all(), stage
        assert list(maps[stage].shape) == golden[f"{case['id']}/out/{stage}_shape"].tolist()
        corners += want.numel()
        layer = "stem" if stage == "stem" else f"layer{int(stage[3]) - 1}"
        assert torch.equal(maps[stage], ours[layer]), stage
    assert corners == 5 * 54


@pytest.mark.parametrize("arch", ["resnet18", "resnet50", "resnext101_32x8d"])
@torch.no_grad()
def test_every_kind_of_network_passes(arch: str) -> None:
    trunk = filled(arch)
    found = feature_check(detectron2_arrays(trunk.state_dict()), trunk, STANDARD_PREPROCESSING)
    assert list(found) == list(STAGES)
    assert max(found.values()) < 1e-5


@torch.no_grad()
def test_the_stride_matters() -> None:
    """With detectron2's default the same arrays give other features, and no error."""
    arrays = detectron2_arrays(filled("resnet50").state_dict())
    x = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    right, wrong = (detectron2_features(arrays, x, stride_in_1x1=flag)["res5"] for flag in (False, True))
    assert (right - wrong).abs().max() > 0.1 * right.abs().max()


def swapped(arrays: dict[str, np.ndarray], left: str, right: str) -> dict[str, np.ndarray]:
    return {**arrays, left: arrays[right], right: arrays[left]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: {**arrays, "stem.conv1.weight": arrays["stem.conv1.weight"][:, ::-1].copy()},  # BGR
        lambda arrays: swapped(arrays, "res2.0.conv1.norm.running_mean", "res2.0.conv1.norm.bias"),
        lambda arrays: swapped(arrays, "res4.1.conv3.norm.weight", "res4.1.conv3.norm.running_var"),
        lambda arrays: {name: array for name, array in arrays.items() if not name.startswith("res5.2.")},
        lambda arrays: swapped(arrays, "res3.1.conv2.weight", "res3.2.conv2.weight"),
        lambda arrays: {**arrays, "res3.0.conv2.weight": np.full_like(arrays["res3.0.conv2.weight"], np.nan)},
    ],
    ids=["BGR", "mean and bias", "weight and variance", "a block", "two blocks", "NaN"],
)
@torch.no_grad()
def test_a_wrong_array_is_found(damage) -> None:
    trunk = filled("resnet50")
    damaged = damage(detectron2_arrays(trunk.state_dict()))
    with pytest.raises(RunError, match="would compute other features"):
        feature_check(damaged, trunk, STANDARD_PREPROCESSING)


@torch.no_grad()
def test_another_preprocessing_is_found() -> None:
    """detectron2's default (std 1) is 50 times off: the check runs on pixels, not on normalised values."""
    trunk = filled("resnet18")
    arrays = detectron2_arrays(trunk.state_dict())
    x = torch.randint(0, 256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0)).float()
    how = {key: torch.tensor(STANDARD_PREPROCESSING[key]).view(1, 3, 1, 1) for key in ("mean", "std")}
    right = stage_features(trunk, (x / 255 - how["mean"]) / how["std"])["layer4"]
    wrong = detectron2_features(arrays, x - 255 * how["mean"])["res5"]
    assert (right - wrong).abs().max() > 5 * right.abs().max()


# --- the file ---


def test_it_comes_back(tmp_path: Path) -> None:
    trunk = backbone("resnet50")
    file = save(tmp_path / "moco.pth", {"state_dict": with_prefix("module.encoder_q.", trunk)})
    done = convert(file, to="detectron2", out=tmp_path / "moco.pkl")
    again = read_model(done.path)
    assert again.format == "detectron2" and again.network.base_planes == 4
    assert list(again.trunk) == list(trunk)
    for name, tensor in trunk.items():
        expected = torch.zeros_like(tensor) if name.endswith(COUNTER) else tensor
        assert torch.equal(again.trunk[name], expected), name
    assert any("differ from the trunk's by" in note for note in done.notes)
    (settings,) = (note for note in done.notes if "must be told" in note)
    for setting in ("INPUT.FORMAT RGB", "[58.395, 57.12, 57.375]", "STRIDE_IN_1X1 False", "DEPTH 50",
                    "STEM_OUT_CHANNELS 4", "RES2_OUT_CHANNELS 16", "WIDTH_PER_GROUP 4"):  # fmt: skip
        assert setting in settings


def test_what_detectron2_unpickles(tmp_path: Path) -> None:
    trunk = weights_of(describe())
    done = convert(save(tmp_path / "it.pth", trunk), to="detectron2", out=tmp_path / "it.pkl")
    content = done.path.read_bytes()
    value = pickle.loads(content, encoding="latin1")
    assert set(value) == {"model", "__author__", "matching_heuristics"}
    assert value["matching_heuristics"] is True and value["__author__"] == "vision-model-zoo"
    arrays = value["model"]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    assert all(array.flags.writeable for array in arrays.values())
    kept = {name: tensor for name, tensor in trunk.items() if not name.endswith(COUNTER)}
    assert list(arrays) == [detectron2_key(name) for name in kept]
    assert all(np.array_equal(arrays[detectron2_key(name)], tensor.numpy()) for name, tensor in kept.items())
    # Names that every numpy has: numpy 2 pickles by numpy._core, which older ones lack.
    named = {argument for code, argument, _ in pickletools.genops(content) if code.name == "GLOBAL"}
    assert named == {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}
    assert "STACK_GLOBAL" not in {code.name for code, _, _ in pickletools.genops(content)}


def test_weights_that_compute_nothing_are_not_written(tmp_path: Path) -> None:
    trunk = weights_of(describe())
    trunk["layer2.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    file = save(tmp_path / "nan.pth", trunk)
    with pytest.raises(InputError, match="no finite numbers"):
        convert(file, to="detectron2", out=tmp_path / "nan.pkl")
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["nan.pth"]


def test_an_untrained_network_is_told(tmp_path: Path) -> None:
    trunk = create_trunk("resnet18", base_planes=8).state_dict()
    done = convert(save(tmp_path / "it.pth", trunk), to="detectron2", out=tmp_path / "it.pkl")
    assert any("untrained network" in note for note in done.notes)
    trunk["bn1.running_mean"] += 1
    done = convert(save(tmp_path / "it.pth", trunk), to="detectron2", out=tmp_path / "it.pkl", force=True)
    assert not any("untrained network" in note for note in done.notes)
