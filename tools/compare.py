"""ringstow and its peers side by side: the same state, the same disk, rounds interleaved.

    python tools/compare.py                     # 1 GB, 3 rounds, in the current directory's disk
    python tools/compare.py --gb 4 --dir /mnt/nvme --json result.json

Every measurement is a process of its own (peers.py) in a fresh directory that is removed after it.
A save counts when it is durable; a load is cold and its bytes are checked against what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import PEERS

DEFAULT_PEERS = [name for name in PEERS if name != "dcp-8-threads"]
OURS = "ringstow"
FIO = "fio"
FIO_BLOCK_BYTES = 4 << 20
FIO_JOB = "--ioengine=io_uring --bs=4M --iodepth=8 --fixedbufs --registerfiles --direct=1"
SPARE_BYTES = 512 << 20  # left free on the disk beside the checkpoint

Result = dict[str, float]
Row = dict[str, Result]  # "save" and, where the peer has its own, "load"


class CompareFailed(Exception):
    """The comparison cannot be made here; the message says what to change."""


def say(text: str = "") -> None:
    print(text, flush=True)


# --- measuring ---------------------------------------------------------------------------------


def drop_caches(directory: Path) -> None:
    """Makes the next read of these files a read of the disk."""
    os.sync()
    for file in (path for path in directory.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if os.geteuid() == 0 and os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def run_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise CompareFailed(lines[-1])
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return answer


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="compare-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def measure_peer(name: str, parent: Path, state_bytes: int) -> Row:
    worker = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("peers.py"))]
    with fresh_directory(parent) as directory:
        row = {
            "save": run_json([*worker, "save", name, str(directory), "--bytes", str(state_bytes)])
        }
        if PEERS[name].load is not None:
            drop_caches(directory)
            row["load"] = run_json([*worker, "load", name, str(directory)])
        return row


def fio_pass(operation: str, file: Path, size: int) -> Result:
    """One fio pass over `file`: write (new, flushed at its end) or read."""
    command = ["fio", "--name=ceiling", f"--filename={file}", f"--rw={operation}"]
    command += [f"--size={size}", *FIO_JOB.split(), "--output-format=json"]
    job = run_json(command + (["--end_fsync=1"] if operation == "write" else []))["jobs"][0]
    if job["error"] != 0:
        raise CompareFailed(f"fio: {os.strerror(job['error'])}")
    seconds = job[operation]["io_bytes"] / job[operation]["bw_bytes"]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"bytes": job[operation]["io_bytes"], "seconds": seconds, "cpu_seconds": cpu_seconds}


def measure_fio(parent: Path, state_bytes: int) -> Row:
    size = -(-state_bytes // FIO_BLOCK_BYTES) * FIO_BLOCK_BYTES
    with fresh_directory(parent) as directory:
        os.sync()
        written = fio_pass("write", directory / "file", size)
        drop_caches(directory)
        return {"save": written, "load": fio_pass("read", directory / "file", size)}


def fio_jobs(parent: Path, size: int, jobs: int) -> Result:
    """Seconds of fio for a durable save and a cold load of `size` bytes by several jobs at once."""
    each = -(-size // jobs // FIO_BLOCK_BYTES) * FIO_BLOCK_BYTES
    seconds = {}
    with fresh_directory(parent) as directory:
        command = ["fio", "--name=ceiling", f"--directory={directory}", f"--size={each}"]
        command += [
            *FIO_JOB.split(),
            f"--numjobs={jobs}",
            "--group_reporting",
            "--output-format=json",
        ]
        for what, operation in [("save", "write"), ("load", "read")]:
            os.sync()
            drop_caches(directory)
            flush = ["--end_fsync=1"] if operation == "write" else []
            job = run_json([*command, f"--rw={operation}", *flush])["jobs"][0]
            if job["error"] != 0:
                raise CompareFailed(f"fio: {os.strerror(job['error'])}")
            seconds[what] = size / job[operation]["bw_bytes"]
    return seconds


def measure(name: str, parent: Path, state_bytes: int) -> Row:
    if name == FIO:
        return measure_fio(parent, state_bytes)
    return measure_peer(name, parent, state_bytes)


def measure_rounds(
    names: list[str], parent: Path, state_bytes: int, rounds: int
) -> tuple[list[dict[str, Row]], dict[str, str]]:
    """All rounds, and the reason for each row that failed. Each round starts with another row, so
    that nobody always comes first."""
    results: list[dict[str, Row]] = []
    failed: dict[str, str] = {}
    for number in range(rounds):
        results.append({})
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if name in failed:
                continue
            try:
                row = measure(name, parent, state_bytes)
            except CompareFailed as failure:
                failed[name] = str(failure)
                say(f"  round {number + 1}/{rounds}  {name:<15} failed: {failure}")
                continue
            results[-1][name] = row
            told = ", ".join(f"{what} {speed(r):.2f} GB/s" for what, r in row.items())
            say(f"  round {number + 1}/{rounds}  {name:<15} {told}")
    return results, failed


# --- the table ---------------------------------------------------------------------------------


def speed(result: Result) -> float:
    return result["bytes"] / result["seconds"] / 1e9


def spread(values: list[float]) -> str:
    """Median (lowest to highest)."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table_line(cells: list[str]) -> str:
    widths = [15, 17, 17, 9, 17, 9]
    first = f"{cells[0]:<{widths[0]}}"
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()


def table_row(name: str, rounds: list[dict[str, Row]]) -> list[str]:
    rows = [results[name] for results in rounds if name in results]
    saves = [row["save"] for row in rows]
    loads = [row["load"] for row in rows if "load" in row]

    def median(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f}" if values else "-"

    return [
        name,
        spread([speed(save) for save in saves]),
        spread([speed(load) for load in loads]),
        median([save["cpu_seconds"] / save["bytes"] * 1e9 for save in saves], 2),
        spread([save["blocked_seconds"] for save in saves if "blocked_seconds" in save]),
        median([s["extra_ram_bytes"] / 1e6 for s in saves if "extra_ram_bytes" in s], 0),
    ]


def ratios(rounds: list[dict[str, Row]], what: str, others: list[str]) -> list[float]:
    """Per round: ringstow's speed over that of the fastest of the others."""
    found = []
    for results in rounds:
        speeds = [speed(results[o][what]) for o in others if o in results and what in results[o]]
        if OURS in results and speeds:
            found.append(speed(results[OURS][what]) / max(speeds))
    return found


def ratio_lines(rounds: list[dict[str, Row]], names: list[str]) -> Iterator[str]:
    peers = [name for name in names if name != FIO and not name.startswith(OURS)]
    for label, others in [(FIO, [FIO]), ("best peer", peers)]:
        save, load = (spread(ratios(rounds, what, others)) for what in ("save", "load"))
        yield f"{OURS + ' / ' + label:<21} save {save}   load {load}"


def file_system(directory: Path) -> str:
    """Type of the file system that holds `directory`, as the kernel names it."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown file system"


def machine(directory: Path) -> str:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    ram_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return (
        f"{os.cpu_count()} x {cpu}, {ram_gb:.0f} GB RAM, {file_system(directory)}, "
        f"Linux {platform.release()}"
    )


def notes(directory: Path, names: list[str]) -> Iterator[str]:
    yield "Median (lowest-highest) over the rounds; CPU and RAM: median. GB = 1e9 bytes."
    yield "Durable: a save ends when its data is fsync'd. ringstow also syncs its directory and"
    yield "  commits by rename; torch.save and safetensors get an fsync of file and directory here;"
    yield "  DCP syncs its files, not their directory. A few MB are saved first, unmeasured."
    yield "Cold load: page cache dropped, new process. What was read is then checked against what"
    yield "  was saved. DCP loads into tensors that exist already, the others make theirs."
    yield "CPU: user + system of the process; the kernel's write-back for buffered peers is not in."
    yield "Blocked: until training may change the weights. Extra RAM: peak RSS over that before."
    if FIO in names:
        yield f"fio: {FIO_JOB}"
        yield "  --end_fsync=1, writing a new file; then reading it"
    if file_system(directory) == "tmpfs":
        yield "This directory is in memory (tmpfs): no load is cold, nothing is durable."
    yield f"{time.strftime('%Y-%m-%d')}, {machine(directory)}"


def print_table(
    rounds: list[dict[str, Row]], names: list[str], failed: dict[str, str], directory: Path
) -> None:
    say()
    say(table_line(["", "durable save", "cold load", "CPU save", "blocked", "extra RAM"]))
    say(table_line(["", "GB/s", "GB/s", "s/GB", "s", "MB"]))
    for name in names:
        say(table_line(table_row(name, rounds)))
    say()
    if any(OURS in results for results in rounds):
        for line in ratio_lines(rounds, names):
            say(line)
        say()
    for line in notes(directory, names):
        say(line)
    for name, reason in failed.items():
        say(f"FAILED {name}: {reason}")


# --- the program -------------------------------------------------------------------------------


def check_room(directory: Path, state_bytes: int) -> None:
    need = int(state_bytes * 1.1) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < need:
        raise CompareFailed(
            f"{directory} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} GB are needed. "
            "Choose another disk with --dir or a smaller state with --gb"
        )
    available = int(
        next(
            line.split()[1]
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable")
        )
    )
    if available * 1024 < 3 * state_bytes:
        raise CompareFailed(
            f"{available * 1024 / 1e9:.1f} GB of memory available; some peers need "
            f"{3 * state_bytes / 1e9:.1f} GB for this state. Choose a smaller one with --gb"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ringstow and its peers on the same state.")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state, 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), default=DEFAULT_PEERS, metavar="PEER",
        help="any of: " + ", ".join(PEERS),
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    args = arguments()
    state_bytes = int(args.gb * 1e9)
    names = [*args.peers]
    try:
        check_room(args.dir, state_bytes)
    except CompareFailed as failure:
        say(f"compare: {failure}")
        return 2
    if shutil.which(FIO):
        names.append(FIO)
    else:
        say("  no fio here, so no ceiling to compare with (Debian, Ubuntu: apt-get install fio)")
    rounds, failed = measure_rounds(names, args.dir, state_bytes, args.rounds)
    print_table(rounds, names, failed, args.dir)
    if args.json:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(args.dir)}
        args.json.write_text(json.dumps(about | {"rounds": rounds, "failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
