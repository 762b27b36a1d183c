"""Formats reports in one line, as the program prints them.

Uses only the printed fields of reports, which import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ringstow import _native
from ringstow._native import size


class _Seconds(Protocol):
    @property
    def total(self) -> float: ...


class Moved(Protocol):
    """How bytes were moved, and between which path and memory."""

    @property
    def path(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def fixed_buffers(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def gb_per_s(self) -> float: ...
    @property
    def seconds(self) -> _Seconds: ...


class _Fallback(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...


class _Saved(Moved, Protocol):
    @property
    def written_bytes(self) -> int: ...
    @property
    def linked_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def blocked_seconds(self) -> float | None: ...
    @property
    def fallbacks(self) -> Sequence[_Fallback]: ...


class _Loaded(Moved, Protocol):
    @property
    def read_bytes(self) -> int: ...
    @property
    def cached_bytes(self) -> int: ...
    @property
    def received_bytes(self) -> int: ...


def of_save(report: _Saved, who: str = "") -> str:
    """Return ``run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT), ...``.

    Args:
        report: the save's report.
        who: text after the path, such as ``rank 3``.
    """
    done = of_move(report, report.written_bytes, who)
    if report.linked_bytes:
        done = f"{done}, {size(report.linked_bytes)} linked"
    if report.blocked_seconds is None:
        return done
    done = f"{done}, training waited {_native.duration(report.blocked_seconds)}"
    reasons = (one.reason for one in report.fallbacks if one.kind == "staging_memory")
    memory = f"{size(report.pool_bytes)} of staging memory for {size(report.written_bytes)}"
    return done + "".join(f", with {memory}: {reason}" for reason in reasons)


def of_load(report: _Loaded, who: str = "") -> str:
    """Return ``loaded run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT)``."""
    done = f"loaded {of_move(report, report.read_bytes, who)}"
    sources = {"the page cache": report.cached_bytes, "other ranks": report.received_bytes}
    return done + "".join(f", {size(n)} from {source}" for source, n in sources.items() if n)


def of_move(report: Moved, count: int, who: str = "") -> str:
    """Return ``run/step-1000, rank 3: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT)``."""
    place = f"{report.path}, {who}" if who else report.path
    figures = (count, report.seconds.total, report.gb_per_s)
    done = _native.moved(figures, report.engine, report.fixed_buffers, report.direct)
    return f"{place}: {done}"
