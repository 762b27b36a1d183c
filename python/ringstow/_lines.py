"""Reports in one line, and sizes and times with three digits, as the program prints them.

Knows of reports only what it prints: the reports themselves print these lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# What a background save that had too little of it wanted, by the first words.
_MEMORY = "staging memory for all"
# Settings have a shorter name for it.
_ENGINES = {"uring": "io_uring", "": "no engine"}


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
    def wanted(self) -> str: ...
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


def of_save(report: _Saved, who: str = "") -> str:
    """Return ``run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT), ...``.

    Args:
        report: the save's.
        who: goes behind the path, such as ``rank 3``.
    """
    done = of_move(report, report.written_bytes, who)
    if report.linked_bytes:
        done = f"{done}, {size(report.linked_bytes)} linked"
    if report.blocked_seconds is None:
        return done
    done = f"{done}, training waited {duration(report.blocked_seconds)}"
    reasons = (one.reason for one in report.fallbacks if one.wanted.startswith(_MEMORY))
    memory = f"{size(report.pool_bytes)} of staging memory for {size(report.written_bytes)}"
    return done + "".join(f", with {memory}: {reason}" for reason in reasons)


def of_load(report: _Loaded, who: str = "") -> str:
    """Return ``loaded run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT)``."""
    return f"loaded {of_move(report, report.read_bytes, who)}"


def of_move(report: Moved, count: int, who: str = "") -> str:
    """Return ``run/step-1000, rank 3: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT)``."""
    place = f"{report.path}, {who}" if who else report.path
    words = [
        f"{size(round(report.gb_per_s * 1e9))}/s",
        _ENGINES.get(report.engine, report.engine),
        *(["fixed buffers"] if report.fixed_buffers else []),
        "O_DIRECT" if report.direct else "buffered",
    ]
    return f"{place}: {size(count)} in {duration(report.seconds.total)} ({', '.join(words)})"


def size(count: int) -> str:
    """Return a number of bytes in powers of ten: ``4.19 MB``."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """Return seconds: ``12 ms``, ``1.52 s``, ``185 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{0 if seconds >= 0.00995 else 1}f} ms"
    return f"{seconds:.{2 if seconds < 9.995 else 1 if seconds < 99.95 else 0}f} s"
