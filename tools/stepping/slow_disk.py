"""A disk that takes a number of bytes per second: a loop device that the kernel throttles."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from comparing.directories import fresh_directory
from comparing.processes import CompareFailed

THROTTLES = Path("/sys/fs/cgroup/blkio")
"""Version 1 of control groups, whose root group can be throttled."""


@contextmanager
def slow_disk(parent: Path, size: int, bytes_per_second: int) -> Iterator[Path]:
    """Mount an ext4 file system of `size` bytes, in a file below `parent`, until the end.

    Raises:
        CompareFailed: this needs root, `losetup`, `mkfs.ext4` and version 1 of control groups.
    """
    throttles = [THROTTLES / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    if os.geteuid() != 0 or not all(throttle.exists() for throttle in throttles):
        raise CompareFailed(
            f"--disk-rate needs root, and control groups of version 1 at {THROTTLES}"
        )
    with fresh_directory(parent) as directory, ExitStack() as undo:
        image, mounted = directory / "disk.img", directory / "disk"
        image.touch()
        os.truncate(image, size)
        mounted.mkdir()
        run("mkfs.ext4", "-q", str(image))
        device = run("losetup", "--find", "--show", "--direct-io=on", str(image))
        undo.callback(run, "losetup", "--detach", device)
        run("mount", device, str(mounted))
        undo.callback(run, "umount", str(mounted))
        number = os.stat(device).st_rdev
        for throttle in throttles:
            name = f"{os.major(number)}:{os.minor(number)}"
            throttle.write_text(f"{name} {bytes_per_second}")
            undo.callback(throttle.write_text, f"{name} 0")
        yield mounted


def run(*command: str) -> str:
    """Run a command, and return what it prints.

    Raises:
        CompareFailed: it failed, or there is no such program.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        raise CompareFailed(f"--disk-rate needs {command[0]}") from missing
    if done.returncode != 0:
        raise CompareFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
