"""Count the instructions of planner, manifest, receipts, checksum and pipeline, and compare them
with the committed counts. Times are too noisy on shared machines; instruction counts are not.

    make bench-check       # compares with benches/baseline.json; exits with 1 if a count is higher
    make bench-baseline    # writes a new benches/baseline.json

The tool runs each case of `benches/instructions.rs` under callgrind in two sizes. The difference,
divided by the number of additional items, is the cost of an item without start-up. All threads
count. Callgrind runs one thread at a time, so no thread spins for long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "benches" / "baseline.json"

# The allowed increase over the baseline, in percent. The second bound applies if compiler, C
# library or crates differ from the baseline's, because these change the counts as well.
BOUND_PERCENT = 5.0
BOUND_ELSEWHERE_PERCENT = 25.0

# The crates that execute most of the counted instructions.
CRATES = ["crc32fast", "crossbeam-channel", "serde_json"]


@dataclass(frozen=True)
class Case:
    """One case of the bench and its two sizes."""

    name: str
    few: int
    many: int
    # True: count only the code inside the bench's `measured`, on one thread.
    measured: bool = True


CASES = [
    Case("layout of a tensor", 1000, 6000),
    Case("box of a tensor laid out", 500, 3000),
    Case("pieces of a block", 1, 11),
    Case("manifest's entry written", 1000, 6000),
    Case("manifest's entry read", 1000, 6000),
    Case("receipt of 100 chunks packed", 100, 600),
    Case("receipt of 100 chunks merged", 100, 600),
    Case("100 chunks of a manifest written", 100, 600),
    Case("100 chunks of a manifest read", 100, 600),
    Case("read of a tensor planned", 1000, 6000),
    Case("checksum of 64 KiB", 10, 110),
    Case("hash of 64 KiB", 10, 110),
    Case("place in a shared file planned", 1000, 6000),
    Case("block saved", 200, 1200, measured=False),
    Case("block saved and loaded", 200, 1200, measured=False),
    Case("block saved at a rate", 200, 1200, measured=False),
    Case("tensor saved", 1000, 6000, measured=False),
    Case("tensor saved, and not again", 1000, 6000, measured=False),
    Case("tensor saved and loaded", 1000, 6000, measured=False),
]


class CheckFailed(Exception):
    """An error message for the user."""


def bench() -> Path:
    """Build the bench if necessary and return its binary."""
    command = ["cargo", "bench", "--no-run", "--bench", "instructions"]
    command.append("--message-format=json-render-diagnostics")
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise CheckFailed("cargo could not build the bench `instructions`; see above")
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "instructions":
            return Path(message["executable"])
    raise CheckFailed("cargo did not report the path of the bench `instructions`")


def count(binary: Path, case: Case, size: int) -> int:
    """Return the instructions of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={scratch}/out"]
        if case.measured:
            command.append("--toggle-collect=*instructions::measured*")
        command += [str(binary), case.name, str(size)]
        # A fixed environment: it is on the stack, and programs search it.
        environment = {"TMPDIR": scratch, "PATH": os.defpath}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or not found:
        raise CheckFailed(f"valgrind could not count {case.name!r}:\n{run.stderr}")
    return int(found[1])


def cost(binary: Path, case: Case) -> float:
    """Return the instructions per item."""
    few, many = (count(binary, case, size) for size in (case.few, case.many))
    return (many - few) / (case.many - case.few)


def setting() -> dict[str, str]:
    """Return the versions that the counts depend on besides the code."""
    said = output("rustc", "-vV")
    fields = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    tree = output("cargo", "tree", "--offline", "-e", "normal", "--depth", "1", "--prefix", "none")
    versions = dict(line.split()[:2] for line in tree.splitlines() if line)
    return {
        "rustc": fields["release"],
        "target": fields["host"],
        "libc": " ".join(platform.libc_ver()),
        "crates": ", ".join(f"{crate} {versions.get(crate, '?')}" for crate in CRATES),
    }


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def compare_bound(baseline: dict[str, Any], here: dict[str, str]) -> float:
    """Return how far counts may differ from the baseline, in percent."""
    others = [key for key, value in here.items() if baseline.get(key) != value]
    for key in others:
        print(f"{key}: {baseline.get(key)} in the baseline, {here[key]} here")
    if not others:
        return BOUND_PERCENT
    print(f"only increases above {BOUND_ELSEWHERE_PERCENT:.0f} % are reported")
    return BOUND_ELSEWHERE_PERCENT


def compare(
    baseline: dict[str, float], found: dict[str, float], bound: float
) -> tuple[list[str], list[str]]:
    """Return the failures, and the improvements that call for a new baseline."""
    worse, better = [], []
    for name, now in found.items():
        if name not in baseline:
            worse.append(f"{name}: not in the baseline")
            continue
        change = (now / baseline[name] - 1) * 100
        told = f"{name}: {baseline[name]:,.0f} instructions before, {now:,.0f} now, {change:+.1f} %"
        if change > bound:
            worse.append(told)
        elif change < -bound:
            better.append(told)
    worse += [f"{name}: no longer counted" for name in baseline if name not in found]
    return worse, better


def check(found: dict[str, float], baseline: dict[str, Any], here: dict[str, str]) -> int:
    """Print the changes and return the exit code."""
    bound = compare_bound(baseline, here)
    worse, better = compare(baseline["instructions"], found, bound)
    for line in better:
        print(f"better: {line}")
    for line in worse:
        print(f"WORSE: {line}")
    if worse or better:
        print("if you expect this, run `make bench-baseline` and commit benches/baseline.json")
    if not worse:
        print(f"{len(found)} cases, none more than {bound:.0f} % over the baseline")
    return 1 if worse else 0


def read_baseline() -> dict[str, Any]:
    """Read and check the committed baseline, before counting takes minutes."""
    try:
        baseline: dict[str, Any] = json.loads(BASELINE.read_text())
        dict(baseline["instructions"])
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, LookupError, TypeError):
        why = "this tool did not write it"
    else:
        return baseline
    raise CheckFailed(f"{BASELINE}: {why}; restore it, or write a new one: make bench-baseline")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write a new baseline")
    parser.add_argument(
        "--runs", type=int, default=1, help="number of runs; shows how far they agree"
    )
    args = parser.parse_args(arguments)
    if not shutil.which("valgrind"):
        print("valgrind counts the instructions, and is not here: apt-get install valgrind")
        return 2
    try:
        baseline = {} if args.write else read_baseline()
        binary, found = bench(), {}
        for case in CASES:
            costs = sorted(cost(binary, case) for _ in range(args.runs))
            found[case.name] = costs[len(costs) // 2]
            apart = f", {(costs[-1] / costs[0] - 1) * 100:.2f} % apart" if args.runs > 1 else ""
            print(f"{found[case.name]:>12,.0f}  {case.name}{apart}", flush=True)
    except CheckFailed as failed:
        print(failed)
        return 1
    here = setting()
    if args.write:
        rounded = {name: round(instructions) for name, instructions in found.items()}
        BASELINE.write_text(json.dumps(here | {"instructions": rounded}, indent=2) + "\n")
        print(f"written: {BASELINE.relative_to(ROOT)}")
        return 0
    return check(found, baseline, here)


if __name__ == "__main__":
    sys.exit(main())
