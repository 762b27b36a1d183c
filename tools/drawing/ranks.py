"""What the manifest costs against the number of simulated ranks."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawing.plot import Data, Plot, Table, rounded, significant, spread

SECONDS = {
    "committed": "receipts merged, checked, written",
    "merged": "of that, merged",
    "opened": "manifest opened, with all checks",
}
BYTES = {
    "receipts": "in receipts",
    "disk": "on disk",
    "open": "in memory, once open",
    "opening": "in memory, most while opening",
    "merging": "in memory, most while merging",
}
EXPECTED = (1, 16, 256, 4096, 16_384)


def draw(data: Data) -> Figure:
    rows = data["ranks"]
    ranks = [row["ranks"] for row in rows]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for key, label in SECONDS.items():
        found = [spread(row["seconds"][key]) for row in rows]
        middles = [told.median for told in found]
        arms = [[t.median - t.low for t in found], [t.high - t.median for t in found]]
        left.errorbar(ranks, middles, yerr=arms, label=label, marker="o", ms=4, capsize=2)
    for key, label in BYTES.items():
        found_bytes = [row["bytes_per_chunk"][key] for row in rows]
        right.plot(ranks, found_bytes, label=label, marker="o", ms=4)
    for panel, title in ((left, f"seconds, {chunks(data)} chunks"), (right, "bytes per chunk")):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ranks, [f"{count:,}" for count in ranks])
        panel.set_xlabel("simulated ranks")
        panel.set_title(title)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    return figure


def chunks(data: Data) -> str:
    """Return the number of chunks, which is about the same for all numbers of ranks."""
    most = max(row["chunks"] for row in data["ranks"])
    return f"{significant(most, 2):,.0f}"


def table(data: Data) -> Table:
    rows = data["ranks"]
    return [
        ["simulated ranks", *(f"{row['ranks']:,}" for row in rows)],
        ["tensors", *(f"{row['tensors']:,}" for row in rows)],
        *(
            [f"{label}, s", *(str(spread(row["seconds"][key])) for row in rows)]
            for key, label in SECONDS.items()
        ),
        *(
            [f"bytes per chunk {label}", *(rounded(row["bytes_per_chunk"][key]) for row in rows)]
            for key, label in BYTES.items()
        ),
    ]


def missing(data: Data) -> list[str]:
    found = {row["ranks"] for row in data["ranks"]}
    lacking = [f"{count:,}" for count in EXPECTED if count not in found]
    return [f"{', '.join(lacking)} ranks: not measured"] if lacking else []


PLOT = Plot(
    "ranks",
    "Cost of the manifest against the number of simulated ranks",
    "python tools/bench_ranks.py --json docs/figures/ranks.json",
    draw,
    table,
    missing,
)
