"""Processes that are forked from this one, which has one thread and has saved nothing."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAILED = 3


class Trouble(Exception):
    """A process hangs, or has ended without an answer."""


class Child:
    """A forked process that writes to a pipe; the rest of its output goes to a file."""

    def __init__(self, work: Callable[[int], None], log: Path) -> None:
        """Start it; ``work`` gets the pipe."""
        self._pipe, theirs = os.pipe()
        self._said = b""
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _run(work, theirs, log)
        os.close(theirs)

    @property
    def bytes_said(self) -> int:
        """How much it has written, as far as anybody has waited for it."""
        return len(self._said)

    @property
    def last_byte(self) -> bytes:
        """The last byte of these."""
        return self._said[-1:]

    def await_bytes(self, count: int, seconds: float) -> bool:
        """Wait until it has written so many bytes; return False if it has ended before."""
        until = time.monotonic() + seconds
        while len(self._said) < count:
            if not self._read(until):
                return False
        return True

    def output(self, seconds: float) -> bytes:
        """Wait for its end, and return all that it wrote to the pipe."""
        until = time.monotonic() + seconds
        while self._read(until):
            pass
        self.wait()
        return self._said

    def answer(self, seconds: float) -> Any:
        """Wait for its end; return the JSON that it wrote."""
        said = self.output(seconds)
        if self.wait():
            raise Trouble(f"process {self.pid} ended with {self.wait()}, without an answer")
        return json.loads(said)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it is gone; return its exit code, negative for a signal."""
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
            os.close(self._pipe)
        return self._status

    def _read(self, until: float) -> bool:
        if self._status is not None:
            return False
        left = until - time.monotonic()
        if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
            os.kill(self.pid, signal.SIGABRT)  # it says where it hangs
            self.wait()
            raise Trouble(f"process {self.pid} hangs after {len(self._said)} bytes")
        more = os.read(self._pipe, 1 << 16)
        self._said += more
        return bool(more)


def _run(work: Callable[[int], None], pipe: int, log: Path) -> None:
    """Work in the forked process, and leave it without the parent's clean-up."""
    code = FAILED
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(2)
        work(pipe)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
