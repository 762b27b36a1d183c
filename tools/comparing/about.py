"""What a file of measurements says of its origin: the command, the machine and the date."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from comparing.directories import machine

TOOLS = Path(__file__).resolve().parent.parent


def about(directory: Path) -> dict[str, str]:
    """Return what tools/figures.py prints under a plot; `directory` is on the measured disk."""
    return {"command": command(), "date": time.strftime("%Y-%m-%d"), "machine": machine(directory)}


def command() -> str:
    """Return this program's command line, to be typed in the root of the project."""
    program = Path(sys.argv[0]).resolve()
    name = program.relative_to(TOOLS.parent) if program.is_relative_to(TOOLS) else program.name
    return shlex.join(["python", str(name), *sys.argv[1:]])
