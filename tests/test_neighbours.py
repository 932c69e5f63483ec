"""``zoo neighbours``: the nearest images by hand, the query left out, ties in order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import zoo
from tiny import half_jpeg, image_folder, save_image
from weights.published import assert_clear, command, isolate, publish
from zoo.data.builtin import PhotoPatches
from zoo.errors import InputError
from zoo.neighbourhood import neighbours

__all__ = ["command"]


@pytest.fixture(autouse=True)
def _homes(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    publish()


@pytest.fixture
def images(tmp_path):
    """12 images in two folders."""
    return image_folder(tmp_path / "photos", 12, 2, 40)


def pictures(folder: Path) -> list[str]:
    return [str(file) for file in sorted(folder.rglob("*.png"))]


def cosines(images: Path, index: int) -> torch.Tensor:
    features = zoo.extract("me/small", str(images), exact=True)["features"].double()
    features = features / features.norm(dim=1, keepdim=True)
    return features @ features[index]


def test_the_nearest_come_first_and_the_query_not_at_all(images):
    files = pictures(images)
    (found,) = neighbours("me/small", str(images), files[3], k=5)
    by_hand = cosines(images, 3)
    by_hand[3] = -2
    assert found.ids.tolist() == by_hand.argsort(descending=True)[:5].tolist()
    assert found.images == tuple(files[index] for index in found.ids.tolist())
    torch.testing.assert_close(found.scores.double(), by_hand[found.ids], rtol=0, atol=1e-6)
    assert found.left_out == (files[3],)


def test_a_query_by_its_path_in_the_collection_or_of_any_other_file(images, tmp_path, monkeypatch):
    files = pictures(images)
    outside = save_image(tmp_path / "other.png", 99, 40)
    inside, other = neighbours("me/small", str(images), ["class1/003.png", outside], k=3)
    (by_path,) = neighbours("me/small", str(images), files[7], k=3)
    assert files[7].endswith("class1/003.png")
    assert inside.left_out == by_path.left_out == (files[7],)
    assert inside.images == by_path.images and torch.equal(inside.scores, by_path.scores)
    assert other.left_out == () and len(other.images) == 3 and other.query == str(outside)
    # A path that exists wins over one in the collection.
    monkeypatch.chdir(tmp_path)
    save_image(tmp_path / "class1" / "003.png", 99, 40)
    (here,) = neighbours("me/small", str(images), "class1/003.png", k=3)
    assert here.images == other.images and here.left_out == ()


def test_copies_of_the_query_are_left_out_and_named(images, tmp_path):
    files = pictures(images)
    shutil.copy(files[0], images / "class1" / "again.png")
    shutil.copy(files[0], tmp_path / "copy.png")
    (tmp_path / "link.png").symlink_to(files[0])
    expected = (files[0], str(images / "class1" / "again.png"))
    for query in (files[0], tmp_path / "copy.png", tmp_path / "link.png"):
        (found,) = neighbours("me/small", str(images), query, k=20)
        assert found.left_out == expected and len(found.images) == 11


def test_equally_near_images_come_in_their_order(images, tmp_path):
    save_image(tmp_path / "query.png", 50, 40)
    for name in ("z", "m", "a"):  # the same pixels again and again, all over the collection
        shutil.copy(images / "class0" / "004.png", images / "class1" / f"{name}.png")
    (found,) = neighbours("me/small", str(images), tmp_path / "query.png", k=15)
    places = [place for place, image in enumerate(found.images) if Path(image).stem in ["004", "z", "m", "a"]]
    assert [Path(found.images[place]).stem for place in places] == ["004", "a", "m", "z"]
    assert len({float(found.scores[place]) for place in places}) == 1
    assert places == list(range(places[0], places[0] + 4))


def test_a_score_does_not_depend_on_the_other_images(images, tmp_path):
    files = pictures(images)
    (whole,) = neighbours("me/small", str(images), files[0], k=11, batch_size=8)
    for place, file in enumerate(whole.images[:3]):
        (tmp_path / "list.txt").write_text(f"{file}\n")
        (alone,) = neighbours("me/small", str(tmp_path / "list.txt"), files[0], batch_size=8)
        assert torch.equal(alone.scores[0], whole.scores[place])


def test_more_neighbours_than_images_are_all_of_them(images, caplog):
    with caplog.at_level("WARNING", "zoo"):
        (found,) = neighbours("me/small", str(images), pictures(images)[0], k=100)
    assert len(found.images) == 11
    assert "only 11 images to choose from, not 100" in caplog.text


def test_images_without_files_are_named_by_number(tmp_path):
    class Few(PhotoPatches):
        def __len__(self) -> int:
            return 30

    outside = save_image(tmp_path / "other.png", 0)
    first, same, other = neighbours("me/small", Few("val"), ["4", "builtin:photos[4]", str(outside)], k=3)
    assert first.left_out == same.left_out == ("builtin:photos[4]",) and other.left_out == ()
    assert first.images == same.images and "builtin:photos[4]" not in first.images
    for query in ("30", "cifar10[4]", "four"):
        with pytest.raises(InputError, match="neither a picture's path nor the number"):
            neighbours("me/small", Few("val"), query)


def test_a_loaded_model_searches_and_comes_back_as_it_was(images):
    model = zoo.load("me/small", progress=False)
    (found,) = zoo.neighbours(model, str(images), pictures(images)[0])
    (again,) = zoo.neighbours("me/small", str(images), pictures(images)[0])
    assert model.training and torch.equal(found.scores, again.scores)


def test_bad_queries(images, tmp_path):
    half_jpeg(tmp_path / "half.jpg")
    with pytest.raises(InputError) as caught:
        neighbours("me/small", str(images), [pictures(images)[0], tmp_path / "half.jpg"])
    assert caught.value.where == str(tmp_path / "half.jpg")
    for query in ("class0/999.png", str(tmp_path), ""):
        with pytest.raises(InputError, match="no such picture"):
            neighbours("me/small", str(images), query)
    with pytest.raises(InputError, match="No picture was named"):
        neighbours("me/small", str(images), [])
    with pytest.raises(InputError, match="At least one"):
        neighbours("me/small", str(images), pictures(images)[0], k=0)


def test_on_the_command_line(images, tmp_path, command):
    files = pictures(images)
    words = ("neighbours", "me/small", images, "--query", "class0/000.png", "--query", files[1], "-k", 4)
    code, out, err = command(*words)
    assert code == 0 and out.count(": the 4 nearest images") == 2
    assert f"note: class0/000.png is in the collection and left out: {files[0]}" in err
    rows = [line.split() for line in out.splitlines()[2:6]]
    (found, _) = neighbours("me/small", str(images), [files[0], files[1]], k=4)
    assert [row[0] for row in rows] == list(found.images)
    code, out, err = command(*words, "--json", "--quiet")
    document = json.loads(out)
    assert err == ""
    assert (code, document["schema"], len(document["queries"])) == (0, 1, 2)
    assert document["queries"][0]["neighbours"] == found.rows()
    assert document["queries"][0]["left_out"] == [files[0]]
    assert_clear(command("neighbours", "me/small", images, "--query", "no.png"), "no.png", "relative to")
    assert_clear(command("neighbours", "me/smal", images, "--query", files[0]), "did you mean me/small")
    assert_clear(command("neighbours", "me/small", tmp_path / "no", "--query", files[0]), "no")
    code, out, err = command("neighbours", "me/small", images)
    assert (code, out) == (2, "") and "--query" in err
