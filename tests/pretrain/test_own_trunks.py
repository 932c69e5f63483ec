"""Training, resuming, publishing and loading networks of timm's, a user's own, and AMDIM's encoder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import zoo
from tiny import StopAfter, assert_same_state, go_on, save_image
from transfer.run import transfer
from zoo.doctor import diagnose
from zoo.engine.collectives import WorldOfOne
from zoo.engine.loop import Callback
from zoo.engine.sync_batchnorm import warn_of_others
from zoo.errors import EXIT_SAVED, InputError
from zoo.keyed import keyed_seed
from zoo.models.factory import create_trunk
from zoo.pretrain.publish import read_run
from zoo.pretrain.resolve import parse_assignments, resolve
from zoo.pretrain.run import RunResult, start
from zoo.pretrain.session import Session
from zoo.tensors import seeded
from zoo.verify import verify
from zoo.weights.fingerprint import feature_record, record_features
from zoo.weights.formats.base import Network
from zoo.weights.training_signs import signs_of

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OWN = "our_trunks:narrow"
# 24 images and batches of 8: an epoch is 3 steps.
TINY: dict[str, Any] = {
    "views.size": [16, 8],
    "views.count": [2, 1],
    "views.min_scale": [0.2, 0.05],
    "views.max_scale": [1.0, 0.2],
    "evaluation.resize": 20,
    "evaluation.crop": 16,
    "method.hidden": 16,
    "method.dim": 8,
    "batch_size": 8,
    "epochs": 1,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}
METHODS: dict[str, dict[str, Any]] = {
    "swav_rn50_bs256": {"method.prototypes": 8, "method.queue_length": 0},
    "moco_v2_rn50_200ep": {"method.negatives": 20, "method.shuffle_groups": 2},
    "simclr_rn50_bs256": {},
    "deepclusterv2_rn50_400ep_2x224": {"method.prototypes": [8, 6]},
    "selav2_rn50_400ep_2x224": {"method.prototypes": [8, 6]},
    "supervised_rn50_200ep_2x224": {"method.hidden": None, "method.dim": None},
}
VIT = {"dynamic_img_size": True, "patch_size": 4, "img_size": 16}
# What a function's network has and no file holds: it is there after loading, too.
SOURCE = """
from pathlib import Path

import torch
from torch import nn

(Path(__file__).parent / "was imported").touch()


class Narrow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
        )
        self.register_buffer("factors", torch.linspace(0.5, 2, 2 * width)[:, None, None], persistent=False)

    def forward(self, x):
        return self.body(x) * self.factors


def narrow(width=8):
    return Narrow(width)


def sequence():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Stubborn(Narrow):
    def forward(self, x):
        return super().forward(x.float())


def stubborn():
    return Stubborn(8)


def half():
    return nn.Sequential(Narrow(8), Half())


class Half(nn.Module):
    def forward(self, x):
        return x.half()


def frozen():
    return Narrow(8).requires_grad_(False)


def empty():
    with torch.device("meta"):
        return nn.Sequential(nn.Conv2d(3, 8, 3))
"""


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Homes of its own, and a module in the current folder, which is not on Python's path."""
    for variable in ("ZOO_HOME", "ZOO_CACHE", "ZOO_RUNS", "ZOO_RESULTS"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "our_trunks.py").write_text(SOURCE, "utf-8")
    monkeypatch.chdir(tmp_path)
    others = ("sequence", "stubborn", "half", "frozen", "empty")
    monkeypatch.setenv("ZOO_OWN_TRUNKS", ",".join([OWN, *(f"our_trunks:{name}" for name in others)]))
    yield
    sys.modules.pop("our_trunks", None)


def train(
    images: Path,
    out: str,
    arch: str,
    recipe: str = "simclr_rn50_bs256",
    callbacks: tuple[Callback, ...] = (),
    **more: Any,
) -> RunResult:
    overrides = {**TINY, **METHODS[recipe], "trunk.arch": arch}
    overrides |= {key.replace("__", "."): value for key, value in more.items()}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    return start(
        recipe, data=str(images), out=out, overrides=overrides, callbacks=callbacks, progress="quiet"
    )


def refusal(work: Callable[[], Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        work()
    assert caught.value.fix and caught.value.where
    return caught.value


def answers(features: torch.Tensor, trunk: nn.Module) -> None:
    """A trained trunk, in its own memory layout, gives these features."""
    with torch.no_grad():
        torch.testing.assert_close(features, trunk.eval()(X), rtol=1e-4, atol=1e-6)


# --- training ---


def same_network(network: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor = X) -> None:
    """Equal weights, and so equal outputs: to the last digits, since MKL's sums hang on where weights lie in memory."""
    state = other.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    torch.testing.assert_close(network(x), other(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "arch", "options"),
    [
        ("swav_rn50_bs256", "timm:test_resnet", {}),
        ("swav_rn50_bs256", "timm:test_vit", VIT),
        ("swav_rn50_bs256", OWN, {"width": 4}),
        ("moco_v2_rn50_200ep", "timm:test_vit", VIT),
        ("moco_v2_rn50_200ep", OWN, {}),
        ("moco_v2_rn50_200ep", "our_trunks:sequence", {}),
    ],
)
def test_a_run_is_resumed_bit_for_bit_published_and_loaded(
    images: Path, recipe: str, arch: str, options: dict[str, Any]
) -> None:
    more = {"trunk__options": options}
    whole = train(images, "whole", arch, recipe, **more)
    stopped = train(images, "stopped", arch, recipe, (StopAfter(2),), **more)
    assert (stopped.exit_code, stopped.step) == (EXIT_SAVED, 2)
    go_on(stopped.path)
    assert_same_state(whole.path, stopped.path)

    trunk: Any = whole.method.trunk
    before = create_trunk(arch, options=options, size=16).state_dict()
    assert list(trunk.state_dict()) == list(before)
    published = zoo.publish(whole.path, name="me/model")
    info = json.loads((published.path / "zoo.json").read_text("utf-8"))
    assert (info["arch"], info.get("options", {})) == (arch, options)
    assert info["num_features"] == trunk.num_features
    with torch.no_grad():
        model = zoo.load("me/model", progress=False).eval()
        features = model(X)
        assert list(model.state_dict()) == list(before)
        answers(features, trunk)
        same_network(zoo.load(str(whole.path), progress=False).eval(), model)
        classifier = zoo.load("me/model", num_classes=5, progress=False).eval()
        assert torch.allclose(classifier(X), classifier.fc(features), atol=1e-6)
    error = refusal(lambda: zoo.load("me/model", features_only=True, progress=False))
    assert "stages" in error.what


@pytest.mark.parametrize("arch", ["timm:test_resnet", OWN])
@pytest.mark.parametrize("recipe", [name for name in METHODS if name[:4] not in ("swav", "moco")])
def test_every_method_trains_any_trunk(images: Path, recipe: str, arch: str) -> None:
    run = train(images, "run", arch, recipe, optimizer__lr=1.0, schedule__warmup_epochs=0)
    assert (run.exit_code, run.step) == (0, 3)
    with seeded(keyed_seed(0, "init")):
        fresh = create_trunk(arch, size=16).state_dict()
    trained = run.method.trunk.state_dict()
    weights = [key for key, value in trained.items() if value.dim() == 4]
    assert weights and not any(torch.equal(trained[key], fresh[key]) for key in weights)


def test_the_whole_batch_in_parts(images: Path) -> None:
    run = train(images, "run", "timm:test_vit", "swav_rn50_bs256", trunk__options=VIT, engine__accumulate=2)
    assert run.exit_code == 0 and run.step == 3


def test_amdims_encoder_by_its_options(images: Path) -> None:
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 1}
    views = {"size": [32], "count": [2], "min_scale": [0.2], "max_scale": [1.0]}
    size: dict[str, Any] = {f"views__{key}": value for key, value in views.items()}
    size |= {"evaluation__resize": 32, "evaluation__crop": 32}
    given = {f"trunk__options__{key}": str(value) for key, value in options.items()}  # as --set gives them
    run = train(images, "run", "amdim", **size, **given)
    what, _, _ = read_run(run.path)
    assert (what.arch, what.options, what.num_features) == ("amdim", options, 16)
    zoo.publish(run.path, name="me/amdim")
    model = zoo.load("me/amdim", progress=False)
    assert (model.encoder_size, model.num_features) == (32, 16)
    error = refusal(lambda: train(images, "other", "amdim", trunk__options__n_rkh=3))
    assert error.where == "trunk.options.n_rkh" and "n_rkhs?" in str(error.fix)


def test_a_momentum_encoder_is_compiled_too(images: Path) -> None:
    overrides = {
        **TINY,
        **METHODS["moco_v2_rn50_200ep"],
        "trunk.arch": "timm:test_resnet",
        "engine.compile": True,
    }
    resolved = resolve("moco_v2_rn50_200ep", overrides, {"data.sources": [str(images)]})
    method: Any = Session(resolved, torch.device("cpu"), WorldOfOne()).method
    compiled = [m for m in method.modules() if m._compiled_call_impl is not None]
    assert compiled == [method.trunk, method.momentum_encoder]


def test_norms_that_are_not_synchronised_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class WorldOfTwo(WorldOfOne):
        world_size = 2

    for arch, named in (("timm:test_efficientnet", True), ("timm:test_vit", False)):
        caplog.clear()
        warn_of_others(create_trunk(arch), WorldOfTwo())
        assert ("BatchNormAct2d" in caplog.text) is named
    warn_of_others(create_trunk("timm:test_efficientnet"), WorldOfOne())
    assert not caplog.text


# --- what can't be trained ---


@pytest.mark.parametrize(
    ("arch", "more", "words"),
    [
        (
            "timm:test_vit",
            {"trunk__options__dynamic_img_size": False},
            ["16 x 16", "(160)", "dynamic_img_size"],
        ),
        (
            "timm:test_vit",
            {"trunk__options": {"dynamic_img_size": False, "img_size": 16, "patch_size": 4}},
            ["8 x 8 pixels", "(16)", "views.size"],
        ),
        (OWN, {"data__channels": 1}, ["16 x 16 pixels and 1 channel (", "trunk.options alone"]),
        (OWN, {"trunk__options__depth": 3}, ["'depth'", "depth=3"]),
        ("our_trunks:narow", {}, ["own code", "ZOO_OWN_TRUNKS="]),
        ("our_trunks:half", {}, ["(float16)", "leave half precision to the recipe"]),
        ("our_trunks:empty", {}, ["without content", "meta"]),
        ("timm:test_resnets", {}, ["did you mean test_resnet"]),
        ("timm:TEST_ResNet", {}, ["did you mean test_resnet"]),
        (OWN, {"engine__activation_checkpointing": True}, ["Narrow", "engine.activation_checkpointing"]),
        (OWN, {"trunk__base_planes": 8}, ["base_planes"]),
        (OWN, {"trunk__options__width": float("inf")}, ["plain values", "trunk.options"]),
    ],
)
def test_bad_trunks_are_refused_before_a_run_begins(
    images: Path, arch: str, more: dict[str, Any], words: list[str]
) -> None:
    if more.get("data__channels") == 1:
        more = {**more, "views__gray_p": 0, "views__jitter": [0.4, 0.4, 0, 0]}
    with pytest.raises(InputError) as caught:
        train(images, "run", arch, **more)
    assert [word for word in words if word not in str(caught.value)] == []
    assert not Path("run").exists()


def test_a_trunk_that_can_not_learn_is_said(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    for arch, said in (("our_trunks:frozen", True), (OWN, False)):
        caplog.clear()
        train(images, f"run of {arch}", arch)
        assert ("no gradient reaches" in caplog.text) is said


def test_neither_a_run_nor_a_model_runs_code(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(images, "run", OWN)
    card = zoo.publish(run.path, name="me/model").path / "README.md"
    assert f"export ZOO_OWN_TRUNKS={OWN}" in card.read_text("utf-8")
    mark = Path("was imported")
    mark.unlink()
    del sys.modules["our_trunks"]
    monkeypatch.delenv("ZOO_OWN_TRUNKS")
    for work in (
        lambda: go_on(run.path, epochs=2),
        lambda: train(images, "again", "amdim", trunk__arch=OWN),
        lambda: zoo.load(str(run.path)),
        lambda: zoo.load("me/model"),
        lambda: zoo.publish(run.path),
        lambda: zoo.load(f"random:{OWN}"),
    ):
        assert f"export ZOO_OWN_TRUNKS={OWN}" in str(refusal(work).fix)
    found = {check.name: check for check in verify("me/model", progress=False).checks}
    assert found["network"].state == "FAILED" and "ZOO_OWN_TRUNKS" in found["network"].detail
    assert diagnose("me/model", progress=False)["verdict"] == "unreadable"
    assert not mark.exists() and "our_trunks" not in sys.modules


def test_a_function_that_changed_meanwhile(images: Path) -> None:
    run = train(images, "run", OWN)
    zoo.publish(run.path, name="me/model")
    sys.modules["our_trunks"].narrow = lambda: sys.modules["our_trunks"].Narrow(5)
    error = refusal(lambda: go_on(run.path, epochs=2))
    assert "another network than when the run was started" in error.what
    with pytest.raises(InputError, match="The weights don't fit the network"):
        zoo.load("me/model")


# --- published ---


def test_what_commands_make_of_a_network_of_timms(images: Path) -> None:
    run = train(images, "run", "timm:test_resnet")
    zoo.publish(run.path, name="me/model", licence="mit")
    checked = verify("me/model", progress=False)
    assert {check.state for check in checked.checks} == {"ok"}
    found = diagnose("me/model", progress=False)
    assert (found["network"], found["num_features"]) == ("timm:test_resnet", 96)
    assert found["verdict"] == "hardly trained"
    assert any("--set trunk.arch=timm:test_resnet" in line for line in found["load"]["commands"])
    zoo.convert("me/model", to="timm", out="folder", progress=False)
    model = zoo.load("me/model", progress=False).eval()
    again = timm.create_model("local-dir:folder", pretrained=True).eval()
    with torch.no_grad():
        same_network(again, model)
    zoo.convert("me/model", to="bundle", out="bundle", progress=False)
    assert zoo.load("bundle", progress=False).num_features == 96
    error = refusal(lambda: zoo.convert("me/model", to="torchvision", out="file.pth", progress=False))
    assert "ResNets only" in error.what
    for number in range(16):
        part = "train" if number < 12 else "val"
        save_image(Path("photos", part, f"class{number % 2}", f"{number}.png"), number)
    result = transfer("knn", model="me/model", dataset="photos", out="result")
    assert result["metrics"] and all(0 <= value <= 1 for value in result["metrics"].values())
    settings = {"epochs": 1, "batch_size": 4, "fraction": 1.0, "lr_head": 0.02}
    tuned = transfer("semisup", model="me/model", dataset="photos", out="tuned", settings=settings)
    assert tuned["details"]["labelled_images"] == 12


def test_options_and_channels_are_published_for_timm(images: Path) -> None:
    gray = {"data__channels": 1, "views__gray_p": 0, "views__jitter": [0.4, 0.4, 0, 0]}
    run = train(images, "run", "timm:test_vit", trunk__options=VIT, **gray)
    bundle = zoo.publish(run.path, name="me/gray").path
    plain = timm.create_model(f"local-dir:{bundle}", pretrained=True).eval()
    model = zoo.load("me/gray", progress=False).eval()
    with torch.no_grad():
        same_network(model, plain, X[:, :1])
    assert model.patch_embed.proj.weight.shape == (64, 1, 4, 4)


@pytest.mark.parametrize("arch", ["timm:test_vit", "timm:test_efficientnet", "timm:test_nfnet", OWN])
def test_a_new_network_was_never_trained(arch: str) -> None:
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trunk = create_trunk(arch)
        assert signs_of(trunk, Network(arch)).verdict == "untrained"
    with torch.no_grad():  # as a first step of training does
        for parameter in trunk.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert signs_of(trunk, Network(arch)).verdict != "untrained"


def test_the_record_of_a_network_that_insists_on_float32() -> None:
    how = {"mean": [0.5] * 3, "std": [0.25] * 3, "resize": 16, "crop": 16, "interpolation": "bilinear"}
    trunk = create_trunk("our_trunks:stubborn", size=16)
    state = {name: value.clone() for name, value in trunk.state_dict().items()}
    found = record_features(Network("our_trunks:stubborn"), state, how, "here")
    assert found == feature_record(trunk, how, "here") and len(found["values"]) == 16
    assert all(value.dtype == state[name].dtype for name, value in trunk.state_dict().items())


# --- recipes ---


def test_options_in_a_recipe_come_back(tmp_path: Path) -> None:
    sets = parse_assignments(
        [
            "trunk.arch=amdim",
            "trunk.options.n_rkhs=64",
            "trunk.options.encoder_size=32",
            "trunk.options.use_bn=on",
        ]
    )
    resolved = resolve("simclr_rn50_bs256", sets)
    assert resolved.recipe.trunk.options == {"n_rkhs": 64, "encoder_size": 32, "use_bn": True}
    assert resolved.sources["trunk.options.n_rkhs"] == "--set"
    for one in (resolved, resolve("simclr_rn50_bs256")):
        (tmp_path / "recipe.yaml").write_text(one.to_yaml(), "utf-8")
        assert resolve(tmp_path / "recipe.yaml").recipe == one.recipe
    nested = resolve("simclr_rn50_bs256", {"trunk.options": {"sizes": (1, 2), "inner": {"a": None}}})
    assert nested.recipe.trunk.options == {"sizes": [1, 2], "inner": {"a": None}}
    with pytest.raises(InputError, match=r"trunk\.options"):
        resolve("simclr_rn50_bs256", {"trunk.options": "n_rkhs"})
