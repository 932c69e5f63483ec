"""``zoo.extract``: the same features in any company, whole files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zoo
from tiny import half_jpeg, image_folder, save_image
from zoo.errors import InputError

from .published import assert_clear, publish


@pytest.fixture
def images(tmp_path):
    publish()
    return image_folder(tmp_path / "images", 10, 2, 40)


def test_an_image_alone_and_among_many_has_the_same_bits(images, tmp_path):
    many = zoo.extract("me/small", str(images))
    assert many["features"].shape == (10, 64) and many["features"].dtype == torch.float32
    assert many["ids"].tolist() == list(range(10))
    assert many["labels"].tolist() == [0] * 5 + [1] * 5
    for index, path in enumerate(sorted(images.rglob("*.png"))):
        alone = tmp_path / "alone" / str(index)
        alone.mkdir(parents=True)
        (alone / "only.png").write_bytes(path.read_bytes())
        found = zoo.extract("me/small", str(alone))
        assert torch.equal(found["features"][0], many["features"][index])
        assert found["labels"].tolist() == [-1]
    torch.testing.assert_close(
        zoo.extract("me/small", str(images), batch_size=1, exact=True)["features"],
        zoo.extract("me/small", str(images), exact=True)["features"],
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_loaded_model_extracts_and_comes_back_as_it_was(images):
    model = zoo.load("me/small", progress=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    features = zoo.extract(model, str(images))["features"]
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(features, zoo.extract("me/small", str(images))["features"])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_holds_what_is_returned(images, tmp_path, suffix):
    found = zoo.extract("me/small", str(images), out=tmp_path / f"f{suffix}")
    if suffix == ".npz":
        with np.load(tmp_path / "f.npz") as file:
            read = {key: torch.from_numpy(file[key]) for key in file.files}
    else:
        read = load_file(tmp_path / "f.safetensors")
    assert read.keys() == found.keys() == {"ids", "labels", "features"}
    assert all(torch.equal(read[key], found[key]) for key in read)
    assert not list(tmp_path.glob(".*.tmp"))


def test_another_suffix_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match=r"\.safetensors, \.npz or \.parquet"):
        zoo.extract("no/model", "nowhere", out=tmp_path / "f.csv")


def test_a_bad_image_is_named_and_nothing_is_written(images, tmp_path):
    half_jpeg(images / "class0" / "bad.jpg")
    with pytest.raises(InputError) as caught:
        zoo.extract("me/small", str(images), out=tmp_path / "f.npz")
    assert caught.value.where.endswith("bad.jpg")
    assert not (tmp_path / "f.npz").exists()


def test_a_place_that_is_not_there_is_an_error_in_words(images, tmp_path):
    with pytest.raises(InputError, match="folder to write to isn't there") as caught:
        zoo.extract("me/small", str(images), out=tmp_path / "no" / "f.npz")
    assert caught.value.where == str(tmp_path / "no")


def test_on_the_command_line(images, tmp_path, command):
    code, out, _ = command("extract", "me/small", images, "-o", tmp_path / "f.npz")
    assert (code, out) == (0, f"{tmp_path / 'f.npz'}: 10 x 64 features\n")
    assert_clear(command("extract", "me/small", images, "-o", tmp_path / "f.csv"), "f.csv")
    assert_clear(command("extract", "me/smal", images, "-o", tmp_path / "f.npz"), "did you mean me/small")
    assert_clear(command("extract", "me/small", tmp_path / "no", "-o", tmp_path / "f.npz"), "no")
    save_image(tmp_path / "one.png", 0)
    (tmp_path / "list.txt").write_text("one.png\n")
    code, out, _ = command("extract", "random:resnet18", tmp_path / "list.txt", "-o", tmp_path / "g.npz")
    assert code == 0 and "1 x 512" in out
