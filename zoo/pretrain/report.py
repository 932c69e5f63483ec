"""``zoo report``: what became of one or several runs, on one page that needs nothing else.

Runs may be old, unfinished or damaged: what is missing is left out, and said.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ..addresses import shown_urls
from ..errors import InputError, ZooError
from ..files import read_json
from .charts import Curve, Mark, line_chart
from .collapse import read_events
from .report_style import COLORS, page_at, write_page
from .rundir import RunFolder, list_runs, runs_root

__all__ = ["figures_in", "write_report"]


@dataclass(frozen=True)
class _Chart:
    """A chart and the figures in it: ``metrics.jsonl``'s keys and what they are multiplied by."""

    title: str
    keys: tuple[str, ...]
    factor: float = 1.0
    log: bool = False


_CHARTS = (
    _Chart("Loss", ("loss",)),
    _Chart("Learning rate", ("lr",)),
    _Chart("Images a second", ("img_s",)),
    _Chart("Waiting for data, % of a step", ("waiting",), 100),
    _Chart("kNN accuracy of the probe, %", ("probe/knn",), 100),
    _Chart("Linear accuracy of the probe, %", ("probe/linear",), 100),
    _Chart("Effective rank of the embeddings", ("health/rank",)),
    _Chart("Spread of the embeddings (0: all alike)", ("health/spread",)),
    _Chart("Prototypes in use, % of those that could be", ("health/usage",), 100),
    _Chart("Largest share of a prototype, %", ("health/top_share",), 100),
    _Chart("Entropy of the prototypes' use (1: all alike)", ("health/entropy",)),
    _Chart("Entropy of a code (1: uniform)", ("health/code_entropy",)),
    _Chart("Gradient norm", ("health/grad_norm",), log=True),
    _Chart("Age of the queue, steps", ("health/queue_age",)),
)
_NOT_DRAWN = {"schema", "step", "epoch", "time", "data_wait", "step_time", "health/chance"}


@dataclass
class _Run:
    """A run as it was read; ``notes`` say what of it could not be."""

    folder: RunFolder
    label: str
    color: int
    info: dict[str, Any]
    curves: dict[str, Curve] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    recipe: str = ""
    notes: list[str] = field(default_factory=list)

    def read(self) -> None:
        self._read_metrics()
        self._read_events()
        try:
            self.recipe = shown_urls(self.folder.recipe.read_text("utf-8", errors="replace"))
        except OSError as error:
            self.notes.append(f"its recipe can't be read ({error.strerror})")

    def _read_metrics(self) -> None:
        chance, damaged = None, 0
        try:
            with open(self.folder.metrics, "rb") as lines:
                for line in lines:
                    found = figures_in(line)
                    if found is None:
                        damaged += 1
                        continue
                    self.last = found
                    chance = found.get("health/chance", chance)
                    for key, value in found.items():
                        if key not in _NOT_DRAWN:
                            curve = self.curves.setdefault(key, Curve(self.label, self.color))
                            curve.add(found["step"], value)
        except OSError as error:
            self.notes.append(f"its figures can't be read ({error.strerror})")
        if damaged:
            self.notes.append(f"{damaged} damaged line(s) of {self.folder.metrics.name} were skipped")
        if self.last and not any(key.startswith("health/") for key in self.curves):
            self.notes.append(
                "it has no figures of its health: made by an older version, or with health.every=0"
            )
        if "loss" in self.curves:
            self.curves["loss"].level = chance

    def _read_events(self) -> None:
        self.events = read_events(self.folder.events)
        try:
            broken = read_json(self.folder.nonfinite)
            self.events.append(_of_nonfinite(broken))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            self.notes.append(f"{self.folder.nonfinite.name} can't be read")
        self.marks = [
            Mark(event["step"], f"{self.label}: {event['name']} at step {event['step']}", self.color)
            for event in self.events
        ]

    def json(self, name: str) -> dict[str, Any]:
        """A file of the run, empty if there is none."""
        try:
            return dict(read_json(self.folder.path / name))
        except (OSError, ValueError, TypeError):
            return {}


def figures_in(line: bytes) -> dict[str, Any] | None:
    """The numbers of a line of ``metrics.jsonl``; None if it is damaged."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or type(value["step"]) is not int:
            return None
    except (ValueError, KeyError, RecursionError):
        return None
    found = {key: v for key, v in value.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if found.get("step_time", 0) > 0 and "data_wait" in found:
        found["waiting"] = min(1.0, found["data_wait"] / found["step_time"])
    return found


def _of_nonfinite(broken: dict[str, Any]) -> dict[str, Any]:
    """An event of ``nonfinite.json`` (``zoo.pretrain.health.Autopsy``)."""
    parameters = broken["parameters"]
    files = [image["file"] for found in broken["processes"] for image in found["images"]]
    sick = [image["file"] for found in broken["processes"] for image in found["images"] if len(image) > 2]
    said = [f"the loss was {broken['processes'][0]['loss']}, the weights were not touched"]
    for key in ("values", "gradients"):
        if parameters[key]["count"]:
            said.append(
                f"{parameters[key]['count']} of {parameters['count']} parameters had {key} that were not finite, "
                f"first {parameters[key]['first'][0]}"
            )
    if sick:
        said.append(f"views that were not finite were those of {', '.join(sick[:3])}")
    said.append(f"the batch held {len(files)} images, first {files[0]}")
    return {
        "name": "non-finite-loss",
        "step": int(broken["step"]),
        "seen": "; ".join(said),
        "advice": "a lower optimizer.lr; a longer warm-up (schedule.warmup_epochs)",
    }


def write_report(runs: Sequence[str | Path], out: str | Path, views: int = 3) -> dict[str, Any]:
    """Write the page, whole or not at all.

    Args:
        runs: folders of runs, drawn over one another; the newest run if there are none.
        out: the HTML file to write; it is replaced.
        views: images whose views are drawn, if the data is still there; 0: none.

    Returns:
        As JSON: schema, ``report``, and of each run ``run``, ``step`` and ``notes``.

    Raises:
        InputError: not a run, or ``out`` is a folder.
        RunError: the page can't be written.
    """
    out = page_at(out)
    read = [
        _Run(folder, label, n % COLORS, folder.read()) for n, (folder, label) in enumerate(_labelled(runs))
    ]
    for run in read:
        run.read()
    write_page(out, ", ".join(run.label for run in read), "\n".join(_body(read, views)))
    rows = [
        {"run": str(run.folder.path), "step": run.last.get("step", -1) + 1, "notes": run.notes}
        for run in read
    ]
    return {"schema": 1, "report": str(out), "runs": rows}


def _labelled(runs: Sequence[str | Path]) -> list[tuple[RunFolder, str]]:
    """Each run once, called by its folder's name, or by more of its path where that is another's name, too."""
    folders = [RunFolder(Path(run).expanduser()) for run in dict.fromkeys(map(str, runs))]
    if not folders:
        folders = list_runs(runs_root())[-1:]
        if not folders:
            raise InputError(
                "There is no run.", where=runs_root(), fix="name one, or train one: zoo pretrain"
            )
    names = [folder.path.absolute().name for folder in folders]
    return [
        (folder, name if names.count(name) == 1 else str(folder.path))
        for folder, name in zip(folders, names, strict=True)
    ]


def _body(runs: Sequence[_Run], views: int) -> Iterable[str]:
    yield _overview(runs)
    yield _events(runs)
    yield '<section class="charts">'
    yield from _charts(runs)
    yield "</section>"
    for run in runs:
        name = escape(run.label) if len(runs) > 1 else ""
        if views:
            yield f"<h2>Views {name}</h2>" + _views(run, views)
        yield f"<h2>Recipe {name}</h2><details open><summary>every value, and where it came from</summary>"
        yield f"<pre>{escape(run.recipe) or 'no recipe'}</pre></details>"
        yield from _machine(run)


def _overview(runs: Sequence[_Run]) -> str:
    columns = ("run", "recipe", "state", "steps", "loss", "img/s", "kNN", "linear", "device")
    rows = []
    for run in runs:
        last, environment = run.last, run.json("environment.json")
        cells = [
            f'<span class="key c{run.color}"></span>{escape(run.label)}',
            escape(str(run.info.get("recipe_name"))),
            escape(_state(run)),
            f"{last.get('step', -1) + 1} / {escape(str(run.info.get('total_steps')))}",
            _shown(last.get("loss")),
            _shown(last.get("img_s")),
            *(_percent(run.curves.get(f"probe/{name}")) for name in ("knn", "linear")),
            escape(f"{environment.get('device', '-')}, {environment.get('precision', '-')}"),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        if run.notes:
            note = escape("; ".join(run.notes))
            rows.append(
                f'<tr><td colspan="{len(columns)}" class="note">{escape(run.label)}: {note}</td></tr>'
            )
    head = "".join(f"<th>{name}</th>" for name in columns)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _state(run: _Run) -> str:
    try:
        return str(run.folder.summary()["state"])
    except (KeyError, TypeError, ValueError, OSError):
        return "unreadable"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _percent(curve: Curve | None) -> str:
    return f"{100 * curve.values[-1]:.1f} %" if curve is not None and curve.values else "-"


def _events(runs: Sequence[_Run]) -> str:
    items = [
        f'<li><span class="key c{run.color}"></span><b>{escape(event["name"])}</b> at step {event["step"]}'
        f"{' of ' + escape(run.label) if len(runs) > 1 else ''}: {escape(str(event['seen']))}.<br>"
        f"<i>What helps:</i> {escape(str(event['advice']))}.</li>"
        for run in runs
        for event in sorted(run.events, key=lambda event: event["step"])
    ]
    found = f"<ul>{''.join(items)}</ul>" if items else "<p>The doctor found nothing to warn of.</p>"
    return f"<h2>Events</h2>{found}"


def _charts(runs: Sequence[_Run]) -> Iterable[str]:
    known = {key for chart in _CHARTS for key in chart.keys}
    others = dict.fromkeys(key for run in runs for key in run.curves if key not in known)
    ends = [
        curve.steps[end] for run in runs for curve in run.curves.values() if curve.steps for end in (0, -1)
    ]
    for chart in (*_CHARTS, *(_Chart(key, (key,)) for key in others)):
        curves = [
            _scaled(run.curves[key], chart.factor) for run in runs for key in chart.keys if key in run.curves
        ]
        if any(curve.values for curve in curves):
            marks = [mark for run in runs for mark in run.marks]
            yield line_chart(chart.title, curves, marks, chart.log, (min(ends), max(ends)))


def _scaled(curve: Curve, factor: float) -> Curve:
    if factor != 1:
        for index, value in enumerate(curve.values):
            curve.values[index] = factor * value
    return curve


def _views(run: _Run, count: int) -> str:
    """A picture of some images' views, or a sentence why there is none."""
    from .resolve import resolve
    from .show_views import show_views

    if run.info.get("own_views"):
        return "<p>The run's views are its user's own transforms, which are not kept with it.</p>"
    try:
        recipe = resolve(run.folder.recipe).recipe
        with tempfile.TemporaryDirectory() as place:
            picture = Path(place) / "views.png"
            show_views(recipe.data.sources[0], str(run.folder.recipe), picture, count=count, seed=recipe.seed)
            encoded = base64.b64encode(picture.read_bytes()).decode()
    except (ZooError, OSError, IndexError) as error:
        what = error.what if isinstance(error, ZooError) else str(error)
        return f"<p>They can't be drawn any more: {escape(shown_urls(what))}</p>"
    return (
        f'<div class="wide"><img alt="views of {count} images" src="data:image/png;base64,{encoded}"></div>'
    )


def _machine(run: _Run) -> Iterable[str]:
    for title, name in (("Where the time went", "efficiency.json"), ("Environment", "environment.json")):
        content = run.json(name)
        if content:
            text = json.dumps(content, indent=1, ensure_ascii=False)
            yield f"<details><summary>{title}</summary><pre>{escape(shown_urls(text))}</pre></details>"
