"""The training time that a save takes, by contender."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawing.plot import Data, Plot, Spread, Table, bars, lacking

LABELS = {
    "ringstow": "ringstow.save_async",
    "ringstow-manager": "ringstow's CheckpointManager",
    "ringstow-dcp": "ringstow under dcp.async_save",
    "ringstow:pool_bytes=256M": 'ringstow.save_async, pool_bytes="256M"',
    "dcp-thread": "dcp.async_save, thread",
    "dcp-stager": "dcp.async_save with DefaultStager",
    "dcp-process": "dcp.async_save, process",
    "nvrx": "NVIDIA's resiliency extension, process",
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


def plot(name: str, title: str, command: str, *expected: str) -> Plot:
    """Return a plot of step_time.py's contenders, of which a reader expects some."""
    labels = {contender: LABELS[contender] for contender in expected}

    def missing(data: Data) -> list[str]:
        return lacking(labels, data, data["skipped"] | data["failed"])

    return Plot(name, title, f"python tools/step_time.py {command}", draw, table, missing)


SHORT = plot(
    "short-steps",
    "Training time that a save takes from a loop of short steps, to a slow disk",
    "--gb 1 --step-ms 50 --disk-rate 200 --rounds 5 --no-gil --contenders ringstow "
    "ringstow-manager ringstow-dcp dcp-stager dcp-thread nvrx ringstow:pool_bytes=256M "
    "--json docs/figures/short-steps.json",
    *("ringstow", "ringstow-manager", "ringstow-dcp", "dcp-stager", "dcp-thread", "nvrx"),
)
PLOT = plot(
    "step-time",
    "Training time that a save takes",
    "--gb 1.5 --rounds 5 --json docs/figures/step-time.json",
    *("ringstow", "ringstow-manager", "ringstow-dcp", "dcp-thread", "dcp-process"),
    *("torch_checkpointing", "torch.save"),
)
