"""``zoo views``: what training would see, as a picture and as JSON."""

from __future__ import annotations

import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from pillow_views import plain_view

from tiny import image_folder, pixels, save_image
from zoo.data.folder import open_folder
from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.grid import describe_view, draw_grid
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.data.views.presets import PRESETS, find_preset
from zoo.errors import InputError
from zoo.pretrain.resolve import list_recipes
from zoo.pretrain.show_views import show_views

PAPER = (255, 255, 255)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), 10, side=60)


@pytest.fixture(scope="module")
def photo(shared):
    return sorted((shared / "data" / "imagenet_like" / "imagen40" / "val").glob("*/*"))[0]


# --- the picture ---


def painted(params, channels=3):
    """Views of one colour that nothing else on the page has."""
    return [
        np.full((view.size, view.size, channels), [1, 200, 2, 0, 0][:channels], np.uint8) for view in params
    ]


def grid(plan, images, name="x.png", params=None):
    rows = []
    for key, image in enumerate(images):
        drawn = params or PlannedViews(plan).params(*image.shape[:2], key)
        rows.append((name, image, painted(drawn, image.shape[2]), drawn))
    return np.asarray(draw_grid(rows, plan, "title"))


def ink(page):
    return (page != PAPER).any(axis=2)


def paint(page):
    return (page == (1, 200, 2)).all(axis=2)


def test_every_view_is_there_and_nothing_is_cut_off():
    page = grid(find_preset("swav").plan, [pixels(0, 300), pixels(1, 200)])
    assert paint(page).sum() == 2 * (2 * 224**2 + 6 * 96**2)
    assert set(paint(page).sum(axis=1)) == {0, 2 * 224, 2 * 224 + 6 * 96}
    # Views stand below one another, though the images differ in width.
    rows = np.flatnonzero(paint(page).any(axis=1))
    assert np.array_equal(paint(page)[rows[0]], paint(page)[rows[-1] - 223])
    border = ink(page)
    assert not (border[:6].any() or border[-6:].any() or border[:, :6].any() or border[:, -6:].any())


@pytest.mark.parametrize("size", [16, 32])
def test_small_views_and_images_are_enlarged(size):
    page = grid(ViewPlan((CropSpec(size, 0.2, 1.0),)), [np.zeros((size, size, 3), np.uint8)])
    assert paint(page).sum() == 96**2
    assert (page == 0).all(axis=2).sum() > 0.7 * 96**2


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2000), (3000, 3), (40, 30), (1500, 2000)])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_images_of_any_shape(height, width, channels):
    image = np.zeros((height, width, channels), np.uint8)
    page = grid(find_preset("swav-2x224+4x96").plan, [image, image])
    if channels >= 3:
        assert paint(page).sum() == 2 * (2 * 224**2 + 4 * 96**2)
    assert 700 < page.shape[1] < 2000


def test_texts_do_not_overlap():
    """Long texts make their column wider: between the columns runs a stripe of empty paper."""
    plan = ViewPlan((CropSpec(32, 0.9, 1.0),) * 5)
    image = np.zeros((40, 40, 3), np.uint8)
    short = [plain_view(image, size=32)] * 5
    long = [plain_view(image, size=32, top=10_345, left=20_456, height=33_333, width=44_444)] * 5
    assert grid(plan, [image], params=long).shape[1] > grid(plan, [image], params=short).shape[1]
    # The second row's texts are the long ones.
    rows = [("x.png", image, painted(params), params) for params in (short, long)]
    page = np.asarray(draw_grid(rows, plan, "title"))
    first = paint(page).any(axis=0).argmax()
    empty = np.flatnonzero(~ink(page)[45:, first:].any(axis=0))
    stripes = np.split(empty, np.flatnonzero(np.diff(empty) > 1) + 1)
    assert sum(len(stripe) >= 10 for stripe in stripes) == 5


def test_no_number_hides_another_one():
    plan = ViewPlan((CropSpec(32, 0.9, 1.0),) * 8)
    image = np.full((300, 300, 3), 255, np.uint8)
    page = grid(plan, [image], params=[plain_view(image, size=32, top=100, left=290, height=9, width=9)] * 8)
    tags = page[12:, 12:312]
    for colour in ("e6194b", "3cb44b", "4363d8", "f58231", "911eb4", "008080", "9a6324", "000075"):
        assert (tags == tuple(bytes.fromhex(colour))).all(axis=2).sum() > 0.5 * 12 * 15


def test_a_long_name_is_not_cut_off():
    plan = ViewPlan((CropSpec(32, 0.2, 1.0),))
    name = "a_long_name_" * 20
    page = grid(plan, [pixels(0, 40)], name)
    assert page.shape[1] > 1000
    assert not ink(page)[:, -6:].any()


def test_names_that_the_font_can_not_write_stay_apart():
    plan, image = PRESETS["amdim-32"].plan, pixels(0)
    names = ("猫.jpg", "犬.jpg", "a\nb.jpg", "a\nc.jpg", os.fsdecode(b"\xff.jpg"), os.fsdecode(b"\xfe.jpg"))
    pages = {name: grid(plan, [image], name) for name in names}
    assert len({page.tobytes() for page in pages.values()}) == len(names)
    assert len({len(page) for page in pages.values()}) == 1  # each on one line


def test_boxes_are_where_the_crops_are():
    plan = ViewPlan((CropSpec(96, 0.2, 0.3),))
    image = np.full((200, 200, 3), 255, np.uint8)
    view = plain_view(image, top=50, left=80, height=60, width=70, size=96)
    page = np.asarray(draw_grid([("x", image, [np.zeros((96, 96, 3), np.uint8)], [view])], plan, "t"))
    first = (page == (0xE6, 0x19, 0x4B)).all(axis=2)[:, : 12 + 200]
    rows, columns = np.flatnonzero(first.any(axis=1)), np.flatnonzero(first.any(axis=0))
    assert (columns[0] - 12, columns[-1] - columns[0] + 1) == (80, 70)
    assert rows[-1] - rows[0] + 1 == 60


def test_what_was_drawn_is_said_in_the_order_of_its_doing():
    image = np.zeros((50, 40, 3), np.uint8)
    plan = ViewPlan((CropSpec(32, 0.2, 1.0),), jitter=(0.4, 0.4, 0.0, 0.1))
    view = plain_view(image, top=3, left=4, flip=True, gray=True, blur_radius=1.234)
    assert describe_view(view, plan) == ["40 x 50 px at 4, 3", "flipped", "grayscale", "blur 1.23 px"]
    view = plain_view(image, gray=True, jitter=(1.2, 0.5, 1.0, -0.05), jitter_order=(3, 2, 1, 0))
    jitter = ["hue -0.050", "contrast x 0.50", "brightness x 1.20"]
    assert describe_view(view, plan)[1:] == [*jitter, "grayscale"]
    first = ViewPlan(plan.crops, jitter=plan.jitter, gray_first=True)
    assert describe_view(view, first)[1:] == ["grayscale", *jitter]
    moved = ViewPlan(plan.crops, translate=4)
    assert describe_view(plain_view(image, shift=(3, -2), flip=True), moved) == ["flipped", "moved +3, -2 px"]


# --- the command ---


@pytest.mark.parametrize("preset", ["swav", "amdim-32", "moco-v1", "linear", "swav_tiny"])
def test_a_photograph(zoo, photo, tmp_path, preset):
    code, out, err = zoo("views", photo, "--preset", preset, "-o", "grid.png")
    assert (code, err) == (0, "")
    assert "grid.png" in out
    page = np.asarray(Image.open(tmp_path / "grid.png"))
    assert page.shape[2] == 3 and page.shape[0] > 200 and page.shape[1] > 200
    assert 0.1 < ink(page).mean() < 0.95
    colours = page.astype(np.int64) @ (65536, 256, 1)
    assert len(np.unique(colours)) > 1000  # photographs, not only text
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]


def test_json_tells_the_parameters(zoo, photo, tmp_path):
    code, out, _ = zoo("views", photo, "--preset", "moco-v2", "-o", "grid.jpg", "--json", "--epoch", "3")
    found = json.loads(out)
    assert code == 0
    assert (found["schema"], found["preset"], found["views"]) == (1, "moco-v2", 2)
    (image,) = found["images"]
    assert image["image"] == photo.name
    assert [view["size"] for view in image["views"]] == [224, 224]
    assert Image.open(tmp_path / "grid.jpg").format == "JPEG"
    again = json.loads(zoo("views", photo, "--preset", "moco-v2", "-o", "b.jpg", "--json", "--epoch", "3")[1])
    assert again["images"] == found["images"]
    for other in (["--epoch", "4"], ["--epoch", "3", "--seed", "1"]):
        changed = json.loads(zoo("views", photo, "--preset", "moco-v2", "-o", "c.jpg", "--json", *other)[1])
        assert changed["images"] != found["images"]


def test_a_folder_shows_the_views_that_training_sees(folder, tmp_path, monkeypatch):
    """Seed, epoch and sample are those of a run: the very pixels of its batches."""
    drawn = []
    monkeypatch.setattr(
        "zoo.pretrain.show_views.draw_grid",
        lambda rows, plan, title: drawn.append((rows, plan)) or draw_grid(rows, plan, title),
    )
    found = show_views(str(folder), "small-32", tmp_path / "grid.png", count=3, epoch=1, seed=4)
    assert len(found["images"]) == 3
    ((rows, plan),) = drawn
    source = open_folder(folder)
    names = [source.where(i).rsplit("/", 1)[-1] for i in range(len(source))]
    order = EpochOrder(len(source), 10, 4)
    maker = PlannedViews(plan)
    (batch,) = view_batches(source, maker, order, first_step=1, last_step=2, workers=0)
    for name, _, views, _ in rows:
        row = batch.ids.tolist().index(names.index(name))
        for view in range(2):
            trained = batch.views[0][view * 10 + row].permute(1, 2, 0)
            assert torch.equal(trained, torch.from_numpy(views[view]))


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (4, 4), (99, 10)])
def test_how_many_images_of_a_folder(zoo, folder, count, shown):
    found = json.loads(zoo("views", folder, "--preset", "small-32", "--count", count, "--json")[1])
    assert len({image["image"] for image in found["images"]}) == shown


def test_a_picture_is_known_by_its_bytes_and_other_files_are_sources(zoo, folder, tmp_path):
    photo = save_image(tmp_path / "photo.png", 7, 50).read_bytes()
    (tmp_path / "photo").write_bytes(photo)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    (tmp_path / "paths.dat").write_text("".join(f"{folder / name}\n" for name in names[:3]))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.png" / "a.png").write_bytes(photo)
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(tmp_path / "photo.png", "a.png")
        shard.add(tmp_path / "photo.png", "b.png")
    for source, images in (("photo", 1), ("paths.dat", 3), ("folder.png", 1), ("shard.tar", 2)):
        code, out, err = zoo("views", source, "--preset", "small-32", "-o", "grid.png")
        assert (code, out) == (0, f"grid.png: {images} image(s), 6 views each\n"), err


def test_a_recipe_of_one_channel(zoo, folder, tmp_path):
    (tmp_path / "gray.yaml").write_text("extends: swav_tiny\ndata: {channels: 1}\n")
    code, _, err = zoo("views", folder, "--preset", "gray.yaml", "-o", "gray.png", "--count", 2)
    assert (code, err) == (0, "")
    page = np.asarray(Image.open(tmp_path / "gray.png")).astype(int)
    views = page[:, 320:].reshape(-1, 3)  # beyond the image with its coloured boxes
    assert (np.ptp(views, axis=1) > 60).mean() < 0.02 < (views[:, 0] < 200).mean()


def test_a_transparent_a_gray_and_a_turned_picture(zoo, tmp_path):
    Image.fromarray(np.zeros((50, 60, 4), np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(np.zeros((50, 60), np.uint8)).save(tmp_path / "b.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(0, 60)[:40]).save(tmp_path / "c.jpg", exif=exif)
    for name, size in (("a.png", (60, 50)), ("b.png", (60, 50)), ("c.jpg", (40, 60))):
        code, out, err = zoo("views", name, "--preset", "amdim-64", "--json")
        assert (code, err) == (0, "")
        boxes = json.loads(out)["images"][0]["views"]
        assert all(0 < v["left"] + v["width"] <= size[0] and v["top"] + v["height"] <= size[1] for v in boxes)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["nowhere.jpg"], ["There is no such picture", "nowhere.jpg", "check the path"]),
        (["nowhere"], ["neither a folder", "nowhere"]),
        (["good.png", "-o", "grid.gif"], [".png or .jpg", "grid.gif"]),
        (["good.png", "--preset", "swav_tinny"], ["swav_tinny", "did you mean swav_tiny?"]),
        (["good.png", "--preset", "swaw"], ["swaw", "did you mean swav?"]),
        (["good.png", "--max-pixels", "399"], ["20 x 20 pixels, more than the limit of 399", "--max-pixels"]),
        (["good.png", "--preset", "moco-v3"], ["moco-v3", "did you mean moco-v"]),
        (["good.png", "--preset", "nowhere.yaml"], ["nowhere.yaml"]),
        (["bad.png"], ["bad.png"]),
        ([], ["Nothing to show"]),
    ],
)
def test_bad_input_is_said_clearly_and_leaves_nothing(zoo, tmp_path, words, names):
    save_image(tmp_path / "good.png", 0)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    code, out, err = zoo("views", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err and "unexpected" not in err
    assert all(name in err for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png", "good.png"]


def test_a_place_that_is_not_there(zoo, tmp_path):
    save_image(tmp_path / "good.png", 0)
    code, out, err = zoo("views", "good.png", "-o", "nowhere/grid.png")
    assert (code, out) == (1, "")
    assert "Writing the picture failed" in err and "nowhere" in err


def test_the_list(zoo):
    code, out, err = zoo("views", "--list")
    assert (code, err) == (0, "")
    assert all(name in out for name in PRESETS)
    assert "2 x 224 + 6 x 96" in out and "(short: swav)" in out
    listed = json.loads(zoo("views", "--list", "--json")[1])
    assert listed["schema"] == 1
    assert set(listed["presets"]) == set(PRESETS) and listed["short"] == {"swav": "swav-2x224+6x96"}
    assert listed["presets"]["moco-v1"] == [PRESETS["moco-v1"].summary, PRESETS["moco-v1"].source]


@pytest.mark.parametrize("recipe", sorted(list_recipes()))
def test_every_recipe_can_be_shown(recipe, tmp_path):
    save_image(tmp_path / "image.png", 3, 64)
    found = show_views(str(tmp_path / "image.png"), recipe, tmp_path / "grid.png")
    assert found["views"] >= 1


def test_an_unknown_format_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match="drawn as"):
        show_views(str(tmp_path / "nowhere.png"), "swav", tmp_path / "grid.tiff")
