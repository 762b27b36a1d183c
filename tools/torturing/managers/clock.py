"""Steps of the clock: a library that shifts the time of day of all processes here.

It is compiled at the start, and this program starts anew with it loaded. The shift is in a file
that all of them have mapped, so it can change while they run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE, SHIFT = "TORTURE_CLOCK", "shift"
HOUR, YEAR = 3600, 366 * 24 * 3600
# Seconds. The last two are near 1970, and in the 23rd century; Python knows no time after 2262.
DAY = 25 * HOUR
SHIFTS = [0, 0, 1, -1, -HOUR, HOUR, -DAY, DAY, -YEAR, YEAR, -56 * YEAR, 200 * YEAR]

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("TORTURE_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) shift = mapped;
}

int torture_clock(void) { return shift != 0; }

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, at);
    int is_time_of_day = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (!done && shift && is_time_of_day) at->tv_sec += *shift;
    return done;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    int done = clock_gettime(CLOCK_REALTIME, &now);
    if (!done && at) at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return done;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """The time of day that this process and its children see."""

    def __init__(self, shift: mmap.mmap | None) -> None:
        """Take the mapped file of the library; without it the clock does not step."""
        self._shift = shift

    def step(self, rng: random.Random) -> None:
        """Step forward or back."""
        self._set(rng.choice(SHIFTS))

    def reset(self) -> None:
        """Return to the true time."""
        self._set(0)

    def _set(self, seconds: int) -> None:
        if self._shift is not None:
            struct.pack_into("=q", self._shift, 0, seconds)


def found_or_started() -> Clock:
    """Return the clock; start this program anew with the library if it is not loaded.

    Says so, and returns a clock that does not step, if that is impossible.
    """
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        folder = Path(tempfile.mkdtemp(prefix="torture-clock-"))
        reason = _started_anew(folder)
    else:
        folder = Path(path).parent
        reason = "" if _is_loaded() else "clocks that step: LD_PRELOAD has no effect here"
    shift = None
    if reason:
        print(f"skipped: {reason}", flush=True)
    else:
        with open(folder / SHIFT, "r+b") as file:
            shift = mmap.mmap(file.fileno(), 8)
    shutil.rmtree(folder)
    os.environ.pop("LD_PRELOAD", None)  # what this program starts does not need it
    return Clock(shift)


def _is_loaded() -> bool:
    own = ctypes.CDLL(None)
    return hasattr(own, "torture_clock") and bool(own.torture_clock())


def _started_anew(folder: Path) -> str:
    """Start this program anew with the library; return why that is impossible."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "clocks that step: there is no cc"
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    (folder / SHIFT).write_bytes(bytes(8))
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        return f"clocks that step: cc failed: {built.stderr.strip()[:200]}"
    before = os.environ.get("LD_PRELOAD")
    loaded = f"{library}:{before}" if before else str(library)
    environment = {**os.environ, "LD_PRELOAD": loaded, VARIABLE: str(folder / SHIFT)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
