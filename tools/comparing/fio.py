"""The ceiling: fio's speed on the same disk, in the same rounds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from comparing.directories import fresh_directory
from comparing.durable import drop_caches
from comparing.measuring import Bench
from comparing.processes import CompareFailed

FIO = "fio"
BLOCK_BYTES = 4 << 20
JOB = "--ioengine=io_uring --bs=4M --iodepth=8 --fixedbufs --registerfiles --direct=1"


def run_job(operation: str, size: int, *options: str) -> dict[str, Any]:
    """Run one fio job that writes (and flushes) or reads `size` bytes; return its report."""
    command = [FIO, "--name=ceiling", f"--rw={operation}", f"--size={size}", *JOB.split()]
    command += [*options, "--output-format=json"]
    command += ["--end_fsync=1"] if operation == "write" else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise CompareFailed(lines[-1])
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if job["error"] != 0:
        raise CompareFailed(f"fio: {os.strerror(job['error'])}")
    return job


def fio_pass(operation: str, file: Path, size: int) -> dict[str, float]:
    """Run one fio pass over `file`: write a new file and flush it, or read it."""
    job = run_job(operation, size, f"--filename={file}")
    seconds = job[operation]["io_bytes"] / job[operation]["bw_bytes"]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"bytes": job[operation]["io_bytes"], "seconds": seconds, "cpu_seconds": cpu_seconds}


def measure_fio(bench: Bench) -> dict[str, dict[str, float]]:
    size = -(-bench.state_bytes // BLOCK_BYTES) * BLOCK_BYTES
    with fresh_directory(bench.directory) as directory:
        bench.settle()
        written = fio_pass("write", directory / "file", size)
        bench.make_cold(directory)
        bench.settle()
        return {"save": written, "load": fio_pass("read", directory / "file", size)}


def fio_jobs(parent: Path, size: int, jobs: int) -> dict[str, float]:
    """Return fio's seconds for a durable save and a cold load of `size` bytes by parallel jobs."""
    each = -(-size // jobs // BLOCK_BYTES) * BLOCK_BYTES
    seconds = {}
    with fresh_directory(parent) as directory:
        options = [f"--directory={directory}", f"--numjobs={jobs}", "--group_reporting"]
        for what, operation in [("save", "write"), ("load", "read")]:
            os.sync()
            drop_caches(directory)
            job = run_job(operation, each, *options)
            seconds[what] = size / job[operation]["bw_bytes"]
    return seconds
