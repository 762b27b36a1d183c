"""Charts as SVG text: pure, without scripts, readable by their titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ringstow._program._page._text import cut, nbytes, number, shown

WIDTH = 960
_HEIGHT = 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 10, 34
_LABELS_MAX = 8
# With more points than this, draw only the line: the dots would touch and make the page large.
_DOTS_MAX = 120
_MAP_HEIGHT = 420
# A smaller tile has no room for a name.
_NAME_WIDTH, _NAME_HEIGHT, _CHAR = 60, 16, 6.4


class Bar(NamedTuple):
    """One bar of a chart: its label, its value, and its tooltip."""

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
    parts += _labels(_places(range(len(every))), [bar.label for bar in every])
    return _svg(title, _HEIGHT, parts)


def line(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    *,
    at: Sequence[int] | None = None,
    from_zero: bool = False,
) -> str:
    """Return a chart of one value over the steps; values that are not finite leave gaps.

    Args:
        title: what the chart shows.
        labels: the label of each value.
        values: one value for each point.
        at: the position of each point, in ascending order; None means equal distances.
        from_zero: whether the axis begins at zero.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    low = min(low, 0.0) if from_zero else low
    span = (high - low) or abs(high) or 1.0
    height = _HEIGHT - _TOP - _BOTTOM
    places = _places(range(len(values)) if at is None else at)
    parts = [_axis(low, high, number(low), number(high))]
    run: list[str] = []
    ended = [*values, math.nan]
    for index, value in enumerate(ended):
        if not math.isfinite(value):
            if len(run) > 1:
                parts.append(f'<polyline class="line" points="{" ".join(run)}"/>')
            run = []
            continue
        x, y = places[index], _TOP + height * (1 - (value - low) / span)
        is_alone = not (run or math.isfinite(ended[index + 1]))
        run.append(f"{x:.1f},{y:.1f}")
        if is_alone or len(values) <= _DOTS_MAX:
            told = f"{labels[index]}: {number(value)}"
            parts.append(
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{shown(told)}</title></circle>"
            )
    parts += _labels(places, labels)
    return _svg(title, _HEIGHT, parts)


def treemap(title: str, weights: Sequence[tuple[str, int]]) -> str:
    """Return rectangles with areas by weight; names with the same first part share a colour."""
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
    """Cut an area into one tile per weight, by repeated halving into similar weights."""
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
    name = cut(tile.name, int((tile.width - 8) / _CHAR))
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


def _places(at: Sequence[int]) -> list[float]:
    """Return the horizontal position of each point, half a point's share from either end."""
    inner = WIDTH - _LEFT - _RIGHT
    share = inner / max(len(at), 1)
    span = at[-1] - at[0] if at else 0
    if span == 0:
        return [_LEFT + inner / 2 for _ in at]
    return [_LEFT + share / 2 + (inner - share) * ((one - at[0]) / span) for one in at]


def _labels(places: Sequence[float], labels: Sequence[str]) -> list[str]:
    """Return labels under their points, as many as fit into the chart, the last one among them."""
    apart = (WIDTH - _LEFT - _RIGHT) / min(max(len(labels), 1), _LABELS_MAX)
    found: list[str] = []
    next_place, next_begin = math.inf, math.inf
    for place, label in reversed([*zip(places, labels, strict=True)]):
        text = cut(label, int(apart / _CHAR) - 1)
        half = len(text) * _CHAR / 2
        middle = min(max(place, half), WIDTH - half)
        if next_place - place < apart * 0.99 or middle + half > next_begin:
            continue
        next_place, next_begin = place, middle - half - _CHAR
        whole = "" if text == label else f"<title>{shown(label)}</title>"
        under = f'class="under" x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 16}"'
        found.append(f"<text {under}>{whole}{shown(text)}</text>")
    return found[::-1]


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    name = shown(title)
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg></div>"
    )
