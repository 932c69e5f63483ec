"""``zoo report`` for results of detection: scores, curves, and what was found in which images, on one page.

Results may be old or without their images: what is missing is left out, and said.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from zoo.addresses import shown_urls
from zoo.errors import InputError, ZooError
from zoo.files import read_json
from zoo.pretrain.charts import Curve, bar_chart, line_chart
from zoo.pretrain.report import figures_in
from zoo.pretrain.report_style import COLORS, page_at, write_page

from .annotations import BoxSet, Objects
from .predict import SCORE, draw
from .scored import read_scored
from .scores import Detections, image_precision

__all__ = ["chosen_images", "write_report"]

_SIDE = 480  # pixels of a drawn picture
_HEADLINES = ("AP", "AP50", "AP75", "mask_AP", "mask_AP50")
_TRAINED = ("loss", "proposal_recall", "lr")  # beginnings of the figures that are drawn


@dataclass
class _Result:
    """A result as it was read; ``notes`` say what of it could not be."""

    folder: Path
    label: str
    color: int
    result: dict[str, Any]
    scores: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The first of its trainings."""
        return self.folder / "run-0"

    def read(self) -> None:
        try:
            self.scores = dict(read_json(self.run / "scores.json"))
        except (OSError, ValueError, TypeError):
            self.notes.append("its scores of each class can't be read")
        try:
            with open(self.run / "metrics.jsonl", "rb") as lines:
                for found in filter(None, map(figures_in, lines)):
                    for key in (key for key in found if key.startswith(_TRAINED)):
                        self.curves.setdefault(key, Curve(self.label, self.color)).add(
                            found["step"], found[key]
                        )
        except OSError as error:
            self.notes.append(f"the figures of its training can't be read ({error.strerror})")

    def precision(self, name: str | None = None) -> Curve:
        """Precision by recall in %, of a class or of the mean over all that have objects."""
        known = {key: curve for key, curve in (self.scores.get("curves") or {}).items() if curve is not None}
        chosen = [known[name]] if name in known else list(known.values()) if name is None else []
        curve = Curve(self.label, self.color)
        if chosen:
            for recall, value in enumerate(np.mean(chosen, axis=0).tolist()):
                curve.add(recall, 100 * value)
        return curve


def write_report(results: Sequence[str | Path], out: str | Path, views: int = 3) -> dict[str, Any]:
    """Write the page, whole or not at all.

    Args:
        results: folders of ``zoo transfer detect``, side by side.
        out: the HTML file to write; it is replaced.
        views: images of each kind (best, typical, worst) that are drawn, if they are still there; 0: none.

    Returns:
        As JSON: schema, ``report``, and of each result ``run`` and ``notes``.

    Raises:
        InputError: no result of detection, or ``out`` is a folder.
        RunError: the page can't be written.
    """
    out = page_at(out)
    folders = [Path(result).expanduser() for result in dict.fromkeys(map(str, results))]
    names = [folder.absolute().name for folder in folders]
    read = []
    for number, (folder, name) in enumerate(zip(folders, names, strict=True)):
        label = name if names.count(name) == 1 else str(folder)
        read.append(_Result(folder, label, number % COLORS, _result_of(folder)))
        read[-1].read()
    write_page(out, ", ".join(one.label for one in read), "\n".join(_body(read, views)))
    rows = [{"run": str(one.folder), "notes": one.notes} for one in read]
    return {"schema": 1, "report": str(out), "runs": rows}


def _result_of(folder: Path) -> dict[str, Any]:
    try:
        result = dict(read_json(folder / "result.json"))
        if result["recipe"] == "detect" and {"metrics", "details", "data"} <= result.keys():
            return result
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise InputError(
        "This is no result of detection.", where=folder, fix="pass the folder that zoo transfer detect wrote"
    )


def _body(results: Sequence[_Result], views: int) -> Iterable[str]:
    parts = [_charts(results)]
    for one in results:
        name = escape(one.label) if len(results) > 1 else ""
        parts += [*_pictures(one, views, name), *_evidence(one, name)]
    yield _overview(results)  # made last: the others add notes
    yield from parts


def _overview(results: Sequence[_Result]) -> str:
    metrics = [key for key in _HEADLINES if any(key in one.result["metrics"] for one in results)]
    columns = ("result", "model", "data", "protocol", "steps", "runs", *metrics)
    rows = []
    for one in results:
        details = one.result["details"]
        cells = [
            f'<span class="key c{one.color}"></span>{escape(one.label)}',
            escape(str(one.result.get("model"))),
            escape(f"{one.result.get('dataset')}, {details.get('scored_on')}"),
            escape(str((details.get("trained_by") or {}).get("name"))),
            escape(str(details.get("steps"))),
            str(len(details.get("runs") or [0])),
            *(
                _share(one.result["metrics"].get(key), (details.get("deviation") or {}).get(key))
                for key in metrics
            ),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        said = [f"AP: {details.get('average_precision')}", details.get("rescaled"), details.get("flatters")]
        notes = [str(note) for note in (*said, *(details.get("notes") or []), *one.notes) if note]
        rows.append(
            f'<tr><td colspan="{len(columns)}" class="note">{escape(one.label)}: {escape("; ".join(notes))}</td></tr>'
        )
    head = "".join(f"<th>{name}</th>" for name in columns)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _share(value: Any, deviation: Any) -> str:
    if not isinstance(value, int | float) or value < 0:
        return "-"
    return f"{100 * value:.1f} %" + (
        f" ± {100 * deviation:.1f}" if isinstance(deviation, int | float) else ""
    )


def _charts(results: Sequence[_Result]) -> str:
    drawn = [
        line_chart("Precision by recall at an IoU of 0.5, mean of the classes, %", curves, unit="recall")
        for curves in [_known(one.precision() for one in results)]
        if curves
    ]
    keys = list(dict.fromkeys(key for one in results for key in one.curves))
    drawn += [
        line_chart(key, curves)
        for key in keys
        if (curves := _known(one.curves[key] for one in results if key in one.curves))
    ]
    names = list(dict.fromkeys(name for one in results for name in _classes(one)))
    columns = [(one.color, [_classes(one).get(name) for name in names]) for one in results]
    bars = bar_chart("AP of each class, %", names, columns, 100.0) if names else ""
    of_classes = [
        line_chart(f"{name}: precision by recall, %", curves, unit="recall")
        for name in names
        if (curves := _known(one.precision(name) for one in results))
    ]
    found = f'<section class="charts">{"".join(drawn)}</section>'
    if names:
        found += f'<h2>Classes</h2><section class="charts">{bars}</section>'
    if of_classes:
        inside = f'<section class="charts">{"".join(of_classes)}</section>'
        found += f"<details><summary>precision by recall of each class</summary>{inside}</details>"
    return found


def _known(curves: Iterable[Curve]) -> list[Curve]:
    return [curve for curve in curves if curve.values]


def _classes(one: _Result) -> dict[str, float | None]:
    """AP of each class in %, the mean over its trainings' first."""
    rows = one.scores.get("per_class") or one.result["details"].get("per_class") or []
    return {str(row["class"]): None if row["AP"] is None else 100 * row["AP"] for row in rows}


def chosen_images(scores: Sequence[float], objects: Sequence[int], count: int) -> dict[str, list[int]]:
    """Rows of the ``best``, ``typical`` (nearest to the median) and ``worst`` images, ``count`` of each at most.

    Args:
        scores: of each image; NaN: nothing to judge it by.
        objects: how many each has; of images that are alike the one with more tells more.
        count: of each kind.
    """
    left = [row for row, score in enumerate(scores) if not math.isnan(score)]
    if not left:
        return {"best": [], "typical": [], "worst": []}
    median = float(np.median([scores[row] for row in left]))
    keys = {
        "best": lambda row: (-scores[row], -objects[row]),
        "worst": lambda row: (scores[row], -objects[row]),
        "typical": lambda row: (abs(scores[row] - median), -objects[row]),
    }
    found: dict[str, list[int]] = {}
    for kind, key in keys.items():
        found[kind] = sorted(left, key=key)[:count]
        left = [row for row in left if row not in found[kind]]
    return {kind: found[kind] for kind in ("best", "typical", "worst")}


def _pictures(one: _Result, views: int, name: str) -> Iterable[str]:
    if not views:
        return
    try:
        images, found = read_scored(one.run)
        scores = [
            image_precision(picture.objects, said)
            for picture, said in zip(images.pictures, found, strict=True)
        ]
        counts = [len(picture.objects) for picture in images.pictures]
        for kind, rows in chosen_images(scores, counts, views).items():
            shown = [_pair(images, row, found[row], scores[row]) for row in rows]
            if shown:
                yield f"<h2>{kind.capitalize()} images {name}</h2><p>Left: the truth; right: what was found.</p>"
                yield f'<section class="charts">{"".join(shown)}</section>'
    except (ZooError, OSError, ValueError) as error:
        what = error.what if isinstance(error, ZooError) else str(error)
        one.notes.append(f"its images can't be drawn any more: {shown_urls(what)}")


def _pair(images: BoxSet, row: int, found: Detections, score: float) -> str:
    pixels, classes, picture = images.read(row), images.classes, images.pictures[row]
    objects = picture.objects
    sure, least = int((found.scores >= SCORE).sum()), SCORE
    said = f"{sure} detections of {SCORE:g} and more"
    if not sure and len(found.scores):  # then the best, as many as there are objects
        least = float(found.scores[: len(objects)][-1])
        said = f"no detection of {SCORE:g} and more, those from {least:.2f} on are drawn"
    what = f"{picture.name}: AP50 of this image {100 * score:.0f} %; {len(objects)} objects, {said}"
    sides = (
        ("truth", draw(pixels, _as_found(objects), classes, 0.0, say=False)),
        ("found", draw(pixels, found, classes, least)),
    )
    shown = "".join(f'<img alt="{side}" src="{_encoded(image)}">' for side, image in sides)
    return f'<figure><figcaption>{escape(what)}</figcaption><div class="pair">{shown}</div></figure>'


def _as_found(objects: Objects) -> Detections:
    """The truth as a detector would say it."""
    masks = objects.masks if objects.masks and None not in objects.masks else None
    return Detections(objects.boxes, np.ones(len(objects)), objects.labels, masks)


def _encoded(image: Any) -> str:
    image.thumbnail((_SIDE, _SIDE))
    written = io.BytesIO()
    image.save(written, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"


def _evidence(one: _Result, name: str) -> Iterable[str]:
    details = one.result["details"]
    rows = [("Protocol", details.get("trained_by")), ("Settings", one.result.get("protocol"))]
    rows += [("Trainings", details.get("runs")), ("Data", one.result["data"])]
    rows += [
        ("Environment", {key: one.result.get(key) for key in ("versions", "machine", "seconds", "created")})
    ]
    yield f"<h2>Evidence {name}</h2>"
    for title, content in rows:
        text = json.dumps(content, indent=1, ensure_ascii=False)
        yield f"<details><summary>{title}</summary><pre>{escape(shown_urls(text))}</pre></details>"
