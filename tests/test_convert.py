"""``zoo.conversion.convert`` and ``zoo convert``: the account, where it goes, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from weights.formats.layouts import save, with_prefix
from weights.published import (
    assert_clear,
    command,
    describe,
    flip,
    in_fresh_process,
    isolate,
    names_no_place,
    publish,
    small_run,
    weights_of,
)
from weights.writers.sources import backbone, classified, same, swav_file
from zoo.conversion import convert
from zoo.errors import InputError, RunError
from zoo.weights import catalog
from zoo.weights.bundle import read_bundle, write_bundle
from zoo.weights.formats import read_model
from zoo.weights.hubs.local import LocalHub

__all__ = ["command"]


@pytest.fixture(autouse=True)
def _homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def swav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow ResNet-18 under SwAV's names; read-only."""
    return swav_file(tmp_path_factory.mktemp("swav") / "swav_800ep.pth.tar", backbone())


def entries(folder: Path) -> list[str]:
    """What lies in a folder, temporary things included, but for the homes."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in ("home", "cache", "runs"))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- the account ---


def test_the_account_and_the_origin(swav: Path, tmp_path: Path) -> None:
    done = convert(swav, out=tmp_path / "bundle", licence="cc-by-nc-4.0")
    assert (done.to, done.path, done.format, done.method) == ("bundle", tmp_path / "bundle", "swav", "swav")
    assert (done.account.matched, done.account.prefix) == (len(backbone()), "module.")
    assert {group.what: len(group.keys) for group in done.account.dropped} == {
        "projection head": 2,
        "prototypes": 1,
    }
    assert "kept beside the trunk, heads: projection_head, prototypes (3 tensors)" in done.notes
    info = read_bundle(done.path).info
    assert info["lineage"] == {
        "converted_from": {
            "format": "swav",
            "what": "SwAV pretraining weights",
            "file": "swav_800ep.pth.tar",
            "sha256": sha256(swav),
        }
    }
    assert (info["recipe"], info["data"], info["results"]) == ({}, {}, [])
    assert (info["licence"], info["method"], info["base_planes"]) == ("cc-by-nc-4.0", "swav", 4)
    assert info["preprocessing"]["std"] == [0.228, 0.224, 0.225]
    for name in ("README.md", "zoo.json"):
        names_no_place((done.path / name).read_text(), tmp_path, swav.parent)


def test_what_the_file_says_goes_along(tmp_path: Path) -> None:
    value = {"epoch": 200, "arch": "resnet18", "state_dict": with_prefix("module.encoder_q.", backbone())}
    convert(save(tmp_path / "moco.pth.tar", value), out=tmp_path / "bundle")
    origin = read_bundle(tmp_path / "bundle").info["lineage"]["converted_from"]
    assert (origin["facts"]["epoch"], origin["facts"]["arch"]) == (200, "resnet18")


def test_the_zoos_own_models_keep_their_history(tmp_path: Path) -> None:
    published = publish("me/small", what=describe(licence="mit"))
    done = convert("me/small", out=tmp_path / "copy")
    before, after = read_bundle(published.path), read_bundle(done.path)
    assert after.weights_sha256 == before.weights_sha256
    for key in ("recipe", "data", "lineage", "versions", "licence", "results"):
        assert after.info[key] == before.info[key], key
    assert convert("me/small", out=tmp_path / "other", licence="bsd-3-clause").licence == "bsd-3-clause"
    again = convert(done.path, name="me/small")  # the same model, by another title
    assert again.published is not None and again.path == again.published.path
    assert LocalHub().resolve("me/small").weights_sha256 == before.weights_sha256


def test_a_bundle_that_says_nothing_of_its_history(tmp_path: Path) -> None:
    what = describe(recipe={}, data={}, lineage={})
    (tmp_path / "bare").mkdir()
    write_bundle(tmp_path / "bare", what, weights_of(what), {}, "# A card\n")
    done = convert(tmp_path / "bare", out=tmp_path / "copy")
    assert read_bundle(done.path).info["lineage"] == {
        "converted_from": {"format": "zoo_bundle", "what": "a published model"}
    }


def test_a_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = small_run(tmp_path_factory)
    done = convert(run, to="torchvision", out=tmp_path / "run.pth")
    assert (done.format, done.method) == ("zoo_run", "swav")
    bundle = convert(run, out=tmp_path / "bundle")
    info = read_bundle(bundle.path).info
    assert info["lineage"]["run"] == run.name and info["recipe"]["name"] == "swav_tiny"
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        models = [zoo.load(str(path), progress=False).eval() for path in (run, bundle.path)]
        assert torch.equal(models[0](x), models[1](x))
    assert same(read_model(done.path).trunk, models[0].state_dict())


def test_an_address(swav: Path, tmp_path: Path) -> None:
    done = convert(swav.as_uri().replace("file:", "url:file:"), out=tmp_path / "bundle", progress=False)
    origin = read_bundle(done.path).info["lineage"]["converted_from"]
    assert (origin["file"], origin["sha256"]) == (swav.name, sha256(swav))


def test_released_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    value = {"state_dict": with_prefix("module.encoder_q.", backbone())}
    file = save(mirror / "small.pth.tar", value)
    card = dataclasses.replace(
        catalog.CATALOG["moco_v2_resnet50.200ep"],
        name="small.200ep",
        arch="resnet18",
        base_planes=4,
        file=catalog.Remote("small.pth.tar"),
    )
    for module in ("catalog", "reference", "load"):
        monkeypatch.setattr(f"zoo.weights.{module}.CATALOG", {"small.200ep": card})
    monkeypatch.setenv("ZOO_MIRROR", str(mirror))
    done = convert("small.200ep", out=tmp_path / "bundle", progress=False)
    info = read_bundle(done.path).info
    assert info["licence"] == card.licence == done.licence
    origin = info["lineage"]["converted_from"]
    assert (origin["released"], origin["file"]) == ("small.200ep", "small.pth.tar")
    assert origin["sha256"] == sha256(file)


# --- where it goes ---


def test_into_the_local_hub(swav: Path) -> None:
    done = convert(swav, name="me/swav")
    assert done.published is not None and done.published.new
    assert done.path == LocalHub().resolve("me/swav").path
    assert not convert(swav, name="me/swav").published.new  # type: ignore[union-attr]
    assert zoo.load("me/swav", progress=False).num_features == 32


def test_what_is_there_stays_unless_forced(swav: Path, tmp_path: Path) -> None:
    other = classified(tmp_path / "other.pth", backbone(seed=1))
    for to, name in (("torchvision", "it.pth"), ("bundle", "it"), ("transformers", "hf")):
        out = tmp_path / name
        convert(swav, to=to, out=out)
        file = out if out.is_file() else out / "model.safetensors"
        before = file.read_bytes()
        with pytest.raises(InputError, match="exists already") as caught:
            convert(other, to=to, out=out)
        assert caught.value.where == str(out) and "--force" in str(caught.value.fix)
        assert file.read_bytes() == before
        convert(other, to=to, out=out, force=True)
        assert file.read_bytes() != before
    # The old bundle had heads, the new one has a classifier: nothing of the old one is left in it.
    assert not (tmp_path / "it" / "heads.safetensors").exists()
    assert (tmp_path / "it" / "classifier.safetensors").is_file()
    assert entries(tmp_path) == ["hf", "it", "it.pth", "other.pth"]


def test_a_file_over_itself(tmp_path: Path) -> None:
    """A file is left alone; a bundle's tensors lie in the mapped files while it is replaced."""
    trunk = backbone()
    file = save(tmp_path / "it.pth", {"state_dict": with_prefix("backbone.", trunk)})
    link = tmp_path / "link.pth"
    link.symlink_to(file)
    before = file.read_bytes()
    for place in (file, link):
        with pytest.raises(InputError, match="This is the file that is converted"):
            convert(file, to="torchvision", out=place, force=True)
    assert file.read_bytes() == before
    link.unlink()
    folder = convert(file, out=tmp_path / "bundle").path
    convert(folder, out=folder, force=True, licence="mit")
    assert same(read_model(folder / "model.safetensors").trunk, trunk)
    assert read_bundle(folder).verify(full=True) == "full"
    assert entries(tmp_path) == ["bundle", "it.pth"]


def test_force_removes_nothing_of_anybody_else(swav: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"x")
    for force in (False, True):
        with pytest.raises(InputError, match=r"holds other things than a bundle model, e\.g\. cat\.jpg"):
            convert(swav, out=folder, force=force)
    assert entries(folder) == ["cat.jpg"]
    for to, out in (("torchvision", folder), ("timm", swav)):
        with pytest.raises(InputError, match="and this isn't one"):
            convert(swav, to=to, out=out, force=True)
    assert entries(tmp_path) == ["photos"]


def test_an_empty_folder_and_a_link(swav: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert convert(swav, out=tmp_path / "link").path == tmp_path / "empty"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "zoo.json").is_file()


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "where", "fix"),
    [
        ({"to": "torchvison", "out": "x"}, "torchvison", "did you mean torchvision?"),
        ({"to": "timm"}, "--out", "--out FOLDER"),
        ({"to": "onnx"}, "--out", "--out FILE.onnx"),
        ({}, "--out", "--name org/name"),
        ({"to": "timm", "name": "me/it"}, "--name me/it", "leave --name"),
        ({"name": "me/it", "out": "x"}, "--name me/it", "leave --name"),
        ({"name": "it"}, "it", "e.g. me/"),
        ({"to": "detectron2", "out": "it.pth"}, "it.pth", "--out it.pkl"),
        ({"out": "not/here"}, "not", "make it first"),
    ],
)
def test_bad_words(
    swav: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    where: str,
    fix: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        convert(swav, **arguments)
    assert str(caught.value.where).endswith(where) and fix in str(caught.value.fix)
    assert entries(tmp_path) == []


def test_models_that_are_none(swav: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pth"
    cut.write_bytes(swav.read_bytes()[:-100])
    published = publish("me/small")
    flip(published.path / "model.safetensors")
    for reference in ("random:resnet18", "nobody/nothing", str(cut), "me/small"):
        with pytest.raises(InputError):
            convert(reference, out=tmp_path / "out")
    assert entries(tmp_path) == ["cut.pth"]


# --- a disk that is full ---


def test_a_disk_that_the_system_fills(swav: Path, tmp_path: Path) -> None:
    """The real thing: the kernel stops each write half-way, and nothing is left of it."""
    file = save(tmp_path / "r18.pth", weights_of(describe(base_planes=64)))
    code = """
        import resource, sys
        from pathlib import Path
        from zoo.conversion import convert
        from zoo.errors import RunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for to, name in (("torchvision", "a.pth"), ("detectron2", "b.pkl"), ("timm", "c"), ("bundle", "d")):
            try:
                convert(sys.argv[1], to=to, out=Path(sys.argv[2]) / name)
            except RunError as error:
                print(to, error.what, error.where)
    """
    out = in_fresh_process(code, file, tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in out] == ["torchvision", "detectron2", "timm", "bundle"], out
    assert all("Writing the model failed: " in line and str(tmp_path) in line for line in out), out
    assert entries(tmp_path) == ["r18.pth"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("broken", ["zoo.files.fsync_path", "zoo.conversion.os.rename"])
def test_a_replacement_that_fails_leaves_the_old_one(
    swav: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, number: int
) -> None:
    out = convert(swav, out=tmp_path / "it").path
    before = sha256(out / "SHA256SUMS")
    other = classified(tmp_path / "other.pth", backbone(seed=1))
    rename, calls = os.rename, []

    def fail(*places: Any) -> None:
        # Of the renames, the one that brings the new folder to its place, once: the old one must come back.
        if broken.endswith("rename") and (calls or Path(places[1]) != out):
            return rename(*places)
        calls.append(places)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(RunError, match="Writing the model failed: ") as caught:
            convert(other, out=out, force=True)
    assert calls and caught.value.fix and caught.value.exit_code == 1
    assert sha256(out / "SHA256SUMS") == before and read_bundle(out).verify(full=True) == "full"
    assert entries(tmp_path) == ["it", "other.pth"]


# --- the command ---


def test_the_command_says_where_everything_went(command: Any, swav: Path, tmp_path: Path) -> None:
    code, out, err = command("convert", swav, "--out", tmp_path / "bundle")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "read     SwAV pretraining weights (format swav): resnet18, method swav, licence unspecified"
    )
    count = len(backbone())
    assert lines[1] == f"matched  {count} of {count} backbone tensors under 'module.'"
    assert lines[2] == (
        "apart    projection head: 2 tensors (module.projection_head.weight, module.projection_head.bias), "
        "as a file of this format has"
    )
    assert "note     kept beside the trunk, heads: projection_head, prototypes (3 tensors)" in lines
    assert lines[-1] == f"wrote    {tmp_path / 'bundle'} (bundle)"
    code, out, _ = command("convert", swav, "--name", "me/swav")
    revision = LocalHub().refs("me/swav")["latest"]
    assert out.splitlines()[-2:] == [f"published me/swav@{revision}", 'load it with: zoo.load("me/swav")']


def test_tensors_that_nobody_expected_are_told(command: Any, tmp_path: Path) -> None:
    file = save(tmp_path / "it.pth", {**backbone(), "gizmo.weight": torch.ones(3)})
    code, out, _ = command("convert", file, "--to", "torchvision", "--out", tmp_path / "out.pth")
    assert code == 0
    assert "apart    unknown tensors: 1 tensors (gizmo.weight), NOT expected in this format" in out


def test_the_commands_json(command: Any, swav: Path, tmp_path: Path) -> None:
    code, out, err = command("convert", swav, "--to", "detectron2", "--out", tmp_path / "it.pkl", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["schema"], answer["to"], answer["format"]) == (1, "detectron2", "swav")
    assert answer["path"] == str(tmp_path / "it.pkl") and answer["published"] is None
    assert answer["network"] == {"arch": "resnet18", "stem": "imagenet", "base_planes": 4, "options": {}}
    assert answer["account"]["dropped"][1] == {
        "what": "prototypes",
        "keys": ["module.prototypes.weight"],
        "expected": True,
    }
    assert any("left out" in note for note in answer["notes"])
    code, out, _ = command("convert", swav, "--name", "me/swav", "--json")
    published = json.loads(out)["published"]
    assert published["name"] == "me/swav" and Path(published["path"]).is_dir()


def test_the_command_refuses_clearly(command: Any, swav: Path, tmp_path: Path) -> None:
    assert_clear(command("convert", swav), "--out FOLDER", "--name org/name")
    assert_clear(command("convert", swav, "--to", "tim", "--out", "x"), "did you mean timm?")
    assert_clear(
        command("convert", swav, "--to", "timm", "--out", tmp_path / "x"), "timm", "a stem of 64", "bundle"
    )
    assert_clear(command("convert", "nobody/it", "--out", tmp_path / "x"), "nobody/it")
    (tmp_path / "there.pth").write_bytes(b"mine")
    there = ("convert", swav, "--to", "torchvision", "--out", tmp_path / "there.pth")
    assert_clear(command(*there), tmp_path / "there.pth", "--force")
    assert (tmp_path / "there.pth").read_bytes() == b"mine"
    assert command(*there, "--force")[0] == 0
    assert entries(tmp_path) == ["there.pth"]


def test_the_help_lists_the_layouts(command: Any) -> None:
    code, out, _ = command("convert", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0 and "bundle, torchvision, timm, detectron2, transformers, onnx" in text
