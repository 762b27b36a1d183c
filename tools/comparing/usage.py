"""CPU time and memory of this process and its descendants."""

from __future__ import annotations

import os
import resource
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (state) on; the name may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants() -> list[int]:
    """Return the live descendants of this process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(stat_fields(int(entry.name))[1])
            except OSError:
                continue  # it has ended meanwhile
    found = [os.getpid()]
    for pid in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """Return a field of /proc/PID/status, such as VmRSS (now) or VmHWM (peak), in bytes."""
    return _field_bytes(Path(f"/proc/{pid}/status"), field)


def read_bytes() -> int:
    """Return the bytes that storage gave this process, and the children that it has waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def meminfo_bytes(field: str) -> int:
    """Return a field of /proc/meminfo, such as MemFree, in bytes."""
    return _field_bytes(Path("/proc/meminfo"), field)


def _field_bytes(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file} has no {field}")


def reset_peak() -> None:
    """Reset every process's VmHWM to its current use."""
    for pid in ("self", *descendants()):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the sum of all processes' peaks; memory that a child shares with us counts once."""
    peak = memory_bytes("VmHWM")
    for pid in descendants():
        peak += memory_bytes("VmHWM", pid) - memory_bytes("RssShmem", pid)
    return peak


def cpu_seconds() -> float:
    """Return user and system time of this process and its children, ended or not."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = sum(sum(map(int, stat_fields(pid)[11:15])) for pid in descendants())
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + alive / TICKS_PER_SECOND
