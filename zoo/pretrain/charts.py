"""Line and bar charts as SVG text, for pages that must hold all that they show. No torch here."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Curve", "Mark", "bar_chart", "line_chart"]

_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 16, 26
_POINTS = 300  # of a curve; more would not be seen


@dataclass
class Curve:
    """Values over steps; those that are not finite are left out.

    Args:
        label: what it is called when pointed at.
        color: a number from 0, see the page's style.
        level: a constant to draw beside it, such as the loss of guessing.
    """

    label: str
    color: int
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    level: float | None = None

    def add(self, step: int, value: float) -> None:
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    text: str
    color: int


@dataclass(frozen=True)
class _Point:
    """Neighbouring steps, drawn as one."""

    step: float
    mean: float
    low: float
    high: float


def line_chart(
    title: str,
    curves: Sequence[Curve],
    marks: Iterable[Mark] = (),
    log: bool = False,
    span: tuple[int, int] | None = None,
    unit: str = "step",
) -> str:
    """A chart of curves over the same axis of steps; where steps are many, means with the range around them.

    Args:
        title: above it.
        curves: with a value each, at least.
        marks: drawn as vertical lines.
        log: a logarithmic axis, if all values are above 0.
        span: the first and last step of the axis, if not the curves' own.
        unit: what the steps are.
    """
    drawn = [(curve, _thinned(curve)) for curve in curves if curve.values]
    lows = [point.low for _, points in drawn for point in points]
    highs = [point.high for _, points in drawn for point in points]
    levels = [curve.level for curve, _ in drawn if curve.level is not None]
    log = log and min(lows + levels) > 0
    y_axis = _Axis(min(lows + levels), max(highs + levels), _HEIGHT - _BOTTOM, _TOP, log)
    first, last = span or (
        min(curve.steps[0] for curve, _ in drawn),
        max(curve.steps[-1] for curve, _ in drawn),
    )
    x_axis = _Axis(first, last, _LEFT, _WIDTH - _RIGHT, widen=False)
    parts = [*_frame(x_axis, y_axis)]
    for mark in marks:
        if x_axis.low <= mark.step <= x_axis.high:
            x = x_axis.at(mark.step)
            parts.append(
                f'<line class="mark c{mark.color}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    for level in dict.fromkeys(levels):
        y = y_axis.at(level)
        parts.append(
            f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="level" x="{_WIDTH - _RIGHT - 2}" y="{y - 4:.1f}" text-anchor="end">'
            f"ln {round(math.exp(level))} = {level:.3f}</text>"
        )
    for curve, points in drawn:
        parts += _line(curve, points, x_axis, y_axis, unit)
    return _figure(title, _HEIGHT, parts)


def bar_chart(
    title: str, names: Sequence[str], columns: Sequence[tuple[int, Sequence[float | None]]], most: float
) -> str:
    """Horizontal bars from 0 to ``most``, for each name one of each column.

    Args:
        title: above it.
        names: of the rows.
        columns: a color (as of ``Curve``) and a value for each name; None: no bar.
        most: the end of the axis.
    """
    left, line = _WIDTH // 3, 12
    axis = _Axis(0.0, most, left, _WIDTH - _RIGHT - 40, widen=False)
    group = line * len(columns) + 6
    parts = []
    for row, name in enumerate(names):
        top = _TOP + row * group
        middle = top + line * len(columns) / 2 + 4
        parts.append(f'<text x="{left - 6}" y="{middle:.1f}" text-anchor="end">{escape(_short(name))}</text>')
        for number, (color, values) in enumerate(columns):
            value, y = values[row], top + number * line
            if value is None:
                continue
            end = axis.at(min(max(value, 0.0), most))
            parts.append(
                f'<rect class="c{color}" x="{left}" y="{y}" width="{max(end - left, 1):.1f}" height="{line - 2}">'
                f"<title>{escape(name)}: {value:.4g}</title></rect>"
                f'<text x="{end + 4:.1f}" y="{y + line - 3}">{value:.1f}</text>'
            )
    return _figure(title, _TOP + len(names) * group + 4, parts)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _line(curve: Curve, points: Sequence[_Point], x_axis: _Axis, y_axis: _Axis, unit: str) -> list[str]:
    places = [(x_axis.at(point.step), y_axis.at(point.mean)) for point in points]
    said = f"<title>{escape(curve.label)}: {points[-1].mean:.4g} at {unit} {points[-1].step:.0f}</title>"
    if len(points) == 1:
        x, y = places[0]
        return [f'<circle class="c{curve.color}" cx="{x:.1f}" cy="{y:.1f}" r="3">{said}</circle>']
    parts = []
    if any(point.low < point.high for point in points):
        upper = [(x_axis.at(point.step), y_axis.at(point.high)) for point in points]
        lower = [(x_axis.at(point.step), y_axis.at(point.low)) for point in reversed(points)]
        parts.append(f'<polygon class="band c{curve.color}" points="{_joined(upper + lower)}"/>')
    parts.append(f'<polyline class="curve c{curve.color}" points="{_joined(places)}">{said}</polyline>')
    if len(points) <= 40:
        parts += [f'<circle class="c{curve.color}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places]
    return parts


def _joined(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _thinned(curve: Curve) -> list[_Point]:
    """As many points as can be told apart: of neighbouring steps the mean and the range."""
    count = len(curve.values)
    size = max(1, math.ceil(count / _POINTS))
    points = []
    for first in range(0, count, size):
        steps, values = curve.steps[first : first + size], curve.values[first : first + size]
        mean = math.fsum(values) / len(values)
        points.append(_Point((steps[0] + steps[-1]) / 2, mean, min(values), max(values)))
    return points


class _Axis:
    """Numbers to pixels; ``ticks`` are round numbers."""

    def __init__(
        self, low: float, high: float, start: float, end: float, log: bool = False, widen: bool = True
    ) -> None:
        if low == high and not log:
            low, high = (low - 0.5, high + 0.5) if widen or low == 0 else (low - 1, high)
        elif log and low == high:
            low, high = low / 2, high * 2
        elif widen and not log:
            low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
        self.low, self.high, self._start, self._end, self._log = low, high, start, end, log

    def at(self, value: float) -> float:
        if self._log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log and self.high / self.low >= 10:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in list(powers)[:: max(1, len(powers) // 5)]]
        size = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(size))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= size)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _frame(x_axis: _Axis, y_axis: _Axis) -> Iterable[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in y_axis.ticks():
        y = y_axis.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
    for value in x_axis.ticks():
        if value == int(value):
            x = x_axis.at(value)
            yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_number(value)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{round(value, 12):.4g}"
