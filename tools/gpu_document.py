"""The figures of the GPU report, their targets, and the report as Markdown."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """A figure and the target for its median."""

    what: str
    unit: str
    """Empty for a ratio."""
    bound: Literal["at least", "at most"]
    target: float

    def reached(self, median: float) -> bool:
        return median >= self.target if self.bound == "at least" else median <= self.target


PIPELINE = "pipeline"
FIGURES = {
    PIPELINE: Figure(
        "a save without a disk, GPU to host and checksummed / one large pinned copy",
        "", "at least", 0.95,
    ),
    "save_of_host": Figure(
        "durable save from the GPU / the same from host memory", "", "at least", 0.97
    ),
    "async_returns": Figure(
        "save_async of 1,000 CUDA tensors returns after", "ms", "at most", 5.0
    ),
    "staged": Figure(
        "staging time, pool as large as the state / time of one large pinned copy",
        "", "at most", 1.1,
    ),
    "step": Figure("a training step during a save / one without, time", "", "at most", 1.03),
    "lost": Figure(
        "training lost by save_async at steps of 100 ms / by DCP's DefaultStager",
        "", "at most", 0.5,
    ),
    "load_of_disk": Figure(
        "cold load onto the GPU / fio reading the same file", "", "at least", 0.95
    ),
    "load_of_copy": Figure(
        "load onto the GPU from tmpfs / one large pinned copy to it", "", "at least", 0.8
    ),
    "device_memory": Figure("extra memory on the GPU", "MiB", "at most", 64),
    "host_memory": Figure("extra memory on the host, beyond the pool", "MiB", "at most", 32),
}  # fmt: skip


@dataclass
class Step:
    """A step of the report that passed, failed or was skipped."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    why: str = ""
    output: str = ""
    """The end of its output."""


@dataclass
class Measured:
    """A figure's values, one per round; empty if it was skipped or failed."""

    values: list[float] = field(default_factory=list)
    note: str = ""
    skipped: str = ""
    failed: str = ""


@dataclass
class Report:
    """The results of all steps."""

    about: dict[str, Any] = field(default_factory=dict)
    doctor: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    figures: dict[str, Measured] = field(default_factory=dict)

    def is_good(self) -> bool:
        """True if nothing failed and every target was reached."""
        return all(step.status != "failed" for step in self.steps) and not any(
            measured.failed or verdict(name, measured) == "MISSED"
            for name, measured in self.figures.items()
        )

    def as_json(self) -> dict[str, Any]:
        figures = {name: figure_json(name, m) for name, m in self.figures.items()}
        return asdict(self) | {"figures": figures, "good": self.is_good()}


def figure_json(name: str, measured: Measured) -> dict[str, Any]:
    told = asdict(FIGURES[name]) | asdict(measured)
    if measured.values:
        told["median"] = statistics.median(measured.values)
        told["reached"] = verdict(name, measured) == "reached"
    return told


def verdict(name: str, measured: Measured) -> str:
    if measured.failed:
        return "FAILED"
    if not measured.values:
        return "skipped"
    reached = FIGURES[name].reached(statistics.median(measured.values))
    return "reached" if reached else "MISSED"


def spread(values: list[float], unit: str) -> str:
    """Format as median (lowest-highest)."""
    digits = 2 if not unit else 1
    median, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return f"{median} ({low}-{high}){' ' + unit if unit else ''}"


def figure_row(name: str, measured: Measured) -> str:
    figure = FIGURES[name]
    found = spread(measured.values, figure.unit) if measured.values else "-"
    target = f"{figure.bound} {figure.target:g} {figure.unit}".strip()
    told = measured.failed or measured.skipped or measured.note
    return row(figure.what, found, target, verdict(name, measured), told)


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def table(titles: list[str], rows: list[str]) -> list[str]:
    return [row(*titles), row(*("---" for _ in titles)), *rows]


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = ["# ringstow on a GPU", ""]
    lines += [f"- {name}: {told(value)}" for name, value in report.about.items()]
    lines += ["", "## Figures", "", "Median (lowest to highest) over the rounds; both sides of a"]
    lines += ["ratio are measured in turn, within each round.", ""]
    rows = [figure_row(name, measured) for name, measured in report.figures.items()]
    lines += table(["figure", "measured", "target", "", ""], rows)
    lines += ["", "## Steps", ""]
    steps = [row(s.name, s.status, f"{s.seconds:.0f} s", s.why) for s in report.steps]
    lines += table(["step", "", "", ""], steps)
    lines += ["", "## Doctor", ""]
    checks = [row(c["name"], c["status"], c["found"], c["remedy"] or "") for c in report.doctor]
    lines += table(["check", "", "found", "remedy"], checks)
    for step in report.steps:
        if step.status == "failed" and step.output:
            lines += ["", f"## Output of {step.name}", "", "```", step.output.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def told(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(told(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(item)}" for name, item in value.items())
    return str(value)
