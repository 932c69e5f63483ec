"""Every card of the catalog against the network it names, the released file's keys, and its sources."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import torch

from tiny import ROOT
from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.weights.catalog import CATALOG, Card, Head, Remote, find_card

CARDS = list(CATALOG.values())
NAMES = [card.name for card in CARDS]
PUBLISHED = [card for card in CARDS if card.manifest is not None]
PREFIXES = {"swav": "module.", "moco": "module.encoder_q.", "amdim": "encoder.module."}
every_card = pytest.mark.parametrize("card", CARDS, ids=NAMES)
every_published = pytest.mark.parametrize("card", PUBLISHED, ids=[card.name for card in PUBLISHED])


@functools.cache
def _built(arch: str, stem: str, base_planes: int | None, options: str) -> torch.nn.Module:
    import torchvision.models  # noqa: F401 (whatever tensors its import makes must be real ones)

    with torch.device("meta"):
        return create_trunk(arch, stem=stem, base_planes=base_planes, options=json.loads(options))


def trunk_of(card: Card) -> torch.nn.Module:
    """The card's network, without memory for its weights."""
    return _built(card.arch, card.stem, card.base_planes, json.dumps(card.options))


def manifest_of(shared, card: Card):
    """(everything about the file, shape of each tensor by its name there)."""
    text = (shared / "golden" / "manifests" / f"{card.manifest}.json").read_text("utf-8")
    manifest = json.loads(text)
    shapes = {}
    for key, described in manifest["state_dict"].items():
        _, _, sizes = described.partition(" ")
        shapes[key] = tuple(int(size) for size in sizes.split(",") if size)
    return manifest, shapes


@every_card
def test_a_card_is_complete(card):
    entry, dot, tag = card.name.partition(".")
    assert dot and re.fullmatch(r"[a-z0-9_]+", entry) and re.fullmatch(r"[a-z0-9_]+", tag)
    assert card.licence in ("CC-BY-NC-4.0", "MIT", "BSD-3-Clause")
    assert set(card.preprocessing) == {"mean", "std", "resize", "crop", "interpolation"}
    assert len(card.preprocessing["mean"]) == len(card.preprocessing["std"]) == 3
    assert card.preprocessing["resize"] >= card.preprocessing["crop"]
    assert card.page.startswith("https://")
    for remote in (card.file, *card.classifiers.values()):
        assert bool(remote.mirrors) != bool(remote.gone)
        for address in (*remote.mirrors, *([remote.gone] if remote.gone else [])):
            parts = urlsplit(address)
            assert parts.scheme == "https" and parts.path.rpartition("/")[2] == remote.name
    for metric in card.metrics:
        assert 0 < metric.value < 100 and metric.source


def test_files_have_names_of_their_own():
    files = {remote for card in CARDS for remote in (card.file, *card.classifiers.values())}
    names = [remote.name for remote in files]
    assert len(set(names)) == len(names) == len(CARDS) + 1  # one classifier has a file of its own
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names)


def test_what_was_released_is_there():
    tags: dict[str, list[str]] = {}
    for name in NAMES:
        tags.setdefault(name.partition(".")[0], []).append(name.partition(".")[2])
    assert tags == {
        "swav_resnet50": [
            "800ep", "400ep", "200ep", "100ep", "400ep_bs256", "200ep_bs256", "400ep_2x224",
        ],
        "swav_resnet50w2": ["400ep"],
        "swav_resnet50w4": ["400ep"],
        "swav_resnet50w5": ["400ep"],
        "deepclusterv2_resnet50": ["800ep", "400ep", "400ep_2x224"],
        "selav2_resnet50": ["400ep", "400ep_2x224"],
        "moco_v1_resnet50": ["200ep"],
        "moco_v2_resnet50": ["800ep", "200ep"],
        "amdim_medium": ["in128"],
        "amdim_large": ["in128"],
        "supervised_resnet50": ["v2", "v1"],
    }  # fmt: skip


def test_the_best_of_an_entry_comes_first():
    best: dict[str, float] = {}
    for card in CARDS:
        value = next((m.value for m in card.metrics if m.dataset == "imagenet1k" and m.metric == "top1"), 0.0)
        assert best.setdefault(card.name.partition(".")[0], value) >= value


# --- the network ---


@every_card
def test_the_network_has_as_many_parameters_and_features(card):
    trunk = trunk_of(card)
    assert sum(parameter.numel() for parameter in trunk.parameters()) == card.parameters
    assert trunk.num_features == trunk.fc.in_features == card.num_features


@every_published
def test_the_networks_tensors_are_the_files(shared, card):
    manifest, shapes = manifest_of(shared, card)
    prefix = PREFIXES[card.format]
    heads = ("fc.", "projection_head.", "prototypes.")
    found = {key[len(prefix) :]: shape for key, shape in shapes.items() if key.startswith(prefix)}
    found = {key: shape for key, shape in found.items() if not key.startswith(heads)}
    assert found == {key: tuple(value.shape) for key, value in trunk_of(card).state_dict().items()}
    assert (
        manifest["feature_dim"] == card.num_features if "feature_dim" in manifest else card.format == "moco"
    )
    counted = manifest.get("parameters_backbone", manifest.get("encoder_parameters"))
    assert counted == card.parameters or (counted is None and card.format == "moco")


@every_published
def test_the_file_is_the_published_one(shared, card):
    manifest, _ = manifest_of(shared, card)
    assert (card.file.gone or card.file.mirrors[0]) in manifest["files"]
    for stem, digest in manifest.get("md5_prefix", {}).items():
        if card.file.name.startswith(f"{stem}_"):
            assert card.file.md5 == digest
    assert bool(card.file.md5) == (card.format == "moco")


@every_published
def test_the_head_is_the_files(shared, card):
    _, shapes = manifest_of(shared, card)
    prefix = PREFIXES[card.format]
    layers = [shape for key, shape in shapes.items()
              if re.fullmatch(re.escape(prefix) + r"(projection_head|fc)\.(\d\.)?weight", key) and len(shape) == 2]  # fmt: skip
    if card.format == "amdim":
        assert card.head is None and layers == []
        return
    norms = [key for key in shapes if re.match(re.escape(prefix) + r"projection_head\.\d\.running_mean", key)]
    sets = [shape[0] for key, shape in shapes.items() if key.startswith(f"{prefix}prototypes.")]
    assert card.head is not None
    assert card.head.widths == (layers[0][1], *(rows for rows, _ in layers))
    assert (card.head.batchnorm, list(card.head.prototypes)) == (bool(norms), sets)


def test_a_layout_that_nobody_published_says_so(shared):
    for card in PUBLISHED:
        manifest, _ = manifest_of(shared, card)
        doubted = "INFERRED" in manifest["verified"]
        assert doubted == (card.head is not None and card.head.inferred), card.name


def test_all_weights_of_the_manifests_are_in_the_catalog(shared):
    known = {address for card in CARDS for remote in (card.file, *card.classifiers.values())
             for address in (*remote.mirrors, remote.gone)}  # fmt: skip
    files = set()
    for file in (shared / "golden" / "manifests").glob("*.json"):
        files |= {
            entry for entry in json.loads(file.read_text()).get("files", []) if entry.startswith("http")
        }
    assert len(files) == 21 and files <= known


def test_the_classifier_is_the_networks(shared):
    card = find_card("swav_resnet50.800ep")
    text = (shared / "golden" / "manifests" / "swav_eval_linear.json").read_text()
    manifest = json.loads(text)
    assert list(card.classifiers["imagenet1k"].mirrors) == manifest["files"]
    assert manifest["state_dict"]["module.linear.weight"] == f"F32 1000,{card.num_features}"
    assert [c.name for c in CARDS if c.classifiers] == [
        "swav_resnet50.800ep", "supervised_resnet50.v2", "supervised_resnet50.v1",
    ]  # fmt: skip


# --- numbers and their sources ---


def test_preprocessing_is_what_the_code_of_each_release_does(shared):
    facts = json.loads((shared / "golden" / "augmentation_facts.json").read_text())
    amdim = facts["amdim_imagenet128"]
    for card in PUBLISHED:
        how = card.preprocessing
        if card.format == "amdim":
            assert amdim["test"] == [f"Resize({how['resize']}, bicubic)", f"CenterCrop({how['crop']})"]
            assert (how["mean"], how["std"]) == (amdim["mean"], amdim["std"])
            assert how["crop"] == card.options["encoder_size"] and how["interpolation"] == "bicubic"
        else:
            release = "moco_v2" if card.format == "moco" else "swav_multicrop"
            assert (how["mean"], how["std"]) == (facts[release]["mean"], facts[release]["std"])
            assert (how["resize"], how["crop"], how["interpolation"]) == (256, 224, "bilinear")


def test_published_numbers_stand_in_the_sources(shared):
    paper = next((shared / "seeds").glob("002_*.txt")).read_text("utf-8")
    text = paper + (shared / "facts" / "protocols.md").read_text("utf-8")
    count = 0
    for card in CARDS:
        for metric in card.metrics:
            if metric.source.startswith("SwAV paper"):
                count += 1
                assert re.search(rf"(?<![\d.]){metric.value}(?!\d)", text), (card.name, metric)
    assert count == 15 + 10 + 3 + 1


@pytest.mark.parametrize("version", [1, 2])
def test_the_supervised_ones_are_torchvisions(version):
    from torchvision.models import ResNet50_Weights, resnet50

    card = find_card(f"supervised_resnet50.v{version}")
    theirs = ResNet50_Weights[f"IMAGENET1K_V{version}"]
    assert card.file.mirrors == (theirs.url,) and theirs.url.endswith(f"-{card.file.sha256}.pth")
    preset = theirs.transforms()
    assert card.preprocessing == {
        "mean": preset.mean, "std": preset.std, "resize": preset.resize_size[0], "crop": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
    }  # fmt: skip
    assert {"top1": theirs.meta["_metrics"]["ImageNet-1K"]["acc@1"],
            "top5": theirs.meta["_metrics"]["ImageNet-1K"]["acc@5"]} == {m.metric: m.value for m in card.metrics}  # fmt: skip
    with torch.device("meta"):
        keys = {
            key: value.shape for key, value in resnet50().state_dict().items() if not key.startswith("fc.")
        }
    assert keys == {key: value.shape for key, value in trunk_of(card).state_dict().items()}
    assert card.parameters + 2048 * 1000 + 1000 == theirs.meta["num_params"]


# --- asking for a card ---


def test_a_card_is_found_by_its_name():
    assert find_card("swav_resnet50.800ep") is CATALOG["swav_resnet50.800ep"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("swav_resnet50.80ep", "did you mean swav_resnet50.800ep"),
        ("swav_resnet5.800ep", "swav_resnet50.800ep"),
        ("moco_v2_resnet50", "say which: moco_v2_resnet50.800ep, moco_v2_resnet50.200ep"),
        ("amdim_medium", "say which: amdim_medium.in128"),
        ("qqqqq", "zoo list"),
        ("", "zoo list"),
    ],
)
def test_an_unknown_name_says_what_was_meant(name, advice):
    with pytest.raises(InputError, match="no released weights of this name") as caught:
        find_card(name)
    assert caught.value.where == name and advice in caught.value.fix


@every_card
def test_a_description_is_json_of_its_own(card):
    described = card.describe()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert described["name"] == card.name and described["file"]["name"] == card.file.name
    described["preprocessing"]["mean"].clear()
    described["options"]["encoder_size"] = 1
    assert math.isclose(sum(card.preprocessing["mean"]), 0.485 + 0.456 + 0.406)
    assert card.options.get("encoder_size") in (None, 128)


def test_a_description_says_what_is_pinned_upstream():
    assert find_card("swav_resnet50.800ep").describe()["pinning"] == "unpinned upstream"
    assert find_card("moco_v2_resnet50.800ep").describe()["pinning"] == "upstream states MD5 a04e12f8..."
    assert find_card("supervised_resnet50.v1").describe()["pinning"] == "upstream states SHA-256 0676ba61..."


def test_cards_cant_be_changed():
    with pytest.raises(AttributeError):
        CARDS[0].licence = "MIT"  # type: ignore[misc]
    with pytest.raises(TypeError):
        CATALOG["new"] = CARDS[0]  # type: ignore[index]
    assert Head((1, 2)) == Head((1, 2)) and hash(Remote("x")) == hash(Remote("x"))


def test_the_catalog_and_the_downloads_load_no_torch():
    code = (
        "import sys\nimport zoo.weights.catalog, zoo.weights.lock, zoo.weights.hubs.url\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'rich', 'huggingface_hub', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_formats_are_known():
    from zoo.weights.formats import FORMATS

    assert {card.format for card in CARDS} <= set(FORMATS)
