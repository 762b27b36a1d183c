"""Reports in one line, and sizes and times with three digits, as the program prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringstow._report import LoadReport, SaveReport


def of_save(report: SaveReport, who: str = "") -> str:
    """Return ``run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, uring, fixed, direct), ...``.

    Args:
        report: the save's.
        who: goes behind the path, such as ``rank 3``.
    """
    place = f"{report.path}, {who}" if who else report.path
    done = _done(report, report.written_bytes)
    if report.linked_bytes:
        done = f"{done}, {size(report.linked_bytes)} linked"
    if report.blocked_seconds is None:
        return f"{place}: {done}"
    return f"{place}: {done}, training waited {duration(report.blocked_seconds)}"


def of_load(report: LoadReport) -> str:
    """Return ``loaded run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, uring, fixed, direct)``."""
    return f"loaded {report.path}: {_done(report, report.read_bytes)}"


def _done(report: SaveReport | LoadReport, count: int) -> str:
    words = [
        f"{report.gb_per_s:.2f} GB/s",
        report.engine or "no engine",
        *(["fixed"] if report.fixed_buffers else []),
        "direct" if report.direct else "buffered",
    ]
    return f"{size(count)} in {duration(report.seconds.total)} ({', '.join(words)})"


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
