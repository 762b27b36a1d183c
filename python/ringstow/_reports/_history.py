"""The history of a run's saves: one line of JSON for each, in the run's directory.

`CheckpointManager` records it, and ``ringstow report`` draws it. It holds what no checkpoint does:
how long training waited, which saves failed and why, fallbacks to a slower mode, and the metrics of
removed steps. No load needs the file: it may be removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringstow import _native
from ringstow._core import _files, _metrics
from ringstow._core._errors import InvalidStateError
from ringstow._reports import _done_callbacks
from ringstow._reports._io_reports import Fallback, SaveReport, bytes_of, seconds_of

NAME = ".ringstow-history.jsonl"
# Maximum bytes of the file and its predecessor together; it is renamed at half: about 10,000 saves.
_MOST_BYTES = 4_000_000
_ERROR_MAX = 500
# A save may have 256 metrics with long names, but the file must have room for many saves.
_METRICS_MAX = 32

_directories: set[str] = set()
"""The directories whose saves and loads are recorded."""

_log = logging.getLogger("ringstow")


class Entry(NamedTuple):
    """One save, load, promotion or removal that ended."""

    kind: str
    name: str
    """The checkpoint's name, without its directory."""
    at_unix_ms: int
    """When it ended."""
    step: int | None = None
    to: str | None = None
    """Where a promotion copies to."""
    seconds: float | None = None
    bytes: int | None = None
    """Bytes written, read or sent."""
    blocked_seconds: float | None = None
    """How long training waited for the save."""
    error: str | None = None
    reason: str | None = None
    """Why a step was removed; the native side records removals."""
    fallbacks: tuple[Fallback, ...] = ()
    metrics: Mapping[str, float] = {}
    """Metrics of the save, the first by name."""


def keep(directory: str) -> None:
    """Record the saves to and loads from a directory, until the process ends.

    A forked child starts empty, as with `on_done`.
    """
    if _note not in _done_callbacks.notes:
        _directories.clear()
        _done_callbacks.notes.append(_note)
    _directories.add(directory)


def _note(outcome: _done_callbacks.Outcome) -> None:
    """Append a line before the caller gets the outcome, and could remove the run. Never fails."""
    directory, name = os.path.split(outcome.path)
    if directory not in _directories or outcome.kind == "skip":
        return  # there may be more skipped steps than saves
    # A full disk, a removed run, or `str(error)` raised.
    with contextlib.suppress(Exception):
        line = json.dumps(_fields(_entry(outcome, name)))
        try:
            _native.add_to_history(directory, line)
        except InvalidStateError as error:
            _directories.discard(directory)  # log it once
            _log.warning("what saves of %s take is not noted: %s", directory, error)


def _entry(outcome: _done_callbacks.Outcome, name: str) -> Entry:
    entry = Entry(outcome.kind, name, time.time_ns() // 1_000_000, step=outcome.step, to=outcome.to)
    error = outcome.error
    if error is not None:
        entry = entry._replace(error=f"{type(error).__name__}: {error}"[:_ERROR_MAX])
    report = outcome.report
    if report is not None:
        entry = entry._replace(seconds=seconds_of(report), bytes=bytes_of(report))
    if isinstance(report, SaveReport):
        blocked = report.blocked_seconds
        metrics = dict(sorted(outcome.metrics.items())[:_METRICS_MAX])
        entry = entry._replace(blocked_seconds=blocked, fallbacks=report.fallbacks, metrics=metrics)
    return entry


def _fields(entry: Entry) -> dict[str, Any]:
    fields = {name: value for name, value in entry._asdict().items() if value not in (None, (), {})}
    if entry.metrics:
        fields["metrics"] = _metrics.to_json(entry.metrics)
    if entry.fallbacks:
        fields["fallbacks"] = [dataclasses.asdict(one) for one in entry.fallbacks]
    return fields


def read(directory: str) -> list[Entry]:
    """Return the entries of a directory, oldest first. Skips lines that cannot be parsed."""
    entries = []
    for name in (f"{NAME}.1", NAME):
        try:
            with _files.reading(os.path.join(directory, name), links=False) as file:
                lines = file.read(_MOST_BYTES).splitlines()
        except OSError:
            continue
        entries += [entry for line in lines if (entry := _parsed(line)) is not None]
    return entries


def _parsed(line: bytes) -> Entry | None:
    """Return the entry of a line; None if a kill truncated it, or another program wrote it."""
    try:
        fields = json.loads(line)
        fields["fallbacks"] = tuple(Fallback(**one) for one in fields.get("fallbacks", ()))
        fields["metrics"] = _metrics.from_json(fields.get("metrics", {}))
        known = {name: fields[name] for name in Entry._fields if name in fields}
        entry = Entry(**known)
        is_whole = (
            isinstance(entry.name, str)
            and isinstance(entry.kind, str)
            and isinstance(entry.at_unix_ms, int)
            and all(isinstance(one, str | None) for one in (entry.to, entry.error, entry.reason))
            and all(isinstance(one, int | None) for one in (entry.step, entry.bytes))
            and all(
                one is None or isinstance(one, float) or abs(one) < 1 << 63
                for one in (entry.step, entry.bytes, entry.seconds, entry.blocked_seconds)
            )
            and all(
                isinstance(one, float) or (isinstance(one, int) and abs(one) < 1 << 63)
                for one in entry.metrics.values()
            )
            and all(isinstance(text, str) for one in entry.fallbacks for text in vars(one).values())
        )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return entry if is_whole else None
