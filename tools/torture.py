"""Run the rigs that try to make ringstow lose a checkpoint, and say what each of them held.

    python tools/torture.py                        # every rig at full length: hours
    python tools/torture.py --minutes 5 --seed 7   # a share of each that fits, on two idle cores
    python tools/torture.py --rigs cuts hosts      # only these

Each rig is a target of the Makefile, `torture-NAME`, that takes a seed and a number. It ends with
lines `promise: TEXT: COUNT THINGS, 0 broken`; these are collected, each once, at the end. A rig
that this machine lacks something for is skipped with the reason. Exits with 1 if a promise is
broken, a rig fails or does not end, and with 2 if nothing ran. Everything that the rigs print is
in torture-out/NAME.log.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMISE = "promise: "
SKIPPED = "skipped: "
# A rig that takes this many times its share hangs, or the machine is busy beyond use.
OVERTIME = 8


@dataclass(frozen=True)
class Rig:
    """A target `torture-NAME` of the Makefile."""

    name: str
    # The Makefile's variable that says how many, all of them, and about how many a minute.
    variable: str
    full: int | str
    a_minute: float
    needs_root: bool = False

    def number(self, minutes: float | None) -> int | str:
        """Return how many fit into the minutes; all of them for None.

        A rig that takes no number makes a seeded tenth for "".
        """
        if minutes is None:
            return self.full
        return max(1, int(self.a_minute * minutes)) if self.a_minute else ""

    def lacks(self) -> str:
        """Return why the rig cannot run on this machine; "" if it can."""
        return "it mounts file systems: run it as root" if self.needs_root and os.geteuid() else ""


RIGS = [
    Rig("calls", "EACH_CALL", full="all", a_minute=0),
    Rig("calls-python", "MINUTES", full=120, a_minute=1),
    Rig("simulation", "SEEDS", full=100_000, a_minute=2000),
    Rig("kills", "KILLS", full=3000, a_minute=400),
    # Of each of three file systems, from Rust and from Python: 3,000 in all.
    Rig("cuts", "CUTS", full=500, a_minute=6, needs_root=True),
    Rig("hosts", "INTERLEAVINGS", full=500, a_minute=60, needs_root=True),
    Rig("background", "LOOPS", full=1000, a_minute=60),
    Rig("faults", "FAULT_SEEDS", full=5000, a_minute=500),
    Rig("flips", "FLIPS", full=10_000, a_minute=3000),
    Rig("fuzz", "MINUTES", full=60, a_minute=1),
    Rig("image", "MINUTES", full=60, a_minute=1),
    Rig("managers", "MANAGER_KILLS", full=1000, a_minute=100),
    Rig("promotes", "PROMOTION_KILLS", full=200, a_minute=30),
    Rig("restarts", "RESTARTS", full="all", a_minute=0),
    Rig("stops", "STOPS", full=200, a_minute=12),
    Rig("leaks", "LEAK_ROUNDS", full=50_000, a_minute=500),
    Rig("soak", "SOAK_MINUTES", full=60, a_minute=1),
]


@dataclass
class Ran:
    """How a rig ended."""

    rig: Rig
    number: int | str
    seconds: float = 0.0
    problem: str = ""
    skipped: list[str] = field(default_factory=list)
    promises: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """Return the result in a few words."""
        if self.problem:
            return self.problem
        if not self.promises:
            return "skipped: " + "; ".join(dict.fromkeys(self.skipped))
        return "held"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rigs that the arguments select."""
    options = parse(arguments)
    share = options.minutes / len(options.rigs) if options.minutes else None
    options.out.mkdir(exist_ok=True)
    ran = []
    for rig in options.rigs:
        ran.append(run(rig, rig.number(share), options.seed, share, options.out))
        print(line(ran[-1]), flush=True)
    return summary(ran, options.seed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    by_name = {rig.name: rig for rig in RIGS}
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--minutes", type=float, help="about how long in all; default: full length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rigs", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "torture-out", help="where logs go")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.minutes <= 0:
        parser.error("--minutes must be more than 0")
    options.rigs = [by_name[name] for name in options.rigs]
    return options


def run(rig: Rig, number: int | str, seed: int, share: float | None, out: Path) -> Ran:
    """Run one rig to its end."""
    ran = Ran(rig, number)
    if reason := rig.lacks():
        ran.skipped.append(reason)
        return ran
    log = out / f"{rig.name}.log"
    command = ["make", "--no-print-directory", f"torture-{rig.name}"]
    command += [f"{rig.variable}={number}", f"SEED={seed}"]
    started = time.monotonic()
    ran.problem = outcome(command, log, None if share is None else 60 * (share * OVERTIME + 10))
    ran.seconds = time.monotonic() - started
    for text in log.read_text(errors="replace").splitlines():
        if text.startswith(PROMISE):
            ran.promises.append(text.removeprefix(PROMISE))
        elif text.startswith(SKIPPED):
            ran.skipped.append(text.removeprefix(SKIPPED))
    if not ran.problem and not ran.promises and not ran.skipped:
        ran.problem = f"FAILED: it ended without a promise; see {log}"
    return ran


def outcome(command: list[str], log: Path, limit: float | None) -> str:
    """Run a command; return "" if it succeeds, else what happened."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(limit)
        except BaseException as error:
            # The rig's own children too.
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"FAILED: it did not end within {limit:.0f} s; see {log}"
            raise
    return f"FAILED: exit status {code}; see {log}" if code else ""


def line(ran: Ran) -> str:
    """Return the row of one rig."""
    count = f"{ran.rig.variable}={ran.number or 'a tenth'}"
    return f"{ran.rig.name:18} {count:20} {ran.seconds:7.0f} s  {ran.result}"


def summary(ran: list[Ran], seed: int) -> int:
    """Print one line a promise; return the exit status."""
    print(f"\nSeed {seed}, commit {commit()}, {datetime.date.today()}, {os.cpu_count()} cores")
    for one in ran:
        for promise in one.promises:
            print(f"  {promise}")
        if one.promises and one.skipped:
            print(f"  {one.rig.name}, in part: skipped: {'; '.join(dict.fromkeys(one.skipped))}")
    failed = [one for one in ran if one.problem]
    for one in failed:
        print(f"  {one.rig.name}: {one.problem}")
    if failed:
        return 1
    if not any(one.promises for one in ran):
        print("  nothing ran")
        return 2
    return 0


def commit() -> str:
    """Return the tree's commit, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
