"""What was measured here, beside what was published: never in its place. No torch here.

A result stands in a paper's row only if its model is that row's, its data are the whole of the paper's data set, and
it was measured by the paper's protocol in all of its settings. Other results of the same methods come below, and each
says in what it isn't the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import RECIPES
from ..compare import groups_of, in_percent
from ..detect.detr.protocol import choose_detr
from ..detect.protocols import choose_protocol
from ..trained import described_training
from .model import Measure, Panel, Row

__all__ = ["beside"]

_SMALL = ("cached", "small")
_OF_THEIR_OWN = ("places205", "inat18")  # what they give is no stand-in for ImageNet's numbers
_HARMLESS = ("seed", "labels")
# What a detector was trained by is compared as a whole; these say where it ran and how often.
_HOW_IT_RAN = (
    *("engine", "runs", "precision", "nproc", "save_every", "tracker", "batch_size", "backbone_lr"),
    *("method", "head", "schedule"),
)
_TRUNK_RATES = (1e-5, 5e-5, 1e-4)  # of DETR, A.5
_ROUNDED = 0.05  # a list's share, or one that was rounded in each class, is as good as the whole one

Result = Mapping[str, Any]


def beside(
    panel: Panel, results: Sequence[Result]
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """What was measured of a panel's columns.

    Args:
        panel: a part of a table or figure.
        results: contents of ``result.json``, oldest first; what diverged is left out.

    Returns:
        For each row what belongs into it, and what else was measured of the panel's methods. Each is JSON:
        ``model``, ``method``, ``dataset``, ``protocol``, ``seeds``, ``small`` (whether the protocol is one for small
        sets), ``differs`` (``model``, ``data``, ``protocol``: in what it isn't the paper's), and ``values``: for
        titles of columns ``mean``, ``deviation`` and ``interval``, in percent.
    """
    methods = {row.ours for row in panel.rows} - {""}
    measures = dict.fromkeys(column.measure for column in panel.columns)
    inside: list[list[dict[str, Any]]] = [[] for _ in panel.rows]
    below: list[dict[str, Any]] = []
    for measure in measures:
        if measure is None:
            continue
        alike: dict[str, list[Result]] = {}
        for result in results:
            trained = described_training(result)
            if trained is None or trained["method"] not in methods or not _measures(measure, result):
                continue
            number = _row_of(panel, trained, result)
            differs = _differences(measure, None if number is None else panel.rows[number], trained, result)
            place = json.dumps([None if differs else number, trained["method"], differs, _is_small(result)])
            alike.setdefault(place, []).append(result)
        for place, members in alike.items():
            number, method, differs, small = json.loads(place)
            for entry in _entries(panel, measure, members):
                entry |= {"method": method, "small": small, "differs": differs}
                (below if number is None else inside[number]).append(entry)
    return inside, below


def _entries(panel: Panel, measure: Measure, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Means over seeds, for each protocol and model."""
    columns = [column for column in panel.columns if column.measure is measure]
    found = []
    for group in groups_of(results):
        for row in group["rows"]:
            have = [column for column in columns if column.metric in row["metrics"]]
            values = {column.title: in_percent(row["metrics"][column.metric]) for column in have}
            what = {"model": row["model"], "dataset": group["dataset"], "protocol": group["protocol"]}
            found.append({**what, "seeds": row["seeds"], "values": values})
    return [entry for entry in found if entry["values"]]


# --- where a result belongs ---


def _measures(measure: Measure, result: Result) -> bool:
    """Whether a result is of a column's kind, whatever its data and settings are."""
    if result.get("recipe") != measure.recipe:
        return False
    dataset, details = _dataset(result), result.get("details", {})
    if dataset not in measure.datasets and (not measure.stands_for or dataset in _OF_THEIR_OWN):
        return False
    if measure.recipe == "semisup":
        wanted = measure.settings["fraction"]
        return bool(abs(_share(result) - wanted) <= _ROUNDED * wanted)
    if measure.recipe == "detect":
        return bool(details.get("trained_by", {}).get("head") == measure.settings["head"])
    return True


def _row_of(panel: Panel, trained: Mapping[str, Any], result: Result) -> int | None:
    names = {trained["released"], trained["recipe"] if trained["as_published"] else None}
    names.add(str(result.get("model")).partition("@")[0])  # random:resnet50
    return next((n for n, row in enumerate(panel.rows) if names & set(row.models)), None)


def _differences(measure: Measure, row: Row | None, trained: Mapping[str, Any], result: Result) -> list[str]:
    """In what a result isn't the paper's."""
    data = _dataset(result) in measure.datasets and not result.get("details", {}).get("flatters")
    found = {"model": row is not None, "data": data, "protocol": _follows(measure, row, trained, result)}
    return [name for name, same in found.items() if not same]


def _follows(measure: Measure, row: Row | None, trained: Mapping[str, Any], result: Result) -> bool:
    """Whether all settings are the paper's."""
    settings, details = result.get("protocol", {}), result.get("details", {})
    ignored = set(_HARMLESS)
    if measure.recipe == "detect":
        ignored |= {*_HOW_IT_RAN}
        if not _trained_as(measure, trained, details["trained_by"]):
            return False
    else:
        how = result.get("preprocessing") or {}
        if (how.get("resize"), how.get("crop")) != (row.sizes if row else (256, 224)):
            return False
        if settings.get("labels"):
            ignored.add("fraction")  # the list decides
    wanted = _wanted(measure, row, details)
    return all(wanted.get(key) == value for key, value in settings.items() if key not in ignored)


def _wanted(measure: Measure, row: Row | None, details: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(measure.settings) | dict(row.settings.get(measure.recipe, {}) if row else {})
    config = RECIPES.config(measure.recipe)(**given)
    if measure.recipe == "semisup":
        config = config.settled(int(details.get("labelled_images", 0)), given["fraction"])
    elif measure.recipe == "finetune":
        config = config.settled(int(details.get("labelled_images", 0)))
    return dict(config.model_dump(mode="json"))


def _trained_as(measure: Measure, trained: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a detector was trained by the paper's protocol, for its batch, rates and steps."""
    head = measure.settings["head"]
    if head == "detr":  # steps follow from the images; A.5 takes the best of three rates of the trunk
        wanted = choose_detr("coco", "300ep").to_json()
        if found.get("backbone_lr") not in _TRUNK_RATES:
            return False
        wanted = {key: value for key, value in wanted.items() if key not in ("steps", "drops", "backbone_lr")}
    else:
        family = "voc" if head == "c4" else "coco"
        method = str(trained["method"])
        wanted = choose_protocol(measure.datasets[0], family, method, head, "", family == "coco").to_json()
    return all(found.get(key) == value for key, value in json.loads(json.dumps(wanted)).items())


def _is_small(result: Result) -> bool:
    name = str(result.get("details", {}).get("trained_by", {}).get("name", ""))
    return result.get("protocol", {}).get("protocol") in _SMALL or name.startswith("small")


def _dataset(result: Result) -> str:
    return str(result.get("dataset", "")).lower()


def _share(result: Result) -> float:
    """Which share of the labels was used."""
    settings = result.get("protocol", {})
    if not settings.get("labels"):
        return float(settings.get("fraction", 0))
    count = result.get("data", {}).get("train", {}).get("count") or 0
    return float(result.get("details", {}).get("labelled_images", 0)) / count if count else 0.0
