"""Networks of timm's and of a user's own as trunks: what they become, and what is refused."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from zoo.errors import InputError
from zoo.models.factory import create_trunk
from zoo.models.foreign import check_sizes, is_foreign, put_classifier
from zoo.models.recompute import recompute_blocks

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
# A Swin transformer whose maps have their channels last.
SWIN = {"embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "global_pool": ""}

SOURCE = """
import torch
from torch import nn

VALUE = 7


class Net(nn.Module):
    def __init__(self, width=4, out=lambda x: x, **parts):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.out = out
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.out(self.bn(self.conv(x)))


class Doubling(Net):
    def forward(self, x):
        x = super().forward(x).mean((2, 3))
        return torch.cat([x, self.fc(x)], 1)


class Last(Net):
    def forward(self, x):
        return self.fc(super().forward(x).mean((2, 3)))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.ReLU()

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + 0 * torch.rand(1)


class Sequence(nn.Sequential):
    pass


class NoProperty(Net):
    @property
    def num_features(self):
        return 4


def maps(width=4): return Net(width)
def chained(): return Chain()
def counting(): return Counting()
def sequence(): return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
def own_sequence(): return Sequence(nn.Conv2d(3, 5, 3), nn.ReLU())
def resnet(): return Last(fc=nn.Identity())
def doubling(): return Doubling(fc=nn.Identity())
def logits(): return Last(fc=nn.Linear(4, 9))
def two(): return Net(out=lambda x: (x, x.mean((2, 3))))
def named(): return Net(out=lambda x: {"features": x})
def tokens(): return Net(out=lambda x: x.flatten(2).transpose(1, 2))
def whole(): return Net(out=lambda x: x.mean((2, 3)).argmax(1))
def mixed(): return Net(out=lambda x: x.mean((0, 2, 3))[None])
def flat(): return Net(out=lambda x: x.flatten(1))
def hung(): return Net(projection_head=nn.Linear(4, 4))
def no_property(): return NoProperty()
def lazy(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(6, 1))
def nothing(): return None
def raising(): raise ValueError("no such luck")
def torchvisions(): return __import__("torchvision").models.resnet18(num_classes=3)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the trunk of a function of the module above, which lies in the current folder and is allowed."""
    (tmp_path / "my_trunks.py").write_text(SOURCE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    importlib.invalidate_caches()

    def make(name: str, **arguments: Any) -> Any:
        monkeypatch.setenv("ZOO_OWN_TRUNKS", f"other:thing, my_trunks:{name}")
        return create_trunk(f"my_trunks:{name}", **arguments)

    yield make
    sys.modules.pop("my_trunks", None)


def refusal(work: Callable[[], Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        work()
    assert caught.value.fix and caught.value.where
    return caught.value


# --- timm ---


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_mambaout"])
@torch.no_grad()
def test_a_network_of_timms_is_timms(name: str) -> None:
    theirs = timm.create_model(name, num_classes=0).eval()
    ours = create_trunk(f"timm:{name}").eval()
    assert type(ours) is type(theirs) and is_foreign(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    features = ours(X)
    assert torch.equal(features, theirs(X))
    assert features.shape == (2, ours.num_features) == (2, ours.fc.in_features)
    put_classifier(ours, nn.Linear(ours.num_features, 7))
    assert torch.equal(ours(X), ours.fc(features))


@torch.no_grad()
def test_maps_are_averaged_over_space() -> None:
    trunk = create_trunk("timm:test_resnet", options={"global_pool": ""}).eval()
    assert trunk.num_features == 96
    assert torch.allclose(trunk(X), trunk.forward_features(X).mean((2, 3)))
    swin = create_trunk("timm:swin_tiny_patch4_window7_224", options=SWIN).eval()
    assert swin.num_features == 96
    assert torch.allclose(
        swin(torch.ones(1, 3, 224, 224)), swin.forward_features(torch.ones(1, 3, 224, 224)).mean((1, 2))
    )


def test_options_and_channels_go_to_timm() -> None:
    trunk = create_trunk("timm:test_vit", channels=5, options={"img_size": 32, "embed_dim": 48})
    assert trunk.num_features == 48 and trunk.patch_embed.proj.weight.shape == (48, 5, 16, 16)


def test_a_trunk_on_the_meta_device() -> None:
    with torch.device("meta"):
        trunk = create_trunk("timm:test_resnet")
    assert trunk.num_features == 96 and all(p.is_meta for p in trunk.parameters())


@pytest.mark.parametrize(
    ("arch", "arguments", "words"),
    [
        ("timm:test_resnett", {}, ["no network of this name", "did you mean test_resnet or "]),
        ("timm:", {}, ["no network of this name"]),
        ("timm:test_resnet.r160_in1k", {}, ["no network of this name", "leave .r160_in1k away"]),
        ("timm:hf-hub:someone/thing", {}, ["no network of this name"]),
        ("timm:test_resnet", {"options": {"widht": 3}}, ["'widht'", "widht=3"]),
        ("timm:test_resnet", {"options": {"pretrained": True}}, ["not for a recipe"]),
        ("timm:test_resnet", {"options": {"checkpoint_path": "/etc/passwd"}}, ["not for a recipe"]),
        ("timm:test_resnet", {"options": {"num_classes": 5}}, ["not for a recipe", "no classifier"]),
        ("timm:test_resnet", {"stem": "small"}, ["doesn't take this", "stem", "trunk.stem=imagenet"]),
        ("timm:test_resnet", {"base_planes": 8}, ["doesn't take this", "trunk.base_planes=null"]),
        ("timm:test_resnet", {"norm_layer": nn.BatchNorm2d}, ["doesn't take this", "norm_layer"]),
        ("timm:test_resnet", {"replace_stride_with_dilation": [False, False, True]}, ["doesn't take this"]),
        ("timm:test_vit", {"options": {"global_pool": ""}}, ["(2, 101, 64)", "(N, F)", "averaged over"]),
        (
            "timm:test_vit",
            {"options": {"dynamic_img_size": False}, "size": 96},
            ["96 x 96 pixels and 3 channels", "(96)", "(160)", "dynamic_img_size=true", "img_size=N"],
        ),
        ("timn:test_resnet", {}, ["own code", "did you mean timm:test_resnet?"]),
        ("resnet51", {}, ["no trunk of this name", "did you mean resnet50", "timm:NAME"]),
    ],
)
def test_what_timm_does_not_have_or_take(arch: str, arguments: dict[str, Any], words: list[str]) -> None:
    said = str(refusal(lambda: create_trunk(arch, **arguments)))
    assert [word for word in words if word not in said] == []


def test_without_timm_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    error = refusal(lambda: create_trunk("timm:test_resnet"))
    assert error.fix == "pip install 'vision-model-zoo[timm]'"


# --- the user's own ---


@torch.no_grad()
def test_a_function_makes_a_trunk(own: Callable[..., Any]) -> None:
    trunk = own("maps", options={"width": 6}).eval()
    assert list(trunk.state_dict()) == [
        "conv.weight",
        *(f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
    ]
    assert trunk.num_features == trunk.fc.in_features == 6
    assert torch.equal(trunk(X), trunk.bn(trunk.conv(X)).mean((2, 3)))
    put_classifier(trunk, nn.Linear(6, 3))
    assert trunk(X).shape == (2, 3)
    assert "" not in sys.path


@torch.no_grad()
def test_copies_are_trunks_too(own: Callable[..., Any]) -> None:
    for name in ("maps", "sequence", "own_sequence"):
        trunk = own(name)
        other = copy.deepcopy(trunk)
        other.projection_head = nn.Linear(trunk.num_features, 2)  # as momentum encoders carry theirs
        other.requires_grad_(False)
        assert torch.equal(trunk.eval()(X), other.eval()(X))
        assert other(X).shape == (2, trunk.num_features)
        assert isinstance(trunk, nn.Sequential) == (name != "maps")


def test_trying_leaves_no_trace(own: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    own("counting")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    sys.modules["my_trunks"].Counting()
    assert torch.equal(torch.rand(1), drawn)  # the constructor draws, the trial doesn't
    trunk = own("counting")
    trunk.bn.eval()
    before = copy.deepcopy(trunk.state_dict())
    state = torch.get_rng_state()
    check_sizes(trunk, "my_trunks:counting", 3, [16, 8, 16])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in trunk.state_dict().items())
    assert trunk.calls == 0 and trunk.training and trunk.conv.training and not trunk.bn.training


def test_where_a_classifier_has_its_place(own: Callable[..., Any]) -> None:
    last = own("resnet")
    put_classifier(last, nn.Linear(4, 3))
    assert last(X).shape == (2, 3)
    for name in ("doubling", "logits"):
        trunk = own(name)
        error = refusal(lambda trunk=trunk: put_classifier(trunk, nn.Linear(trunk.num_features, 3)))
        assert "called fc" in error.what
    assert (own("doubling").num_features, own("logits").num_features) == (8, 9)


def test_the_same_network_each_time_is_one_trunk(
    own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own("maps")
    monkeypatch.setattr(sys.modules["my_trunks"], "maps", lambda: first)
    second = own("maps")
    assert second is first and len(second._forward_hooks) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", ["a tuple of 2", "(2, 4, 112, 112)", "(2, 4)", "(N, C, H, W)"]),
        ("named", ["a dict of 'features'", "(N, F)"]),
        ("tokens", ["(2, 12544, 4)", "averaged over the tokens"]),
        ("whole", ["(2,) (int64)", "(N, F)"]),
        ("mixed", ["(1, 4) for 2 images"]),
        ("chained", ["calls all of its children", "nn.Sequential"]),
        ("hung", ["a part called projection_head"]),
        ("no_property", ["a part called num_features"]),
        ("nothing", ["returned a NoneType"]),
        ("raising", ["failed (ValueError: no such luck)"]),
        ("VALUE", ["a int, which can't be called"]),
        ("mapz", ["has no mapz", "did you mean maps?", "my_trunks.py"]),
    ],
)
def test_what_is_no_trunk(own: Callable[..., Any], name: str, words: list[str]) -> None:
    said = str(refusal(lambda: own(name)))
    assert [word for word in words if word not in said] == []


def test_options_that_a_function_does_not_take(own: Callable[..., Any]) -> None:
    error = refusal(lambda: own("maps", options={"depth": 3}))
    assert "TypeError" in error.what and "'depth'" in error.what and error.where == "trunk.options: depth=3"


def test_sizes_are_tried(own: Callable[..., Any]) -> None:
    trunk = own("flat", size=16)
    check_sizes(trunk, "my_trunks:flat", 3, [16])
    error = refusal(lambda: check_sizes(trunk, "my_trunks:flat", 3, [16, 8]))
    assert "64 features of images of 8 x 8" in error.what and "256 of others" in error.what
    error = refusal(lambda: own("maps", channels=1))
    assert "224 x 224 pixels and 1 channel (" in error.what and "trunk.options alone" in str(error.fix)


def test_code_is_not_run_unless_it_is_named(
    own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_trunks.py").write_text("raise SystemExit('this ran')\n" + SOURCE, "utf-8")
    for allowed in (None, "", "my_trunks", "my_trunks:", "my_trunks:map", "my_trunks:maps2", "*", "maps"):
        monkeypatch.delenv("ZOO_OWN_TRUNKS", raising=False)
        if allowed is not None:
            monkeypatch.setenv("ZOO_OWN_TRUNKS", allowed)
        error = refusal(lambda: create_trunk("my_trunks:maps"))
        before = f"{allowed}," if allowed else ""
        assert str(error.fix).endswith(f"export ZOO_OWN_TRUNKS={before}my_trunks:maps")
    assert "my_trunks" not in sys.modules
    error = refusal(lambda: own("maps"))  # it runs now, and nothing that it does is a traceback
    assert "can't be imported (SystemExit: this ran)" in error.what


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("my_trunkz:maps", "can't be imported (ModuleNotFoundError: No module named 'my_trunkz')"),
        ("broken:maps", "can't be imported (SyntaxError"),
        ("my_trunks:maps:more", "not of the form MODULE:FUNCTION"),
        (":maps", "not of the form MODULE:FUNCTION"),
        ("my_trunks:", "not of the form MODULE:FUNCTION"),
    ],
)
def test_modules_that_cannot_be_imported(
    own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arch: str, words: str
) -> None:
    Path("broken.py").write_text("def maps(:\n", "utf-8")
    monkeypatch.setenv("ZOO_OWN_TRUNKS", arch)
    assert words in refusal(lambda: create_trunk(arch)).what


def test_lazy_layers_are_filled_by_the_trial(own: Callable[..., Any]) -> None:
    trunk = own("lazy")
    assert trunk.num_features == 6 and trunk[1].weight.shape == (6, 4, 1, 1)


# --- activation checkpointing ---


def test_blocks_that_are_known_are_recomputed_and_others_refused(own: Callable[..., Any]) -> None:
    trunk = own("torchvisions")
    assert type(trunk) is torchvision.models.ResNet
    recompute_blocks(trunk)
    error = refusal(lambda: recompute_blocks(create_trunk("timm:test_vit")))
    assert error.where == "engine.activation_checkpointing" and "VisionTransformer" in error.what
