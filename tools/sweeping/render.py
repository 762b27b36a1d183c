"""Render a sweep's table, JSON, ringstow.toml and page. Values in, text out.

plots.py draws the plots that the page embeds.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from sweeping import choose
from sweeping.choose import Measured, Spread, Verdict, What
from sweeping.plan import AGAIN, DEFAULT, FIO, Knob, Setting, duration, written

FOR_WHAT = {
    "engine": "moves the bytes: io_uring, or threads with positioned reads and writes",
    "block_bytes": "size of one transfer and of one staging buffer, in bytes",
    "queue_depth": "transfers in flight at once",
    "fillers": "threads that copy and checksum",
    "direct": "O_DIRECT: bypasses the page cache",
    "fixed": "staging memory is registered with io_uring once, not pinned at every transfer",
    "recycle": "writes over the files of a replaced checkpoint, not into new ones",
}
RULE = (
    "A ratio is a setting's speed divided by the default's within one block of a few measurements "
    "in random order. The table shows the median over the blocks and its bootstrapped 95 % "
    "interval, which says little if n, the number of measurements, is two or three. A "
    "setting is better than the default if that interval, widened for the number of finalists, "
    "is above 1 in at least five rounds of the final."
)
COLUMNS = ["", "save GB/s", "ratio", "load GB/s", "ratio", "CPU s/GB", "staged s", "n"]


@dataclass
class Results:
    """One sweep: arguments, machine and measurements. `ended` says why it stopped early, if so."""

    command: str
    machine: str
    date: str
    goal: What
    state_bytes: int
    seed: int
    load_average: float  # over one minute, at the beginning
    defaults: Mapping[str, Any] = field(default_factory=dict)
    knobs: Sequence[Knob] = ()
    refused: Mapping[Setting, str] = field(default_factory=dict)
    notes: Mapping[Setting, Sequence[str]] = field(default_factory=dict)
    found: Sequence[Measured] = ()
    seconds: float = 0.0
    ended: str = ""

    @property
    def verdict(self) -> Verdict:
        return choose.verdict(self.found, self.goal)


# --- the table ---------------------------------------------------------------------------------


def settings_told(found: Sequence[Measured]) -> list[Setting]:
    """Return the default and its references, then all others, fastest first."""
    ours = choose.settings_of(found)
    ours.sort(key=lambda setting: choose.score(found, setting, "both"), reverse=True)
    first = [s for s in (DEFAULT, AGAIN, FIO) if any(m.setting == s for m in found)]
    return [*first, *ours]


def row(found: Sequence[Measured], setting: Setting) -> list[str]:
    mine = [m for m in found if m.setting == setting]

    def told(spread: Spread | None) -> str:
        return str(spread) if spread and setting != DEFAULT else ""

    def middle(values: Iterable[float], digits: int) -> str:
        listed = list(values)
        return f"{median(listed):.{digits}f}" if listed else ""

    return [
        str(setting),
        middle((m.speed("save") for m in mine), 2),
        told(choose.figure(found, setting, "save")),
        middle((m.speed("load") for m in mine), 2),
        told(choose.figure(found, setting, "load")),
        middle((m.save["cpu_seconds"] / m.save["bytes"] * 1e9 for m in mine), 2),
        middle((m.save["staged_seconds"] for m in mine if "staged_seconds" in m.save), 2),
        str(len(mine)),
    ]


def table(results: Results) -> Iterator[str]:
    rows = [COLUMNS, *(row(results.found, setting) for setting in settings_told(results.found))]
    widths = [max(len(line[column]) for line in rows) for column in range(len(COLUMNS))]
    for line in rows:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def worth(results: Results, knob: Knob, what: What) -> str:
    """Format the best and the worst level of a knob that is varied by itself."""
    figures = {
        written(knob.name, level): got
        for level in knob.levels
        if (got := choose.figure(results.found, Setting.of({knob.name: level}), what))
    }
    if not figures:
        return "not measured"
    ranked = sorted(figures, key=lambda level: figures[level].median)
    told = [f"{level}: {figures[level]}" for level in dict.fromkeys([ranked[-1], ranked[0]])]
    return ", ".join(told)


def summary(results: Results) -> Iterator[str]:
    """Yield the lines after the table."""
    fio = choose.figure(results.found, FIO, "save"), choose.figure(results.found, FIO, "load")
    if fio[0] and fio[1]:
        yield f"default / fio: save {1 / fio[0].median:.2f}, load {1 / fio[1].median:.2f}"
    again = choose.figure(results.found, AGAIN, results.goal)
    if again:
        yield f"the default against itself: {again}; smaller differences mean nothing"
    for setting, got in results.verdict.figures.items():
        yield f"final, {results.goal}: {setting}: {got}, {got.count} rounds"
    yield f"To be used: {results.verdict.why}"
    for setting, why in results.refused.items():
        yield f"refused: {setting}: {why}"
    for setting, notes in results.notes.items():
        for note in notes:
            yield f"{setting}: {note}"
    if results.ended:
        yield f"Not complete: {results.ended}"
    yield (
        f"{results.date}, {results.machine}; load average {results.load_average:.1f} at the "
        f"beginning; {results.state_bytes / 1e9:.2f} GB, {duration(results.seconds)}"
    )


# --- the files ---------------------------------------------------------------------------------


def as_json(results: Results) -> str:
    """Return every measurement, the figures and the verdict as JSON."""
    about = {
        name: getattr(results, name)
        for name in ("command", "machine", "date", "goal", "state_bytes", "seed", "load_average")
    }

    def figures(setting: Setting) -> dict[str, Any]:
        spreads = {w: choose.figure(results.found, setting, w) for w in ("save", "load", "both")}
        return {what: asdict(got) for what, got in spreads.items() if got}

    return json.dumps(
        about
        | {
            "seconds": results.seconds,
            "ended": results.ended,
            "defaults": results.defaults,
            "chosen": dict(results.verdict.setting.changes),
            "why": results.verdict.why,
            "final": {str(s): asdict(got) for s, got in results.verdict.figures.items()},
            "settings": [
                {"setting": str(s), "changes": dict(s.changes), "ratio": figures(s)}
                for s in settings_told(results.found)
            ],
            "refused": {str(setting): why for setting, why in results.refused.items()},
            "notes": {str(setting): list(notes) for setting, notes in results.notes.items()},
            "measurements": [
                asdict(m) | {"setting": str(m.setting), "changes": dict(m.setting.changes)}
                for m in results.found
            ],
        },
        indent=1,
    )


def toml_value(name: str, value: Any) -> str:
    text = written(name, value)
    return text if isinstance(value, bool) or text.lstrip("-").isdigit() else json.dumps(text)


def as_toml(results: Results) -> str:
    """Return ringstow.toml with the changes from the default, and the defaults as comments."""
    changes = dict(results.verdict.setting.changes)
    lines = [
        f"Found by: {results.command}",
        f"{results.date}, {results.machine}",
        *(part for part in [results.ended and f"Not complete: {results.ended}"] if part),
        f"State of {results.state_bytes / 1e9:.2f} GB. In use: {results.verdict.why}",
    ]
    for setting in (DEFAULT, results.verdict.setting):
        of = [m for m in results.found if m.setting == setting]
        if of:
            save, load = (median(m.speed(w) for m in of) for w in ("save", "load"))
            lines.append(f"{setting}: save {save:.2f} GB/s, load {load:.2f} GB/s (medians)")
    lines += [
        "ringstow reads this file from the working directory, or from the path in RINGSTOW_CONFIG.",
        "RINGSTOW_* in the environment and a program's own settings take precedence over it.",
    ]
    text = "".join(f"# {' '.join(line.split())}\n" for line in dict.fromkeys(lines)) + "\n"
    for name, default in results.defaults.items():
        if name in changes:
            text += f"{name} = {toml_value(name, changes[name])}\n"
        elif name in FOR_WHAT:
            text += f"# {name} = {toml_value(name, default)}\n"
    return text


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } .text td { text-align: left }
.chosen { background: #fff3c4 }
.winner { font-size: 1.1rem; padding: .6rem 1rem; background: #eef4fb }
img { max-width: 100% } pre { background: #f6f6f6; padding: .7rem; overflow-x: auto }
"""


def cells(line: Iterable[str], kind: str = "td", marked: str = "") -> str:
    inner = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in line)
    return f"<tr{marked}>{inner}</tr>"


def image(data: bytes | None, kind: str, what: str) -> str:
    if data is None:
        return f"<p>{html.escape(what)}: not measured.</p>"
    text = base64.b64encode(data).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/{kind};base64,{text}">'


def as_html(results: Results, heat_map: bytes | None, knob_plot: bytes | None) -> str:
    """Return the self-contained page. `heat_map` is a PNG, `knob_plot` an SVG."""
    found, chosen = results.found, results.verdict.setting
    marked = {chosen: ' class="chosen"'}
    rows = "\n".join(
        cells(row(found, setting), marked=marked.get(setting, ""))
        for setting in settings_told(found)
    )
    knob_rows = "\n".join(
        cells(
            [
                knob.name,
                FOR_WHAT.get(knob.name, ""),
                written(knob.name, knob.default),
                worth(results, knob, "save"),
                worth(results, knob, "load"),
            ]
        )
        for knob in results.knobs
    )
    said = "".join(f"<li>{html.escape(line)}</li>" for line in summary(results))
    knob_heads = cells(["knob", "purpose", "default", "save: best, worst", "load"], "th")
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>ringstow sweep, {html.escape(results.date)}</title>
<style>{STYLE}</style>
<h1>ringstow sweep</h1>
<p>{html.escape(results.machine)}<br>{html.escape(results.date)},
state of {results.state_bytes / 1e9:.2f} GB, goal: {results.goal}<br>
<code>{html.escape(results.command)}</code></p>
<p class="winner">{html.escape(results.verdict.why)}</p>
<ul>{said}</ul>
<h2>Block size and queue depth</h2>
{image(heat_map, "png", "Heat map of block size and queue depth")}
<h2>Effect of each knob by itself</h2>
{image(knob_plot, "svg+xml", "Ratios to the default, one knob changed at a time")}
<table class="text">{knob_heads}
{knob_rows}</table>
<h2>ringstow.toml</h2>
<pre>{html.escape(as_toml(results))}</pre>
<h2>All settings</h2>
<table>{cells(COLUMNS, "th")}
{rows}</table>
<p>{html.escape(RULE)} GB = 10<sup>9</sup> bytes. Staged: until training may change the weights.</p>
</html>
"""
