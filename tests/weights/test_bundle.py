"""The published form: what is in it, whether it is whole, and what is refused."""

from __future__ import annotations

import argparse
import hashlib
import json
import stat

import pytest
import torch
from safetensors import safe_open
from torchvision.models import resnet18 as torchvision_resnet18

import zoo
from zoo.errors import InputError
from zoo.pretrain.publish import publish_run, read_run
from zoo.weights.bundle import read_bundle, weights_digest, write_bundle
from zoo.weights.card import model_card

from .published import (
    bundle_at,
    describe,
    flip,
    in_fresh_process,
    names_no_place,
    publish,
    standard,
    weights_of,
)

FILES = ("README.md", "config.json", "heads.safetensors", "model.safetensors", "zoo.json")
HEADS = {"prototypes.weight": torch.ones(3, 2)}


def write(folder, what, trunk, heads=None):
    folder.mkdir()
    return write_bundle(folder, what, trunk, heads or {}, "# A card\n")


# --- what is in it ---


def test_the_weights_have_torchvisions_keys_and_no_classifier(resnet18):
    with safe_open(resnet18 / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert keys == {key for key in torchvision_resnet18().state_dict() if not key.startswith("fc.")}


def test_everybody_may_read_every_file(tmp_path):
    bundle = bundle_at(tmp_path / "a", **HEADS)
    assert {file.name for file in bundle.path.iterdir()} == {*FILES, "SHA256SUMS"}
    assert set(bundle.sums) == set(FILES)
    for file in bundle.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name


def test_the_same_input_gives_the_same_bytes(tmp_path):
    first, second = (bundle_at(tmp_path / name, **HEADS) for name in ("a", "b"))
    for name in (*FILES, "SHA256SUMS"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name


def test_the_listing_is_what_sha256sum_reads(tmp_path):
    bundle = bundle_at(tmp_path / "a")
    for line in (bundle.path / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((bundle.path / name).read_bytes()).hexdigest() == digest


def test_the_digest_of_weights_is_known_before_they_are_published(tmp_path):
    trunk = weights_of(describe(), 3)
    bundle = write(tmp_path / "a", describe(), trunk)
    assert bundle.weights_sha256 == weights_digest(trunk) == weights_digest(dict(reversed(trunk.items())))
    assert weights_digest(weights_of(describe(), 4)) != bundle.weights_sha256


def test_tied_tensors_are_kept_once_and_come_back(tmp_path):  # case 45
    trunk = weights_of(describe(), 1)
    trunk["layer1.1.conv2.weight"] = trunk["layer1.1.conv1.weight"]
    bundle = write(tmp_path / "a", describe(), trunk)
    with safe_open(bundle.weights, framework="pt") as file:
        assert len(file.keys()) == len(trunk) - 1
    assert bundle.info["aliases"] == {"model.safetensors": {"layer1.1.conv2.weight": "layer1.1.conv1.weight"}}
    loaded = zoo.load(str(bundle.path), progress=False).state_dict()
    assert loaded.keys() == trunk.keys()
    assert all(torch.equal(loaded[key], trunk[key]) for key in trunk)


def test_tensors_that_only_share_memory_are_kept_whole(tmp_path):
    trunk = weights_of(describe(), 1)
    both = torch.arange(2.0 * trunk["bn1.weight"].numel())
    trunk["bn1.weight"], trunk["bn1.bias"] = both.split(trunk["bn1.weight"].numel())
    loaded = zoo.load(str(write(tmp_path / "a", describe(), trunk).path), progress=False)
    assert torch.equal(torch.cat((loaded.bn1.weight, loaded.bn1.bias)), both)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("recipe", {"arguments": argparse.Namespace(lr=1)}),
        ("lineage", {"when": {1, 2}}),
        ("data", {"count": float("nan")}),
    ],
)
def test_a_description_that_is_not_json_is_refused_by_field(tmp_path, field, value):  # case 48
    with pytest.raises(InputError) as caught:
        write(tmp_path / "a", describe(**{field: value}), weights_of(describe()))
    assert field in caught.value.where
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(InputError) as caught:
        model_card("me/small", describe(**{field: value}))
    assert field in caught.value.where


def test_a_new_process_needs_no_arguments_to_rebuild_the_network(tmp_path):  # case 48
    what = describe(arch="resnet34", stem="small", base_planes=4, num_features=32)
    bundle = bundle_at(tmp_path / "a", what)
    code = """
        import sys, torch, zoo
        model = zoo.load(sys.argv[1], progress=False).eval()
        print(len(model.layer3), type(model.maxpool).__name__, tuple(model(torch.zeros(1, 3, 32, 32)).shape))
    """
    assert in_fresh_process(code, bundle.path).stdout.split("\n")[0] == "6 Identity (1, 32)"


def test_the_card_speaks_of_the_model_and_its_lines_work(tmp_path):
    done = publish(name="me/shown", what=describe(licence="CC-BY-4.0"))
    card = (done.path / "README.md").read_text()
    head = card.split("---\n")[1]
    assert 'license: "cc-by-4.0"' in head and "- swav" in head
    assert "24 images" in card and "flowers" in card and "64 pooled features" in card
    lines = card.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(lines, names)
    assert names["model"](names["transform"](torch.zeros(3, 50, 60, dtype=torch.uint8))[None]).shape == (
        1,
        64,
    )


def test_the_card_of_a_usual_network_tells_timms_users(resnet18):
    assert 'timm.create_model("local-dir:FOLDER", pretrained=True)' in (resnet18 / "README.md").read_text()


def test_a_result_without_a_number_does_not_break_the_card():
    metrics = {"top1": 0.25, "train_loss": None}
    result = {"recipe": "semisup", "dataset": "d", "metrics": metrics, "protocol": {"seed": 0, "k": [5, 20]}}
    card = model_card("me/small", describe(results=[result]))
    assert "| semisup | d | top1 | 0.25 | seed 0, k 5 20 |" in card
    assert "None" not in card.split("## Results")[1].split("## Training")[0]


def test_a_published_run_says_what_it_is_and_names_no_place_of_the_machine(run, tmp_path):
    done = publish_run(run)
    assert done.name == "me/swav_tiny"
    info = json.loads((done.path / "zoo.json").read_text())
    assert info["schema"] == 1
    assert info["method"] == "swav" and info["recipe"]["batch_size"] == 8
    assert info["data"]["count"] == 24 and info["data"]["sha256"]
    assert info["lineage"]["step"] == info["lineage"]["total_steps"] == 6
    assert info["preprocessing"] == {
        "mean": info["recipe"]["views"]["mean"],
        "std": info["recipe"]["views"]["std"],
        "resize": 48,
        "crop": 48,
        "interpolation": "bilinear",
    }
    assert info["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["licence"] == "unspecified"
    _, trunk, heads = read_run(run)
    with safe_open(done.path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(trunk)
    with safe_open(done.path / "heads.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(heads) != set()
    for name in ("zoo.json", "README.md", "config.json"):
        names_no_place((done.path / name).read_text(), run, run.parent, tmp_path, run.parent.parent)


# --- whether it is whole ---


@pytest.fixture
def whole(tmp_path):
    """A published revision with heads, loaded once, so that there is a receipt."""
    from zoo.weights.hubs.local import LocalHub

    what = describe()
    card = model_card("me/small", what)
    done = LocalHub().publish("me/small", lambda f: write_bundle(f, what, weights_of(what), HEADS, card))
    zoo.load("me/small", progress=False)
    return done.path


@pytest.mark.parametrize("mask", [0x01, 0x80])
@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS"])
def test_a_flipped_byte_is_named(whole, name, mask):
    size = (whole / name).stat().st_size
    for offset in sorted({0, 12, size // 2, size - 2, size - 1}):
        flip(whole / name, offset, mask)
        with pytest.raises(InputError) as caught:
            zoo.load("me/small", progress=False)
        assert caught.value.where.endswith(f"/{name}"), offset
        assert "again" in caught.value.fix
        flip(whole / name, offset, mask)
    zoo.load("me/small", progress=False)


@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS"])
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_byte_of_a_folder_is_an_error_in_words(tmp_path, name, mask):
    """Without the hub there is no name to hold SHA256SUMS against: then a file is named that differs."""
    folder = bundle_at(tmp_path / "a", **HEADS).path
    for offset in (0, 70, -1):
        flip(folder / name, offset, mask)
        with pytest.raises(InputError) as caught:
            zoo.load(str(folder), progress=False)
        if name != "SHA256SUMS":
            assert caught.value.where.endswith(f"/{name}")
        flip(folder / name, offset, mask)


def test_publishing_again_repairs_a_damaged_revision(whole):
    flip(whole / "model.safetensors")
    what = describe()
    card = model_card("me/small", what)
    from zoo.weights.hubs.local import LocalHub

    done = LocalHub().publish("me/small", lambda f: write_bundle(f, what, weights_of(what), HEADS, card))
    assert done.new and done.path == whole
    zoo.load("me/small", progress=False)


def test_a_truncated_or_missing_file_is_named(whole):
    data = (whole / "heads.safetensors").read_bytes()
    (whole / "heads.safetensors").write_bytes(data[:-1])
    with pytest.raises(InputError, match="heads"):
        zoo.load("me/small", progress=False)
    (whole / "heads.safetensors").unlink()
    with pytest.raises(InputError, match="missing") as caught:
        zoo.load("me/small", progress=False)
    assert caught.value.where.endswith("heads.safetensors")


def test_a_receipt_spares_the_second_hashing(whole, monkeypatch, tmp_path, capsys):
    read = []
    real = hashlib.sha256
    monkeypatch.setattr(
        "zoo.weights.bundle.sha256_of", lambda path: read.append(path.name) or _sha256(path, real)
    )
    zoo.load("me/small")
    assert "model.safetensors" not in read
    assert "hashes checked before" in capsys.readouterr().err
    zoo.load("me/small", verify=True)
    assert "model.safetensors" in read
    assert "; hashes checked\n" in capsys.readouterr().err
    # A cache that was emptied costs time, nothing else.
    read.clear()
    for receipt in (tmp_path / "cache" / "receipts").iterdir():
        receipt.write_text("{")
    zoo.load("me/small", progress=False)
    assert "model.safetensors" in read


def _sha256(path, kind):
    return kind(path.read_bytes()).hexdigest()


def test_a_file_that_was_replaced_by_an_equal_one_is_hashed_again(whole):
    assert read_bundle(whole).verify() == "receipt"
    data = (whole / "model.safetensors").read_bytes()
    (whole / "other").write_bytes(data)
    (whole / "other").replace(whole / "model.safetensors")
    assert read_bundle(whole).verify() == "full"
    assert read_bundle(whole).verify() == "receipt"


def test_a_cache_that_can_not_be_written_is_no_obstacle(whole, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    zoo.load("me/small", progress=False)
    zoo.load("me/small", progress=False)


# --- what is refused ---


@pytest.mark.parametrize("name", ["model.safetensors", "heads.safetensors", "zoo.json", "SHA256SUMS"])
def test_a_link_in_a_bundle_is_refused(tmp_path, name):
    folder = bundle_at(tmp_path / "a", **HEADS).path
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="link") as caught:
        zoo.load(str(folder), progress=False)
    assert caught.value.where.endswith(name)


def rewrite(folder, **changes):
    """Change zoo.json and list its new hash."""
    info = json.loads((folder / "zoo.json").read_text())
    old = hashlib.sha256((folder / "zoo.json").read_bytes()).hexdigest()
    (folder / "zoo.json").write_text(json.dumps({**info, **changes}))
    new = hashlib.sha256((folder / "zoo.json").read_bytes()).hexdigest()
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(old, new))


def test_a_bundle_of_a_future_schema_says_so(tmp_path):
    folder = bundle_at(tmp_path / "a").path
    rewrite(folder, schema=2)
    with pytest.raises(InputError, match=r"schema 2.*reads schema 1") as caught:
        zoo.load(str(folder), progress=False)
    assert "update" in caught.value.fix


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", ".."])
def test_a_listing_that_leads_out_is_refused(tmp_path, name):
    folder = bundle_at(tmp_path / "a").path
    with open(folder / "SHA256SUMS", "a") as file:
        file.write("0" * 64 + f"  {name}\n")
    with pytest.raises(InputError, match="SHA256SUMS has a line"):
        zoo.load(str(folder), progress=False)


def test_a_listing_must_list_the_weights(tmp_path):
    folder = bundle_at(tmp_path / "a").path
    lines = (folder / "SHA256SUMS").read_text().splitlines(True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if "model" not in line))
    with pytest.raises(InputError, match=r"does not list model\.safetensors"):
        zoo.load(str(folder), progress=False)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """Strict: one tensor too few, one too many, one of another shape."""
    for index, change in enumerate(
        (
            lambda t: t.pop("bn1.weight"),
            lambda t: t.update({"fc.weight": torch.zeros(3, 64)}),
            lambda t: t.update({"conv1.weight": torch.zeros(4, 3, 7, 7)}),
        )
    ):
        trunk = weights_of(describe())
        change(trunk)
        folder = write(tmp_path / str(index), describe(), trunk).path
        with pytest.raises(InputError, match="don't fit"):
            zoo.load(str(folder), progress=False)


def test_timm_loads_the_folder_with_no_difference(resnet18):
    import timm

    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ours = zoo.load(str(resnet18), progress=False).eval()
    theirs = timm.create_model(f"local-dir:{resnet18}", pretrained=True).eval()
    with torch.no_grad():
        assert float((ours(x) - theirs(x)).abs().max()) == 0.0
    how = standard().preprocessing
    assert list(theirs.pretrained_cfg["mean"]) == how["mean"]
    assert list(theirs.pretrained_cfg["input_size"]) == [3, how["crop"], how["crop"]]
    classifier = timm.create_model(f"local-dir:{resnet18}", pretrained=True, num_classes=10)
    assert classifier(x).shape == (2, 10)
