"""Fuzz ringstow's parsers and plans with libFuzzer, each target in turn, on a nightly toolchain.

    python tools/fuzz.py --minutes 10             # all targets, 10 minutes in all
    python tools/fuzz.py --target header          # one of them
    python tools/fuzz.py --reduce                 # store the fewest inputs that reach as much
    python tools/fuzz.py --sanitizer address      # with AddressSanitizer, at half the speed

What a run finds is kept in target/fuzz/corpus/TARGET, so the next one goes on from there. An input
that fails is named: store it as tests/fuzz/corpus/TARGET/failed-WHY, where
`cargo test --test fuzz_corpus` runs it from then on. Exits with 1 if there is one, and with 77 if
the machine has no nightly toolchain.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tests/fuzz/libfuzzer"
STORED = ROOT / "tests/fuzz/corpus"
TARGETS = sorted(path.name for path in STORED.iterdir())
NO_TOOLCHAIN = 77
# Inputs of a target in the tree. libFuzzer keeps hundreds, each for a branch or two.
STORED_MAX = 50

# What `cargo fuzz` passes: coverage counters and compared values.
COVERAGE = (
    "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 "
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters "
    "-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares "
    "-Ccodegen-units=1"
)


@dataclass
class Outcome:
    """How the run of a target ended."""

    target: str
    executions: int
    seconds: float
    failed: list[Path]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    missing = why_not()
    if missing:
        print(f"skipped: {missing}")
        return 1 if os.environ.get("RINGSTOW_REQUIRE_RIGS") else NO_TOOLCHAIN
    out = ROOT / "target/fuzz"
    program = build(out / f"build-{options.sanitizer}", options.sanitizer)
    if options.reduce:
        for target in options.target:
            reduce(program, out, target)
        return 0
    seconds = max(1, int(options.minutes * 60 / len(options.target)))
    outcomes = [fuzz(program, out, target, seconds, options) for target in options.target]
    return summary(outcomes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--sanitizer", choices=["none", "address"], default="none")
    parser.add_argument("--reduce", action="store_true")
    options = parser.parse_args(arguments)
    options.target = options.target or TARGETS
    return options


def why_not() -> str | None:
    """Say why nothing can be fuzzed here."""
    if not shutil.which("cargo"):
        return "cargo is not installed"
    asked = subprocess.run(["cargo", "+nightly", "--version"], capture_output=True, text=True)
    return (
        None if asked.returncode == 0 else "no nightly toolchain (rustup toolchain install nightly)"
    )


def build(out: Path, sanitizer: str) -> Path:
    flags = COVERAGE + (f" -Zsanitizer={sanitizer}" if sanitizer != "none" else "")
    host = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    triple = host.split("host: ")[1].split()[0]
    # With a target triple, the flags are not those of build scripts and macros.
    command = ["cargo", "+nightly", "build", "--release", "--quiet", "--target", triple]
    command += ["--manifest-path", str(PACKAGE / "Cargo.toml"), "--target-dir", str(out)]
    subprocess.run(command, env={**os.environ, "RUSTFLAGS": flags}, check=True)
    return out / triple / "release/fuzz"


def fuzz(
    program: Path, out: Path, target: str, seconds: int, options: argparse.Namespace
) -> Outcome:
    found, failed = out / "corpus" / target, out / "failed" / target
    for folder in (found, failed):
        folder.mkdir(parents=True, exist_ok=True)
    started, executions = time.monotonic(), 0
    before = set(failed.iterdir())
    command = [str(program), str(found), str(STORED / target)]
    command += ["-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1", "-max_len=4096"]
    command += ["-use_value_profile=0", f"-seed={options.seed}", f"-artifact_prefix={failed}/"]
    # A failure ends libFuzzer: go on after it for the rest of the time, but not for ever.
    while (left := seconds - (time.monotonic() - started)) >= 1:
        ran = run(target, [*command, f"-max_total_time={int(left)}"])
        counted = re.findall(r"stat::number_of_executed_units: (\d+)", ran.stderr)
        executions += sum(map(int, counted))
        if ran.returncode != 0:
            print(f"--- {target} failed\n{ran.stderr[-3000:]}", flush=True)
            if len(set(failed.iterdir()) - before) >= 3 or not counted:
                break
    new = sorted(set(failed.iterdir()) - before)
    took = time.monotonic() - started
    print(
        f"{target:10} {executions:12,} executions in {took:5.0f} s, {len(new)} failed", flush=True
    )
    return Outcome(target, executions, took, new)


def run(target: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RINGSTOW_FUZZ": target}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace"
    )


def reduce(program: Path, out: Path, target: str) -> None:
    """Keep the fewest inputs that reach as much, and all that once failed (their names say so)."""
    stored = STORED / target
    with tempfile.TemporaryDirectory() as merged:
        command = [str(program), "-merge=1", "-max_len=1024", merged, str(stored)]
        found = out / "corpus" / target
        run(target, [*command, *([str(found)] if found.is_dir() else [])])
        kept = sorted(Path(merged).iterdir(), key=lambda path: (path.stat().st_size, path.name))
        for old in stored.iterdir():
            if not old.name.startswith("failed-"):
                old.unlink()
        for path in kept[:: max(1, len(kept) // STORED_MAX)]:
            shutil.copy(path, stored / path.name[:12])
    print(f"{target}: {len(list(stored.iterdir()))} inputs")


def summary(outcomes: list[Outcome]) -> int:
    executions = sum(outcome.executions for outcome in outcomes)
    failed = [path for outcome in outcomes for path in outcome.failed]
    for path in failed:
        print(f"fails: {path}")
    promise = "no input makes a parser or a plan panic, hang or take more memory than it may"
    print(f"promise: {promise}: {executions:,} executions, {len(failed)} broken")
    return 1 if failed or not all(outcome.executions for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
