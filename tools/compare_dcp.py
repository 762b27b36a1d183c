"""Compare DCP's own storage with ringstow's: same state, same ranks.

    python tools/compare_dcp.py                          # 2 ranks, 3 GB, 3 rounds, on this disk
    python tools/compare_dcp.py --tensors 100000         # the cost of planning and metadata, and of
                                                         # a load by one process
    python tools/compare_dcp.py --replicated --gb 0.5    # loads with and without broadcast
    python tools/compare_dcp.py --export --ranks 8       # one Hugging Face model, by all ranks
    python tools/compare_dcp.py --gb 6 --ranks 4 --dir /mnt/nvme --json result.json

Rounds are interleaved. Saves are durable; loads are cold and their bytes are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from comparing.about import about
from comparing.directories import fresh_directory
from comparing.processes import CompareFailed, say
from comparing.table import spread

Measurement = dict[str, float | str]


def launcher(ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def program(name: str, *options: str) -> list[str]:
    return [str(Path(__file__).with_name(name)), *options]


def measure(args: argparse.Namespace, directory: Path) -> list[Measurement]:
    where = [f"--dir={directory}", f"--rounds={args.rounds}"]
    if args.tensors:
        return measure_many(args, where)
    where += [f"--gb={args.gb}"]
    if args.export:
        where += ["--columns"] if args.columns else []
        return run_ranks([*launcher(args.ranks), *program("export_ranks.py", *where)])
    where += ["--replicated"] if args.replicated else []
    where += ["--fio"] if shutil.which("fio") else []
    return run_ranks([*launcher(args.ranks), *program("dcp_ranks.py", *where)])


def measure_many(args: argparse.Namespace, where: list[str]) -> list[Measurement]:
    """Measure saves and loads by the ranks, and then loads of the same by one process."""
    options = [*where, f"--tensors={args.tensors}", *(["--flat"] if args.flat else [])]
    by_ranks = run_ranks([*launcher(args.ranks), *program("dcp_many.py", *options)])
    options += [f"--saved-by={args.ranks}"]
    return by_ranks + run_ranks([*launcher(1), *program("dcp_many.py", *options)])


def run_ranks(command: list[str]) -> list[Measurement]:
    """Run the ranks, print each measurement as it arrives, and return all."""
    found: list[Measurement] = []
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as ranks:
        assert ranks.stdout is not None
        for line in ranks.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                say(f"  {told(found[-1])}")
            else:
                say(line.rstrip())
    if ranks.returncode != 0:
        raise CompareFailed(f"the ranks ended with exit code {ranks.returncode}; see above")
    return found


def told(m: Measurement) -> str:
    figures = {k: v for k, v in m.items() if k not in ("round", "row", "what", "bytes")}
    text = ", ".join(f"{k} {v:.3f}" for k, v in figures.items() if isinstance(v, float))
    return f"round {int(m['round']) + 1}  {m['row']:<19} {m['what']:<8} {text}"


def values(found: list[Measurement], row: str, what: str, figure: str) -> dict[int, float]:
    """Return a figure by round."""
    return {
        int(m["round"]): float(m[figure])
        for m in found
        if (m["row"], m["what"]) == (row, what) and figure in m
    }


def ratio(one: dict[int, float], other: dict[int, float], after: int = 0) -> str:
    """Format median (lowest-highest) of the ratios within a round."""
    return spread([one[r] / other[r] for r in sorted(one) if r in other and r >= after])


def speeds(found: list[Measurement], row: str, what: str) -> dict[int, float]:
    seconds = values(found, row, what, "seconds")
    size = values(found, row, what, "bytes")
    return {r: size[r] / s / 1e9 for r, s in seconds.items()}


def lines(found: list[Measurement]) -> Iterator[str]:
    for what, title in [("save", "durable save"), ("load", "cold load"), ("slice", "1/16 slice")]:
        ours, stock, fio = (speeds(found, row, what) for row in ("ringstow", "dcp", "fio"))
        gb_per_s = [spread(list(row.values())) for row in (ours, stock, fio)]
        yield f"{title}: GB/s of ringstow {gb_per_s[0]}, dcp {gb_per_s[1]}, fio {gb_per_s[2]}"
        yield f"    ringstow / dcp {ratio(ours, stock)}, ringstow / fio {ratio(ours, fio)}"
    ours, stock = (values(found, row, "async", "blocked") for row in ("ringstow", "dcp"))
    memcpy = values(found, "memcpy", "memcpy", "seconds")
    yield f"async_save: seconds blocked by ringstow {later(ours)}, dcp {later(stock)}"
    yield f"    ringstow / one memcpy of the bytes {ratio(ours, memcpy, after=1)}"
    yield f"    the first, which allocates memory: ringstow {ours[0]:.2f}, dcp {stock[0]:.2f}"
    blocked, staged = (values(found, "ringstow", "overlap", f) for f in ("blocked", "staged"))
    yield f"async_save, overlapped: seconds blocked {later(blocked)}, staged after {later(staged)}"


def later(rounds: dict[int, float]) -> str:
    """Format the spread of all rounds except the first."""
    return spread([value for number, value in rounds.items() if number > 0])


PLANNING_ROWS = (
    *("no writer", "ringstow", "planner first", "planner later"),
    *("caching first", "caching later", "distributed", "dcp"),
    *("load ringstow", "load planner", "load distributed", "load dcp"),
    *("reshard planner", "reshard distributed", "reshard dcp"),  # one process loads
)


def planning_lines(found: list[Measurement]) -> Iterator[str]:
    rows = {row: values(found, row, "planning", "seconds") for row in PLANNING_ROWS}
    for row, seconds in rows.items():
        yield f"{row:<19} {spread(list(seconds.values()))} s"
    yield f"ringstow / no writer {ratio(rows['ringstow'], rows['no writer'])}"
    yield f"ringstow / dcp       {ratio(rows['ringstow'], rows['dcp'])}"
    yield f"ringstow / planner, first save {ratio(rows['ringstow'], rows['planner first'])}"
    yield f"ringstow / planner, later saves {ratio(rows['ringstow'], rows['planner later'])}"
    yield f"ringstow / planner, loads {ratio(rows['load ringstow'], rows['load planner'])}"
    yield f"dcp / distributed    {ratio(rows['dcp'], rows['distributed'])}"
    yield f"dcp / distributed, loads {ratio(rows['load dcp'], rows['load distributed'])}"
    for row in ("distributed", "planner"):
        told = ratio(rows["reshard dcp"], rows[f"reshard {row}"])
        yield f"dcp / {row}, loads by one process {told}"


def replicated_lines(found: list[Measurement]) -> Iterator[str]:
    for row in ("alone", "together"):
        seconds, read = (list(values(found, row, "load", f).values()) for f in ("seconds", "read"))
        yield f"{row:<10} {spread(seconds)} s, {spread(read)} GB read by all ranks"


def export_lines(found: list[Measurement]) -> Iterator[str]:
    rows = {row: values(found, row, "export", "seconds") for row in ("sharded", "export", "torch")}
    for row, title in [
        ("sharded", "sharded save by ringstow's StorageWriter"),
        ("export", "export_hf"),
        ("torch", "torch's HuggingFaceStorageWriter, consolidated, synced"),
    ]:
        yield f"{title}: {spread(list(rows[row].values()))} s"
    yield f"export_hf / sharded save {ratio(rows['export'], rows['sharded'])}"
    yield f"torch's / export_hf {ratio(rows['torch'], rows['export'])}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DCP's own storage and ringstow's, side by side.")
    parser.add_argument("--gb", type=float, default=3.0, help="size of the state, 1e9 bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tensors",
        type=int,
        default=0,
        help="measure planning with this number of tensors, and how one process loads them",
    )
    parser.add_argument(
        "--flat",
        action="store_true",
        help="with all tensors at the top level of the state, where DCP takes 25 us for each",
    )
    parser.add_argument(
        "--replicated", action="store_true", help="measure loads with and without broadcast"
    )
    parser.add_argument(
        "--export", action="store_true", help="measure writing one Hugging Face model"
    )
    parser.add_argument(
        "--columns", action="store_true", help="of a model that is sharded along inner dimensions"
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        with fresh_directory(args.dir) as directory:
            found = measure(args, directory)
    except CompareFailed as failure:
        say(f"compare_dcp: {failure}")
        return 1
    say()
    told_by = planning_lines if args.tensors else replicated_lines if args.replicated else lines
    told_by = export_lines if args.export else told_by
    for line in told_by(found):
        say(line)
    say()
    say("Median (lowest-highest) over the rounds. Both fsync files, ringstow its directory too.")
    origin = about(args.dir)
    say(f"{origin['date']}, {args.ranks} ranks, {origin['machine']}")
    if args.json:
        settings = {"ranks": args.ranks, "tensors": args.tensors, "gb": args.gb}
        result = origin | settings | {"measurements": found}
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
