"""Draw the plots of docs/figures.md from the measurements in docs/figures/.

    python tools/figures.py           # `make figures`

Each data file is what a measuring tool writes with --json, so a new measurement is a commit of one
file. This tool draws NAME.svg from each NAME.json, and writes into the page, between its markers,
the command, machine and date, a table, and what is missing. It measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from comparing import chart
from comparing.environments import environment_of
from comparing.processes import CompareFailed, say

if TYPE_CHECKING:
    from drawing.plot import Data, Plot

DOCS = Path(__file__).resolve().parent.parent / "docs"


class NotDrawn(Exception):
    """A data file cannot be drawn; the message names it and says what to do."""


def restart_with_matplotlib(log: Path) -> None:
    """Run this program again in an environment that has matplotlib, as the chart's does."""
    where = environment_of(chart.REQUIREMENTS, log)
    os.execve(where.python, [where.python, *sys.argv], os.environ | {**where.variables})


def read(plot: Plot, directory: Path) -> Data | None:
    """Return the plot's measurements, or None if there are none yet."""
    file = directory / f"{plot.name}.json"
    try:
        found: Data = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise NotDrawn(f"{file} is not JSON ({error}); write it anew: {plot.command}") from error
    return found


def draw(plot: Plot, data: Data, directory: Path) -> str:
    """Draw one plot, and return its part of the page."""
    from drawing import page
    from drawing.plot import svg

    file = directory / f"{plot.name}.json"
    try:
        image, part = svg(plot.draw(data)), page.rendered(plot, data)
    except (KeyError, TypeError) as error:
        raise NotDrawn(
            f"{file} is not what its tool writes ({type(error).__name__}: {error}); "
            f"write it anew: {plot.command}"
        ) from error
    (directory / f"{plot.name}.svg").write_bytes(image)
    say(f"{plot.name}.svg, from {file.name}: {data['date']}, {data['command']}")
    for line in plot.missing(data):
        say(f"  not in the plot: {line}")
    return part


def draw_all(directory: Path, page_file: Path) -> None:
    from drawing import page
    from drawing.plots import PLOTS

    parts = {}
    for plot in PLOTS:
        data = read(plot, directory)
        if data is None:
            say(f"no {plot.name}.svg, because there is no {plot.name}.json: {plot.command}")
            parts[plot.name] = page.rendered(plot, None)
        else:
            parts[plot.name] = draw(plot, data, directory)
    page_file.write_text(page.filled(page_file.read_text(), parts))


def main() -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--data", type=Path, default=DOCS / "figures", help="the JSON files")
    parser.add_argument("--page", type=Path, default=DOCS / "figures.md", help="the page to fill")
    args = parser.parse_args()
    try:
        if importlib.util.find_spec("matplotlib") is None:
            restart_with_matplotlib(DOCS.parent / ".peers" / "figures.log")
        draw_all(args.data, args.page)
    except (CompareFailed, NotDrawn, ValueError) as failure:
        say(f"figures: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
