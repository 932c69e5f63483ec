"""``zoo assign``: the prototypes by hand, the same in any company; files and folders whole or not at all."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import zoo
from tiny import TINY, half_jpeg, image_folder, save_image
from weights.published import assert_clear, bundle_at, command, describe, isolate
from weights.writers.sources import backbone, swav_file
from zoo.assignment import assign
from zoo.cluster_folders import write_cluster_folders
from zoo.data.builtin import PhotoPatches
from zoo.errors import InputError, RunError
from zoo.pretrain.run import start

__all__ = ["command"]

SMALL: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if not key.startswith("method.")},
    "trunk.arch": "resnet18",
    "trunk.base_planes": 4,
    "evaluation.resize": 24,
    "evaluation.crop": 16,
    "epochs": 1,
    "method.hidden": 16,
    "method.dim": 8,
}
SEVERAL = [8, 6, 4]
# name -> recipe, its own settings, prototypes of each head
RUNS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "swav": ("swav_tiny", {"method.prototypes": 8, "method.freeze_prototypes_steps": 0}, [8]),
    "swav_sets": ("swav_tiny", {"method.prototypes": SEVERAL, "method.head_norm": False}, SEVERAL),
    "deepcluster": ("deepclusterv2_rn50_400ep_2x160_4x96", {"method.prototypes": SEVERAL}, SEVERAL),
    "sela": ("selav2_rn50_400ep_2x160_4x96", {"method.prototypes": SEVERAL, "method.hidden": 0}, SEVERAL),
}


@pytest.fixture(autouse=True)
def _homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images in two folders, some under equal names; read-only."""
    folder = image_folder(tmp_path_factory.mktemp("images") / "photos", 16, 2)
    for seed in range(16, 24):
        save_image(folder / f"class{seed % 2}" / f"à l'été {seed // 2}.png", seed)
    return folder


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs by name, each made once; read-only."""
    place, made = tmp_path_factory.mktemp("trained"), {}

    def run(name: str) -> Any:
        if name not in made:
            recipe, settings, _ = RUNS[name]
            with pytest.MonkeyPatch.context() as patch:
                isolate(patch, place)
                made[name] = start(
                    recipe,
                    data=str(images),
                    out=place / name,
                    overrides={**SMALL, **settings},
                    progress="quiet",
                )
        return made[name]

    return run


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published model with a linear head and 12 prototypes of very different lengths; read-only."""
    generator = torch.Generator().manual_seed(0)
    heads = {
        "projection_head.weight": torch.randn(6, 64, generator=generator),
        "projection_head.bias": torch.randn(6, generator=generator),
        "prototypes.weight": torch.randn(12, 6, generator=generator) * torch.logspace(-3, 3, 12)[:, None],
    }
    return str(bundle_at(tmp_path_factory.mktemp("bundles") / "clusters", **heads).path)


def pictures(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.png"), key=os.fsencode)


def by_hand(run: Any, files: list[Path], head: int) -> torch.Tensor:
    """Cosines with the prototypes, (N, K), by the formula; the test transform is torchvision's own."""
    transform = zoo.load(str(run.path), progress=False).transforms()
    batch = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    state = {key: value.detach() for key, value in run.method.state_dict().items()}
    with torch.no_grad():
        x = run.method.trunk.eval()(batch)
    layers = {key.removeprefix("projection_head."): v for key, v in state.items() if "projection" in key}
    if "weight" in layers:
        x = x @ layers["weight"].T + layers["bias"]
    else:
        x = x @ layers["0.weight"].T + layers["0.bias"]
        last = "2"
        if "1.weight" in layers:
            last = "3"
            x = (x - layers["1.running_mean"]) / (layers["1.running_var"] + 1e-5).sqrt()
            x = x * layers["1.weight"] + layers["1.bias"]
        x = x.clamp(min=0) @ layers[f"{last}.weight"].T + layers[f"{last}.bias"]
    many = f"prototypes.prototypes{head}.weight"
    rows = state[many if many in state else "prototypes.weight"]
    return (x / x.norm(dim=1, keepdim=True)) @ (rows / rows.norm(dim=1, keepdim=True)).T


@pytest.mark.parametrize("name", RUNS)
def test_the_prototypes_are_those_of_the_formula(trained, images, name):
    run, counts = trained(name), RUNS[name][2]
    files = pictures(images)
    for head, count in enumerate(counts):
        found = assign(run.path, str(images), head=head)
        cosines = by_hand(run, files, head)
        assert cosines.shape == (24, count) and (found.head, found.heads) == (head, len(counts))
        torch.testing.assert_close(found.scores, cosines.amax(dim=1), rtol=1e-4, atol=1e-5)
        first, second = cosines.topk(2, dim=1).values.T
        clear = first - second > 1e-4
        assert clear.sum() >= 20
        assert torch.equal(found.prototypes[clear], cosines.argmax(dim=1)[clear])
        assert found.images == tuple(map(str, files)) and found.ids.tolist() == list(range(24))
        assert found.sizes.tolist() == found.prototypes.bincount(minlength=count).tolist()


@pytest.mark.parametrize("name", RUNS)
def test_published_it_gives_the_same(trained, images, name):
    run, head = trained(name), len(RUNS[name][2]) - 1
    before = assign(run.path, str(images), head=head)
    zoo.publish(run.path, name="me/clusters", licence="mit")
    after = assign("me/clusters", str(images), head=head)
    assert torch.equal(before.prototypes, after.prototypes) and torch.equal(before.scores, after.scores)


@pytest.mark.parametrize("name", ["swav", "deepcluster"])
def test_an_image_alone_and_among_others_has_the_same_prototype(trained, images, tmp_path, name):
    run, files = trained(name).path, pictures(images)
    among = assign(run, str(images), batch_size=8)
    for index in (0, 5, 7, 23):  # in a batch of 8, at its beginning, in the middle, at its end
        (tmp_path / "list.txt").write_text(f"{files[index]}\n", "utf-8")
        alone = assign(run, str(tmp_path / "list.txt"), batch_size=8)
        assert torch.equal(alone.prototypes[0], among.prototypes[index])
        assert torch.equal(alone.scores[0], among.scores[index])
    for size in (1, 64):
        other = assign(run, str(images), batch_size=size)
        torch.testing.assert_close(other.scores, among.scores, rtol=1e-4, atol=1e-5)


def test_the_length_of_a_prototype_does_not_count(clusters, images):
    found = assign(clusters, str(images))
    assert found.scores.abs().max() <= 1 and len(found.sizes) == 12
    assert len(set(found.prototypes.tolist())) > 1  # the longest one would have them all


def test_of_equal_prototypes_the_first_is_taken(tmp_path, images):
    one = torch.ones(1, 64)
    heads = {"projection_head.weight": torch.eye(64), "projection_head.bias": torch.zeros(64)}
    model = bundle_at(tmp_path / "model", **heads, **{"prototypes.weight": torch.cat([-one, one, one])})
    assert set(assign(model.path, str(images)).prototypes.tolist()) == {1}


def test_anybodys_file_that_kept_its_prototypes(tmp_path, images):
    file = swav_file(tmp_path / "swav.pth.tar", backbone())
    found = assign(file, str(images))
    assert found.heads == 1 and found.scores.isfinite().all()


def test_heads_beside_an_averaged_trunk_are_said(clusters, tmp_path, images, caplog):
    heads = {"projection_head.weight": torch.eye(64), "projection_head.bias": torch.zeros(64)}
    what = describe(lineage={"run": "first", "step": 6, "total_steps": 6, "averaged": True})
    model = bundle_at(tmp_path / "average", what, **heads, **{"prototypes.weight": torch.eye(64)})
    with caplog.at_level("WARNING", "zoo"):
        assign(clusters, str(images))
        assert caplog.text == ""
        assign(model.path, str(images))
    assert "running average" in caplog.text


def test_the_summary_counts(clusters, images):
    found = assign(clusters, str(images))
    sizes, about = found.sizes.tolist(), found.summary()
    assert (about["images"], about["prototypes"]) == (24, 12)
    assert about["used"] == sum(size > 0 for size in sizes)
    assert about["largest_images"] == max(sizes) == sizes[about["largest"]]
    shares = torch.tensor([size / 24 for size in sizes if size])
    assert about["perplexity"] == pytest.approx(float((-(shares * shares.log()).sum()).exp()), abs=1e-3)


def test_only_the_nearest_images_of_each_prototype(clusters, images):
    whole, nearest = assign(clusters, str(images)), assign(clusters, str(images), top=2)
    expected = []
    for prototype in range(12):
        mine = [index for index in range(24) if whole.prototypes[index] == prototype]
        mine.sort(key=lambda index: (-float(whole.scores[index]), index))
        expected += mine[:2]
    assert nearest.ids.tolist() == expected
    assert nearest.images == tuple(whole.images[index] for index in expected)
    assert torch.equal(nearest.scores, whole.scores[expected])
    assert nearest.summary() == whole.summary()


# --- files ---


def test_larger_pictures_than_allowed_are_named(clusters, images):
    with pytest.raises(InputError, match="20 x 20 pixels, more than the limit of 399") as caught:
        assign(clusters, str(images), max_pixels=399)
    assert "--max-pixels" in caught.value.fix
    assert len(assign(clusters, str(images), max_pixels=400).images) == 24


def test_the_files_hold_what_is_returned(clusters, images, tmp_path):
    found = assign(clusters, str(images), out=tmp_path / "clusters.csv")
    with open(tmp_path / "clusters.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "prototype", "score"]
    assert [row["image"] for row in rows] == list(found.images)
    assert any("été" in row["image"] for row in rows)
    assert [int(row["prototype"]) for row in rows] == found.prototypes.tolist()
    torch.testing.assert_close(
        torch.tensor([float(row["score"]) for row in rows]), found.scores, rtol=0, atol=1e-6
    )
    assign(clusters, str(images), out=tmp_path / "clusters.json")
    document = json.loads((tmp_path / "clusters.json").read_text("utf-8"))
    assert (document["schema"], document["head"], document["heads"]) == (1, 0, 1)
    assert document["images"] == found.rows() and document["summary"] == found.summary()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_bad_image_is_named_and_nothing_is_written(clusters, tmp_path):
    folder = image_folder(tmp_path / "photos", 3, 0)
    half_jpeg(folder / "bad.jpg")
    with pytest.raises(InputError) as caught:
        assign(clusters, str(folder), out=tmp_path / "c.csv", links=tmp_path / "links")
    assert caught.value.where.endswith("bad.jpg")
    assert not (tmp_path / "c.csv").exists() and not (tmp_path / "links").exists()


# --- folders ---


def tree(folder: Path) -> dict[str, list[str]]:
    return {place.name: sorted(file.name for file in place.iterdir()) for place in folder.iterdir()}


@pytest.mark.parametrize("copy", [False, True])
def test_a_folder_for_each_prototype_that_has_images(clusters, images, tmp_path, monkeypatch, copy):
    monkeypatch.chdir(images.parent)
    found = assign(clusters, images.name, links=tmp_path / "links", copy=copy)  # links lead on from anywhere
    monkeypatch.chdir(tmp_path)
    folders = tree(tmp_path / "links")
    assert set(folders) == {f"{number:02d}" for number, size in enumerate(found.sizes.tolist()) if size}
    assert [len(folders[name]) for name in sorted(folders)] == [s for s in found.sizes.tolist() if s]
    contents = {}
    for link in (tmp_path / "links").rglob("*.png"):
        assert link.is_symlink() is not copy
        contents[link.read_bytes()] = int(link.parent.name)
    files = pictures(images)
    assert contents == {
        file.read_bytes(): number for file, number in zip(files, found.prototypes.tolist(), strict=True)
    }
    assert not list(tmp_path.glob(".links.*"))


def test_equal_names_in_a_cluster_stay_apart(tmp_path):
    names = [
        "a/x.png",
        "b/x.png",
        "c/X.png",
        "c/x-2.png",
        "d/x.png",
        "e/\u00e9.png",
        "f/e\u0301.png",
        "g/x.png",
    ]
    files = [save_image(tmp_path / "in" / name, seed) for seed, name in enumerate(names)]
    write_cluster_folders(tmp_path / "out", [str(file) for file in files], [3, 3, 3, 3, 3, 3, 3, 1], 1000)
    folders = tree(tmp_path / "out")
    assert set(folders) == {"001", "003"} and folders["001"] == ["x.png"]
    links = {link.name: link.resolve() for link in (tmp_path / "out" / "003").iterdir()}
    assert sorted(links.values()) == sorted(file.resolve() for file in files[:7])
    assert links["x.png"] == files[0].resolve() and links["x-2.png"] == files[1].resolve()
    assert len({name.casefold() for name in links}) == 7


def test_a_disk_without_links_is_said_and_nothing_stays(images, tmp_path, monkeypatch):
    def refuse(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    file = str(pictures(images)[0])
    with pytest.raises(RunError, match="takes no links") as caught:
        write_cluster_folders(tmp_path / "links", [file], [0], 8)
    assert "--copy" in str(caught.value.fix)
    write_cluster_folders(tmp_path / "copies", [file], [0], 8, copy=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies"]


def test_a_file_that_is_gone_leaves_no_half_folder(images, tmp_path):
    with pytest.raises(RunError, match="No such file"):
        write_cluster_folders(
            tmp_path / "x", [str(pictures(images)[0]), str(tmp_path / "gone.png")], [0, 1], 8, copy=True
        )
    assert list(tmp_path.iterdir()) == []


def test_places_that_are_taken_are_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    image_folder(tmp_path / "photos", 2, 0)
    for place, message in (
        ("full", "not empty"),
        ("full/mine", "where a file"),
        ("link", "where a file or a link"),
        ("no/links", "isn't there"),
        ("photos/clusters", "folder of the images"),
    ):
        with pytest.raises(InputError, match=message):
            assign("no/model", str(tmp_path / "photos"), links=tmp_path / place)
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="the folder you are in"):
        assign("no/model", str(tmp_path / "photos"), links=".")


def test_an_empty_folder_is_filled(clusters, images, tmp_path):
    (tmp_path / "empty").mkdir()
    assign(clusters, str(images), links=tmp_path / "empty")
    assert len(list((tmp_path / "empty").rglob("*.png"))) == 24


# --- refusals ---


def test_what_has_no_prototypes_says_what_to_do_instead(tmp_path, images):
    for model in ("random:resnet18", str(bundle_at(tmp_path / "bare").path)):
        with pytest.raises(InputError, match="no prototypes") as caught:
            assign(model, str(images))
        assert "zoo neighbours" in str(caught.value.fix)
    settings = {**SMALL, "views.size": [16], "views.count": [2], "method.negatives": 8}
    settings["method.shuffle_groups"] = 2
    run = start(
        "moco_v2_rn50_200ep", data=str(images), out=tmp_path / "moco", overrides=settings, progress="quiet"
    )
    with pytest.raises(InputError, match="moco"):
        assign(run.path, str(images))


def test_unknown_heads_and_heads_that_do_not_fit(trained, clusters, images, tmp_path):
    with pytest.raises(InputError, match="no head 3") as caught:
        assign(trained("deepcluster").path, str(images), head=3)
    assert caught.value.fix == "it has heads 0 to 2"
    with pytest.raises(InputError, match="no head 1") as caught:
        assign(clusters, str(images), head=1)
    assert caught.value.fix == "it has head 0 only"
    other = {"projection_head.weight": torch.zeros(6, 63), "projection_head.bias": torch.zeros(6)}
    model = bundle_at(tmp_path / "wide", **other, **{"prototypes.weight": torch.ones(4, 6)})
    with pytest.raises(InputError, match="doesn't fit"):
        assign(model.path, str(images))
    other["projection_head.weight"] = torch.full((6, 64), torch.nan)
    model = bundle_at(tmp_path / "nan", **other, **{"prototypes.weight": torch.ones(4, 6)})
    with pytest.raises(InputError, match="not finite"):
        assign(model.path, str(images))


def test_images_without_files_have_numbers_and_no_links(clusters, tmp_path):
    class Few(PhotoPatches):
        def __len__(self) -> int:
            return 5

    found = assign(clusters, Few("val"))
    assert found.images[4] == "builtin:photos[4]"
    with pytest.raises(InputError, match="no files of their own") as caught:
        assign(clusters, "builtin:photos", links=tmp_path / "links")
    assert "--out" in str(caught.value.fix)


# --- the command ---


def test_on_the_command_line(trained, images, tmp_path, command):
    run = trained("swav_sets").path
    found = assign(run, str(images), head=1)
    code, out, err = command("assign", run, images, "--head", 1)
    title, header, *rows = out.splitlines()
    assert (code, len(rows)) == (0, 24) and "6 prototypes (head 1 of 3)" in title
    assert header.split() == ["image", "prototype", "score"]
    assert [int(row.split()[-2]) for row in rows] == found.prototypes.tolist()
    assert f"note: head 1 of 3: {found.summary()['used']} of 6 prototypes have images" in err
    code, out, err = command("assign", run, images, "--head", 1, "--json", "-q")
    assert (code, json.loads(out), err) == (0, found.to_json(), "")
    words = ("-o", tmp_path / "c.csv", "--links", tmp_path / "links", "--copy", "--top", 1)
    code, out, _ = command("assign", run, images, "--head", 1, *words)
    used = found.summary()["used"]
    assert (code, out.splitlines()) == (
        0,
        [
            f"{tmp_path / 'c.csv'}: the prototypes of {used} images",
            f"{tmp_path / 'links'}: {used} copies in {used} folders",
        ],
    )
    assert len((tmp_path / "c.csv").read_text("utf-8").splitlines()) == 1 + used
    assert_clear(command("assign", run, images, "-o", tmp_path / "c.txt"), "c.txt", ".csv")
    assert_clear(command("assign", run, images, "--head", 9), "no head 9")
    assert_clear(command("assign", run, images, "--copy"), "--links DIR --copy")
    assert_clear(command("assign", run, tmp_path / "no"), "no")
    assert_clear(command("assign", "random:resnet18", images), "random:resnet18", "zoo neighbours")
    assert_clear(command("assign", run, images, "--links", tmp_path / "links"), "not empty")
