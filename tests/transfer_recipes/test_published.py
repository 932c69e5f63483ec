"""The published numbers against the paper's own text and the shared facts, row by row."""

from __future__ import annotations

import re

import pytest

from transfer import RECIPES
from transfer.published import PAPER, find_table
from transfer.published.model import Column, Panel, Row
from zoo.errors import InputError
from zoo.pretrain.resolve import list_recipes, resolve
from zoo.weights.catalog import CATALOG

PANELS = {
    panel.source.removeprefix("SwAV paper, "): panel for table in PAPER.values() for panel in table.panels
}
# What the lines of a table in the text begin with, and the caption that ends them.
PLACES = {
    "table 1": ("\t\t\t1% labels", "Table 1:"),
    "table 2": ("\tLinear Classification", "Table 2:"),
    "table 3": ("Method\tMom. Encoder", "Table 3:"),
    "table 4": ("Method\tmulti-crop\ttime", "Table 4:"),
    "table 5": ("Method\tArch.\tParam.", "Table 5:"),
    "table 6": ("\tLinear Classification", "Table 6:"),
    "figure 2 (left)": ("Method\tArch.\tParam.", "Figure 2:"),
    "figure 3 (left)": ("\tTop-1\t", "Figure 3:"),
    "figure 4 (left)": ("Method\tFrozen", "Figure 4:"),
}


@pytest.fixture(scope="module")
def text(shared):
    files = [file.read_text("utf-8") for file in sorted((shared / "seeds").glob("*.txt"))]
    whole = [content for content in files if "Table 6:" in content]
    assert whole, "the paper's text isn't among the shared files"
    return whole[0]


def lines_of(text, place, methods):
    """The lines of a table whose method is known, as plain words."""
    header, caption = PLACES[place]
    end = text.index(caption)
    found = []
    for line in text[text.rindex(header, 0, end) : end].splitlines():
        line = re.sub(r"\s*\[\d+\]", "", line)
        if not methods & {cell.strip() for cell in line.split("\t")}:
            continue
        for tex, plain in (
            (r"^{\phantom{\dagger}}", ""),
            (r"^{\dagger}", "†"),
            (r"\!", ""),
            (r"\times", "x"),
        ):
            line = line.replace(tex, plain)
        line = re.sub(r"\\mathbf\{([^}]*)\}", r"\1", line).replace("$", "")
        found.append(re.sub(r" ?\+ ?(?=\dx)", "+", re.sub(r"(\d) ?x ?(\d)", r"\1x\2", line)))
    return found


def numbers(line):
    """All that is a number, a crop, a time or a dash, without the dashes at the end."""
    found = re.findall(r"\d+x\d+(?:\+\d+x\d+)*|\d+h\d*|\d[\d,]*(?:\.\d+)?G?†?|(?<=\s)-(?=\s|$)", line)
    while found and found[-1] == "-":
        found.pop()
    return found


def line_of(panel, row):
    values = [
        "-" if value is None else f"{value}{'†' if column.title in row.by_authors else ''}"
        for column, value in zip(panel.columns, row.values, strict=True)
    ]
    return " ".join((row.method, *row.about, *values))


@pytest.mark.parametrize("place", PLACES)
def test_every_row_is_the_papers(text, place):
    panel = PANELS[place]
    rows = [row for row in panel.rows if not row.source]
    theirs = [numbers(line) for line in lines_of(text, place, {row.method for row in rows})]
    if place == "figure 3 (left)":  # one line for both crops, and their difference
        pairs = [(a, b, abs(b.values[0] - a.values[0])) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        ours = [numbers(f"{a.method} {a.values[0]} {b.values[0]} {gain:.1f}") for a, b, gain in pairs]
        assert all((a.method, *a.about, *b.about) == (b.method, "2x224", "2x160+4x96") for a, b, _ in pairs)
    else:
        ours = [numbers(line_of(panel, row)) for row in rows]
    assert len(ours) > 1 and ours == theirs


def test_numbers_that_stand_in_the_text(text):
    """What rows of other panels have is printed somewhere, with their source said."""
    plain = re.sub(r"[$\\%]|\\times", "", text)
    for words in (
        "it already achieves strong performance after 100 epochs, i.e., 72.1 in 6h15",
        "train DeepCluster-v2 in SwAV best setting (800 epochs - 8 crops) and obtain 75.2 top-1",
        "SimCLR trained for 1000 epochs (40 hours",
        "shrinks the gap with supervised training to 0.6",
    ):
        assert words in plain
    by_text = {"section 5.3": ("6h15", 72.1), "section 5.1": (75.2,), "section B.1": ("40h", None)}
    found = {
        row.source: row.values for panel in PANELS.values() for row in panel.rows if row.source in by_text
    }
    assert found == by_text


def test_rows_that_quote_another_place_have_its_number():
    for panel in PANELS.values():
        for row in panel.rows:
            if row.source in PANELS:
                known = [r.values[-1] for r in PANELS[row.source].rows if set(r.models) & set(row.models)]
                assert known == [row.values[-1]], (panel.source, row)


def test_the_shared_facts_say_the_same(shared):
    facts = (shared / "facts" / "protocols.md").read_text("utf-8").split("## Published results")[1]
    found = re.search(r"SwAV 75\.3 \(100 epochs ([\d.]+), 200: ([\d.]+), 400: ([\d.]+);", facts)
    longer = [row.values[0] for row in PANELS["figure 3 (right)"].rows]
    assert longer == [*map(float, found.groups()), 75.3]
    assert [row.values[-1] for row in PANELS["figure 6"].rows] == [*longer, None]
    for table, row in (("table 2", 0), ("table 2", 1), ("table 6", -1), ("table 6", -2)):
        values = [value for value in PANELS[table].rows[row].values if value is not None]
        assert all(f"{value}" in facts for value in values), (table, values)
    for row in PANELS["table 4"].rows:
        assert row.values[0] in facts and row.values[1].replace("G", " GB") in facts


# --- which models are whose ---


def rows_of(models):
    return [(panel, row) for panel in PANELS.values() for row in panel.rows if set(row.models) & set(models)]


def test_every_model_exists_and_is_what_its_row_says():
    recipes = list_recipes()
    for panel in PANELS.values():
        seen = [name for row in panel.rows for name in row.models]
        assert len(seen) == len(set(seen)), panel.source  # a result has one row
        for row in panel.rows:
            for name in row.models:
                assert name in CATALOG or name in recipes or name == "random:resnet50"
                if name not in CATALOG:
                    continue
                card = CATALOG[name]
                assert card.method == row.ours
                about = dict(zip(panel.about, row.about, strict=True))
                assert about.get("epochs", str(card.epochs)) == str(card.epochs)
                assert about.get("crops", "").startswith(card.crops) or "crops" not in about
    # A catalog's number is the row's that it belongs to.
    for name, card in CATALOG.items():
        linear = [
            metric.value
            for metric in card.metrics
            if metric.task == "linear" and metric.dataset == "imagenet1k"
        ]
        places = [
            row.values[number]
            for panel, row in rows_of([name])
            for number, column in enumerate(panel.columns)
            if column.measure is not None and column.title == "top-1"
        ]
        assert set(places) == set(linear), name


# Rows of methods that are ours, by other means than ours: an EfficientNet, and images chosen by their hashtags.
OTHERS = {("table 5", "Supervised"), ("figure 4 (left)", "MoCo")}


def test_every_row_of_our_methods_has_a_recipe_that_says_its_number():
    recipes = list_recipes()
    for place in ("table 3", "table 5", *(place for place in PANELS if place.startswith("figure"))):
        panel = PANELS[place]
        for row in panel.rows:
            if row.ours in ("", "random") or (place, row.method) in OTHERS:
                continue
            (name,) = [model for model in row.models if model in recipes]
            recipe = resolve(name).recipe
            assert recipe.method.name == row.ours
            measured = zip(panel.columns, row.values, strict=True)
            numbers = [value for column, value in measured if column.measure and value is not None]
            assert [number for number in numbers if f"{number} %" not in recipe.summary] == [], name


def test_every_measure_is_one_of_the_recipes():
    for panel in PANELS.values():
        for column in panel.columns:
            if column.measure is None:
                assert column.title in ("hours", "time / 100 epochs", "peak memory / GPU")
                continue
            config = RECIPES.config(column.measure.recipe)
            assert set(column.measure.settings) <= set(config.model_fields)
            assert column.metric in ("top1", "top5", "mAP", "AP50", "AP")


def test_names():
    assert list(PAPER) == [*(f"table{n}" for n in range(1, 7)), *(f"figure{n}" for n in (2, 3, 4, 6))]
    for words, name in (
        ("Table 1", "table1"),
        ("fig2", "figure2"),
        ("Fig. 6", "figure6"),
        ("tab_3", "table3"),
    ):
        assert find_table(words).name == name
    with pytest.raises(InputError, match="no such table or figure") as caught:
        find_table("figure5")
    assert "known: table1" in caught.value.fix and "figure6" in caught.value.fix


def test_a_row_that_does_not_fit_is_a_mistake():
    with pytest.raises(ValueError, match="doesn't fit the columns"):
        Panel("t", "s", (), (Column("a"),), (Row("m", (), (1.0, 2.0)),))
