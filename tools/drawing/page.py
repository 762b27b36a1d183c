"""The parts of docs/figures.md that come from the data: image, origin, table, what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drawing.plot import Data, Plot, Table


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by tools/figures.py -->", f"<!-- end of {name} -->"


def rendered(plot: Plot, data: Data | None) -> str:
    """Return the plot's part of the page. Without data, it says how to measure."""
    if data is None:
        return f"Not measured yet: `{plot.command}`, then `make figures`."
    origin = f"`{data['command']}`, {data['machine']}, {data['date']}."
    paragraphs = [
        f"![{plot.title}](figures/{plot.name}.svg)",
        f"{origin} [Data](figures/{plot.name}.json).",
        *([data["note"]] if "note" in data else []),
        "\n".join(markdown(plot.table(data))),
    ]
    if absent := plot.missing(data):
        paragraphs.append("\n".join(["Not in the plot:", "", *(f"- {line}" for line in absent)]))
    return "\n\n".join(paragraphs)


def markdown(table: Table) -> list[str]:
    head, *rows = ["| " + " | ".join(row) + " |" for row in table]
    return [head, "|" + "---|" * len(table[0]), *rows]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each part between its markers. Raise ValueError if it lacks markers."""
    for name, part in parts.items():
        begin, end = markers(name)
        between = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not between.search(page):
            raise ValueError(f"the page has no lines {begin!r} and {end!r}: add them")
        text = f"{begin}\n{part}\n{end}"
        page = between.sub(lambda _, text=text: text, page)  # type: ignore[misc]
    return page
