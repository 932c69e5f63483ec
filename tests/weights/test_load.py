"""``zoo.load``: where a supervised torchvision ResNet stood, ours stands."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.resnet import ResNet as TorchvisionResNet
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3, _deeplabv3_resnet
from torchvision.ops import FrozenBatchNorm2d

import zoo
from golden import cases
from zoo.errors import InputError, ZooError
from zoo.files import sha256_of
from zoo.weights.bundle import write_bundle

from .published import describe, in_fresh_process, publish, standard

X = torch.randn(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))


def load(reference, **arguments):
    return zoo.load(str(reference), progress=False, **arguments)


# --- what comes back ---


def test_it_is_torchvisions_resnet(resnet18):
    model = load(resnet18)
    assert type(model) is TorchvisionResNet
    assert type(model.fc) is nn.Identity
    assert model.fc.in_features == model.num_features == 512
    assert model.training
    assert all(p.requires_grad and p.is_leaf and not p.is_meta for p in model.parameters())
    assert all(not b.is_meta for b in model.buffers())
    model.fc = nn.Linear(model.fc.in_features, 10)
    assert model(X).shape == (2, 10)


def test_two_loads_give_the_same_pooled_features(resnet18):  # case 3
    with torch.no_grad():
        first, second = (load(resnet18).eval()(X[:1]) for _ in range(2))
    assert first.shape == (1, 512)
    assert torch.equal(first, second)


@pytest.mark.parametrize("reference", ["bundle", "random:resnet18"])
def test_loading_leaves_the_random_numbers_alone(resnet18, reference):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load(resnet18 if reference == "bundle" else reference)
    assert torch.equal(torch.rand(4), expected)


def test_a_narrow_network_is_still_a_torchvision_resnet(narrow50):
    model = load(narrow50).eval()
    assert isinstance(model, TorchvisionResNet)
    assert model(X).shape == (2, 256) == (2, model.fc.in_features)


def test_a_fresh_classifier_of_any_size(narrow50):
    model = load(narrow50, num_classes=7)
    assert type(model.fc) is nn.Linear and model.fc.out_features == 7
    assert model(X).shape == (2, 7)


def test_the_normalisation_may_be_frozen(narrow50):
    model = load(narrow50, norm_layer=FrozenBatchNorm2d)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    frozen = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(frozen) == 53 and not any(b.is_meta for b in model.buffers())
    with torch.no_grad():
        torch.testing.assert_close(model.train()(X), load(narrow50).eval()(X), rtol=1e-4, atol=1e-5)


def test_strides_may_become_dilation(narrow50):
    model = load(narrow50, replace_stride_with_dilation=[False, True, True])
    maps = create_feature_extractor(model, ["layer4"])(torch.zeros(2, 3, 64, 64))
    assert maps["layer4"].shape == (2, 256, 8, 8)
    assert model.layer4[1].conv2.dilation == (4, 4)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), load(narrow50).parameters(), strict=True)
    )


def test_the_signature_of_torchvision_passes_through():
    names = set(inspect.signature(zoo.load).parameters)
    assert {"num_classes", "norm_layer", "replace_stride_with_dilation", "progress", "verify"} <= names


def test_progress_says_what_matched_on_standard_error(narrow50, capsys):
    zoo.load(str(narrow50))
    out, err = capsys.readouterr()
    assert out == ""
    assert "318 of 318 tensors matched, none dropped" in err
    zoo.load(str(narrow50), progress=False)
    assert capsys.readouterr() == ("", "")


def test_what_is_known_of_the_weights_comes_along():
    done = publish(tag="v1")
    info = load("me/small@v1").zoo_info
    assert info["reference"] == "local:me/small@v1"
    assert info["revision"] == done.revision
    assert info["arch"] == "resnet18" and info["method"] == "swav" and info["licence"] == "unspecified"
    assert len(info["weights_sha256"]) == 64


def test_the_transform_belongs_to_the_weights(tmp_path):
    publish()
    transform = load("me/small").transforms()
    grey = transform(Image.new("RGB", (70, 50), (128, 128, 128)))
    assert grey.shape == (3, 32, 32)
    how = describe().preprocessing
    for channel in range(3):
        value = (128 / 255 - how["mean"][channel]) / how["std"][channel]
        assert torch.allclose(grey[channel], torch.full((32, 32), value), atol=1e-6)
    assert transform(torch.zeros(3, 70, 50, dtype=torch.uint8)).shape == (3, 32, 32)


def test_the_transform_and_extraction_agree(tmp_path):
    rng = np.random.default_rng(0)
    for index, (width, height) in enumerate([(70, 50), (41, 97), (32, 32)]):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    publish()
    model = load("me/small").eval()
    found = zoo.extract("me/small", str(tmp_path), exact=True)["features"]
    transform = model.transforms()
    with torch.no_grad():
        batch = torch.stack([transform(Image.open(tmp_path / f"{index}.png")) for index in range(3)])
        torch.testing.assert_close(model(batch), found, rtol=1e-4, atol=1e-4)


# --- other kinds of models ---


def test_random_models_are_the_same_everywhere():
    first, second, other = (load(f"random:resnet18@{seed}").eval() for seed in (1, 1, 2))
    with torch.no_grad():
        assert torch.equal(first(X), second(X))
        assert not torch.equal(first(X), other(X))
    assert type(first) is TorchvisionResNet
    with pytest.raises(InputError, match="its seed"):
        load("random:resnet18@one")
    with pytest.raises(InputError) as caught:
        load("random:resnet81")
    assert "did you mean resnet18" in caught.value.fix


def test_a_run_loads_as_its_published_model_does(run):
    from zoo.pretrain.publish import publish_run

    publish_run(run)
    direct, published = (load(reference).eval() for reference in (f"run:{run}", "me/swav_tiny"))
    with torch.no_grad():
        assert torch.equal(direct(X), published(X))
    assert load(run).zoo_info["preprocessing"] == published.zoo_info["preprocessing"]


def test_supervised_weights_come_from_torchvisions_cache(monkeypatch, tmp_path):
    from torchvision.models import ResNet18_Weights, resnet18

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    torch.manual_seed(0)
    state = resnet18().state_dict()
    file = tmp_path / "made.pth"
    torch.save(state, file)
    # torchvision's file names end in the beginning of the file's SHA-256
    name = f"resnet18-{sha256_of(file)[:8]}.pth"
    weights = ResNet18_Weights.IMAGENET1K_V1
    made = dataclasses.replace(weights.value, url=f"https://download.pytorch.org/models/{name}")
    monkeypatch.setattr(weights, "_value_", made)
    with pytest.raises(ZooError) as caught:
        load("supervised:resnet18")
    assert name in str(caught.value) and "ZOO_OFFLINE" in str(caught.value)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"x" + file.read_bytes())
    with pytest.raises(ZooError, match="SHA-256"):
        load("supervised:resnet18")
    (folder / name).write_bytes(file.read_bytes())
    model = load("supervised:resnet18")
    assert type(model) is TorchvisionResNet and type(model.fc) is nn.Identity
    assert torch.equal(model.conv1.weight, state["conv1.weight"])
    assert model.transforms().crop_size == [224]
    assert model.zoo_info["method"] == "supervised"
    classifier = load("supervised:resnet18", classifier="imagenet1k").fc
    assert torch.equal(classifier.weight, state["fc.weight"]) and torch.equal(
        classifier.bias, state["fc.bias"]
    )
    with pytest.raises(InputError, match="no such weights"):
        load("supervised:resnet18@NOPE")


def test_what_names_no_model_and_no_number_of_classes_is_refused(resnet18, tmp_path):
    for reference in (None, 3, "", " "):
        with pytest.raises(InputError, match="named by a text or a path"):
            zoo.load(reference, progress=False)
    file = tmp_path / "it.pth"
    torch.save(load(resnet18).state_dict(), file)
    assert type(zoo.load(file, progress=False)) is TorchvisionResNet
    for count in (0, -1, "7", True):
        with pytest.raises(InputError, match="whole number from 1 on"):
            load(resnet18, num_classes=count)


def test_a_file_can_be_written_over_while_its_model_lives(resnet18, tmp_path):
    """As after fine-tuning: the tensors that are saved are not in the file that is truncated for them."""
    file = tmp_path / "it.pth"
    torch.save(load(resnet18).state_dict(), file)
    model = load(file)
    torch.save(model.state_dict(), file)
    again = load(file).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


def test_timms_folder_keeps_its_preprocessing(tmp_path):
    how = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "resize": 256, "crop": 224}
    from zoo.conversion import convert

    model = load("random:resnet18")
    file = tmp_path / "it.pth"
    torch.save(model.state_dict(), file)
    convert(file, to="timm", out=tmp_path / "timm", progress=False)
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    config["pretrained_cfg"].update(mean=how["mean"], std=how["std"])
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    found = load(tmp_path / "timm").zoo_info["preprocessing"]
    assert {key: found[key] for key in how} == how
    (tmp_path / "timm" / "config.json").write_text("{}")
    assert load(tmp_path / "timm").zoo_info["preprocessing"]["mean"] == [0.485, 0.456, 0.406]


def test_timm_is_not_asked_where_the_network_is_forbidden(monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="ZOO_OFFLINE forbids the network"):
        load("timm:resnet18.a1_in1k")


# --- wherever that class works ---


def test_torchvisions_fpn(resnet18):
    layers = {f"layer{i}": str(i - 1) for i in range(1, 5)}
    pyramid = BackboneWithFPN(load(resnet18), layers, [64, 128, 256, 512], 32)
    maps = pyramid(torch.zeros(1, 3, 64, 64))
    assert isinstance(maps, OrderedDict)
    assert [tuple(m.shape[1:]) for m in maps.values()] == [
        (32, 16, 16),
        (32, 8, 8),
        (32, 4, 4),
        (32, 2, 2),
        (32, 1, 1),
    ]


def test_torchvisions_detector(narrow50):
    trunk = load(narrow50, norm_layer=FrozenBatchNorm2d)
    layers = {f"layer{i}": str(i - 1) for i in range(1, 5)}
    backbone = BackboneWithFPN(trunk, layers, [32, 64, 128, 256], 16)
    detector = FasterRCNN(backbone, num_classes=3, min_size=64, max_size=64)
    target = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    losses = detector([torch.rand(3, 64, 64)], [target])
    assert all(math.isfinite(float(loss.detach())) for loss in losses.values())
    sum(losses.values()).backward()
    assert trunk.conv1.weight.grad is not None
    assert detector.eval()([torch.rand(3, 64, 64)])[0]["boxes"].shape[1] == 4


def test_torchvisions_deeplab(resnet18, narrow50):
    from torchvision.models._utils import IntermediateLayerGetter

    dilated = load(narrow50, replace_stride_with_dilation=[False, True, True])
    trunk = IntermediateLayerGetter(dilated, {"layer4": "out"})
    network = DeepLabV3(trunk, DeepLabHead(256, 5)).eval()
    assert network(torch.zeros(1, 3, 33, 33))["out"].shape == (1, 5, 33, 33)
    # torchvision's own builder expects the usual width of a ResNet-50.
    usual = load("random:resnet50", replace_stride_with_dilation=[False, True, True])
    built = _deeplabv3_resnet(usual, 5, True).eval()
    with torch.no_grad():
        out = built(torch.zeros(1, 3, 33, 33))
    assert out["out"].shape == out["aux"].shape == (1, 5, 33, 33)


def test_torchvisions_feature_extractor(narrow50):
    model = load(narrow50).eval()
    nodes = {"layer1": "early", "avgpool": "pooled"}
    with torch.no_grad():
        maps = create_feature_extractor(model, nodes)(X)
        assert maps["early"].shape[1] == 32
        assert torch.equal(maps["pooled"].flatten(1), model(X))


def test_it_travels_to_another_process(resnet18, tmp_path):
    model = load(resnet18).eval()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    with torch.no_grad():
        torch.save((X, model(X)), tmp_path / "numbers.pt")
    code = """
        import pickle, sys, torch
        model = pickle.load(open(sys.argv[1] + "/model.pickle", "rb"))
        x, y = torch.load(sys.argv[1] + "/numbers.pt")
        torch.set_num_threads(1)
        with torch.no_grad():
            assert torch.equal(model(x), y)
        assert model.transforms()(torch.zeros(3, 60, 60, dtype=torch.uint8)).shape == (3, 32, 32)
        assert model.zoo_info["arch"] == "resnet18"
        print(type(model).__module__)
    """
    assert in_fresh_process(code, tmp_path).stdout.strip() == "torchvision.models.resnet"


def test_it_can_be_copied_and_kept(narrow50, tmp_path):
    model = load(narrow50).eval()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(X), model(X))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_it_compiles(narrow50):
    model = load(narrow50).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), model(X))


def test_it_exports(narrow50):
    model = load(narrow50).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (X,))
        torch.testing.assert_close(program.module()(X), model(X))


# --- the reference's numbers ---


@pytest.mark.parametrize("name", cases.case_ids("rn50_torchvision_hub"))
def test_a_published_resnet50_gives_the_references_numbers(shared, name, tmp_path):
    case = cases.load(shared, name)
    what = standard("resnet50")
    with torch.device("meta"):
        from torchvision.models import resnet50

        shapes = {k: v.shape for k, v in resnet50().state_dict().items() if not k.startswith("fc.")}
    trunk = {key: cases.fill_rule(key, shape, case.args["gain"]) for key, shape in shapes.items()}
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", what, trunk, {}, "# A card\n")
    model = load(tmp_path / "bundle").eval()
    with torch.no_grad():
        case.check("pooled", model(case.inputs["x"]))
        case.check("pooled_odd", model(case.inputs["x_odd"]))
        case.compare("pooled_odd", model(case.inputs["x_odd"]), case.outputs["pooled_odd_swav_class"])
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint({t.data_ptr() for t in trunk.values()})


def test_a_classifier_is_only_taken_for_data_that_it_can_be_for(tmp_path):
    from torchvision.models import resnet18

    for classes in (7, 1000):
        file = tmp_path / f"{classes}.pth"
        torch.save(resnet18(num_classes=classes).state_dict(), file)
        assert load(file, classifier="own").fc.out_features == classes
    assert load(tmp_path / "1000.pth", classifier="imagenet1k").fc.out_features == 1000
    for name, dataset in (("7", "imagenet1k"), ("1000", "cifar10")):
        with pytest.raises(InputError, match="Nothing says that the classifier of") as caught:
            load(tmp_path / f"{name}.pth", classifier=dataset)
        assert "'own'" in caught.value.fix
