"""A clock for a program's environment, which a file moves back and forth."""

from __future__ import annotations

import os
import subprocess

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, t);
    FILE *file = id == CLOCK_REALTIME ? fopen(getenv("CLOCK_FILE"), "r") : 0;
    long ahead = 0;
    if (file) { if (fscanf(file, "%ld", &ahead) != 1) ahead = 0; fclose(file); }
    t->tv_sec += ahead;
    return done;
}
"""


def environment(directory):
    """Return an environment whose clock is as many seconds ahead as its ``CLOCK_FILE`` says."""
    (directory / "clock.c").write_text(CLOCK)
    library = directory / "clock.so"
    how = ["-shared", "-fPIC", "-o", library, directory / "clock.c", "-ldl"]
    subprocess.run(["cc", *how], check=True)
    (directory / "ahead").write_text("0")
    return {**os.environ, "LD_PRELOAD": str(library), "CLOCK_FILE": str(directory / "ahead")}
