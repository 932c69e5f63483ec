"""The published form of other networks than a run's: options, classifiers, foreign origins, older bundles."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.weights.bundle import Bundle, read_bundle, timm_builds, write_bundle
from zoo.weights.card import model_card
from zoo.weights.formats.base import Network

from .published import bundle_at, describe, standard, weights_of

OPTIONS = {"encoder_size": 32, "ndf": 4, "n_rkhs": 24, "n_depth": 2, "use_bn": False}
CONVERTED = {
    "recipe": {},
    "data": {},
    "lineage": {
        "converted_from": {"what": "SwAV pretraining weights", "file": "swav_800ep.pth.tar", "epoch": 800}
    },
}


def amdim(**changes):
    fields = {"arch": "amdim", "base_planes": None, "num_features": 24, "method": "amdim", "options": OPTIONS}
    return describe(**{**fields, **CONVERTED, **changes})


def trunk_of(network, **arguments):
    return create_trunk(
        network.arch,
        stem=network.stem,
        base_planes=network.base_planes,
        options=network.options,
        **arguments,
    )


def classifier(classes, features):
    generator = torch.Generator().manual_seed(4)
    return {
        "weight": torch.randn(classes, features, generator=generator),
        "bias": torch.randn(classes, generator=generator),
    }


def write(folder, what, trunk, given=None):
    folder.mkdir()
    return write_bundle(folder, what, trunk, {}, model_card("me/it", what), classifier=given)


# --- the network ---


def test_options_come_back_and_build_the_network(tmp_path):
    what = amdim()
    torch.manual_seed(0)
    trunk = trunk_of(what.network).eval()
    bundle = read_bundle(write(tmp_path / "a", what, trunk.state_dict()).path)
    assert bundle.network == what.network == Network("amdim", "imagenet", None, OPTIONS)
    again = trunk_of(bundle.network).eval()
    again.load_state_dict(load_file(bundle.weights), strict=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), trunk(x))
    assert json.loads((bundle.path / "config.json").read_text()) == {
        "zoo": {"arch": "amdim", "stem": "imagenet", "base_planes": None, "options": OPTIONS},
        "num_features": 24,
    }


def test_a_bundle_without_options_says_nothing_of_them(tmp_path):
    bundle = bundle_at(tmp_path / "a")
    assert list(bundle.info) == [
        "schema",
        "arch",
        "stem",
        "base_planes",
        "num_features",
        "method",
        "preprocessing",
        "recipe",
        "data",
        "lineage",
        "versions",
        "licence",
        "results",
    ]
    assert bundle.network == Network("resnet18", "imagenet", 8)
    assert bundle.classifier is None and describe().num_classes == 0


# SHA-256 of what the first version of this schema wrote for the same descriptions.
FIRST = {
    "narrow": {
        "zoo.json": "7d3e38c70e58719ca2d5fb653fbe93cde52a21eb650620d36649d4840a818b0a",
        "config.json": "d04e4ba0dcfab3c199070da55242c50855a4d618123f5989e909ca9c0aa58809",
        "README.md": "ba92a712a996667f89fb1ff63f501e90fdd7f6bddb689b7f9d0a16156f238449",
    },
    "usual": {
        "zoo.json": "bd69539e2fc0d7d87aa1415affa86efd81126da07c03f728388ed4897bb76fbd",
        "config.json": "5cce49256674a6e0eadc9f6e1af1cd4424219681038fac5149592b0eebb6ea9d",
        "README.md": "f8b92cd0c35f4bb12a8b50932bd4b91845c2a2c805412b7710250b666aba9e46",
    },
}


@pytest.mark.parametrize(("kind", "what"), [("narrow", describe()), ("usual", standard())])
def test_a_run_is_published_with_the_bytes_of_the_first_version(tmp_path, kind, what):
    """The hash of these files is the revision's name."""
    tmp_path.joinpath("a").mkdir()
    folder = write_bundle(tmp_path / "a", what, {"x": torch.zeros(1)}, {}, model_card("me/small", what)).path
    for name, digest in FIRST[kind].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": None},
        {"stem": 3},
        {"base_planes": "8"},
        {"base_planes": True},
        {"options": ["ndf"]},
    ],
)
def test_a_description_without_a_network_is_an_error_in_words(tmp_path, changes):
    info = {**describe().to_json(), **changes}
    with pytest.raises(InputError, match="which network") as caught:
        _ = Bundle(tmp_path, {}, info).network
    assert caught.value.where.endswith("zoo.json")


# --- the classifier ---


def test_a_classifier_comes_back(tmp_path):
    what = describe(num_classes=5)
    given = classifier(5, 64)
    bundle = read_bundle(write(tmp_path / "a", what, weights_of(what), given).path)
    assert bundle.classifier == bundle.path / "classifier.safetensors"
    assert bundle.info["num_classes"] == 5
    found = load_file(bundle.classifier)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[key], given[key]) for key in given)
    bundle.verify(full=True)
    assert json.loads((bundle.path / "config.json").read_text()).get("num_classes", 0) == 0
    assert "classifier of 5 classes" in (bundle.path / "README.md").read_text()
    without = write(tmp_path / "b", describe(), weights_of(what))
    assert without.weights_sha256 == bundle.weights_sha256


@pytest.mark.parametrize(
    ("classes", "given"),
    [
        (0, classifier(5, 64)),
        (5, None),
        (5, {}),
        (4, classifier(5, 64)),
        (5, classifier(5, 63)),
        (5, {"weight": torch.zeros(5, 64)}),
        (5, {**classifier(5, 64), "scale": torch.ones(1)}),
    ],
)
def test_a_classifier_that_is_not_the_described_one_is_refused(tmp_path, classes, given):
    with pytest.raises(InputError, match="classifier") as caught:
        write(tmp_path / "a", describe(num_classes=classes), {"x": torch.zeros(1)}, given)
    assert "num_classes" in caught.value.where
    assert list((tmp_path / "a").iterdir()) == []


def test_a_damaged_classifier_is_named(tmp_path):
    what = describe(num_classes=5)
    bundle = write(tmp_path / "a", what, weights_of(what), classifier(5, 64))
    data = bytearray(bundle.classifier.read_bytes())
    data[-1] ^= 1
    bundle.classifier.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_bundle(bundle.path).verify()
    assert caught.value.where.endswith("classifier.safetensors")


# --- what timm is told ---


@pytest.mark.parametrize(
    "arch", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    + [f"resnext101_32x{width}d" for width in (8, 16, 32)]
)  # fmt: skip
def test_timm_has_each_network_that_it_is_told_of(arch):
    assert timm_builds(standard(arch))
    with torch.device("meta"):
        theirs = timm.create_model(arch, num_classes=0).state_dict()
        ours = create_trunk(arch).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "resnet50w2"},
        {"arch": "resnet50w4"},
        {"arch": "resnext101_32x48d"},
        {"arch": "resnext101_32x8d", "base_planes": 32},
        {"arch": "resnet50", "stem": "small"},
        {"arch": "amdim", "options": OPTIONS},
    ],
)
def test_timm_is_told_of_no_network_that_it_does_not_have(changes):
    assert not timm_builds(describe(**{"base_planes": None, **changes}))


def test_the_wide_network_is_not_timms_wide_network():
    with torch.device("meta"):
        theirs = timm.create_model("wide_resnet50_2", num_classes=0).state_dict()
        ours = create_trunk("resnet50w2").state_dict()
    assert theirs.keys() == ours.keys()
    assert theirs["conv1.weight"].shape != ours["conv1.weight"].shape


@pytest.mark.parametrize(("crop", "resize"), [(224, 256), (32, 37), (224, 257), (2, 3), (96, 96), (64, 48)])
def test_timm_resizes_as_we_do(tmp_path, crop, resize):
    how = {**describe().preprocessing, "crop": crop, "resize": resize}
    tmp_path.joinpath("a").mkdir()
    what = standard(preprocessing=how)
    folder = write_bundle(tmp_path / "a", what, {"x": torch.zeros(1)}, {}, "# A card\n").path
    config = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    settings = timm.data.resolve_data_config(pretrained_cfg=config)
    first, second = timm.data.create_transform(**settings).transforms[:2]
    assert (first.size, tuple(second.size)) == (resize, (crop, crop))
    assert first.interpolation.value == how["interpolation"]


def test_timm_loads_a_network_of_four_channels(tmp_path):
    how = {**describe().preprocessing, "mean": [0.5] * 4, "std": [0.25] * 4}
    what = standard(preprocessing=how)
    torch.manual_seed(0)
    ours = create_trunk("resnet18", channels=4).eval()
    folder = write(tmp_path / "a", what, ours.state_dict()).path
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.randn(1, 4, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs(x), ours(x))


# --- weights that came out of somebody's file ---


def test_the_card_of_a_converted_model_tells_its_origin_and_no_training():
    what = describe(**CONVERTED, method="swav")
    card = model_card("me/swav", what)
    assert "trained without labels by swav, converted from SwAV pretraining weights." in card
    assert "steps" not in card and "images)" not in card and "## Training" not in card
    origin = json.loads(card.split("## Origin")[1].split("```json\n")[1].split("```")[0])
    assert origin == CONVERTED["lineage"]["converted_from"]
    assert "- self-supervised-learning\n" in card and "- swav\n" in card


@pytest.mark.parametrize(
    ("method", "says"), [("supervised", "trained with labels"), ("unknown", "training is not known")]
)
def test_a_card_claims_no_method_that_there_was_not(method, says):
    what = describe(arch="resnet50", base_planes=None, method=method, **CONVERTED)
    card = model_card("me/it", what)
    assert says in card
    assert "without labels" not in card and "self-supervised" not in card and "unknown" not in card


def test_the_card_of_an_amdim_encoder_states_its_options_and_its_lines_are_true():
    card = model_card("me/amdim", amdim())
    assert "An amdim (encoder_size 32, ndf 4, n_rkhs 24, n_depth 2, use_bn False) trained" in card
    assert "torchvision" not in card and "timm" not in card
    assert "24 pooled features" in card


def test_a_converted_model_needs_no_named_file():
    what = dataclasses.replace(amdim(), lineage={"converted_from": {}})
    assert "converted from a foreign file." in model_card("me/it", what)
