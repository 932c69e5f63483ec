"""What stands around a backbone comes off by rule: from the front only, in any nesting."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file

from zoo.errors import InputError
from zoo.weights.formats import identify, read_model

from .layouts import linear, namespace, optimizer, save, small_backbone, under, with_prefix

CONTAINERS = [
    "state_dict",
    "model",
    "model_state_dict",
    "network",
    "weights",
    "teacher",
    "ema",
    "state_dict_ema",
]
PARTS = [
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "encoder_q",
    "backbone",
    "model",
    "encoder",
    "base_encoder",
    "online_network",
    "trunk",
    "net",
]


def test_any_nesting_comes_off() -> None:
    state = small_backbone()
    chance = random.Random(5)
    for _ in range(60):
        outside = chance.choices(CONTAINERS, k=chance.randint(0, 3))
        prefix = "".join(f"{part}." for part in chance.choices(PARTS, k=chance.randint(0, 5)))
        model = identify(under(outside, with_prefix(prefix, state)), "file")
        place = (outside, prefix)
        assert model.trunk.keys() == state.keys(), place
        assert all(torch.equal(model.trunk[name], tensor) for name, tensor in state.items()), place
        assert (model.account.prefix, model.account.matched) == (prefix, len(state)), place
        assert model.account.dropped == (), place


def test_a_wrappers_name_inside_of_a_key_stays() -> None:
    """The reference takes ``module.`` out anywhere; that would make two keys one."""
    state = {
        **with_prefix("module.", small_backbone()),
        **linear("module.projection_head.module", 32, 8, seed=1),
        **linear("module.projection_head", 32, 8, seed=2),
    }
    model = identify(state, "file")
    for name in ("module.weight", "weight"):
        ours = model.heads[f"projection_head.{name}"]
        assert torch.equal(ours, state[f"module.projection_head.{name}"])


@pytest.mark.parametrize(
    "taken, other",
    [
        ("module.encoder_q.", "module.encoder_k."),
        ("teacher.module.backbone.", "student.module.backbone."),
        ("teacher_backbone.", "student_backbone."),
        ("backbone.", "momentum_backbone."),
        ("backbone.", "backbone_momentum."),
        ("backbone.", "teacher_backbone."),
        ("online_network.", "target_network."),
        ("net.", "online_encoder.net."),
        ("model_ema.", "model."),
        ("base_encoder.", "momentum_encoder."),
    ],
)
@pytest.mark.parametrize("first", ["taken", "other"])
def test_of_several_the_meant_one_is_taken(taken: str, other: str, first: str) -> None:
    right, wrong = small_backbone(seed=1), small_backbone(seed=2)
    both = [with_prefix(taken, right), with_prefix(other, wrong)]
    state = {**both[0], **both[1]} if first == "taken" else {**both[1], **both[0]}
    model = identify(state, "file")
    assert torch.equal(model.trunk["layer3.0.conv1.weight"], right["layer3.0.conv1.weight"])
    assert model.account.prefix == taken
    assert (
        f"2 whole backbones are in the file: the one under {taken[:-1]!r} was taken, not {other[:-1]!r}"
        in (model.account.sentence())
    )
    (group,) = model.account.dropped
    assert set(group.keys) == set(with_prefix(other, wrong))


def test_a_copy_that_is_not_whole_is_not_taken() -> None:
    right, broken = small_backbone(seed=1), small_backbone(seed=2)
    del broken["layer4.1.conv2.weight"]
    state = {**with_prefix("teacher.", broken), **with_prefix("student.", right)}
    model = identify(state, "file")
    assert model.account.prefix == "student."
    assert "under 'teacher' is no whole backbone (119 of 120 tensors)" in model.account.sentence()


def test_containers_count_too() -> None:
    right, wrong = small_backbone(seed=1), small_backbone(seed=2)
    value = {"state_dict": wrong, "state_dict_ema": right, "optimizer": optimizer([60]), "epoch": 8}
    model = identify(value, "file")
    assert torch.equal(model.trunk["conv1.weight"], right["conv1.weight"])
    assert "'state_dict_ema' was taken, not 'state_dict'" in model.account.sentence()
    assert {group.what: len(group.keys) for group in model.account.dropped} == {
        "other copy of the network": len(wrong),
        "optimizer state": 1,
    }


def test_an_unknown_wrapper_is_no_wrapper() -> None:
    state = with_prefix("foo.", small_backbone())
    with pytest.raises(InputError, match=r"None of the 120 tensors .* 120 would be under 'foo\.'") as caught:
        identify(state, "file")
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match=r"'foo\.'"):
        identify({"state_dict": {"foo.conv1.weight": torch.zeros(64, 3, 7, 7)}}, "file")


def test_unknown_tensors_are_said() -> None:
    state = {**with_prefix("backbone.", small_backbone()), "temperature": torch.ones(())}
    model = identify(state, "file")
    (group,) = model.account.dropped
    assert (group.what, group.keys, group.expected) == ("unknown tensors", ("temperature",), False)
    assert "unknown tensors (1 tensors) left out, NOT expected" in model.account.sentence()


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors"])
def test_files(tmp_path, kind: str) -> None:
    state = {**small_backbone(), **linear("fc", 32, 5)}
    path = tmp_path / "weights.pth"
    if kind == "safetensors":
        save_file(state, path)
    else:
        save(path, state, "zip" if kind == "torch" else kind)
    model = read_model(path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.trunk.items())
    assert torch.equal(model.classifier["bias"], state["fc.bias"])


def test_what_a_training_script_says_is_kept_without_paths_and_secrets(tmp_path) -> None:
    args = namespace(lr=0.3, data="/home/somebody/imagenet", hub_token="s3cret", epochs=[1, 2], nothing=None)
    value = {
        "state_dict": small_backbone(),
        "args": args,
        "best": 71.5,
        "api_key": "s3cret",
        "loss": float("nan"),
    }
    facts = read_model(save(tmp_path / "checkpoint.pth", value)).facts
    assert facts == {"args": {"lr": 0.3, "data": "imagenet", "epochs": [1, 2]}, "best": 71.5}


def test_a_dict_that_holds_itself_ends() -> None:
    value: dict[str, object] = {"state_dict": small_backbone()}
    value["model"] = value
    assert identify(value, "file").account.matched == 120
