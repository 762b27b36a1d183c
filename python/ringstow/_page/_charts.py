"""Charts as SVG text: pure, without scripts, readable by their titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ringstow._page._text import nbytes, number, shown

WIDTH = 960
_HEIGHT = 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 10, 34
_LABELS_MAX = 8
_MAP_HEIGHT = 420
# A tile that is smaller has no room for a name.
_NAME_WIDTH, _NAME_HEIGHT, _CHAR = 60, 16, 6.4


class Bar(NamedTuple):
    """One bar of a chart: its label, its value, and what it says when the mouse is over it."""

    label: str
    value: float
    told: str
    is_bad: bool = False


class Tile(NamedTuple):
    """A rectangle of a treemap."""

    name: str
    weight: int
    x: float
    y: float
    width: float
    height: float


def bars(title: str, every: Sequence[Bar]) -> str:
    """Return a chart of bars of bytes."""
    top = max([bar.value for bar in every if math.isfinite(bar.value)], default=0) or 1
    inner, height = WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inner / max(len(every), 1)
    parts = [_axis(0, top, nbytes(0), nbytes(round(top)))]
    for index, bar in enumerate(every):
        tall = height * bar.value / top
        parts.append(
            f'<rect class="{"bad" if bar.is_bad else "bar"}" '
            f'x="{_LEFT + step * (index + 0.1):.1f}" y="{_TOP + height - tall:.1f}" '
            f'width="{step * 0.8:.1f}" height="{max(tall, 0.5):.1f}">'
            f"<title>{shown(bar.told)}</title></rect>"
        )
    middles = [_LEFT + step * (index + 0.5) for index in range(len(every))]
    parts += _labels(middles, [bar.label for bar in every])
    return _svg(title, _HEIGHT, parts)


def line(
    title: str, labels: Sequence[str], values: Sequence[float], *, from_zero: bool = False
) -> str:
    """Return a chart of one value over the steps; what is no finite number leaves a gap."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    low = min(low, 0.0) if from_zero else low
    span = (high - low) or abs(high) or 1.0
    inner, height = WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inner / max(len(values), 1)
    parts = [_axis(low, high, number(low), number(high))]
    run: list[str] = []
    for index, value in enumerate([*values, math.nan]):
        if not math.isfinite(value):
            if len(run) > 1:
                parts.append(f'<polyline class="line" points="{" ".join(run)}"/>')
            run = []
            continue
        x = _LEFT + step * (index + 0.5)
        y = _TOP + height * (1 - (value - low) / span)
        run.append(f"{x:.1f},{y:.1f}")
        told = f"{labels[index]}: {number(value)}"
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{shown(told)}</title></circle>"
        )
    parts += _labels([_LEFT + step * (index + 0.5) for index in range(len(values))], labels)
    return _svg(title, _HEIGHT, parts)


def treemap(title: str, weights: Sequence[tuple[str, int]]) -> str:
    """Return rectangles whose areas are weights; names that begin alike have one colour."""
    groups: dict[str, int] = {}
    parts = []
    for tile in tiles(weights, WIDTH, _MAP_HEIGHT):
        group = groups.setdefault(tile.name.partition(".")[0], len(groups))
        parts.append(
            f'<g><rect class="tile t{group % 6}" x="{tile.x:.1f}" y="{tile.y:.1f}" '
            f'width="{max(tile.width - 1, 0.2):.1f}" height="{max(tile.height - 1, 0.2):.1f}">'
            f"<title>{shown(tile.name)}: {nbytes(tile.weight)}</title></rect>{_name_in(tile)}</g>"
        )
    return _svg(title, _MAP_HEIGHT, parts)


def tiles(weights: Sequence[tuple[str, int]], width: float, height: float) -> list[Tile]:
    """Cut an area into one tile for each weight: into halves of like weight, again and again."""
    found: list[Tile] = []
    # Not recursive: a state may have any number of tensors.
    left = [(list(weights), 0.0, 0.0, width, height)]
    while left:
        some, x, y, wide, tall = left.pop()
        total = sum(weight for _, weight in some)
        if not some or total == 0:
            continue
        if len(some) == 1:
            found.append(Tile(*some[0], x, y, wide, tall))
            continue
        half, taken = 0, 0
        while half < len(some) - 1 and (half == 0 or taken + some[half][1] <= total / 2):
            taken += some[half][1]
            half += 1
        share = taken / total
        first, rest = some[:half], some[half:]
        if wide >= tall:
            left.append((rest, x + wide * share, y, wide * (1 - share), tall))
            left.append((first, x, y, wide * share, tall))
        else:
            left.append((rest, x, y + tall * share, wide, tall * (1 - share)))
            left.append((first, x, y, wide, tall * share))
    return found


def _name_in(tile: Tile) -> str:
    if tile.width < _NAME_WIDTH or tile.height < _NAME_HEIGHT:
        return ""
    room = int((tile.width - 8) / _CHAR)
    # The end of a name tells more than its beginning.
    name = tile.name if len(tile.name) <= room else f"...{tile.name[3 - room :]}"
    return f'<text x="{tile.x + 4:.1f}" y="{tile.y + 13:.1f}">{shown(name)}</text>'


def _axis(low: float, high: float, low_text: str, high_text: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    ends = (
        f'<text class="end" x="{_LEFT - 6}" y="{bottom}">{shown(low_text)}</text>'
        f'<text class="end" x="{_LEFT - 6}" y="{_TOP + 10}">{shown(high_text)}</text>'
    )
    if low == high:
        ends = f'<text class="end" x="{_LEFT - 6}" y="{bottom}">{shown(low_text)}</text>'
    return f'{ends}<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH}" y2="{bottom}"/>'


def _labels(middles: Sequence[float], labels: Sequence[str]) -> list[str]:
    every = max(1, math.ceil(len(labels) / _LABELS_MAX))
    return [
        f'<text class="under" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}">{shown(label[-16:])}</text>'
        for index, (x, label) in enumerate(zip(middles, labels, strict=True))
        if index % every == 0
    ]


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    name = shown(title)
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg></div>"
    )
