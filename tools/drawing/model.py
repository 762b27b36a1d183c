"""Speed of saves and loads of one rank's share of a known model, beside other libraries."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawing.plot import Data, Plot, Spread, Table, lacking, panels

LABELS = {
    "fio": "fio, a file of this size",
    "ringstow": "ringstow",
    "ringstow-into": "ringstow, into existing tensors",
    "torch.save": "torch.save",
    "dcp": "DCP",
}
"""The rows of compare.py that a reader expects."""
WHATS = {"save": "durable save, GB/s", "load": "cold load, GB/s"}


def speeds(data: Data, what: str) -> list[tuple[str, Spread]]:
    """Return GB/s by row, fastest first."""
    found = [
        (LABELS.get(name, name), Spread(*told[f"{what}_gb_s"]))
        for name, told in data["summary"].items()
        if f"{what}_gb_s" in told
    ]
    return sorted(found, key=lambda row: -row[1].median)


def draw(data: Data) -> Figure:
    return panels({title: speeds(data, what) for what, title in WHATS.items()})


def table(data: Data) -> Table:
    saves, loads = (dict(speeds(data, what)) for what in WHATS)
    rows = [
        [label, *(str(found[label]) if label in found else "" for found in (saves, loads))]
        for label in dict.fromkeys([*saves, *loads])
    ]
    return [["by", *WHATS.values()], *rows]


def missing(data: Data) -> list[str]:
    return lacking(LABELS, data, data["failed"] | data["stopped"])


PLOT = Plot(
    "llama3-8b",
    "Speed of a save and of a load of one rank's share of Llama 3 8B",
    "python tools/compare.py --state llama3-8b --gb 2 --rounds 5 --used-memory --peers ringstow "
    "ringstow-into dcp torch.save --json docs/figures/llama3-8b.json",
    draw,
    table,
    missing,
)
