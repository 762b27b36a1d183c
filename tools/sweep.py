"""Find the fastest setting for a directory's disk, and the effect of each knob.

    python tools/sweep.py /mnt/nvme                        # ten minutes, 1 GB
    python tools/sweep.py /mnt/nvme --minutes 30 --gb 4 --goal save
    python tools/sweep.py /mnt/nvme --plan                 # prints what it would measure

It writes results.json, heatmap.png, report.html and ringstow.toml to --out (sweep-out/). Library,
program and Python use a ringstow.toml in the working directory or named by RINGSTOW_CONFIG. Ctrl-C
keeps what was measured. docs/config.md explains the results.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import sys
import time
import typing
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import ringstow
from comparing.directories import machine
from comparing.processes import say
from sweeping import choose, plan, plots, render
from sweeping.measure import (
    Sweep,
    SweepFailed,
    Worker,
    check_directory,
    check_memory,
    work_directory,
)
from sweeping.plan import DEFAULT, Phase, Plan, Setting
from sweeping.render import Results
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]


class Bar:
    """The progress bar; it appears once the number of measurements is known."""

    def __init__(self) -> None:
        self.bar: Any = None

    def begin(self, measurements: int) -> None:
        if self.bar is None:
            form = "{percentage:3.0f}% |{bar:24}| {n_fmt}/{total_fmt} left {remaining}  {desc}"
            self.bar = tqdm(total=measurements, bar_format=form, file=sys.stderr, leave=False)
        self.bar.total = self.bar.n + measurements

    def tell(self, setting: Setting, steps: int) -> None:
        if self.bar is not None:
            self.bar.set_description_str(str(setting), refresh=False)
            self.bar.update(steps)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def find_out(sweep: Sweep, args: argparse.Namespace, fio: bool, ends_at: float) -> Plan:
    """Find the knobs to try on this machine, and plan as many measurements as fit the time."""
    defaults = sweep.worker.about["defaults"]
    default = sweep.probe(DEFAULT)
    if default is None:
        raise SweepFailed(f"the default setting is refused: {sweep.refused[DEFAULT]}")
    cores = sweep.worker.about["cores"]
    knobs = plan.knobs_of(
        typing.get_type_hints(ringstow.Config),
        defaults,
        default["did"] | {"fillers": min(cores, 4)},
        cores,
        args.knobs,
    )
    for setting in plan.one_by_one(knobs):
        if isinstance(setting.changes[0][1], str):  # ringstow never refuses numbers
            sweep.probe(setting)
    each_s = sweep.calibrate(fio)
    seconds = ends_at - time.monotonic()
    return plan.make(knobs, defaults["pool_bytes"], seconds, each_s, fio, sweep.refused)


def tell_plan(made: Plan, sweep: Sweep) -> None:
    defaults = sweep.worker.about["defaults"]
    say("Plan:")
    for phase in made.phases:
        say(f"  {phase}")
    say("  each save and load is compared with the default's in the same block of measurements")
    say("Knobs, their defaults, and the values to try:")
    for knob in made.knobs:
        levels = ", ".join(
            plan.written(knob.name, level) + (" (refused)" if one in sweep.refused else "")
            for level in knob.levels
            for one in [Setting.of({knob.name: level})]
        )
        say(f"  {knob.name:<12} {plan.written(knob.name, defaults[knob.name]):>5}   {levels}")
    for setting, why in sweep.refused.items():
        say(f"  refused: {setting}: {why}")


def measure(sweep: Sweep, made: Plan, goal: choose.What, ends_at: float, bar: Bar) -> None:
    """Measure all phases, each with as many rounds as the remaining time allows."""
    start, seconds = time.monotonic(), ends_at - time.monotonic()
    ahead = sum(phase.measurements for phase in made.phases)
    used = 0.0
    for phase in (made.one_by_one, made.grid):
        if phase is None:
            continue
        used += plan.SHARES[phase.name]
        bar.begin(ahead)
        sweep.rounds(phase, start + used * seconds)
        ahead -= phase.measurements
    chosen = choose.finalists(sweep.found, made.knobs, goal)
    if not chosen:
        return
    each_s = (time.monotonic() - start) / len(sweep.found)
    fio = made.final.fio
    rounds = int((ends_at - time.monotonic()) / each_s / plan.round_length(len(chosen), fio))
    least = plan.LEAST_ROUNDS["final"]
    final = Phase("final", tuple(chosen), max(rounds, least), each_s, fio)
    bar.begin(final.measurements)
    sweep.rounds(final, ends_at)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The fastest setting on a directory's disk.")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory on the disk to measure"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit (10)")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state, 10^9 bytes (1)")
    parser.add_argument(
        "--out", type=Path, default=Path("sweep-out"), help="directory for the results"
    )
    parser.add_argument(
        "--goal", choices=typing.get_args(choose.What), default="both",
        help="speed to optimize; both is the geometric mean of the two",
    )  # fmt: skip
    parser.add_argument("--knobs", nargs="+", default=[], help="vary only these fields of Config")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the measurements")
    parser.add_argument("--no-fio", action="store_true", help="do not measure fio")
    parser.add_argument(
        "--drop-caches", action="store_true",
        help="also drop all kernel caches before loads (needs root; slows other programs down)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", action="store_true", help="print what would be measured, and exit"
    )
    args = parser.parse_args(given)
    if not (args.minutes > 0 and 1e-6 <= args.gb < float("inf")):  # this form also rejects NaN
        parser.error("--minutes must be positive, --gb at least a kilobyte (1e-6)")
    args.state_bytes = int(args.gb * 1e9)
    return args


def write_files(results: Results, out: Path) -> None:
    """Write the results, the plots, the page and ringstow.toml."""
    heat_map, knob_plot = plots.heat_map(results), plots.knob_plot(results)
    if heat_map:
        (out / "heatmap.png").write_bytes(heat_map)
    (out / "report.html").write_text(render.as_html(results, heat_map, knob_plot))
    (out / "ringstow.toml").write_text(render.as_toml(results))
    write_json(results, out)


def write_json(results: Results, out: Path) -> None:
    temporary = out / "results.json.tmp"
    temporary.write_text(render.as_json(results))
    temporary.replace(out / "results.json")


def prepare(args: argparse.Namespace) -> None:
    """Check arguments, memory and disk before measuring.

    Raises:
        SweepFailed: a check failed; the message says what to change.
    """
    check_directory(args.directory, args.state_bytes)
    if args.drop_caches and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        raise SweepFailed("--drop-caches needs root")
    if not args.plan:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SweepFailed(f"--out {args.out}: {error.strerror}") from error
        for name in ("results.json", "heatmap.png", "report.html", "ringstow.toml"):
            (args.out / name).unlink(missing_ok=True)  # left by an earlier sweep
    check_memory(args.state_bytes)


def run(args: argparse.Namespace, results: Results) -> None:
    """Measure, and keep complete rounds in `results` even if this raises.

    Raises:
        SweepFailed: a measurement failed.
        NoPlan: the time is too short.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    start = time.monotonic()
    prepare(args)
    results.machine = machine(args.directory)
    fio = not args.no_fio and shutil.which("fio") is not None
    if not fio and not args.no_fio:
        say("no fio here: the disk's own speed is unknown (Debian, Ubuntu: apt-get install fio)")
    bar = Bar()

    def keep(sweep: Sweep) -> None:
        results.seconds = time.monotonic() - start
        with suppress(OSError):  # the final write reports the error if it persists
            write_json(results, args.out)

    with work_directory(args.directory) as directory, closing(bar):
        worker = Worker(directory, args.state_bytes, args.drop_caches)
        with worker:
            ends_at = time.monotonic() + args.minutes * 60
            results.defaults = worker.about["defaults"]
            sweep = Sweep(
                directory, args.state_bytes, worker, random.Random(args.seed), bar.tell, keep
            )
            results.found, results.refused, results.notes = sweep.found, sweep.refused, sweep.notes
            made = find_out(sweep, args, fio, ends_at)
            results.knobs = made.knobs
            tell_plan(made, sweep)
            if not args.plan:
                measure(sweep, made, args.goal, ends_at, bar)
    results.seconds = time.monotonic() - start


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    command = shlex.join(["python", "tools/sweep.py", *(sys.argv[1:] if given is None else given)])
    results = Results(
        command=command,
        machine="",
        date=time.strftime("%Y-%m-%d"),
        goal=args.goal,
        state_bytes=args.state_bytes,
        seed=args.seed,
        load_average=os.getloadavg()[0],
    )
    code = 0
    try:
        run(args, results)
    except KeyboardInterrupt:
        results.ended, code = "stopped by Ctrl-C", 130  # the shell's exit code for SIGINT
    except (SweepFailed, plan.NoPlan) as failure:
        results.ended, code = str(failure), 2
        say(f"sweep: {failure}")
    if not results.found:
        if code == 130:
            say("sweep: stopped before anything was measured")
        return code
    say()
    for line in [*render.table(results), "", *render.summary(results)]:
        say(line)
    try:
        write_files(results, args.out)
    except OSError as error:
        say(f"sweep: writing to {args.out}: {error.strerror}")
        return 2
    say(f"To use it: copy {args.out / 'ringstow.toml'} into the working directory of your program,")
    say(f"or export RINGSTOW_CONFIG={args.out.absolute() / 'ringstow.toml'}")
    say(f"Full report: {args.out / 'report.html'}")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # keep measurements, as at Ctrl-C
    sys.exit(main())
