"""Seconds of saves and loads of many sharded tensors, under DCP and without its planner."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawing.plot import Data, Plot, Spread, Table, panels, spread

# The rows of compare_dcp.py, and what they are called here.
SAVES = {
    "dcp": "DCP",
    "no writer": "DCP's plans, nothing written",
    "ringstow": "ringstow's StorageWriter",
    "caching later": "ringstow's StorageWriter, torch's plan cached",
    "planner first": "ringstow's SavePlanner, first save",
    "planner later": "ringstow's SavePlanner, later saves",
    "distributed": "ringstow.distributed",
}
LOADS = {
    "load dcp": "DCP",
    "load ringstow": "ringstow's StorageReader",
    "load planner": "ringstow's LoadPlanner",
    "load distributed": "ringstow.distributed",
}
RESHARDED = {
    "reshard dcp": "DCP",
    "reshard planner": "ringstow's LoadPlanner",
    "reshard distributed": "ringstow.distributed",
}


def groups(data: Data) -> dict[str, dict[str, str]]:
    by = f"{data['ranks']} ranks" if data["ranks"] != 1 else "1 rank"
    return {
        f"save by {by}": SAVES,
        f"load by {by}": LOADS,
        f"load by one process of what {by} saved": RESHARDED,
    }


def seconds(data: Data, row: str) -> Spread | None:
    found = [m["seconds"] for m in data["measurements"] if m["row"] == row]
    return spread(found) if found else None


def measured(data: Data, rows: dict[str, str]) -> list[tuple[str, Spread]]:
    return [(label, told) for row, label in rows.items() if (told := seconds(data, row))]


def draw(data: Data) -> Figure:
    found = {title: measured(data, rows) for title, rows in groups(data).items()}
    return panels({
        f"{data['tensors']:,} sharded tensors, {title}, seconds": rows
        for title, rows in found.items()
        if rows
    })  # fmt: skip


def table(data: Data) -> Table:
    return [
        ["", "by", f"seconds, {data['tensors']:,} tensors"],
        *(
            [title if place == 0 else "", label, str(told)]
            for title, rows in groups(data).items()
            for place, (label, told) in enumerate(measured(data, rows))
        ),
    ]


def missing(data: Data) -> list[str]:
    lacking = {
        title: [label for row, label in rows.items() if seconds(data, row) is None]
        for title, rows in groups(data).items()
    }
    return [f"{title}: {'; '.join(labels)}" for title, labels in lacking.items() if labels]


PLOT = Plot(
    "sharded",
    "Seconds of a save and of a load of many sharded tensors",
    "python tools/compare_dcp.py --tensors 100000 --ranks 2 --rounds 3 "
    "--json docs/figures/sharded.json",
    draw,
    table,
    missing,
)
