"""``zoo verify``: what is whole passes, and whatever is wrong is a line that says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.pretrain.publish import publish_run
from zoo.verify import verify
from zoo.weights import catalog
from zoo.weights.bundle import write_bundle
from zoo.weights.card import model_card
from zoo.weights.description import check_description, check_preprocessing
from zoo.weights.fingerprint import record_features
from zoo.weights.hubs.local import LocalHub
from zoo.weights.lock import lock_path

from .published import assert_clear, bundle_at, describe, flip, publish, weights_of


def states(found):
    return {check.name: check.state for check in found.checks}


def failed(found):
    """What failed: its name -> what was said."""
    return {check.name: check.detail for check in found.checks if check.state == "FAILED"}


def write(folder, what, trunk, heads=None, classifier=None):
    folder.mkdir()
    return write_bundle(folder, what, trunk, heads or {}, model_card("me/it", what), classifier).path


def relist(folder: Path) -> None:
    """A listing that fits what is there: what a publisher who makes mistakes would write."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def rewrite(folder: Path, **changes) -> None:
    """Another description, listed as it is. None takes a field away."""
    info = {**json.loads((folder / "zoo.json").read_text()), **changes}
    info = {key: value for key, value in info.items() if value is not ...}
    (folder / "zoo.json").write_text(json.dumps(info))
    relist(folder)


@pytest.fixture
def recorded(tmp_path):
    """A bundle that says everything."""
    trunk = weights_of(describe(), 1)
    features = record_features(describe().network, trunk, describe().preprocessing, "test")
    what = describe(features=features, licence="mit", num_classes=5)
    classifier = {"weight": torch.ones(5, 64), "bias": torch.zeros(5)}
    return write(tmp_path / "whole", what, trunk, {"prototypes.weight": torch.ones(3, 2)}, classifier)


# --- published by the zoo ---


def test_everything_of_a_whole_model_is_ok(recorded):
    found = verify(str(recorded))
    assert found.passed and set(states(found).values()) == {"ok"}, found.checks
    assert list(states(found)) == [
        "listing", "hashes", "description", "tensors", "network", "values", "preprocessing", "features",
        "licence", "lineage",
    ]  # fmt: skip
    assert found.to_json() == json.loads(json.dumps(found.to_json()))
    detail = {check.name: check.detail for check in found.checks}
    assert "176,712 parameters, 64 features" in detail["network"] and "mit" in detail["licence"]


def test_what_nobody_recorded_is_no_failure():
    publish("me/one", tag="v1")
    for reference in ("me/one", "me/one@v1", "local:me/one"):
        found = verify(reference)
        assert found.passed
        assert {name for name, state in states(found).items() if state == "not recorded"} == {
            "features",
            "licence",
        }


def test_a_published_run_passes_and_so_does_the_run(run):
    publish_run(run, name="me/run", licence="cc-by-4.0")
    assert set(states(verify("me/run")).values()) == {"ok"}
    found = verify(str(run))
    assert found.kind == "a run" and found.passed
    assert states(found) == {
        "content": "ok", "network": "ok", "values": "ok", "preprocessing": "ok", "licence": "not recorded",
        "lineage": "ok",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["README.md", "config.json", "model.safetensors", "heads.safetensors", "classifier.safetensors"]
)
def test_a_flipped_bit_of_any_file_is_found(recorded, name):
    assert verify(str(recorded)).passed  # leaves no receipt that would be believed
    flip(recorded / name, 5)
    found = verify(str(recorded))
    assert list(failed(found)) == ["hashes"] and name in failed(found)["hashes"]
    assert states(found)["network"] == states(found)["features"] == "not checked"


def test_all_damaged_files_are_named(recorded):
    for name in ("README.md", "model.safetensors"):
        flip(recorded / name)
    said = failed(verify(str(recorded)))["hashes"]
    assert "README.md" in said and "model.safetensors" in said


@pytest.mark.parametrize("name", ["zoo.json", "SHA256SUMS"])
def test_a_damaged_listing_or_description_of_the_hub_is_found(name):
    done = publish("me/one")
    flip(done.path / name, 3)
    found = verify("me/one")
    assert list(failed(found)) == ["listing"] and name in failed(found)["listing"]
    assert states(found)["hashes"] == "not checked"


def test_a_listing_that_was_changed_together_with_its_files_is_found_in_the_hub():
    done = publish("me/one")
    (done.path / "README.md").write_text("Another story.")
    relist(done.path)
    assert "named after" in failed(verify("me/one"))["listing"]
    assert verify(str(done.path)).passed  # a folder has no name to be held against


def test_nothing_more_and_nothing_less_than_is_listed(recorded):
    (recorded / "extra.txt").write_text("x")
    (recorded / "folder").mkdir()
    said = failed(verify(str(recorded)))["listing"]
    assert "extra.txt, folder: not in SHA256SUMS" in said
    (recorded / "extra.txt").unlink()
    (recorded / "folder").rmdir()
    (recorded / "README.md").rename(recorded.parent / "README.md")
    assert "README.md: missing" in failed(verify(str(recorded)))["listing"]
    (recorded / "README.md").symlink_to(recorded.parent / "README.md")
    assert "README.md: no plain file" in failed(verify(str(recorded)))["listing"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": ...}, "method is missing"),
        ({"num_features": "64"}, "num_features is a text, not a whole number"),
        ({"num_features": True}, "num_features is bool"),
        ({"base_planes": 8.0}, "base_planes is a number, not a whole number or null"),
        ({"results": {}}, "results is an object, not a list"),
        ({"results": [3]}, "results holds"),
        ({"lineage": None}, "lineage is null"),
        ({"features": {"picture": "rings-1"}}, "features lacks"),
        ({"preprocessing": {"mean": [0.5]}}, "preprocessing.std"),
    ],
)
def test_every_field_of_the_description_has_its_type(recorded, changes, said):
    rewrite(recorded, **changes)
    found = verify(str(recorded))
    assert list(failed(found)) == ["description"] and said in failed(found)["description"]


def test_two_wrong_fields_are_both_named_and_new_ones_are_let_pass(recorded):
    rewrite(recorded, arch=..., licence=3)
    said = failed(verify(str(recorded)))["description"]
    assert "arch is missing" in said and "licence is a whole number" in said
    rewrite(recorded, arch="resnet18", licence="mit", colour="red")
    found = verify(str(recorded))
    assert (
        found.passed
        and "of a later version: colour" in {c.name: c.detail for c in found.checks}["description"]
    )


def test_the_description_of_every_kind_of_bundle_passes():
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 24, "n_depth": 2, "use_bn": False}
    for what in (describe(), describe(options=options, num_classes=3, recipe={}, results=[{"metrics": {}}])):
        assert check_description(what.to_json(), "here") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mean": [0.1, 0.2]}, "one length"),
        ({"std": [0.2, 0.0, 0.2]}, "above 0"),
        ({"mean": [0.5], "std": [0.5]}, "1 values, the network takes 3"),
        ({"crop": 0}, "crop"),
        ({"resize": 32.0}, "resize"),
        ({"interpolation": "cubic"}, "'cubic'"),
        ({"mean": [0.1, 0.2, float("nan")]}, "mean"),
    ],
)
def test_a_preprocessing_that_can_not_be(changes, said):
    how = {**describe().preprocessing, **changes}
    with pytest.raises(InputError, match="preprocessing") as caught:
        check_preprocessing(how, "here", 3)
    assert said in caught.value.what and caught.value.where == "here"


def test_weights_of_another_network_are_found(recorded):
    rewrite(recorded, base_planes=16)
    found = verify(str(recorded))
    assert list(failed(found)) == ["network"] and "don't fit" in failed(found)["network"]
    assert states(found)["features"] == "not checked" and states(found)["values"] == "ok"
    rewrite(recorded, base_planes=8, num_features=128)
    assert "128" in failed(verify(str(recorded)))["tensors"]  # the classifier stands on 64
    rewrite(recorded, base_planes=8, num_features=64, num_classes=6)
    assert "6 classes" in failed(verify(str(recorded)))["tensors"]


def test_numbers_that_are_none_are_found(tmp_path):
    trunk = weights_of(describe())
    trunk["layer2.0.conv1.weight"][0, 0, 0, 0] = float("inf")
    found = verify(str(write(tmp_path / "a", describe(), trunk, {"queue": torch.full((2,), float("nan"))})))
    assert list(failed(found)) == ["values"]
    assert "layer2.0.conv1.weight of model.safetensors" in failed(found)["values"]
    assert "queue of heads.safetensors" in failed(found)["values"]


def test_other_features_than_were_recorded_are_found(recorded):
    features = json.loads((recorded / "zoo.json").read_text())["features"]
    rewrite(recorded, features={**features, "norm": features["norm"] * 1.001})
    found = verify(str(recorded))
    assert list(failed(found)) == ["features"] and "norm" in failed(found)["features"]
    rewrite(recorded, features={**features, "picture": "rings-9"})
    assert "can't draw" in failed(verify(str(recorded)))["features"]


def test_tied_tensors_are_checked_as_what_they_stand_for(tmp_path):
    trunk = weights_of(describe(), 1)
    trunk["layer1.1.conv2.weight"] = trunk["layer1.1.conv1.weight"]
    folder = write(tmp_path / "a", describe(), trunk)
    assert verify(str(folder)).passed
    rewrite(folder, aliases={"model.safetensors": {"layer1.1.conv2.weight": "nothing"}})
    assert "nothing" in failed(verify(str(folder)))["tensors"]


# --- a file ---


def test_a_file_of_weights(tmp_path):
    torch.save({"state_dict": weights_of(describe())}, tmp_path / "x.pth")
    found = verify(str(tmp_path / "x.pth"))
    assert found.passed and states(found)["licence"] == "not recorded"
    assert list(states(found)) == ["bytes", "safe", "format", "network", "values", "preprocessing", "licence"]
    digest = hashlib.sha256((tmp_path / "x.pth").read_bytes()).hexdigest()
    assert digest in found.checks[0].detail and "inert" in found.checks[1].detail


def test_files_that_are_no_whole_backbone_fail_where_they_should(tmp_path):
    file = tmp_path / "x.pth"
    file.write_text("<!DOCTYPE html><html></html>")
    found = verify(str(file))
    assert list(failed(found)) == ["safe"] and "HTML" in failed(found)["safe"]
    trunk = weights_of(describe())
    del trunk["layer3.0.conv1.weight"]
    torch.save(trunk, file)
    found = verify(str(file))
    assert list(failed(found)) == ["format"] and "layer3.0.conv1.weight" in failed(found)["format"]
    torch.save({"model": create_trunk("resnet18", base_planes=8)}, file)
    assert "torch.nn.modules" in failed(verify(str(file)))["safe"]
    trunk = weights_of(describe())
    trunk["bn1.bias"][0] = float("nan")
    torch.save(trunk, file)
    assert list(failed(verify(str(file)))) == ["values"]


# --- the catalog ---


@pytest.fixture
def small_card(monkeypatch, tmp_path):
    """A card of a small MoCo file on a mirror of the user's."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    trunk = weights_of(describe(), 1)
    encoder = {f"module.encoder_q.{name}": value for name, value in trunk.items()}
    encoder |= {
        "module.encoder_q.fc.0.weight": torch.ones(8, 64),
        "module.encoder_q.fc.0.bias": torch.ones(8),
    }
    torch.save({"epoch": 200, "state_dict": encoder}, mirror / "small.pth.tar")
    content = (mirror / "small.pth.tar").read_bytes()
    file = catalog.Remote(
        "small.pth.tar",
        ("https://nowhere.invalid/small.pth.tar",),
        size=len(content),
        md5=hashlib.md5(content).hexdigest()[:8],
    )
    card = dataclasses.replace(
        catalog.CATALOG["moco_v2_resnet50.200ep"], name="small.200ep", arch="resnet18", base_planes=8, file=file,
        parameters=176_712, num_features=64,
    )  # fmt: skip

    def use(**changes):
        changed = dataclasses.replace(card, **changes)
        known = {changed.name: changed}
        for module in ("catalog", "reference", "load", "listing"):
            monkeypatch.setattr(f"zoo.weights.{module}.CATALOG", known, raising=False)
        monkeypatch.setattr("zoo.verify.CATALOG", known)
        return changed

    monkeypatch.setenv("ZOO_MIRROR", str(mirror))
    use()
    return use


def test_released_weights(small_card):
    found = verify("small.200ep", progress=False)
    assert found.passed, found.checks
    assert states(found) == {
        "download": "ok", "published hash": "ok", "safe": "ok", "format": "ok", "network": "ok", "values": "ok",
        "preprocessing": "ok", "licence": "ok",
    }  # fmt: skip
    detail = {check.name: check.detail for check in found.checks}
    assert (
        detail["licence"] == "MIT" and "size" in detail["published hash"] and "pinned" in detail["download"]
    )


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"parameters": 5}, "network", "parameters is said to be 5"),
        ({"num_features": 5}, "network", "num_features is said to be 5"),
        ({"base_planes": 4}, "network", "don't fit"),
        ({"format": "swav"}, "format", "moco; that of small.200ep is swav"),
        ({"preprocessing": {"mean": [0.5]}}, "preprocessing", "std"),
    ],
)
def test_what_the_card_says_is_held_against_the_file(small_card, changes, check, said):
    small_card(**changes)
    found = verify("small.200ep", progress=False)
    assert check in failed(found) and said in failed(found)[check]


def test_a_released_file_that_nobody_states_a_hash_of(small_card):
    remote = dataclasses.replace(small_card().file, size=None, md5="")
    small_card(file=remote)
    found = verify("small.200ep", progress=False)
    assert found.passed and states(found)["published hash"] == "not recorded"


def test_another_file_than_was_first_used_is_found(small_card, monkeypatch):
    remote = dataclasses.replace(small_card().file, size=None, md5="")
    small_card(file=remote)
    assert verify("small.200ep", progress=False).passed
    pins = json.loads(lock_path().read_text())
    pins["pins"]["small.pth.tar"]["sha256"] = "0" * 64
    lock_path().write_text(json.dumps(pins))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    found = verify("small.200ep", progress=False)
    assert list(failed(found)) == ["download"] and "lock.json" in failed(found)["download"]
    assert states(found)["network"] == "not checked"


def test_an_own_copy_of_a_released_file_is_held_against_its_hash(small_card, tmp_path):
    copy = tmp_path / "small.pth.tar"
    shutil.copy(Path(os.environ["ZOO_MIRROR"]) / "small.pth.tar", copy)
    assert states(verify(str(copy)))["published hash"] == "ok"
    flip(copy, 2000)
    assert "publisher" in failed(verify(str(copy)))["published hash"]


# --- the command ---


def test_the_command_prints_a_list_and_its_exit_code_tells(command, recorded):
    code, out, err = command("verify", recorded)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{recorded}: a published model" and out.splitlines()[-1] == "10 ok"
    assert all(line.startswith("  ok  ") for line in out.splitlines()[1:-1])
    flip(recorded / "model.safetensors")
    code, out, err = command("verify", recorded)
    assert (code, err) == (1, "") and "model.safetensors" in out
    assert out.splitlines()[-1] == "1 FAILED, 1 ok, 7 not checked"
    code, out, err = command("verify", recorded, "--json")
    answer = json.loads(out)
    assert (code, answer["schema"], answer["passed"]) == (1, 1, False)
    assert {"name", "state", "detail"} == set(answer["checks"][0])


def test_what_is_not_there_is_bad_input(command, tmp_path):
    publish("me/one")
    assert_clear(command("verify", "me/two"), "me/one")
    assert_clear(command("verify", "me/one@v9"), "v9")
    assert_clear(command("verify", "swav_resnet50.80ep"), "swav_resnet50.800ep")
    assert_clear(command("verify", f"file:{tmp_path}/x"), "x")
    assert_clear(command("verify", f"path:{tmp_path}/x"), "x")
    assert_clear(command("verify", f"run:{tmp_path}/x"), "x")
    assert_clear(command("verify", "random:resnet18"), "random")


def test_removed_revisions_are_bad_input(command):
    done = publish("me/one")
    shutil.rmtree(LocalHub().home / "me" / "one" / "revisions" / done.revision)
    assert command("verify", "me/one")[0] == 2


def test_a_damaged_run_fails(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for step in (copy / "checkpoints").iterdir():
        flip(step / "global.safetensors", 900)
    found = verify(str(copy))
    assert list(failed(found)) == ["content"] and "global.safetensors" in failed(found)["content"]


def test_a_bundle_of_a_future_schema_says_so(tmp_path):
    folder = bundle_at(tmp_path / "a").path
    rewrite(folder, schema=2)
    assert "update the toolkit" in failed(verify(str(folder)))["listing"]
