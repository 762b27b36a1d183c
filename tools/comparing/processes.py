"""Runs a command with a time limit and its output kept, and leaves none of its processes behind."""

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
    """The comparison cannot be made here, or not with this peer; the message says why."""


def say(text: str = "") -> None:
    print(text, flush=True)


def run_kept(
    command: list[str],
    log: Path,
    seconds_max: float,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> tuple[int, str]:
    """Exit code and all output, which is added to `log`. Raises CompareFailed after `seconds_max`.
    What the command has started ends with it."""
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
    """Ends the process, if need be, and everything it left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended by themselves
    finally:
        process.wait()


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
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
    """What comparing.worker answers; CompareFailed with its one line where it failed."""
    tools = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": str(tools), **extra}
    command = [python, "-W", "ignore", "-m", "comparing.worker", *arguments]
    code, text = run_kept(command, log, seconds_max, environment, stdin)
    answer = last_json(text)
    if code < 0 and answer is None:
        raise CompareFailed(f"ended by {signal.Signals(-code).name}")
    if answer is None:
        lines = text.strip().splitlines() or ["no output"]
        raise CompareFailed(f"exit code {code}: {lines[-1][:300]}")
    if "failed" in answer:
        raise CompareFailed(answer["failed"])
    return answer
