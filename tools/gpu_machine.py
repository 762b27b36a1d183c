"""What the GPU report says of a machine and its disk, and how it measures that disk.

Needs nothing but Python; Linux.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 << 20
FIO_JOB = "--ioengine=io_uring --bs=4M --iodepth=8 --fixedbufs --registerfiles --direct=1"


def field(path: str, name: str) -> str | None:
    """A line's value in a file of `name: value` lines."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def memory_bytes(name: str) -> int:
    """A field of /proc/self/status, such as VmRSS (now) or VmHWM (the peak)."""
    value = field("/proc/self/status", name + ":")
    if value is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(value.split()[0]) * 1024


def forget_peak() -> None:
    """Sets the peak of resident memory, VmHWM, to what is used now."""
    Path("/proc/self/clear_refs").write_text("5")


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown file system"


def nvidia_smi() -> list[dict[str, str]]:
    """Name, memory, driver and PCIe link of each GPU, as NVIDIA's own program tells."""
    names = ["name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max"]
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return [dict(zip(names, row, strict=False)) for row in rows]


def describe(directory: Path) -> dict[str, Any]:
    """The machine, and the file system to measure on."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": f"{os.cpu_count()} x {field('/proc/cpuinfo', 'model name') or 'unknown CPU'}",
        "ram_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(directory),
        "fio": shutil.which("fio") is not None,
        "gpus": nvidia_smi(),
    }


def drop_caches(directory: Path) -> None:
    """Makes the next read of these files a read of the disk."""
    os.sync()
    for file in (path for path in directory.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fio_read_gb_per_s(file: Path, size: int) -> float:
    """What fio reads of a file, in GB/s, past the page cache."""
    size -= size % BLOCK_BYTES
    command = ["fio", "--name=ceiling", f"--filename={file}", "--rw=read", "--readonly"]
    command += [f"--size={size}", *FIO_JOB.split(), "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"]) / 1e9
