"""The page: turns the data of `_gather` into HTML with its style, without scripts. Pure."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ringstow._program._page import _charts
from ringstow._program._page._run import Change, Checkpoint, Run
from ringstow._program._page._style import STYLE
from ringstow._program._page._text import counted, lines, nbytes, number, shown

if TYPE_CHECKING:
    from ringstow._reports._history import Entry

# Number of tensors in the treemap; the others are one tile.
_TILES_MAX = 400
_NAMES_MAX = 40
_METRICS_MAX = 6


def page(run: Run) -> str:
    """Return the whole page."""
    body = "\n".join(part for section in _SECTIONS if (part := "\n".join(section(run))))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">\n"
        f"<title>{shown(run.directory)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(run: Run) -> Iterator[str]:
    steps = run.checkpoints
    total = sum(one.nbytes or 0 for one in steps)
    shared = sum(one.shared_bytes for one in steps)
    bad = sum(1 for one in steps if one.problem or one.damage)
    facts = [
        ("newest that can be loaded", "none" if run.newest is None else run.newest),
        ("checkpoints", f"{len(steps)}" + (f", and {run.left_out} older" if run.left_out else "")),
        ("size", nbytes(total) + (f", of which {nbytes(shared)} are shared" if shared else "")),
        ("first and last commit", _span(steps)),
        ("health", _judged(run, bad)),
    ]
    yield f"<h1>{shown(run.directory)}</h1>"
    yield f'<p class="soft">ringstow {shown(run.version)}, {shown(run.written)}</p>'
    yield "<dl>" + "".join(f"<dt>{shown(a)}</dt><dd>{shown(b)}</dd>" for a, b in facts) + "</dl>"


def _judged(run: Run, bad: int) -> str:
    saves = sum(1 for one in run.saves if one.error is not None)
    copies = len(run.failed_copies)
    parts = [f"{counted(bad, 'checkpoint')} with problems"] if bad else []
    parts += [f"{counted(saves, 'failed save')}"] if saves else []
    parts += [f"{copies:,} failed to be copied"] if copies else []
    return f"{', '.join(parts)}: see below" if parts else "no problem is known"


def _span(steps: Sequence[Checkpoint]) -> str:
    times = [one.created_unix_ms for one in steps if one.created_unix_ms is not None]
    return f"{_time(min(times))} to {_time(max(times))}" if times else "unknown"


def _time(unix_ms: int | None) -> str:
    if unix_ms is None:
        return "?"
    try:
        at = datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{unix_ms} ms after 1970"
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _health(run: Run) -> Iterator[str]:
    rows = []
    for one in run.checkpoints:
        if one.problem:
            rows.append((one.name, "cannot be loaded", one.problem))
        rows += [(one.name, "damaged", damage) for damage in one.damage or ()]
    failed = [one for one in run.saves if one.error is not None]
    yield "<h2>Health</h2>"
    if rows:
        yield _table(["checkpoint", "what", "why"], [[(t, "") for t in row] for row in rows])
    elif failed or run.failed_copies:
        yield "<p>The checkpoints that are here have no problem.</p>" if run.checkpoints else ""
    else:
        yield '<p class="good">No problem is known.</p>'
    if all(one.damage is None for one in run.checkpoints):
        yield (
            '<p class="soft">Judged by manifests and lengths of files. '
            "<code>ringstow report --verify</code> reads every byte.</p>"
        )
    if failed:
        yield "<p>Saves that failed:</p>"
        rows = [(one.name, _time(one.at_unix_ms), one.error or "") for one in failed[-_NAMES_MAX:]]
        yield _table(["checkpoint", "when, UTC", "why"], [[(t, "") for t in row] for row in rows])
    if run.fallbacks:
        yield "<p>What the last save did in a slower way:</p>"
        heads = ["wanted", "done instead", "why", "what to do"]
        slower = [(one.wanted, one.got, one.reason, one.remedy) for one in run.fallbacks]
        yield _table(heads, [[(text, "") for text in row] for row in slower])
    if run.failed_copies:
        yield "<p>Copies that failed:</p>"
        rows = list(run.failed_copies[-_NAMES_MAX:])
        yield _table(["checkpoint", "to", "why"], [[(t, "") for t in row] for row in rows])
    if run.unfinished:
        yield "<p>Copies that have begun and not ended:</p>"
        yield _table(["checkpoint", "to"], [[(a, ""), (b, "")] for a, b in run.unfinished])


def _sizes(run: Run) -> Iterator[str]:
    bars = [
        _charts.Bar(
            _label(one),
            one.nbytes or 0,
            f"{one.name}: {nbytes(one.nbytes)}, {_time(one.created_unix_ms)}",
            bool(one.problem or one.damage),
        )
        for one in run.checkpoints
    ]
    yield "<h2>Sizes</h2>"
    yield _charts.bars("bytes of each checkpoint", bars)


def _saves(run: Run) -> Iterator[str]:
    done = [one for one in run.saves if one.error is None and one.seconds]
    if not done:
        return
    labels = [_label(one) for one in done]
    waited = [one.blocked_seconds for one in done]
    yield "<h2>Saves</h2>"
    yield (
        f'<p class="soft">The last {counted(len(done), "save")} that this directory has notes of, '
        "also of steps that are gone by now.</p>"
    )
    for title, values in (
        ("GB/s, durable", [(one.bytes or 0) / 1e9 / (one.seconds or 1) for one in done]),
        ("seconds of a save", [one.seconds for one in done]),
        ("seconds for which training waited", waited),
    ):
        numbers = [math.nan if value is None else value for value in values]
        if any(math.isfinite(value) for value in numbers):
            yield f"<h3>{title}</h3>"
            yield _charts.line(title, labels, numbers, from_zero=True)


def _label(one: Checkpoint | Entry) -> str:
    return one.name if one.step is None else str(one.step)


def _metrics(run: Run) -> Iterator[str]:
    names = sorted({name for one in run.measured for name in one.metrics})
    if not names:
        return
    yield "<h2>Metrics</h2>"
    kept = {_label(one) for one in run.checkpoints}
    gone = sum(1 for one in run.measured if _label(one) not in kept)
    if gone:
        yield (
            f'<p class="soft">Of {counted(len(run.measured), "save")}, {gone:,} of which are gone '
            "by now or older than the checkpoints below.</p>"
        )
    labels = [_label(one) for one in run.measured]
    steps = [one.step for one in run.measured if one.step is not None]
    at = steps if len(steps) == len(labels) else None
    for name in names[:_METRICS_MAX]:
        values = [one.metrics.get(name, math.nan) for one in run.measured]
        yield f"<h3>{shown(name)}</h3>"
        yield _charts.line(name, labels, values, at=at)
    if len(names) > _METRICS_MAX:
        yield f'<p class="soft">Not drawn: {shown(", ".join(names[_METRICS_MAX:]))}</p>'


def _tensors(run: Run) -> Iterator[str]:
    if run.newest is None or not run.tensors:
        return
    total = sum(one.nbytes for one in run.tensors)
    yield f"<h2>Tensors of {shown(run.newest)}</h2>"
    yield (
        f'<p class="soft">{counted(len(run.tensors), "tensor")}, {nbytes(total)}. '
        "An area is a number of bytes, and a colour the first part of a name.</p>"
    )
    largest = sorted(run.tensors, key=lambda one: one.nbytes, reverse=True)
    shown_ones, others = largest[:_TILES_MAX], largest[_TILES_MAX:]
    weights = sorted((one.name, one.nbytes) for one in shown_ones)
    if others:
        weights.append((f"{len(others):,} smaller ones", sum(one.nbytes for one in others)))
    yield _charts.treemap("tensors by bytes", weights)
    rows = [
        [(one.name, ""), (one.dtype, ""), (str(list(one.shape)), ""), (nbytes(one.nbytes), "n")]
        for one in largest[:_NAMES_MAX]
    ]
    yield f"<details><summary>The largest {len(rows)}</summary>"
    yield _table(["name", "dtype", "shape", "bytes"], rows)
    yield "</details>"


def _changes(run: Run) -> Iterator[str]:
    if not run.changes:
        return
    yield "<h2>Changes</h2>"
    yield '<p class="soft">From one checkpoint to the next, by their checksums.</p>'
    for change in reversed(run.changes):
        yield f"<details><summary>{shown(_summary(change))}</summary>"
        yield from _change(change)
        yield "</details>"


def _summary(change: Change) -> str:
    pair = f"{change.before} to {change.after}"
    if change.problem:
        return f"{pair}: not compared"
    count = len(change.changed)
    told = [f"{counted(count, 'tensor')} changed ({nbytes(change.changed_bytes)})"]
    told += [f"{change.equal:,} equal"]
    told += [f"{len(change.added):,} new"] if change.added else []
    told += [f"{len(change.removed):,} gone"] if change.removed else []
    told += [f"{counted(len(change.values), 'value')} changed"] if change.values else []
    return f"{pair}: {', '.join(told)}"


def _change(change: Change) -> Iterator[str]:
    if change.problem:
        yield f"<p>{lines(change.problem)}</p>"
        return
    for what, names in (
        ("changed", change.changed),
        ("new", change.added),
        ("gone", change.removed),
    ):
        if names:
            yield f"<p>{what}: {_some(names)}</p>"
    if change.values:
        rows = [[(cell, "") for cell in row] for row in change.values[:_NAMES_MAX]]
        yield _table(["value", "before", "after"], rows)


def _some(names: Sequence[str]) -> str:
    told = ", ".join(f"<code>{shown(name)}</code>" for name in names[:_NAMES_MAX])
    more = len(names) - _NAMES_MAX
    return told + (f" and {more:,} more" if more > 0 else "")


def _values(run: Run) -> Iterator[str]:
    if not run.values:
        return
    yield f"<h2>Values of {shown(run.newest)}</h2>"
    yield "<details><summary>What is no tensor</summary>"
    yield _table(["name", "value"], [[(name, ""), (value, "")] for name, value in run.values])
    yield "</details>"


def _all(run: Run) -> Iterator[str]:
    names = sorted({name for one in run.checkpoints for name in one.metrics})[:_METRICS_MAX]
    heads = ["checkpoint", "committed, UTC", "bytes", "tensors", "ranks", "dropped", *names]
    rows = []
    for one in reversed(run.checkpoints):
        cells = [
            (one.name, "bad" if one.problem or one.damage else ""),
            (_time(one.created_unix_ms), ""),
            (nbytes(one.nbytes), "n"),
            ("?" if one.tensors is None else f"{one.tensors:,}", "n"),
            ("?" if one.ranks is None else f"{one.ranks:,}", "n"),
            (", ".join(one.dropped), ""),
        ]
        cells += [(number(one.metrics[n]) if n in one.metrics else "", "n") for n in names]
        rows.append(cells)
    yield "<h2>Checkpoints</h2>"
    yield _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Return a table; each cell is its text and its class."""
    head = "".join(f"<th>{shown(text)}</th>" for text in heads)
    body = [
        "<tr>" + "".join(f'<td class="{kind}">{lines(text)}</td>' for text, kind in row) + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


_SECTIONS = (_head, _health, _saves, _sizes, _metrics, _tensors, _changes, _values, _all)
