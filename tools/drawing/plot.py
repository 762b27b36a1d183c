"""What all plots share: their description, their colours, and bars with ranges."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Data = dict[str, Any]
Table = list[list[str]]  # its first row is the head

OURS, PEER, CEILING = "#c44e00", "#8c9aa8", "#303030"


@dataclass(frozen=True)
class Plot:
    """One plot: docs/figures/NAME.svg, drawn from docs/figures/NAME.json.

    `command` writes the data file. `missing` returns a sentence for each row that a reader expects
    and the data lacks.
    """

    name: str
    title: str
    command: str
    draw: Callable[[Data], Figure]
    table: Callable[[Data], Table]
    missing: Callable[[Data], list[str]]


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return rounded(self.median)
        return f"{rounded(self.median)} ({rounded(self.low)} to {rounded(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def rounded(value: float) -> str:
    """Format with three significant digits, and at most four decimals."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{significant(value, 3):.4f}".rstrip("0").rstrip(".")


def color(name: str) -> str:
    return OURS if name.startswith("ringstow") else PEER


def svg(figure: Figure) -> bytes:
    """Return the drawing. The same data and matplotlib give the same bytes."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ringstow", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def panels(groups: Mapping[str, Sequence[tuple[str, Spread]]]) -> Figure:
    """Return a panel of bars for each title, one above the other."""
    heights = [len(rows) + 1 for rows in groups.values()]
    figure = Figure(figsize=(9, 0.8 + 0.36 * sum(heights)), layout="constrained")
    ratios = {"height_ratios": heights}
    drawn = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw=ratios)[:, 0]
    for (title, rows), panel in zip(groups.items(), drawn, strict=True):
        bars(panel, rows, title)
    return figure


def lacking(labels: Mapping[str, str], data: Data, reasons: Mapping[str, str]) -> list[str]:
    """Return why each row that a reader expects is not in the data's summary."""
    return [
        f"{label}: {reasons.get(name, 'not measured')}"
        for name, label in labels.items()
        if name not in data["summary"]
    ]


def bars(axes: Axes, rows: Sequence[tuple[str, Spread]], title: str) -> None:
    """Draw a horizontal bar for each label, the first at the top, with its range and number."""
    places = range(len(rows))
    middles = [told.median for _, told in rows]
    below = [told.median - told.low for _, told in rows]
    above = [told.high - told.median for _, told in rows]
    colors = [color(label) for label, _ in rows]
    axes.barh(places, middles, xerr=[below, above], color=colors, capsize=2)
    axes.set_yticks(places, [label for label, _ in rows])
    axes.invert_yaxis()
    furthest = max([told.high for _, told in rows], default=1.0)
    for place, (_, told) in zip(places, rows, strict=True):
        axes.text(max(told.high, 0) + furthest / 50, place, rounded(told.median), va="center")
    axes.set_xlim(right=furthest * 1.15)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
