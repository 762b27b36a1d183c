"""The directories to measure in: fresh ones, the disk under them, and its free space."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comparing.processes import CompareFailed
from comparing.usage import meminfo_bytes

SPARE_BYTES = 512 << 20  # left free on the disk beside the checkpoint


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="compare-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def file_system(directory: Path) -> str:
    """Return the kernel's name for the type of the file system that holds `directory`."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown file system"


def machine(directory: Path) -> str:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    ram_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return (
        f"{os.cpu_count()} x {cpu}, {ram_gb:.0f} GB RAM, {file_system(directory)}, "
        f"Linux {platform.release()}"
    )


def check_room(directory: Path, state_bytes: int) -> None:
    need = int(state_bytes * 1.1) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < need:
        raise CompareFailed(
            f"{directory} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} GB are needed. "
            "Choose another disk with --dir or a smaller state with --gb"
        )
    available = meminfo_bytes("MemAvailable")
    if available < 3 * state_bytes:
        raise CompareFailed(
            f"{available / 1e9:.1f} GB of memory available; some peers need "
            f"{3 * state_bytes / 1e9:.1f} GB for this state. Choose a smaller one with --gb"
        )
