"""Weights in detectron2's model: what convert writes, features that must be the trunk's, layers that may be missing."""

from __future__ import annotations

import pytest
import torch

from weights.published import describe
from zoo.errors import RunError
from zoo.loading import load
from zoo.models.factory import create_trunk
from zoo.models.resnet import stage_features
from zoo.tensors import seeded
from zoo.weights.writers.detectron2 import largest_difference

from .detectron2_part import narrow, part

__all__ = ["narrow", "part"]


def test_what_convert_writes_loads_in_five_lines(narrow, tmp_path, command):
    out = tmp_path / "r50.pkl"
    code, text, err = command("convert", narrow, "--to", "detectron2", "-o", out, "--yaml")
    assert code == 0, err
    usage = [line.strip() for line in text.split("use it with:\n")[1].splitlines()]
    assert len(usage) == 5 and str(out.with_suffix(".yaml")) in text
    # As it is printed; there is no GPU here, which the third line speaks of.
    scope = {}
    exec("\n".join([*usage[:3], "cfg.MODEL.DEVICE = 'cpu'", *usage[3:]]), scope)
    model, trunk = scope["model"].eval(), load(narrow, progress=False).eval()
    assert str(out) == scope["cfg"].MODEL.WEIGHTS
    pixels = torch.randint(0, 256, (3, 64, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        res4 = model.backbone(model.preprocess_image([{"image": pixels}]).tensor)["res4"]
        how = trunk.zoo_info["preprocessing"]
        mean, std = (torch.tensor(how[key]).view(3, 1, 1) for key in ("mean", "std"))
        maps = stage_features(trunk, ((pixels / 255 - mean) / std)[None])
        res5 = model.roi_heads.res5(res4)
    assert largest_difference(res4, maps["layer3"]) < 1e-5
    assert largest_difference(res5, maps["layer4"]) < 1e-5


def test_a_network_that_no_c4_detector_takes(tmp_path, command, monkeypatch):
    """Its settings are those of a pyramid, in which all stages arrive; the file is called as the model is."""
    from detectron2 import checkpoint, config, modeling

    monkeypatch.chdir(tmp_path)
    with seeded(0):
        trunk = create_trunk("resnet18").eval()
        trunk.layer4[1].bn2.running_mean.uniform_(-0.3, 0.3)
    torch.save(trunk.state_dict(), "r18.tv.pth")
    code, text, err = command("convert", "r18.tv.pth", "--to", "detectron2", "--yaml")
    assert code == 0, err
    assert "three bottlenecks" in text and str(tmp_path / "r18.yaml") in text
    cfg = config.get_cfg()
    cfg.merge_from_file("r18.yaml", allow_unsafe=False)
    assert str(tmp_path / "r18.pkl") == cfg.MODEL.WEIGHTS and cfg.INPUT.FORMAT == "RGB"
    backbone = modeling.build_backbone(cfg).eval()
    checkpoint.DetectionCheckpointer(backbone).load(cfg.MODEL.WEIGHTS)
    with seeded(1), torch.no_grad():
        images = torch.randn(1, 3, 64, 96)
        found, wanted = backbone.bottom_up(images), stage_features(trunk, images)
    for number in (1, 2, 3, 4):
        assert largest_difference(found[f"res{number + 1}"], wanted[f"layer{number}"]) < 1e-5


@pytest.fixture
def built():
    """A narrow trunk and detectron2's model for it, with these settings changed."""
    from detectron2.config import get_cfg
    from detectron2.modeling import build_model

    from transfer.detect.detectron2_engine import heads  # noqa: F401
    from zoo.weights.formats.resnets import fit
    from zoo.weights.writers.detectron2_yaml import backbone_settings, flat

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = create_trunk("resnet50", base_planes=8).eval()
    how = describe().preprocessing

    def build(**changes):
        cfg = get_cfg()
        given = flat(backbone_settings("resnet50", fit(trunk.state_dict()).plan, how))
        given |= {"MODEL.DEVICE": "cpu", "MODEL.ROI_HEADS.NAME": "Res5ROIHeadsExtraNorm"}
        given |= {name.replace("__", "."): value for name, value in changes.items()}
        cfg.merge_from_list([part for pair in given.items() for part in pair])
        return trunk, how, build_model(cfg), cfg.INPUT.FORMAT

    return build


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"MODEL__RESNETS__STRIDE_IN_1X1": True}, "res3"),
        ({"INPUT__FORMAT": "BGR"}, "res2"),
        ({"MODEL__PIXEL_STD": [1.0, 1.0, 1.0]}, "res5"),
        ({"MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675]}, "res2"),
    ],
    ids=["stride", "order", "deviation", "mean"],
)
def test_features_that_are_off_are_refused(built, tmp_path, changes, stages):
    from transfer.detect.detectron2_engine.weights import check_features, write_backbone

    trunk, how, model, channels = built(**changes)
    write_backbone(tmp_path / "it.pkl", trunk)
    with pytest.raises(RunError, match="other features than torchvision") as caught:
        check_features(model, trunk, how, channels, tmp_path / "it.pkl")
    assert stages in str(caught.value)


def test_an_untrained_network_is_checked_with_drawn_statistics(built, tmp_path, monkeypatch):
    """Its own norms do nothing: two of their tensors that are mixed up are found all the same."""
    from transfer.detect.detectron2_engine import weights

    trunk, how, model, channels = built()
    weights.write_backbone(tmp_path / "it.pkl", trunk)
    found = weights.check_features(model, trunk, how, channels, tmp_path / "it.pkl")
    assert max(found.values()) < 1e-4 and [file.name for file in tmp_path.iterdir()] == ["it.pkl"]

    def mixed_up(state):
        arrays = whole(state)
        mean, bias = "res3.0.conv1.norm.running_mean", "res3.0.conv1.norm.bias"
        return {**arrays, mean: arrays[bias], bias: arrays[mean]}

    whole = weights.detectron2_arrays
    monkeypatch.setattr(weights, "detectron2_arrays", mixed_up)
    with pytest.raises(RunError, match="other features"):
        weights.check_features(model, trunk, how, channels, tmp_path / "it.pkl")


def test_images_without_boxes(built):
    from detectron2.utils.events import EventStorage

    from transfer.detect.batches import DetectionBatch
    from transfer.detect.detectron2_engine.data import inputs_of
    from transfer.detect.detectron2_engine.draws import keyed_samples

    _, _, model, _ = built(MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE=16)
    with seeded(0):
        views = [torch.randint(0, 256, (3, 64, width), dtype=torch.uint8) for width in (64, 80)]
    boxes = [torch.zeros(0, 4), torch.tensor([[5.0, 5.0, 50.0, 60.0]])]
    labels = [torch.zeros(0, dtype=torch.int64), torch.tensor([3])]
    for rows in ([0], [0, 1]):
        parts = ([column[row] for row in rows] for column in (views, boxes, labels, [None, None]))
        batch = DetectionBatch(*parts, torch.tensor(rows), rows)
        with seeded(0), EventStorage(), keyed_samples(model):
            losses = model.train()(inputs_of(batch))
        assert all(loss.isfinite() for loss in losses.values())
        assert (float(losses["loss_box_reg"].detach()) > 0) == (len(rows) == 2)


def test_what_may_be_missing_and_what_not(built, tmp_path):
    from transfer.detect.detectron2_engine.weights import load_backbone, write_backbone
    from zoo.weights.writers.detectron2 import detectron2_arrays, write_arrays

    trunk, _, model, _ = built()
    write_backbone(tmp_path / "it.pkl", trunk)
    load_backbone(model, tmp_path / "it.pkl")
    missing = {name for name, value in model.state_dict().items() if value.isnan().any()}
    starts = ("proposal_generator.", "roi_heads.box_predictor.", "roi_heads.res5.norm.")
    assert len(missing) == 14 and all(name.startswith(starts) for name in missing)
    arrays = detectron2_arrays({k: v for k, v in trunk.state_dict().items() if not k.startswith("fc.")})
    write_arrays(
        tmp_path / "less.pkl", {k: v for k, v in arrays.items() if not k.startswith("res4.5.conv2.")}
    )
    with pytest.raises(RunError, match=r"backbone\.res4\.5\.conv2") as caught:
        load_backbone(model, tmp_path / "less.pkl")
    assert "5 tensors" in str(caught.value)
