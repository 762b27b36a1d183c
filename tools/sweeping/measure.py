"""The sweep's I/O: free space and memory, the worker, fio, the rounds.

It measures the given settings and keeps complete measurements if stopped. It makes no choices.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparing.fio import BLOCK_BYTES, fio_pass
from comparing.processes import CompareFailed
from comparing.usage import meminfo_bytes

from sweeping import plan
from sweeping.choose import Measured
from sweeping.plan import DEFAULT, FIO, Phase, Setting

SPARE_BYTES = 256 << 20  # left free on the disk, and in memory besides the sweep's own need
POOL_BYTES = 256 << 20  # of a plain save
CALIBRATIONS = 3
CAUTION = 1.15  # other settings may be slower than the default
WORKER = Path(__file__).parent.parent / "sweep_worker.py"


class SweepFailed(Exception):
    """The sweep cannot go on; the message says why and what to change."""


def check_directory(directory: Path, state_bytes: int) -> None:
    """Check that the directory exists and its disk has enough free space.

    Raises:
        SweepFailed: one of them is not the case.
    """
    if not directory.is_dir():
        raise SweepFailed(f"{directory} is not a directory; give one on the disk to be measured")
    need = int(state_bytes * 2.1) + SPARE_BYTES  # a checkpoint and the recycled files of another
    free = shutil.disk_usage(directory).free
    if free < need:
        raise SweepFailed(
            f"{directory} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed; "
            "free some space, or choose a smaller --gb"
        )


def check_memory(state_bytes: int) -> None:
    """Check that there is enough memory. Call it before allocating anything.

    It must hold the state twice (to save, and to load into) and the pools of two settings.

    Raises:
        SweepFailed: it does not.
    """
    available = meminfo_bytes("MemAvailable")
    need = 2 * state_bytes + 2 * POOL_BYTES + SPARE_BYTES
    if available < need:
        raise SweepFailed(
            f"{available / 1e9:.1f} GB of memory are available, {need / 1e9:.1f} GB are "
            "needed; choose a smaller --gb"
        )


@contextmanager
def work_directory(parent: Path) -> Iterator[Path]:
    """Create a directory for the sweep and remove it afterwards."""
    try:
        path = Path(tempfile.mkdtemp(prefix=".ringstow-sweep-", dir=parent))
    except OSError as error:
        raise SweepFailed(f"cannot write in {parent}: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def worker_environment() -> dict[str, str]:
    """Return the environment without ringstow's settings, so that they don't change the default."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RINGSTOW_")}
    return kept | {"RINGSTOW_CONFIG": os.devnull}


class Worker:
    """The process that saves and loads, in its own session: only this process gets Ctrl-C."""

    def __init__(self, directory: Path, state_bytes: int, drop_caches: bool = False) -> None:
        command = [sys.executable, "-W", "ignore", str(WORKER), str(directory)]
        command += ["--bytes", str(state_bytes), *(["--drop-caches"] if drop_caches else [])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=worker_environment(),
            start_new_session=True,
        )
        try:
            self.about = self.answer()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, setting: Setting, timed: bool = True) -> dict[str, Any]:
        assert self.process.stdin
        try:
            request = {"changes": dict(setting.changes), "timed": timed}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() raises with the reason
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            why = signal.strsignal(-code) if code < 0 else f"exit code {code}"
            raise SweepFailed(f"the process that saves and loads ended: {why}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *ended: object) -> None:
        self.process.kill()
        self.process.wait()


def fio_round(directory: Path, state_bytes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure fio writing and flushing a new file, then reading it cold."""
    file = directory / "fio"
    size = -(-state_bytes // BLOCK_BYTES) * BLOCK_BYTES
    os.sync()
    try:
        written = fio_pass("write", file, size)
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written, fio_pass("read", file, size)
    except CompareFailed as failure:
        raise SweepFailed(str(failure)) from failure
    finally:
        file.unlink(missing_ok=True)


@dataclass
class Sweep:
    """Measures settings and keeps the results.

    Calls `tell` before each measurement, and `keep` after each round.
    """

    directory: Path
    state_bytes: int
    worker: Worker
    dice: random.Random
    tell: Callable[[Setting, int], None]
    keep: Callable[[Sweep], None]
    found: list[Measured] = field(default_factory=list)
    refused: dict[Setting, str] = field(default_factory=dict)
    notes: dict[Setting, list[str]] = field(default_factory=dict)
    blocks: int = 0

    def probe(self, setting: Setting) -> dict[str, Any] | None:
        """Return the I/O mode with a setting; None if ringstow refuses it, noting the reason."""
        answer = self.worker.ask(setting, timed=False)
        return None if self.is_refused(setting, answer) else answer

    def is_refused(self, setting: Setting, answer: dict[str, Any]) -> bool:
        if "failed" in answer:
            raise SweepFailed(f"{setting}: {answer['failed']}")
        if "refused" in answer:
            self.refused[setting] = answer["refused"]
        for note in answer.get("notes", []):
            known = self.notes.setdefault(setting, [])
            if note not in known:
                known.append(note)
        return "refused" in answer

    def calibrate(self, fio: bool) -> float:
        """Return the seconds of a measurement, after an unmeasured one that allocates memory."""
        for number in range(CALIBRATIONS + 1):
            if number == 1:
                start = time.monotonic()
            if self.is_refused(DEFAULT, self.worker.ask(DEFAULT)):
                raise SweepFailed(f"the default setting is refused: {self.refused[DEFAULT]}")
            if fio and number == 0:
                fio_round(self.directory, self.state_bytes)
        return (time.monotonic() - start) / CALIBRATIONS * CAUTION

    def rounds(self, phase: Phase, ends_at: float) -> None:
        """Measure the phase's rounds: at least LEAST_ROUNDS, then until `ends_at` (monotonic)."""
        longest_s = 0.0
        for number in range(phase.rounds):
            enough = number >= plan.LEAST_ROUNDS[phase.name]
            if enough and time.monotonic() + longest_s > ends_at:
                return
            start = time.monotonic()
            for block in plan.blocks(phase.settings, phase.fio, self.dice):
                self.block(phase.name, number, block)
            longest_s = max(longest_s, time.monotonic() - start)
            self.keep(self)

    def block(self, phase: str, number: int, settings: list[Setting]) -> None:
        self.blocks += 1
        for setting in settings:
            self.tell(setting, 1)
            if setting in self.refused:
                continue
            if setting == FIO:
                save, load = fio_round(self.directory, self.state_bytes)
            else:
                answer = self.worker.ask(setting)
                if self.is_refused(setting, answer):
                    continue
                save, load = answer["save"], answer["load"]
            self.found.append(Measured(setting, phase, number, self.blocks, save, load))
