"""``zoo doctor``: random, trained, half-trained and broken weights are told apart; nothing makes it stumble."""

from __future__ import annotations

import json
import math
import os
import pickle
import shlex

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.doctor import diagnose
from zoo.models.factory import create_trunk
from zoo.tensors import write_safetensors
from zoo.weights.fill import fill_trunk
from zoo.weights.formats.base import Network
from zoo.weights.training_signs import SENTENCES, edge_excess, signs_of

from .published import assert_clear, bundle_at, describe, publish, weights_of

NETWORK = Network("resnet18", base_planes=8)


def gratings(count, generator):
    """Stripes in one of eight directions, with noise: (count, 3, 32, 32) and the direction."""
    labels = torch.randint(0, 8, (count,), generator=generator)
    along = torch.arange(32.0)
    angle = (labels * math.pi / 8)[:, None, None]
    phase, pitch = torch.rand(2, count, 1, 1, generator=generator)
    waves = torch.sin(
        (0.5 + 0.3 * pitch) * (along[:, None] * angle.sin() + along * angle.cos()) + 6.28 * phase
    )
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return waves[:, None] * torch.rand(count, 3, 1, 1, generator=generator) + 0.3 * noise, labels


def trained_for(steps):
    """The state of a narrow ResNet-18 after so many steps with labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = create_trunk("resnet18", base_planes=8)
        head = nn.Linear(64, 8)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images, labels = gratings(32, generator)
        optimizer.zero_grad()
        F.cross_entropy(head(trunk(images)), labels).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in trunk.state_dict().items()}


@pytest.fixture(scope="module")
def trained():
    return trained_for(40)


def signs(tensors, network=NETWORK):
    return signs_of(fill_trunk(create_trunk, network, tensors, "test"), network)


def fresh(seed=5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_trunk("resnet18", base_planes=8).state_dict()


# --- the evidence ---


@pytest.mark.parametrize("shape", [(64, 3, 7, 7), (32, 16, 3, 3), (128, 64, 1, 1), (16, 300)])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_random_matrices_lie_at_the_edge(shape, scale):
    generator = torch.Generator().manual_seed(1)
    for draw in (torch.randn, torch.rand):
        weight = scale * draw(shape, generator=generator)
        multiple, excess = edge_excess(weight - weight.mean())
        assert 0.9 < multiple < 1.05 and abs(excess) < 5


def test_a_little_structure_is_beyond_the_edge():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 576, generator=generator)
    one = torch.randn(64, generator=generator)[:, None] * torch.randn(576, generator=generator)
    assert edge_excess(weight + 0.25 * one)[1] > 50
    assert edge_excess(weight + 0.02 * one)[1] < 5


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        ("resnet18", {"base_planes": 8}),
        ("resnet18", {"stem": "small", "base_planes": 4}),
        ("resnet50", {"base_planes": 16}),
        ("amdim", {"options": {"encoder_size": 32, "ndf": 8, "n_rkhs": 32, "n_depth": 2, "use_bn": False}}),
    ],
)
def test_a_new_network_was_never_trained(arch, arguments):
    for seed in (0, 1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trunk = create_trunk(arch, **arguments)
        found = signs_of(trunk, Network(arch, **arguments))
        assert found.verdict == "untrained", found
        assert found.like_new == found.convolutions and found.beyond_edge == 0
        assert all(stage.initial for stage in found.stages)


def test_a_new_network_of_another_initialisation_was_not_trained_either():
    tensors = fresh()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for value in tensors.values():
            if value.ndim == 4:
                nn.init.kaiming_uniform_(value, a=5**0.5)
    found = signs(tensors)
    assert found.verdict == "untrained" and found.like_new < found.convolutions / 2


def test_training_shows(trained):
    found = signs(trained)
    assert found.verdict == "trained"
    assert found.initial_scales == found.initial_statistics == 0 and found.batches == 40
    assert found.beyond_edge > found.examined / 2
    assert not any(stage.initial for stage in found.stages)
    assert [stage.name for stage in found.stages] == ["stem", "layer1", "layer2", "layer3", "layer4"]
    assert found.stages[-1].edge > 1.2 and found.non_finite == []


def test_a_few_steps_are_not_a_training():
    found = signs(trained_for(4))
    assert found.verdict == "hardly trained"
    assert found.initial_scales == 0 and found.beyond_edge < found.examined / 2


def test_statistics_without_training():
    assert signs(weights_of(describe())).verdict == "only statistics"


def test_lost_statistics(trained):
    new = fresh()
    parts = ("running_mean", "running_var", "num_batches_tracked")
    lost = {name: new[name] if name.endswith(parts) else value for name, value in trained.items()}
    assert signs(lost).verdict == "no statistics"


def test_a_part_that_was_not_loaded(trained):
    new = fresh()
    mixed = {name: new[name] if name.startswith("layer4.") else value for name, value in trained.items()}
    found = signs(mixed)
    assert found.verdict == "partly untrained"
    assert [stage.name for stage in found.stages if stage.initial] == ["layer4"]


@pytest.mark.parametrize("name", ["layer2.0.conv1.weight", "bn1.running_var", "layer4.1.bn2.weight"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_numbers_that_are_none(trained, name, value):
    broken = {key: tensor.clone() for key, tensor in trained.items()}
    broken[name].view(-1)[3] = value
    found = signs(broken)
    assert (found.verdict, found.non_finite) == ("broken", [name])
    json.dumps(found.to_json(), allow_nan=False)


def test_what_is_dead_is_counted(trained):
    dead = {key: tensor.clone() for key, tensor in trained.items()}
    dead["layer1.0.conv1.weight"][:3] = 0
    dead["layer3.1.conv2.weight"][:] = 0
    dead["layer2.1.bn2.weight"][:] = 0
    dead["bn1.running_var"][:2] = 0
    found = signs(dead)
    assert (found.zero_filters, found.zero_scales, found.still_channels) == (3 + 32, 1, 2)
    assert found.verdict == "trained"


def test_norms_that_amdim_does_not_use_say_nothing():
    options = {"encoder_size": 32, "ndf": 8, "n_rkhs": 32, "n_depth": 2}
    counts = {
        use: signs_of(create_trunk("amdim", options={**options, "use_bn": use}), Network("amdim", options=options)).norms
        for use in (False, True)
    }  # fmt: skip
    assert counts[False] == 3 < counts[True]


def test_half_precision_is_no_obstacle(trained):
    halved = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in trained.items()
    }
    assert signs(halved).verdict == "trained"


# --- files and models ---


def test_a_trained_file_from_top_to_bottom(trained, tmp_path):
    file = tmp_path / "my weights.pth.tar"
    head = {"module.fc.weight": torch.zeros(10, 64), "module.fc.bias": torch.zeros(10)}
    state = {f"module.{name}": value for name, value in trained.items()}
    torch.save({"epoch": 7, "arch": "resnet18", "state_dict": {**state, **head}}, file)
    found = diagnose(str(file))
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert (found["schema"], found["problem"], found["verdict"]) == (1, None, "trained")
    assert found["file"]["container"] == "torch zip" and found["file"]["size"] == file.stat().st_size
    assert len(found["file"]["sha256"]) == 64 and found["file"]["refused"] == []
    assert "torch._utils._rebuild_tensor_v2" in found["file"]["globals"]
    assert found["file"]["entries"] == ["epoch: 7", "arch: resnet18", "state_dict: 122 tensors or arrays"]
    assert found["format"] == "torchvision" and found["network"] == "resnet18 (base_planes 8)"
    assert (found["parameters"], found["num_features"]) == (176_712, 64)
    assert found["facts"]["epoch"] == 7 and "'module.'" in found["account"]
    assert SENTENCES["trained"] in found["conclusion"]
    assert any("classifier of 10 classes" in sentence for sentence in found["conclusion"])
    assert found["preprocessing"]["crop"] == 224 and "doesn't say" in found["preprocessing"]["from"]


def test_an_amdim_encoder_is_called_one(tmp_path):
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 1, "use_bn": False}
    write_safetensors(tmp_path / "x.safetensors", create_trunk("amdim", options=options).state_dict())
    found = diagnose(str(tmp_path / "x.safetensors"))
    assert found["conclusion"][0].startswith(f"It is an AMDIM encoder ({found['network'][7:-1]}) of ")


def test_the_lines_to_type_work(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_safetensors(tmp_path / "it's mine.safetensors", trained)
    lines = diagnose("it's mine.safetensors")["load"]
    names: dict = {}
    exec("\n".join(lines["python"]), names)
    assert names["model"](names["transform"](torch.zeros(3, 300, 260, dtype=torch.uint8))[None]).shape == (
        1,
        64,
    )
    words = shlex.split(lines["commands"][1])
    assert words[:3] == ["zoo", "pretrain", "swav_rn50_bs256"] and "it's mine.safetensors" in words
    sets = {
        words[i + 1].split("=")[0]: words[i + 1].split("=")[1] for i, w in enumerate(words) if w == "--set"
    }
    assert sets == {"trunk.arch": "resnet18", "trunk.base_planes": "8"}
    # The trunk that this recipe trains takes these weights.
    from zoo.pretrain.resolve import parse_assignments, resolve
    from zoo.weights.fill import copy_into

    config = resolve(words[2], parse_assignments([f"{k}={v}" for k, v in sets.items()])).recipe.trunk
    trunk = create_trunk(config.arch, stem=config.stem, base_planes=config.base_planes)
    copy_into(trunk, trained, "test")


def test_published_models_and_runs(run, tmp_path):
    publish("me/one")
    found = diagnose("me/one")
    assert found["verdict"] == "only statistics" and found["format"] == "zoo_bundle"
    assert (
        found["file"]["container"] == "safetensors"
        and found["preprocessing"]["from"] == "its own description"
    )
    assert found["load"]["commands"][1].startswith("zoo pretrain swav_tiny --data FOLDER --init-from me/one")
    found = diagnose(str(run))
    assert found["file"] is None and found["format"] == "zoo_run" and found["signs"]["batches"] > 0
    assert found["verdict"] in ("trained", "hardly trained")


def test_a_classifier_can_be_asked_for(trained, tmp_path):
    head = {"fc.weight": torch.zeros(1000, 64), "fc.bias": torch.zeros(1000)}
    torch.save({**trained, **head}, tmp_path / "x.pth")
    lines = diagnose(str(tmp_path / "x.pth"))["load"]["python"]
    names: dict = {}
    exec("\n".join(lines), names)
    assert names["classifier"](torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"<html><body>404</body></html>", "HTML page"),
        (b'{"error": "not found"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "picture"),
        (b"\x1f\x8b" + b"\0" * 40, "gunzip"),
        (os.urandom(300), None),
    ],
)
def test_wrong_files_are_called_by_their_names(tmp_path, content, says):
    file = tmp_path / "weights.pth"
    file.write_bytes(content)
    found = diagnose(str(file))
    assert found["verdict"] == "unreadable" and found["problem"]
    assert says is None or says in " ".join(found["conclusion"])
    assert found["file"]["size"] == len(content)


def test_files_that_want_code_to_run_are_refused_and_say_why(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / "x.pth").write_bytes(pickle.dumps({"a": Evil()}))
    found = diagnose(str(tmp_path / "x.pth"))
    assert found["verdict"] == "unreadable" and found["file"]["refused"] == [f"{os.mkdir.__module__}.mkdir"]
    assert not (tmp_path / "made").exists()
    assert any("What helps" in sentence for sentence in found["conclusion"])


def test_whole_files_without_a_backbone_say_what_is_in_them(trained, tmp_path):
    file = tmp_path / "x.pth"
    torch.save({"blocks.0.attn.qkv.weight": torch.ones(3, 3), "cls_token": torch.ones(1)}, file)
    found = diagnose(str(file))
    assert "ViT" in found["problem"] and found["file"]["entries"][0].startswith("2 tensors")
    assert found["conclusion"][0] == "The file itself is whole and safe to read (torch zip)."
    del (half := dict(trained))["layer4.1.conv1.weight"]
    torch.save(half, file)
    assert "layer4.1.conv1.weight" in diagnose(str(file))["problem"]
    torch.save({"epoch": 3, "api_token": "hf_secret", "path": "/home/me/x.pth"}, file)
    entries = diagnose(str(file))["file"]["entries"]
    assert entries == ["epoch: 3", "api_token: a str", "path: x.pth"]
    torch.save([1, 2], file)
    assert diagnose(str(file))["file"]["entries"] == ["a list"]


def test_a_cut_file_is_diagnosed(trained, tmp_path):
    torch.save(trained, tmp_path / "whole.pth")
    content = (tmp_path / "whole.pth").read_bytes()
    for part in (3, 64, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.pth").write_bytes(content[:part])
        assert diagnose(str(tmp_path / "cut.pth"))["verdict"] == "unreadable"


def test_a_damaged_bundle_is_diagnosed(tmp_path):
    folder = bundle_at(tmp_path / "a").path
    (folder / "model.safetensors").unlink()
    found = diagnose(str(folder))
    assert found["verdict"] == "unreadable" and "missing" in found["problem"]


# --- the command ---


def test_the_command(command, trained, tmp_path):
    file = tmp_path / "x.safetensors"
    write_safetensors(file, trained)
    code, out, err = command("doctor", file)
    assert (code, err) == (0, "")
    for words in (
        "What it is",
        "What its weights tell",
        "Images",
        "To use it",
        "Conclusion",
        "It was trained.",
    ):
        assert words in out
    assert f'zoo.load("{file}")' in out and "layer4" in out
    answer = json.loads(command("doctor", file, "--json")[1])
    assert answer["verdict"] == "trained"
    broken = {**trained, "bn1.bias": torch.full((8,), math.nan)}
    write_safetensors(file, broken)
    code, out, err = command("doctor", file)
    assert (code, err) == (1, "") and "no finite numbers" in out and "bn1.bias" in out
    file.write_text("<html>")
    code, out, err = command("doctor", file)
    assert (code, err) == (1, "") and "HTML" in out and "Traceback" not in out


def test_what_is_not_there_is_bad_input(command, tmp_path):
    assert_clear(command("doctor", tmp_path / "nothing"), "nothing")
    assert_clear(command("doctor", f"file:{tmp_path}/nothing"), "nothing")
    assert_clear(command("doctor", "swav_resnet50.80ep"), "swav_resnet50.800ep")
    assert_clear(command("doctor", tmp_path), tmp_path)
    for words in (("doctor",), ("verify",), ("convert", "--to", "torchvision", "--out", tmp_path / "it.pth")):
        assert_clear(command(*words, "random:resnet18"), "random:resnet18", "fix:   name a file of weights")
