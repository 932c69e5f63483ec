"""Results beside each other: means and deviations over seeds, and only where they can be compared. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["compared", "groups_of", "in_percent", "in_words", "protocol_of", "spread", "table_of"]

_METRICS = ("top1", "top5", "mAP", "AP50", "AP")  # what is shown, as far as a result has it


def protocol_of(result: Mapping[str, Any]) -> str:
    """The recipe's name, with what of its settings tells its kinds apart."""
    settings = result.get("protocol", {})
    if settings.get("labels"):
        share = str(settings["labels"]["name"])
    else:
        share = f"{100 * settings['fraction']:g} %" if "fraction" in settings else ""
    kinds = (share, settings.get("protocol"), settings.get("engine"))
    words = [word for word in kinds if word not in (None, "", "torchvision")]
    return f"{result['recipe']} ({', '.join(words)})" if words else str(result["recipe"])


def groups_of(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results that can be compared, together: the same recipe and settings but for the seed, the same split.

    Left out: what diverged.

    Args:
        results: contents of ``result.json``.

    Returns:
        JSON of each group: ``dataset``, ``protocol``, ``metrics`` (names) and ``rows``, one a model, best first:
        ``model``, ``crop``, ``seeds``, and of each metric ``mean``, ``deviation`` (None of a single seed) and, of a single
        one, its ``interval``.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result.get("details", {}).get("diverged"):
            continue
        settings = {key: value for key, value in result.get("protocol", {}).items() if key != "seed"}
        splits = result.get("data", {}).get("split_sha256")
        key = json.dumps([result.get("recipe"), result.get("dataset"), settings, splits], sort_keys=True)
        groups.setdefault(key, []).append(result)
    return [_group(members) for members in groups.values()]


def _group(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = members[0]
    names = [name for name in _METRICS if any(_has(m, name) for m in members)]
    models: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for member in members:  # oldest first: what was measured again replaces what it was
        key = (str(member.get("weights_sha256")), json.dumps(member.get("preprocessing"), sort_keys=True))
        models.setdefault(key, {})[int(member.get("seeds", [0])[0])] = member
    rows = [_row(list(by_seed.values()), sorted(by_seed), names) for by_seed in models.values()]
    if names:
        rows.sort(key=lambda row: -(row["metrics"][names[0]]["mean"] or 0.0))
    return {
        "dataset": first.get("dataset"),
        "protocol": protocol_of(first),
        "recipe": first.get("recipe"),
        "metrics": names,
        "rows": rows,
    }


def _has(result: Mapping[str, Any], name: str) -> bool:
    return isinstance(result.get("metrics", {}).get(name), int | float)


def _row(results: Sequence[Mapping[str, Any]], seeds: list[int], names: Sequence[str]) -> dict[str, Any]:
    metrics = {}
    for name in names:
        values = [result["metrics"][name] for result in results if _has(result, name)]
        found = {**spread(values), "interval": None}
        if len(values) == 1:
            found["interval"] = results[0].get("intervals", {}).get(name)
        metrics[name] = found
    crop = (results[0].get("preprocessing") or {}).get("crop")
    return {"model": results[0].get("model"), "crop": crop, "seeds": seeds, "metrics": metrics}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and deviation (of a sample, n - 1); the latter needs two values."""
    if not values:
        return {"mean": None, "deviation": None}
    mean = sum(values) / len(values)
    if len(values) < 2:
        return {"mean": mean, "deviation": None}
    return {
        "mean": mean,
        "deviation": math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)),
    }


def compared(group: Mapping[str, Any]) -> list[dict[str, str]]:
    """A group's rows as words: ``71.2 +- 0.4`` over seeds, ``71.2 (69.9 - 72.4)`` of a single one; in percent."""
    rows = []
    for row in group["rows"]:
        shown = {
            "model": str(row["model"]),
            "crop": str(row["crop"] or "-"),
            "seeds": ",".join(map(str, row["seeds"])),
        }
        rows.append(shown | {name: in_words(in_percent(row["metrics"][name])) for name in group["metrics"]})
    return rows


def table_of(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of one table of all groups: a model a row, each protocol's first metric a column."""
    columns = ["model"]
    rows: dict[str, dict[str, str]] = {}
    for group in groups:
        if not group["metrics"]:
            continue
        metric = group["metrics"][0]
        column = f"{group['protocol']} {metric}"
        columns.append(column)
        for row in group["rows"]:
            mine = rows.setdefault(str(row["model"]), {"model": str(row["model"])})
            mine[column] = in_words(in_percent(row["metrics"][metric]))
    return columns, list(rows.values())


def in_words(percent: Mapping[str, Any]) -> str:
    """A mean with its deviation, or its interval, or alone: ``71.2 +- 0.4``, ``71.2 (69.9 - 72.4)``.

    Args:
        percent: ``mean``, ``deviation`` and ``interval``, each None where there is none.
    """
    if percent["mean"] is None:
        return "-"
    text = f"{percent['mean']:.1f}"
    if percent["deviation"] is not None:
        return f"{text} +- {percent['deviation']:.1f}"
    if percent["interval"] is not None:
        low, high = percent["interval"]
        return f"{text} ({low:.1f} - {high:.1f})"
    return text


def in_percent(found: Mapping[str, Any]) -> dict[str, Any]:
    """A row's metric (``groups_of``) times a hundred."""
    scaled = {key: None if found[key] is None else 100 * found[key] for key in ("mean", "deviation")}
    return {**scaled, "interval": found["interval"] and [100 * edge for edge in found["interval"]]}
