"""The training time that a save takes, by contender."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawing.plot import Data, Plot, Spread, Table, bars, lacking

LABELS = {  # of the contenders that a reader expects
    "ringstow": "ringstow.save_async",
    "ringstow-manager": "ringstow's CheckpointManager",
    "ringstow-dcp": "ringstow under dcp.async_save",
    "dcp-thread": "dcp.async_save, thread",
    "dcp-process": "dcp.async_save, process",
    "torch_checkpointing": "torch_checkpointing, process",
    "torch.save": "torch.save, which blocks",
}


def lost(data: Data) -> list[tuple[str, Spread]]:
    """Return the seconds lost by each contender that was measured."""
    return [
        (LABELS.get(name, name), Spread(*told["lost"])) for name, told in data["summary"].items()
    ]


def draw(data: Data) -> Figure:
    rows = lost(data)
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    bars(figure.subplots(), rows, f"seconds of training lost by a save of {data['gb']:g} GB")
    return figure


def table(data: Data) -> Table:
    saves = {name: Spread(*told["save"]) for name, told in data["summary"].items()}
    return [
        ["saves by", "lost, s", "until durable, s"],
        *(
            [label, str(told), str(save)]
            for (label, told), save in zip(lost(data), saves.values(), strict=True)
        ),
    ]


def missing(data: Data) -> list[str]:
    return lacking(LABELS, data, data["skipped"] | data["failed"])


PLOT = Plot(
    "step-time",
    "Training time that a save takes",
    "python tools/step_time.py --gb 1.5 --rounds 5 --json docs/figures/step-time.json",
    draw,
    table,
    missing,
)
