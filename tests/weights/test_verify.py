"""``zoo verify``: what is whole passes, and whatever is wrong is a line that says so."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch

from zoo.models.factory import create_trunk
from zoo.pretrain.publish import publish_run
from zoo.verify import verify
from zoo.weights.hubs.local import LocalHub

from .published import assert_clear, bundle_at, describe, flip, publish, weights_of
from .verifying import failed, recorded, relist, rewrite, states, write

__all__ = ["recorded"]


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


def test_a_file_at_an_address(tmp_path):
    torch.save(weights_of(describe()), tmp_path / "x.pth")
    found = verify((tmp_path / "x.pth").as_uri().replace("file:", "url:file:"), progress=False)
    assert found.passed and list(states(found))[:2] == ["download", "bytes"]
    gone = verify(f"url:file://{tmp_path}/gone.pth", progress=False)
    assert list(failed(gone)) == ["download"] and states(gone)["network"] == "not checked"


def test_heads_of_any_type_are_looked_at(tmp_path):
    heads = {
        "a": torch.ones(3).to(torch.float8_e4m3fn),
        "b": torch.ones(2, dtype=torch.bool),
        "c": torch.ones(2).half(),
    }
    assert verify(str(write(tmp_path / "a", describe(), weights_of(describe()), heads))).passed


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
