"""What is written comes back tensor by tensor, and other libraries load it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torchvision.models import resnet18

import zoo
from zoo.conversion import convert
from zoo.errors import InputError
from zoo.models.factory import TRUNKS, create_trunk
from zoo.weights.formats import read_model
from zoo.weights.formats.base import Account, ForeignModel, Network
from zoo.weights.writers import WRITERS
from zoo.weights.writers.base import Source, Writer
from zoo.weights.writers.transformers import transformers_key

from ..formats.layouts import save, with_prefix
from ..published import bundle_at, describe, standard, weights_of
from .sources import backbone, classified, same, swav_file

HOW = describe().preprocessing
COUNTER = "num_batches_tracked"


def source_of(network: Network, channels: int = 3) -> Source:
    """A network without any values: enough to ask whether a layout has a place for it."""
    with torch.device("meta"):
        trunk = create_trunk(
            network.arch,
            stem=network.stem,
            base_planes=network.base_planes,
            options=network.options,
            channels=channels,
        )
    tensors = trunk.state_dict()
    what = describe(
        arch=network.arch,
        stem=network.stem,
        base_planes=network.base_planes,
        options=network.options,
        num_features=trunk.num_features,
    )
    model = ForeignModel("x", "x", network, tensors, {}, {}, "x", HOW, Account(len(tensors)))
    return Source("x", model, what, trunk)


# --- the list ---


def test_every_entry_is_a_layout() -> None:
    for name, entry in WRITERS.items():
        writer = WRITERS.code(name)
        assert issubclass(writer, Writer) and writer.name == name and entry.summary
        assert bool(writer.files) != bool(writer.suffix)  # a folder or a file


def test_the_list_needs_no_torch() -> None:
    code = "import sys, zoo.weights.writers as w; assert w.WRITERS['timm'].summary; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- bundle ---


def test_a_bundle_has_everything(tmp_path: Path) -> None:
    trunk = backbone()
    file = swav_file(tmp_path / "swav.pth.tar", trunk)
    done = convert(file, out=tmp_path / "bundle")
    assert same(read_model(tmp_path / "bundle" / "model.safetensors").trunk, trunk)
    assert same(
        load_file(tmp_path / "bundle" / "heads.safetensors"), dict(sorted(read_model(file).heads.items()))
    )
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        loaded = zoo.load(str(done.path), progress=False).eval()
        torch.testing.assert_close(
            loaded(x), zoo.load(str(file), progress=False).eval()(x), rtol=1e-5, atol=1e-5
        )
    assert loaded.zoo_info["method"] == "swav"


def test_a_bundle_keeps_the_classifier(tmp_path: Path) -> None:
    file = classified(tmp_path / "it.pth", backbone())
    done = convert(file, out=tmp_path / "bundle")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        models = [zoo.load(str(path), classifier="own", progress=False).eval() for path in (file, done.path)]
        assert torch.equal(models[0](x), models[1](x)) and models[0](x).shape == (2, 5)
    assert json.loads((done.path / "zoo.json").read_text())["num_classes"] == 5
    assert "kept beside the trunk, a classifier of 5 classes" in done.notes


def test_amdim_becomes_a_bundle_and_no_resnet(tmp_path: Path) -> None:
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 24, "n_depth": 2, "use_bn": True}
    torch.manual_seed(0)
    trunk = create_trunk("amdim", options=options).eval()
    value = {"model": with_prefix("encoder.module.", trunk.state_dict()), "hyperparams": options}
    file = save(tmp_path / "amdim_cpt.pth", value)
    done = convert(file, out=tmp_path / "bundle")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            zoo.load(str(done.path), progress=False).eval()(x), trunk(x), rtol=1e-5, atol=1e-5
        )
    for to in ("torchvision", "timm", "detectron2", "transformers"):
        out = tmp_path / ("amdim.pkl" if to == "detectron2" else "amdim")
        with pytest.raises(InputError, match="no place for this amdim: it takes ResNets only") as caught:
            convert(file, to=to, out=out)
        assert caught.value.where == str(file) and "bundle" in str(caught.value.fix)
        assert not out.exists()


# --- torchvision ---


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_torchvision_comes_back(tmp_path: Path, arch: str, stem: str) -> None:
    trunk = backbone(arch, stem=stem)
    file = classified(tmp_path / "it.pth", trunk)
    done = convert(file, to="torchvision", out=tmp_path / "out.pth")
    again, before = read_model(done.path), read_model(file)
    assert again.network == before.network
    assert same(again.trunk, trunk) and same(again.classifier, before.classifier)
    plain = torch.load(done.path, weights_only=True)
    assert list(plain)[-2:] == ["fc.weight", "fc.bias"]
    assert any("a stem of 4 channels" in note and "resnet" in note for note in done.notes)


def test_torchvisions_class_takes_it_strictly(tmp_path: Path) -> None:
    trunk = weights_of(standard())
    convert(classified(tmp_path / "it.pth", trunk, 7), to="torchvision", out=tmp_path / "with.pth")
    network = resnet18(num_classes=7)
    network.load_state_dict(torch.load(tmp_path / "with.pth", weights_only=True), strict=True)
    assert torch.equal(network.layer4[1].bn2.running_var, trunk["layer4.1.bn2.running_var"])
    done = convert(swav_file(tmp_path / "swav.pth", trunk), to="torchvision", out=tmp_path / "without.pth")
    missed = network.load_state_dict(torch.load(tmp_path / "without.pth", weights_only=True), strict=False)
    assert (missed.missing_keys, missed.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    assert any(
        "left out" in note and "projection_head, prototypes (3 tensors)" in note for note in done.notes
    )
    assert any("no classifier" in note for note in done.notes)


def test_a_torchvision_file_holds_its_tensors_alone_and_always_the_same(tmp_path: Path) -> None:
    """torch saves all of the memory that a view lies in: here, a training's whole state."""
    trunk = backbone()
    everything = torch.zeros(4_000_000)
    views, at = {}, 0
    for name, tensor in trunk.items():
        if tensor.is_floating_point():
            views[name] = everything[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
            at += tensor.numel()
    file = save(tmp_path / "views.pth", {**trunk, **views})
    assert file.stat().st_size > 16_000_000
    written = [convert(file, to="torchvision", out=tmp_path / name).path for name in ("a.pth", "b.pth")]
    assert written[0].stat().st_size < 1_500_000
    assert written[0].read_bytes() == written[1].read_bytes()
    assert same(read_model(written[0]).trunk, trunk)


def test_a_stem_that_no_tensor_tells_is_told(tmp_path: Path) -> None:
    medium = bundle_at(tmp_path / "medium", describe(stem="medium"))
    done = convert(medium.path, to="torchvision", out=tmp_path / "medium.pth")
    assert any("the stem 'medium'" in note for note in done.notes)
    assert any("nothing in the file tells the two apart" in note for note in done.notes)


# --- timm ---


def test_timm_loads_it_with_difference_zero(tmp_path: Path) -> None:
    file = classified(tmp_path / "it.pth", weights_of(standard()), 7)
    done = convert(file, to="timm", out=tmp_path / "folder")
    assert sorted(entry.name for entry in done.path.iterdir()) == ["config.json", "model.safetensors"]
    assert same(read_model(done.path / "model.safetensors").trunk, read_model(file).trunk)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours = zoo.load(str(file), progress=False).eval()
        theirs = timm.create_model(f"local-dir:{done.path}", pretrained=True, num_classes=0).eval()
        assert torch.equal(theirs(x), ours(x))
        ours = zoo.load(str(file), classifier="own", progress=False).eval()
        theirs = timm.create_model(f"local-dir:{done.path}", pretrained=True).eval()
        assert torch.equal(theirs(x), ours(x)) and theirs(x).shape == (2, 7)
    cfg = theirs.pretrained_cfg
    assert list(cfg["mean"]) == ours.zoo_info["preprocessing"]["mean"] and cfg["interpolation"] == "bilinear"


def test_timm_loads_it_without_a_classifier(tmp_path: Path) -> None:
    file = swav_file(tmp_path / "swav.pth", weights_of(standard()))
    done = convert(file, to="timm", out=tmp_path / "folder")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        theirs = timm.create_model(f"local-dir:{done.path}", pretrained=True).eval()
        torch.testing.assert_close(
            theirs(x), zoo.load(str(file), progress=False).eval()(x), rtol=1e-5, atol=1e-5
        )
    assert theirs.pretrained_cfg["std"] == [0.228, 0.224, 0.225]


# --- what has no place ---


@pytest.mark.parametrize(
    ("to", "network", "why"),
    [
        ("timm", Network("resnet50w2"), "a stem of 64 channels, this one has 128"),
        ("timm", Network("resnet18", base_planes=8), "this one has 8"),
        ("timm", Network("resnet18", "small"), "ImageNet stem only"),
        ("timm", Network("resnext101_32x48d"), "is not among its networks"),
        ("detectron2", Network("resnet18", "medium"), "ImageNet stem only"),
        ("transformers", Network("resnet50", "small"), "ImageNet stem only"),
        ("transformers", Network("resnext101_32x8d"), "no groups"),
        ("onnx", Network("resnet50w5"), "2 GB at most, and its weights take 2.3"),
    ],
)
def test_a_network_without_a_place(to: str, network: Network, why: str) -> None:
    reason = WRITERS.code(to)().refusal(source_of(network))
    assert reason is not None and why in reason


@pytest.mark.parametrize("arch", [arch for arch in TRUNKS if arch != "amdim"])
def test_networks_with_a_place(arch: str) -> None:
    source = source_of(Network(arch))
    taken = {name for name in WRITERS if WRITERS.code(name)().refusal(source) is None}
    expected = {"bundle", "torchvision", "detectron2"}
    if "resnext" not in arch:
        expected.add("transformers")
    if "w" not in arch and "48d" not in arch:
        expected.add("timm")
    if arch not in ("resnet50w5", "resnext101_32x48d"):
        expected.add("onnx")
    assert taken == expected


# --- transformers ---


def layout_of_transformers(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ``ResNetModel`` (``models/resnet/modeling_resnet.py``), written down from its modules."""
    found: dict[str, tuple[int, ...]] = {}

    def layer(name: str, n_in: int, n_out: int, kernel: int) -> None:
        found[f"{name}.convolution.weight"] = (n_out, n_in, kernel, kernel)
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.normalization.{part}"] = (n_out,)
        found[f"{name}.normalization.{COUNTER}"] = ()

    before = config["embedding_size"]
    layer("embedder.embedder", config["num_channels"], before, 7)
    for stage, (width, depth) in enumerate(zip(config["hidden_sizes"], config["depths"], strict=True)):
        for index in range(depth):
            block = f"encoder.stages.{stage}.layers.{index}"
            if index == 0 and (before != width or stage > 0):
                layer(f"{block}.shortcut", before, width, 1)
            if config["layer_type"] == "basic":
                sizes = [(before, width, 3), (width, width, 3)]
            else:
                sizes = [(before, width // 4, 1), (width // 4, width // 4, 3), (width // 4, width, 1)]
            for number, size in enumerate(sizes):
                layer(f"{block}.layer.{number}", *size)
            before = width
    return found


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_transformers_names_and_configuration(tmp_path: Path, arch: str) -> None:
    trunk = backbone(arch)
    file = save(tmp_path / "it.pth", trunk)
    done = convert(file, to="transformers", out=tmp_path / "folder")
    config = json.loads((done.path / "config.json").read_text())
    assert config["downsample_in_bottleneck"] is False and config["model_type"] == "resnet"
    tensors = load_file(done.path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == layout_of_transformers(config)
    assert all(torch.equal(tensors[transformers_key(name)], tensor) for name, tensor in trunk.items())
    # What becomes what, by hand: the three convolutions of a block are layers 0, 1 and 2 of it.
    assert transformers_key("layer3.5.bn2.running_var") == (
        "encoder.stages.2.layers.5.layer.1.normalization.running_var"
    )
    assert (
        transformers_key("layer1.0.downsample.0.weight")
        == "encoder.stages.0.layers.0.shortcut.convolution.weight"
    )
    how = json.loads((done.path / "preprocessor_config.json").read_text())
    assert (how["size"], how["crop_size"]) == ({"shortest_edge": 256}, {"height": 224, "width": 224})
    assert how["resample"] == 2 and how["image_std"] == [0.229, 0.224, 0.225]


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_transformers_itself(tmp_path: Path, arch: str) -> None:
    from transformers import ResNetModel  # type: ignore[import-not-found]

    trunk = weights_of(describe(arch=arch, base_planes=16))
    file = save(tmp_path / "it.pth", trunk)
    done = convert(file, to="transformers", out=tmp_path / "folder")
    model, info = ResNetModel.from_pretrained(done.path, output_loading_info=True)
    assert not any(info.values())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        pooled = model.eval()(x).pooler_output.flatten(1)
        torch.testing.assert_close(
            pooled, zoo.load(str(file), progress=False).eval()(x), rtol=1e-5, atol=1e-5
        )


# --- ONNX ---

ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript"))


@pytest.mark.skipif(ONNX, reason="onnx and onnxscript are installed")
def test_onnx_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="onnx") as caught:
        convert(save(tmp_path / "it.pth", backbone()), to="onnx", out=tmp_path / "it.onnx")
    assert "pip install 'vision-model-zoo[onnx]'" in str(caught.value.fix)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["it.pth"]


@pytest.mark.skipif(not ONNX, reason="onnx and onnxscript are not installed")
def test_onnx_gives_the_same_features(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    file = save(tmp_path / "it.pth", weights_of(describe()))
    done = convert(file, to="onnx", out=tmp_path / "it.onnx")
    session = runtime.InferenceSession(str(done.path))
    trunk = zoo.load(str(file), progress=False).eval()
    for count in (1, 3):
        x = torch.randn(count, 3, 224, 224)
        (features,) = session.run(["features"], {"images": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(features, trunk(x).numpy(), rtol=1e-4, atol=1e-4)
