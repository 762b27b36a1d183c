"""Seconds of a save and of a load against the number of tensors."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drawing.plot import CEILING, OURS, Data, Plot, Spread, Table, spread

WHATS = ("save", "load")
STYLES = {  # of the rows that a reader expects: colour and line
    "ringstow": (OURS, "-"),
    "ringstow-into": (OURS, "--"),
    "safetensors": ("#3b6fb6", "-"),
    "torch.save": ("#3f9a5a", "-"),
    "torch_checkpointing": ("#8b5fbf", "-"),
    "dcp": ("#8c6d31", "-"),
}
OTHERS = {"fio": (CEILING, ":")}


def names(data: Data) -> list[str]:
    """Return the rows with figures, those that a reader expects first."""
    found = {name for count in data["counts"] for name, told in count["seconds"].items() if told}
    return [name for name in STYLES if name in found] + sorted(found - set(STYLES))


def series(data: Data, name: str, what: str) -> dict[int, Spread]:
    """Return the seconds by number of tensors."""
    return {
        count["tensors"]: spread(seconds)
        for count in data["counts"]
        if (seconds := count["seconds"].get(name, {}).get(what))
    }


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for panel, what in zip(figure.subplots(1, 2, sharey=True), WHATS, strict=True):
        for name in names(data):
            line(panel, name, series(data, name, what))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("tensors of 4 KiB")
        panel.set_title("durable save, seconds" if what == "save" else "cold load, seconds")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=9)
    return figure


def line(panel: Axes, name: str, found: dict[int, Spread]) -> None:
    if not found:
        return
    colour, style = (STYLES | OTHERS).get(name, (None, "-"))
    middles = [told.median for told in found.values()]
    below = [told.median - told.low for told in found.values()]
    above = [told.high - told.median for told in found.values()]
    panel.errorbar(
        list(found), middles, yerr=[below, above], label=name, color=colour, ls=style, marker="o",
        ms=4, capsize=2,
    )  # fmt: skip


def table(data: Data) -> Table:
    counts = [count["tensors"] for count in data["counts"]]
    rows = [["seconds, tensors", *(f"{count:,}" for count in counts)]]
    for what in WHATS:
        for name in names(data):
            found = series(data, name, what)
            if found:
                rows.append([f"{name}, {what}", *(str(found.get(count, "")) for count in counts)])
    return rows


def missing(data: Data) -> list[str]:
    counts_of: dict[str, list[str]] = {}
    for count in data["counts"]:
        for name, reason in (count["failed"] | count["stopped"]).items():
            counts_of.setdefault(f"{name}: {reason}", []).append(f"{count['tensors']:,}")
    told = [f"{reason} ({', '.join(counts)} tensors)" for reason, counts in counts_of.items()]
    named = {*names(data), *(reason.partition(":")[0] for reason in counts_of)}
    return told + [f"{name}: not measured" for name in STYLES if name not in named]


PLOT = Plot(
    "tensors",
    "Seconds of a save and of a load against the number of tensors",
    "python tools/compare.py --tensors 1000 10000 100000 1000000 --rounds 3 --used-memory --peers "
    "ringstow ringstow-into safetensors torch_checkpointing dcp torch.save "
    "--json docs/figures/tensors.json",
    draw,
    table,
    missing,
)
