"""The sweep's two plots, drawn without a display: a heat map (PNG) and the knobs (SVG)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweeping import choose
from sweeping.choose import Measured, What
from sweeping.plan import (
    ACROSS,
    AGAIN,
    DEFAULT,
    UPWARD,
    Knob,
    Setting,
    axis,
    cell,
    one_by_one,
    written,
)
from sweeping.render import Results

SIDES: tuple[What, What] = ("save", "load")
COLOURS = {"save": "#1f6fb2", "load": "#c8641b"}
LEAST_SCALE = 0.1  # minimum range of the ratio to either side, so that noise stays pale


def saved(figure: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=120, bbox_inches="tight")
    return out.getvalue()


def place(knobs: Sequence[Knob], found: Sequence[Measured], what: What) -> list[list[float]]:
    """Return the ratios, a row per block size; NaN if nothing was measured."""

    def ratio(setting: Setting) -> float:
        return 1.0 if setting == DEFAULT else choose.score(found, setting, what) or math.nan

    return [
        [ratio(cell(knobs, across, upward)) for across in axis(knobs, ACROSS)]
        for upward in axis(knobs, UPWARD)
    ]


def heat_map(results: Results) -> bytes | None:
    """Draw the ratio to the default for each block size and queue depth; None if not swept."""
    knobs, found = results.knobs, results.found
    if not any(m.phase == "grid" for m in found):
        return None
    shades = matplotlib.colormaps["RdBu"].with_extremes(bad="#dddddd")
    grids = {what: place(knobs, found, what) for what in SIDES}
    known = [r for grid in grids.values() for line in grid for r in line if not math.isnan(r)]
    scale = max(LEAST_SCALE, *(abs(ratio - 1) for ratio in known))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for what, panel in zip(SIDES, panels, strict=True):
        drawn = panel.imshow(grids[what], cmap=shades, vmin=1 - scale, vmax=1 + scale,
                             origin="lower", aspect="auto")  # fmt: skip
        label(panel, results, what, grids[what], scale)
    figure.colorbar(drawn, ax=panels, label="speed / the default's in the same block")
    return saved(figure, "png")


def label(panel: Axes, results: Results, what: What, grid: list[list[float]], scale: float) -> None:
    """Label the axes and cells, and frame the default and the chosen setting."""
    knobs, found = results.knobs, results.found
    columns, rows = axis(knobs, ACROSS), axis(knobs, UPWARD)
    panel.set_xticks(range(len(columns)), [str(depth) for depth in columns])
    panel.set_yticks(range(len(rows)), [written(UPWARD, value) for value in rows])
    panel.set_xlabel("queue depth")
    panel.set_ylabel("block size")
    panel.set_title(f"{what}: ratio, and GB/s")
    for y, upward in enumerate(rows):
        for x, across in enumerate(columns):
            if math.isnan(grid[y][x]):
                continue
            setting = cell(knobs, across, upward)
            speed = median(choose.speeds(found, setting, what))
            dark = abs(grid[y][x] - 1) > 0.65 * scale
            panel.text(
                x, y, f"{grid[y][x]:.2f}\n{speed:.2f}", ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
            frames = {DEFAULT: "black", results.verdict.setting: "#d4a900"}
            if setting in frames:
                panel.add_patch(
                    matplotlib.patches.Rectangle(
                        (x - 0.47, y - 0.47), 0.94, 0.94, fill=False, lw=2.5, ec=frames[setting]
                    )
                )


def knob_plot(results: Results) -> bytes | None:
    """Draw the ratio and interval of each setting that differs in one knob."""
    found = results.found
    settings = [s for s in (AGAIN, *one_by_one(results.knobs)) if choose.figure(found, s, "save")]
    if not settings:
        return None
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(settings)), layout="constrained")
    panel = figure.subplots()
    for what, shift in zip(SIDES, (0.14, -0.14), strict=True):
        spreads = [spread for s in settings if (spread := choose.figure(found, s, what))]
        middles = [spread.median for spread in spreads]
        arms = [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ]
        places = [-number + shift for number in range(len(settings))]
        panel.errorbar(middles, places, xerr=arms, fmt="o", ms=5, capsize=3, label=what,
                       color=COLOURS[what])  # fmt: skip
    labels = [f"{setting}  n={len(choose.speeds(found, setting, 'save'))}" for setting in settings]
    panel.axvline(1, color="#888888", lw=1)
    panel.set_yticks([-n for n in range(len(settings))], labels)
    panel.set_xlabel("speed / the default's in the same block; median and 95 % interval")
    panel.grid(axis="x", alpha=0.3)
    panel.legend()
    return saved(figure, "svg")
