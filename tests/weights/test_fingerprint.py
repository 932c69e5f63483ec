"""The features of the made picture: the same everywhere, and another network shows."""

from __future__ import annotations

import json

import pytest
import torch

from zoo.errors import InputError
from zoo.pretrain.publish import publish_run
from zoo.weights.bundle import read_bundle
from zoo.weights.fingerprint import features_differ, made_picture, record_features
from zoo.weights.formats.base import Network

from .published import bundle_at, describe, weights_of

HOW = describe().preprocessing
NETWORK = Network("resnet18", base_planes=8)


def record(tensors, how=HOW, network=NETWORK):
    return record_features(network, tensors, how, "here")


def test_the_picture_is_drawn_by_whole_numbers():
    picture = made_picture(256, 2)
    assert picture.dtype == torch.uint8 and picture.shape == (2, 256, 256)
    for c, y, x in ((0, 0, 0), (1, 3, 200), (0, 255, 255), (1, 17, 90)):
        wanted = (((c + 1) * x * x + (c + 2) * y * y + 3 * x * y) // 128 + 41 * c) % 256
        assert int(picture[c, y, x]) == wanted
    small = made_picture(64)
    assert small.shape == (3, 64, 64) and torch.equal(small[:2], picture[:, ::4, ::4])
    assert made_picture(32, 5).float().std() > 60  # no channel is a flat field


def test_the_record_of_the_same_weights_is_the_same():
    tensors = weights_of(describe(), 1)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    first = record(tensors)
    assert first == json.loads(json.dumps(first))
    assert len(first["values"]) == 16 and first["norm"] > 0
    torch.set_num_threads(2)
    try:
        assert record(tensors) == first
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert all(tensor.dtype == before[name].dtype for name, tensor in tensors.items())


def test_the_values_are_the_networks_features(tmp_path):
    import zoo

    bundle = bundle_at(tmp_path / "a", seed=2)
    found = record(weights_of(describe(), 2))
    model = zoo.load(str(bundle.path), progress=False).eval()
    with torch.no_grad():
        mean, std = (torch.tensor(HOW[key])[:, None, None] for key in ("mean", "std"))
        features = model(((made_picture(32) / 255 - mean) / std)[None])[0]
    torch.testing.assert_close(features[:16], torch.tensor(found["values"]), rtol=1e-3, atol=1e-4)
    assert float(features.norm()) == pytest.approx(found["norm"], rel=1e-3)


def test_other_networks_are_told_apart():
    tensors = weights_of(describe(), 1)
    recorded = record(tensors)
    assert features_differ(recorded, record(tensors)) is None
    near = {
        name: value * (1 + 1e-7) if value.is_floating_point() else value for name, value in tensors.items()
    }
    assert features_differ(recorded, record(near)) is None
    changed = dict(tensors)
    changed["layer1.0.conv1.weight"] = tensors["layer1.0.conv1.weight"] * 1.01
    assert "recorded is" in (features_differ(recorded, record(changed)) or "")
    assert features_differ(recorded, record(weights_of(describe(), 3))) is not None
    assert features_differ(recorded, record(tensors, {**HOW, "std": [0.228, 0.224, 0.225]})) is not None
    assert features_differ(recorded, {**recorded, "values": recorded["values"][:3]}) is not None
    assert features_differ(recorded, {**recorded, "norm": float("nan")}) is not None


def test_networks_that_compute_nothing_are_refused():
    tensors = weights_of(describe())
    tensors["bn1.running_var"][3] = float("nan")
    with pytest.raises(InputError, match="no finite numbers"):
        record(tensors)
    with pytest.raises(InputError, match="preprocessing") as caught:
        record(weights_of(describe()), {**HOW, "mean": [0.5], "std": [0.5]})
    assert caught.value.where == "here"


def test_gray_images_and_amdim_have_records_too():
    from zoo.models.factory import create_trunk

    gray = create_trunk("resnet18", base_planes=8, channels=1).state_dict()
    assert record(gray, {**HOW, "mean": [0.5], "std": [0.25]})["norm"] > 0
    options = {"encoder_size": 32, "ndf": 4, "n_rkhs": 16, "n_depth": 1}
    trunk = create_trunk("amdim", options=options).state_dict()
    assert len(record(trunk, HOW, Network("amdim", options=options))["values"]) == 16


def test_a_published_run_carries_it(run):
    first = publish_run(run, name="me/first")
    info = read_bundle(first.path).info
    assert info["features"]["picture"] == "rings-1" and len(info["features"]["values"]) == 16
    again = publish_run(run, name="me/first")
    assert not again.new and again.revision == first.revision


def test_a_description_without_it_has_no_such_field(tmp_path):
    assert "features" not in bundle_at(tmp_path / "a").info
    assert bundle_at(tmp_path / "b", describe(features={"picture": "p"})).info["features"] == {"picture": "p"}
