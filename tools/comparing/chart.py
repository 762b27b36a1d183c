"""Draw the chart: read result.json, write a PNG. Needs matplotlib.

PYTHONPATH=tools python -m comparing.chart compare-out/result.json compare-out/result.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = ("matplotlib>=3.8",)
OURS_COLOR, PEER_COLOR, FIO_COLOR = "#c44e00", "#8c9aa8", "#303030"


def bars(summary: dict[str, dict[str, Any]], what: str) -> list[tuple[str, list[float]]]:
    """Return name and [median, lowest, highest] of each row with this figure, slowest first."""
    rows = [(n, told[f"{what}_gb_s"]) for n, told in summary.items() if f"{what}_gb_s" in told]
    return sorted(rows, key=lambda row: row[1][0])


def label(name: str, told: dict[str, Any], what: str) -> str:
    """Return the row's name, with a star if the library's own save is not durable."""
    return name + (" *" if what == "save" and told["fsync"] == "added" else "")


def color(name: str) -> str:
    if name == "fio":
        return FIO_COLOR
    return OURS_COLOR if name.startswith("ringstow") else PEER_COLOR


def draw(result: dict[str, Any], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    summary = result["summary"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.6 + 0.32 * len(summary)), layout="constrained")
    for axis, what, title in zip(
        axes, ("save", "load"), ("durable save, GB/s", "cold load, GB/s"), strict=True
    ):
        rows = bars(summary, what)
        medians = [told[0] for _, told in rows]
        ranges = [[told[0] - told[1] for _, told in rows], [told[2] - told[0] for _, told in rows]]
        names = [label(name, summary[name], what) for name, _ in rows]
        axis.barh(names, medians, xerr=ranges, color=[color(name) for name, _ in rows], capsize=2)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{result['gb']:g} GB of bf16 parameters and fp32 Adam, {len(result['rounds'])} rounds, "
        f"median and range\n{result['machine']}, {result['date']}", fontsize=10,
    )  # fmt: skip
    figure.supxlabel("* fsync added by the harness; by itself this save is not durable", fontsize=9)
    figure.savefig(png, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
