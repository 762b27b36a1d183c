"""Run a command with a time limit, keep its output, and leave none of its processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CompareFailed(Exception):
    """The comparison, or this peer, cannot run here; the message says why."""


class TimedOut(CompareFailed):
    """The measured part of a save or load took longer than its limit."""


def say(text: str = "") -> None:
    print(text, flush=True)


def run_kept(
    command: list[str],
    log: Path,
    seconds_max: float,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> tuple[int, str]:
    """Run a command, append its output to `log`, and return its exit code and output.

    End every process that the command started. Raise CompareFailed after `seconds_max`.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=stdin,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise CompareFailed(f"not done within {seconds_max:.0f} s") from None
        finally:
            end_session(process)
            output.seek(0)
            text = output.read()
            with open(log, "a") as kept:
                kept.write(f"$ {' '.join(command)}\n{text}\n")
    return process.returncode, text


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs, and everything it left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all processes have ended already
    finally:
        process.wait()


def last_json(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return answer
    return None


def run_worker(
    python: str,
    arguments: list[str],
    log: Path,
    seconds_max: float,
    extra: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
) -> dict[str, Any]:
    """Return comparing.worker's answer, or raise CompareFailed with its one-line error."""
    tools = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(tools), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, **extra}
    command = [python, "-W", "ignore", "-m", "comparing.worker", *arguments]
    code, text = run_kept(command, log, seconds_max, environment, stdin)
    answer = last_json(text)
    if code == -signal.SIGALRM and answer is None:  # only comparing.worker's own limit sends it
        raise TimedOut("the measured part took longer than its limit")
    if code < 0 and answer is None:
        raise CompareFailed(f"ended by {signal.Signals(-code).name}")
    if answer is None:
        lines = text.strip().splitlines() or ["no output"]
        raise CompareFailed(f"exit code {code}: {lines[-1][:300]}")
    if "failed" in answer:
        raise CompareFailed(answer["failed"])
    return answer
