"""AMDIM's own checkpoints: what its code wants, what comes back, and what contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tiny import image_folder
from zoo.conversion import convert
from zoo.errors import InputError
from zoo.models.amdim import AMDIMEncoder
from zoo.models.factory import create_trunk
from zoo.models.heads import feature_classifier
from zoo.pretrain.run import start
from zoo.weights.bundle import write_bundle
from zoo.weights.formats import identify, read_model
from zoo.weights.formats.base import ForeignModel

from ..formats.layouts import manifest, save, with_prefix
from ..published import assert_clear, bundle_at, command, describe, isolate
from .sources import backbone, same

__all__ = ["command"]

OPTIONS = {"encoder_size": 32, "ndf": 4, "n_rkhs": 20, "n_depth": 2, "use_bn": False}
X = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LINEAR = "evaluator.block_glb_lin.block_forward.2"
MLP = "evaluator.block_glb_mlp.block_forward"


def encoder(batches: int = 0, **changes: Any) -> AMDIMEncoder:
    """A small encoder, every residual of it at work, that has seen some batches in training."""
    torch.manual_seed(1)
    trunk = create_trunk("amdim", options={**OPTIONS, **changes})
    assert isinstance(trunk, AMDIMEncoder)
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.any():
            nn.init.kaiming_normal_(module.weight)
    side = trunk.encoder_size
    for seed in range(batches):
        trunk.train().maps(torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(seed)))
    return trunk.eval()


def evaluators(dim: int = 20, classes: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    mlp, linear = feature_classifier(dim, classes, 1024, 0.2), nn.Linear(dim, classes)
    return {**with_prefix(f"{MLP}.", mlp.state_dict()), **with_prefix(f"{LINEAR}.", linear.state_dict())}


def checkpoint(trunk: AMDIMEncoder, hyperparams: dict[str, Any] | None = None) -> dict[str, Any]:
    """As AMDIM's code saves it."""
    masks = {"g2l_loss.masks_r5": torch.eye(25).byte().view(25, 1, 5, 5)}
    state = {**with_prefix("encoder.module.", trunk.state_dict()), **masks, **evaluators(trunk.num_features)}
    given = {"n_classes": 5, "tclip": 13.0, **trunk.options, **(hyperparams or {})}
    cursor = {"info_epoch": 7, "info_step": 70, "classifier_epoch": 2, "classifier_step": 9}
    return {"model": state, "hyperparams": given, "cursor": cursor}


def answers(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.eval()(X), *model.maps(X)]


def assert_near(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Equal weights lie elsewhere in memory, which decides on some processors how sums are rounded."""
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of AMDIM with classifiers beside the encoder, norms inside, and a clip of its own."""
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, tmp_path_factory.mktemp("homes"))
        overrides = {
            "trunk.options": {**OPTIONS, "use_bn": True},
            "method.clip": 13.0,
            "optimizer.lr": 0.01,
            "schedule.warmup_steps": 1,
            "batch_size": 4,
            "samples": 32,  # eight steps, four epochs
            "precision": "float32",
            "device": "cpu",
            "data.workers": 0,
        }
        images = image_folder(tmp_path_factory.mktemp("images"), count=8)
        out = tmp_path_factory.mktemp("runs") / "amdim"
        return start(
            "amdim_ndf128_cifar10", data=str(images), out=out, overrides=overrides, progress="quiet"
        ).path


# --- there and back ---


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_run_published_written_and_read_back(run: Path, tmp_path: Path, legacy: bool) -> None:
    zoo.publish(run, name="me/amdim")
    published = zoo.load("me/amdim", progress=False)
    done = convert("me/amdim", to="amdim", out=tmp_path / "amdim_cpt.pth", legacy=legacy)
    assert (done.path.read_bytes()[:2] == b"PK") is not legacy

    value = torch.load(done.path, weights_only=True)
    assert list(value) == ["model", "hyperparams", "cursor"]
    wanted = {"ndf": 4, "n_classes": 2, "n_rkhs": 20, "tclip": 13.0, "n_depth": 2, "encoder_size": 32}
    assert list(value["hyperparams"].items()) == [*wanted.items(), ("use_bn", True)]
    assert value["cursor"] == {"info_epoch": 4, "info_step": 8, "classifier_epoch": 0, "classifier_step": 0}

    model = zoo.load(str(done.path), progress=False)
    assert same(model.state_dict(), published.state_dict())
    assert_near(answers(model), answers(published))
    assert model.options == published.options == {**OPTIONS, "use_bn": True}
    assert model.zoo_info["facts"]["hyperparams"]["tclip"] == 13.0
    assert any("tclip 20 and use_bn False" in note for note in done.notes)
    logits = [
        zoo.load(str(path), classifier="own", progress=False).eval() for path in ("me/amdim", done.path)
    ]
    with torch.no_grad():
        assert_near([logits[0](X)], [logits[1](X)])
        assert logits[0](X).shape == (3, 2)

    # And once more, from the file and from what is made of it: nothing is lost on the way.
    convert(done.path, to="bundle", out=tmp_path / "bundle")
    for source in (done.path, tmp_path / "bundle"):
        again = convert(source, to="amdim", out=tmp_path / "again.pth", force=True)
        other = torch.load(again.path, weights_only=True)
        assert other["hyperparams"] == value["hyperparams"] and other["cursor"] == value["cursor"]
        assert same(other["model"], value["model"])


def test_the_run_itself_can_be_written(run: Path, tmp_path: Path) -> None:
    files = [
        convert(source, to="amdim", out=tmp_path / f"{number}.pth").path
        for number, source in enumerate((run, f"run:{run}"))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    kept = read_model(files[0])
    assert set(kept.heads) == {
        f"mlp_classifier.{name}" for name in feature_classifier(20, 2, 1024).state_dict()
    }
    assert len(kept.classifier["weight"]) == 2 and kept.classifier["weight"].any()


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_a_file_of_the_released_code_comes_back(tmp_path: Path, container: str) -> None:
    before = checkpoint(encoder(3, use_bn=True))
    file = save(tmp_path / "before.pth", before, container)
    done = convert(file, to="amdim", out=tmp_path / "after.pth", legacy=container == "legacy")
    after = torch.load(done.path, weights_only=True)
    assert same(after["model"], before["model"])
    assert after["hyperparams"] == before["hyperparams"] and after["cursor"] == before["cursor"]
    assert "kept beside the trunk, heads: mlp_classifier (8 tensors)" in done.notes


# --- what the released code wants ---


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks_r5 = nn.Parameter(torch.zeros(25, 1, 5, 5, dtype=torch.uint8), requires_grad=False)


def under(*names: str, module: nn.Module) -> nn.Module:
    for part in reversed(names):
        module = nn.ModuleDict({part: module})
    return module


def model_of(hyperparams: dict[str, Any]) -> nn.Module:
    """The modules that AMDIM's code makes of a file's hyperparams, in its order."""
    dim, classes = hyperparams["n_rkhs"], hyperparams["n_classes"]
    options = {key: hyperparams[key] for key in ("ndf", "n_rkhs", "n_depth", "encoder_size")}
    return nn.ModuleDict(
        {
            "encoder": under("module", module=create_trunk("amdim", options=options)),
            "g2l_loss": Masks(),
            "evaluator": nn.ModuleDict(
                {
                    "block_glb_mlp": under("block_forward", module=feature_classifier(dim, classes, 1024)),
                    "block_glb_lin": under("block_forward", module=feature_classifier(dim, classes)),
                }
            ),
        }
    )


def test_the_released_code_restores_it_strictly(run: Path, tmp_path: Path) -> None:
    file = convert(run, to="amdim", out=tmp_path / "amdim_cpt.pth").path
    value = torch.load(file, weights_only=True)
    model = model_of(value["hyperparams"])
    assert list(model.state_dict()) == list(value["model"])
    model.load_state_dict(value["model"], strict=True)
    masks = value["model"]["g2l_loss.masks_r5"]
    assert all(int(masks[5 * row + column, 0, row, column]) == 1 for row in range(5) for column in range(5))
    assert int(masks.sum()) == 25


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("amdim_c10_32_ndf128_rkhs1024_rd3", {"n_depth": 3}),
        ("amdim_stl10_64_ndf128_rkhs1024_rd3", {"encoder_size": 64, "n_rkhs": 32, "n_depth": 3}),
        ("amdim_in128_ndf192_rkhs1536_rd8", {"encoder_size": 128, "n_rkhs": 32, "n_depth": 8, "ndf": 2}),
    ],
)
def test_keys_and_types_are_those_of_published_files(
    shared: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    file = save(tmp_path / "trunk.pth", encoder(**options).state_dict())
    value = torch.load(convert(file, to="amdim", out=tmp_path / "out.pth").path, weights_only=True)
    published = manifest(shared, name)
    kinds = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}
    assert {key: (kinds[t.dtype], t.ndim) for key, t in value["model"].items()} == {
        key: (text.split()[0], len(text.split()[1].split(",")) if " " in text.strip() else 0)
        for key, text in published["state_dict"].items()
    }
    assert list(value["model"]) == list(published["state_dict"])
    assert list(value["hyperparams"]) == list(published["wrapper"]["hyperparams"])
    assert list(value["cursor"]) == list(published["wrapper"]["cursor"])


def test_classifiers_that_are_not_there_are_zeros_and_none_when_read(tmp_path: Path) -> None:
    trunk = encoder(2)
    done = convert(save(tmp_path / "trunk.pth", trunk.state_dict()), to="amdim", out=tmp_path / "out.pth")
    value = torch.load(done.path, weights_only=True)
    assert value["hyperparams"]["n_classes"] == 1000 and value["hyperparams"]["tclip"] == 20.0
    model_of(value["hyperparams"]).load_state_dict(value["model"], strict=True)
    assert (
        len([note for note in done.notes if "is not in the model: written as zeros, 1000 classes" in note])
        == 2
    )
    assert any("nothing says which tclip" in note for note in done.notes)
    back = read_model(done.path)
    assert same(back.trunk, trunk.state_dict()) and not back.classifier and not back.heads
    assert "never trained" in back.account.sentence()
    with pytest.raises(InputError, match="no classifier"):
        zoo.load(str(done.path), classifier="own", progress=False)


def test_heads_of_other_methods_stay_behind(tmp_path: Path) -> None:
    what = describe(arch="amdim", base_planes=None, num_features=20, options=OPTIONS, method="simclr")
    trunk = encoder(1)
    heads = {"projection_head.weight": torch.ones(4, 20), "mlp_classifier.2.weight": torch.ones(8, 20)}
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", what, trunk.state_dict(), heads, "# A card\n")
    done = convert(tmp_path / "bundle", to="amdim", out=tmp_path / "out.pth")
    assert any("left out" in note and "heads: projection_head (1 tensors)" in note for note in done.notes)
    assert any("block_glb_mlp is of another kind" in note for note in done.notes)
    assert any("left out" not in note and "crop 32" in note for note in done.notes)  # how images are prepared
    assert same(read_model(done.path).trunk, trunk.state_dict())


# --- what is refused ---


def test_what_it_has_no_place_for(tmp_path: Path) -> None:
    resnet = bundle_at(tmp_path / "resnet").path
    gray = {"mean": [0.5], "std": [0.25], "resize": 32, "crop": 32, "interpolation": "bicubic"}
    trunk = create_trunk("amdim", options=OPTIONS, channels=1)
    what = describe(arch="amdim", base_planes=None, num_features=20, options=OPTIONS, preprocessing=gray)
    (tmp_path / "gray").mkdir()
    write_bundle(tmp_path / "gray", what, trunk.state_dict(), {}, "# A card\n")
    for source, words in ((resnet, "AMDIM's encoders only"), (tmp_path / "gray", "3 channels, not 1")):
        with pytest.raises(InputError, match=words) as caught:
            convert(source, to="amdim", out=tmp_path / "out.pth")
        assert "bundle" in str(caught.value.fix)
    assert not (tmp_path / "out.pth").exists()


def test_only_torchs_files_have_another_container(tmp_path: Path, command: Callable[..., Any]) -> None:
    file = save(tmp_path / "trunk.pth", encoder().state_dict())
    answer = command("convert", file, "--out", tmp_path / "out", "--legacy")
    assert_clear(answer, "--legacy", "bundle", "torchvision, amdim")
    code, out, err = command(
        "convert", file, "--to", "amdim", "-o", tmp_path / "out.pth", "--legacy", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["to"] == "amdim"
    assert (tmp_path / "out.pth").read_bytes()[:2] != b"PK"
    code, out, _ = command("doctor", tmp_path / "out.pth")
    assert code == 0 and "tclip" in out


def test_a_torchvision_file_in_the_older_container(tmp_path: Path) -> None:
    trunk = backbone()
    file = save(tmp_path / "it.pth", trunk)
    done = convert(file, to="torchvision", out=tmp_path / "out.pth", legacy=True)
    assert done.path.read_bytes()[:2] != b"PK"
    assert same(read_model(done.path).trunk, trunk)


# --- contradictions ---


def read(trunk: AMDIMEncoder, **hyperparams: Any) -> ForeignModel:
    return identify(checkpoint(trunk, hyperparams), "file")


@pytest.mark.parametrize(
    ("use_bn", "said", "words"),
    [
        (True, False, "hyperparams say use_bn False, but the norms inside have counted as many batches"),
        (
            False,
            True,
            "hyperparams say use_bn True, but the norms inside have counted no batch: False is used",
        ),
        (True, None, "use_bn is not in the file: True"),
        (False, None, "use_bn is not in the file: False"),
        (True, True, None),
        (False, False, None),
        (False, 0, None),
    ],
)
def test_use_bn_is_held_against_what_the_norms_have_counted(
    use_bn: bool, said: bool | None, words: str | None
) -> None:
    trunk = encoder(3, use_bn=use_bn)
    value = checkpoint(trunk, {"use_bn": said})
    if said is None:
        del value["hyperparams"]["use_bn"]
    model = identify(value, "file")
    assert model.network.options["use_bn"] is use_bn
    account = model.account.sentence()
    assert words in account if words is not None else "use_bn" not in account


@pytest.mark.parametrize("said", [True, False])
def test_norms_that_counted_for_a_while_or_never_say_nothing(said: bool) -> None:
    trunk = encoder(2, use_bn=True)
    state = trunk.state_dict()
    state["layer_list.8.bn.num_batches_tracked"].add_(2)  # as after AMDIM's code restored it without them
    fresh = encoder()
    for model in (read(trunk, use_bn=said), read(fresh, use_bn=said)):
        assert model.network.options["use_bn"] is said
        assert "use_bn" not in model.account.sentence()


def test_other_hyperparams_that_the_tensors_contradict() -> None:
    model = read(encoder(), ndf=5, n_depth=7, n_classes=10, n_rkhs=24, encoder_size=64)
    account = model.account.sentence()
    for key, said, found in (
        ("ndf", 5, 4), ("n_depth", 7, 2), ("n_classes", 10, 5), ("n_rkhs", 24, 20), ("encoder_size", 64, 32),
    ):  # fmt: skip
        assert f"hyperparams say {key} {said}, the tensors {found}: the tensors count" in account
    assert model.network.options == OPTIONS
    assert "hyperparams" not in read(encoder()).account.sentence()
