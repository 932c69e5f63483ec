"""``zoo table``: a measured number stands in a paper's row only if model, data and protocol are the paper's."""

from __future__ import annotations

import json

import pytest

from transfer import RECIPES
from transfer.detect.protocols import choose_protocol, rescaled
from transfer.published import PAPER
from transfer.published.measured import beside
from transfer.published.show import panel_words, table_json
from transfer.run import transfer
from transfer.trained import described_training, trained_as
from weights.published import assert_clear
from zoo.pretrain.resolve import resolve

PANELS = {
    panel.source.removeprefix("SwAV paper, "): panel for table in PAPER.values() for panel in table.panels
}


def result(recipe="linear", model="catalog:swav_resnet50.800ep", dataset="imagenet", top=0.75, **more):
    """What ``result.json`` would hold of the whole ImageNet."""
    default = {} if recipe in ("svm", "detect") else {"protocol": "swav"}
    settings = {**default, **more.pop("settings", {})}
    details = more.pop("details", {})
    config = RECIPES.config(recipe)(**settings)
    if recipe == "semisup":
        config = config.settled(details["labelled_images"], config.fraction)
    elif recipe == "finetune":
        config = config.settled(1281167)
    seed = more.pop("seed", 0)
    found = {
        "recipe": recipe,
        "model": model,
        "weights_sha256": model,
        "dataset": dataset,
        "metrics": {"top1": top, "top5": top + 0.1, "mAP": top, "AP50": top, "AP": top, "train_loss": 1.0},
        "intervals": {"top1": [top - 0.01, top + 0.01]},
        "protocol": {**config.model_dump(mode="json"), "seed": seed},
        "preprocessing": {"resize": 256, "crop": 224},
        "seeds": [seed],
        "data": {"train": {"count": 1281167}},
        "details": {"labelled_images": 1281167, **details},
    }
    return {**found, **more}


def placed(place, *results):
    """By the paper's method and what is said of the row: what stands in it; and what stands below."""
    panel = PANELS[place]
    inside, below = beside(panel, results)
    rows = {
        (row.method, *row.about): entries for row, entries in zip(panel.rows, inside, strict=True) if entries
    }
    return rows, below


def test_the_papers_protocol_on_the_papers_data_stands_in_its_row():
    rows, below = placed("figure 2 (left)", result(), result(seed=1, top=0.77))
    assert list(rows) == [("SwAV", "R50", "24")] and below == []
    (entry,) = rows["SwAV", "R50", "24"]
    top1 = entry["values"].pop("top-1")
    assert top1["mean"] == pytest.approx(76) and top1["deviation"] == pytest.approx(2**0.5)
    assert top1["interval"] is None and entry == {
        "model": "catalog:swav_resnet50.800ep",
        "method": "swav",
        "dataset": "imagenet",
        "protocol": "linear (swav)",
        "seeds": [0, 1],
        "small": False,
        "differs": [],
        "values": {},
    }


@pytest.mark.parametrize(
    ("change", "differs", "small"),
    [
        ({"settings": {"protocol": "cached"}}, ["protocol"], True),
        ({"settings": {"lr": [0.1]}}, ["protocol"], False),
        ({"settings": {"limit": 2}}, ["protocol"], False),
        ({"settings": {"protocol": "moco"}}, ["protocol"], False),
        ({"preprocessing": {"resize": 146, "crop": 128}}, ["protocol"], False),
        ({"details": {"flatters": "a part of ImageNet: 9 of 1281167"}}, ["data"], False),
        ({"dataset": "photos"}, ["data"], False),
        ({"model": "catalog:swav_resnet50.400ep_bs256"}, ["model"], False),
        (
            {"dataset": "photos", "settings": {"protocol": "cached"}, "model": "catalog:swav_resnet50.100ep"},
            ["model", "data", "protocol"],
            True,
        ),
    ],
)
def test_whatever_is_not_the_papers_stands_below_and_says_so(change, differs, small):
    rows, (entry,) = placed("figure 2 (left)", result(**change))
    assert rows == {} and (entry["differs"], entry["small"], entry["method"]) == (differs, small, "swav")


def test_each_method_has_its_own_protocol_and_row():
    moco = {"model": "catalog:moco_v2_resnet50.800ep"}
    rows, below = placed(
        "figure 2 (left)", result(**moco, settings={"protocol": "moco"}), result(**moco, top=0.6)
    )
    assert list(rows) == [("MoCov2", "R50", "24")] and [entry["differs"] for entry in below] == [["protocol"]]
    rows, below = placed(
        "table 3", result(model="catalog:moco_v2_resnet50.200ep", settings={"protocol": "moco"})
    )
    assert [key[4] for key in rows] == ["200"] and below == []
    amdim = {"protocol": "amdim", "epochs": 30, "drop_at": [15, 25]}
    small = {"preprocessing": {"resize": 146, "crop": 128}}
    rows, _ = placed("table 5", result(model="catalog:amdim_large.in128", settings=amdim, **small))
    assert list(rows) == [("AMDIM", "Custom-RN", "626")]
    # Another paper's set is no stand-in for ImageNet; a method that a table doesn't have isn't in it.
    assert placed("figure 2 (left)", result(dataset="places205")) == ({}, [])
    assert placed("figure 4 (left)", result(model="catalog:deepclusterv2_resnet50.400ep")) == ({}, [])
    rows, _ = placed("figure 4 (left)", result(model="random:resnet50@3", top=0.1))
    assert list(rows) == [("Random",)]


def test_shares_of_labels():
    few = result("semisup", settings={"fraction": 0.01}, details={"labelled_images": 12811})
    many = result("semisup", settings={"fraction": 0.1}, details={"labelled_images": 128116}, top=0.7)
    (entries,) = placed("table 1", few, many)[0].values()
    shown = [
        {title: round(value["mean"], 6) for title, value in entry["values"].items()} for entry in entries
    ]
    assert shown == [{"1 % top-1": 75, "1 % top-5": 85}, {"10 % top-1": 70, "10 % top-5": 80}]
    # A list decides its share itself.
    by_list = result("semisup", settings={"fraction": 0.01}, details={"labelled_images": 12811})
    by_list["protocol"] |= {"labels": {"name": "1percent.txt", "sha256": "x"}, "fraction": 0.1}
    (entries,) = placed("table 1", by_list)[0].values()
    assert list(entries[0]["values"]) == ["1 % top-1", "1 % top-5"]
    other = result("semisup", settings={"fraction": 0.5}, details={"labelled_images": 640000})
    assert placed("table 1", other) == ({}, [])
    rows, (entry,) = placed(
        "table 1",
        result("semisup", settings={"fraction": 0.1, "lr": 1.0}, details={"labelled_images": 128116}),
    )
    assert rows == {} and entry["differs"] == ["protocol"]


def test_other_tasks():
    protocol = json.loads(json.dumps(choose_protocol("voc07+12", "voc", "swav", "c4", "", False).to_json()))
    slower, _ = rescaled(choose_protocol("voc07+12", "voc", "swav", "c4", "", False), 2)
    found = [
        result("svm", dataset="voc07", top=0.88),
        result(dataset="places205", settings={"protocol": "places205"}, top=0.5),
        result(dataset="inat18", settings={"protocol": "inat18"}, top=0.4),
        result("finetune"),
        result("detect", dataset="voc07+12", top=0.82),
    ]
    found[-1]["details"] = {"trained_by": protocol}
    for place in ("table 2", "table 6"):
        rows, below = placed(place, *found)
        (entries,) = rows.values()
        means = {title: round(value["mean"]) for entry in entries for title, value in entry["values"].items()}
        assert means == {"Places205": 50, "VOC07": 88, "iNat18": 40, "VOC07+12 (Faster R-CNN R50-C4)": 82}
        assert below == []
    found[-1]["details"] = {"trained_by": json.loads(json.dumps(slower.to_json()))}
    rows, (entry,) = placed("table 2", found[-1])
    assert rows == {} and entry["differs"] == ["protocol"]
    small = choose_protocol("photos-voc", "own", "swav", "c4", "small", False)
    found[-1] |= {
        "dataset": "builtin:photos-voc",
        "details": {"trained_by": json.loads(json.dumps(small.to_json()))},
    }
    (entry,) = placed("table 2", found[-1])[1]
    assert entry["small"] and entry["differs"] == ["data", "protocol"]
    rows, below = placed("figure 4 (left)", result("finetune", model="catalog:swav_resnet50.800ep"))
    assert rows == {} and below[0]["differs"] == ["model"] and list(below[0]["values"]) == ["finetuned"]


# --- whose model it is ---


def info(name="swav_rn50_100ep", images=1281167, step=10, **changes):
    recipe = resolve(name, changes).recipe
    return {
        "reference": "path:/somewhere",
        "arch": recipe.trunk.arch,
        "method": recipe.method.name,
        "recipe": recipe.to_dict(),
        "data": {"count": images},
        "lineage": {"step": step, "total_steps": 10},
    }


def test_a_recipe_counts_as_published_only_whole_and_unchanged():
    whole = trained_as(info())
    assert whole == {
        "arch": "resnet50",
        "method": "swav",
        "released": None,
        "recipe": "swav_rn50_100ep",
        "as_published": True,
    }
    # Where it ran, and on whose disk, changes nothing.
    assert trained_as(info(**{"data.workers": 3, "device": "cpu"}))["as_published"]
    for other in (
        info(images=1000),
        info(step=9),
        info(epochs=99),
        info(**{"optimizer.lr": 0.1}),
        info("swav_rn18_64px"),
        {**info(), "recipe": {"name": "swav_rn50_100ep"}},
    ):
        assert trained_as(other)["as_published"] is False
    mine = {"model": "path:/somewhere", "weights_sha256": "w"}
    rows, below = placed("figure 3 (right)", result(**mine, trained=whole))
    assert list(rows) == [("SwAV", "100")] and below == []
    rows, (entry,) = placed("figure 3 (right)", result(**mine, trained={**whole, "as_published": False}))
    assert rows == {} and entry["differs"] == ["model"]


def test_what_is_known_of_released_random_and_older_models():
    released = {"arch": "resnet50", "method": "swav", "lineage": {"released": "swav_resnet50.800ep"}}
    assert trained_as(released)["released"] == "swav_resnet50.800ep"
    converted = {"arch": "resnet50", "method": "swav", "lineage": {"converted_from": released["lineage"]}}
    assert trained_as(converted)["released"] == "swav_resnet50.800ep"
    assert trained_as({"reference": "random:resnet18@3", "arch": "resnet18"})["method"] == "random"
    assert described_training({"model": "catalog:swav_resnet50.200ep"})["released"] == "swav_resnet50.200ep"
    assert described_training({"model": "random:resnet18+small+8@1"})["arch"] == "resnet18"
    assert described_training({"model": "supervised:resnet50"})["method"] == "supervised"
    assert described_training({"model": "path:/x"}) is None


# --- shown ---


def test_published_and_measured_never_share_a_column():
    everything = [
        result(),
        result(settings={"protocol": "cached"}, dataset="photos", top=0.42),
        result("svm", dataset="voc07", top=0.42),
        result("finetune", top=0.42),
        result("semisup", settings={"fraction": 0.1}, details={"labelled_images": 128116}, top=0.42),
    ]
    seen = 0
    for table in PAPER.values():
        plain, full = table_json(table, []), table_json(table, everything)
        for before, after in zip(plain["panels"], full["panels"], strict=True):
            assert [row["published"] for row in before["rows"]] == [row["published"] for row in after["rows"]]
            columns, rows = panel_words(after)
            assert len(set(columns)) == len(columns)
            here = [column for column in columns if column.startswith("here: ")]
            assert set(here).isdisjoint(after["columns"])
            for row in rows:
                measured = [column for column in here if column in row]
                seen += len(measured)
                assert bool(measured) is ("by" in row)
                if measured and any(column in row for column in after["columns"]):
                    assert row["by"].endswith("(as in the paper)")
                if "photos" in row.get("by", ""):
                    assert "small protocol; not the paper's" in row["by"]
                    assert set(row) == {"method", "by", *measured}
            assert panel_words(before)[0] == ["method", *before["about"], *before["columns"]]
    assert seen > 6


def test_on_the_command_line(command, small, greys, tmp_path):
    transfer(
        "linear", model=small, dataset=str(greys), settings={"epochs": 2}, out=tmp_path / "results" / "one"
    )
    knn = transfer("knn", model=small, dataset=str(greys), out=tmp_path / "other" / "knn")
    assert knn["trained"] == {
        "arch": "resnet18",
        "method": "swav",
        "released": None,
        "recipe": "swav_tiny",
        "as_published": False,
    }
    code, out, err = command("table", "fig. 2")
    assert code == 0, err
    line = next(line for line in out.splitlines() if "on greys" in line)
    assert (
        line.startswith("swav ")
        and "linear (cached), seed 0 (small protocol; not the paper's model, data, protocol)" in line
    )
    swav = next(line for line in out.splitlines() if line.startswith("SwAV  "))
    assert "75.3" in swav and "on greys" not in swav
    assert "what fits of 1 results" in out
    answer = json.loads(command("table", "figure2", "table4", "--json")[1])
    assert (answer["schema"], answer["found"], answer["of_unknown_training"]) == (1, 1, 0)
    assert [each["name"] for each in answer["tables"]] == ["figure2", "table4"]
    left = answer["tables"][0]["panels"][0]
    assert left["rows"][-1]["published"] == {"top-1": 75.3} and left["rows"][-1]["measured"] == []
    assert left["also_measured"][0]["small"] is True
    marked = command("table", "table1", "--markdown", "--results", tmp_path / "other")[1].splitlines()
    assert "| method | kind | 1 % top-1 | 1 % top-5 | 10 % top-1 | 10 % top-5 |" in marked
    assert "| SwAV | self-supervision only | 53.9 | 78.5 | 70.2 | 89.9 |" in marked
    assert "| PCL | self-supervision only | - | 75.6 | - | 86.2 |" in marked
    both = ("--results", tmp_path / "other", "--results", tmp_path / "results")
    assert json.loads(command("table", "table1", "--json", *both)[1])["found"] == 2


def test_lists_and_mistakes(command, tmp_path):
    code, out, _ = command("table", "--list")
    assert code == 0 and len(out.splitlines()) == 2 + 10 and "figure6" in out
    names = [each["name"] for each in json.loads(command("table", "--list", "--json")[1])["tables"]]
    assert names == list(PAPER)
    everything = command("table")[1]
    assert everything.count("SwAV paper, ") == len(PANELS) and "no results in" in everything
    assert_clear(command("table", "table7"), "table7", "known: table1")
    assert_clear(command("table", "tabel2"), "did you mean table2?")
    assert_clear(command("table", "table1", "--results", tmp_path / "none"), tmp_path / "none", "--results")
