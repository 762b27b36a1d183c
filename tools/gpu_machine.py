"""The GPU report's description of the machine. Needs only Python, on Linux."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from comparing.directories import file_system


def field(path: str, name: str) -> str | None:
    """Return the value of a line in a file of `name: value` lines."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def nvidia_smi() -> list[dict[str, str]]:
    """Return name, memory, driver and PCIe link of each GPU from nvidia-smi."""
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
    """Describe the machine and the file system to measure on."""
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
