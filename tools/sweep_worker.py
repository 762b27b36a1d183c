"""The process that saves and loads for sweep.py, with one state for all settings.

    python tools/sweep_worker.py DIR --bytes 1000000000

It reads one JSON object per line, {"changes": {Config's fields}, "timed": bool}, and answers each
with another. Before it times a setting, it saves and loads a few MB with it. That allocates and
registers the pool and starts the threads, so it times the second checkpoint of a run, not the
first. It works in DIR, and removes DIR when the input ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringstow
import torch
from comparing.durable import forget
from comparing.state import make_state
from comparing.usage import cpu_seconds

SMALL_BYTES = 8 << 20


def clock(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    cpu_before = cpu_seconds()
    start = time.perf_counter()
    report = work()
    seconds = time.perf_counter() - start
    return report, {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu_before}


class Bench:
    def __init__(self, directory: Path, state_bytes: int, drop_caches: bool) -> None:
        self.directory = directory
        self.drop_caches = drop_caches
        self.state = make_state(state_bytes)
        self.into = {name: torch.empty_like(t).zero_() for name, t in self.state.items()}
        self.small = {"small": torch.arange(SMALL_BYTES // 8)}

    def run(self, changes: dict[str, Any], timed: bool) -> dict[str, Any]:
        config = ringstow.Config(**changes)
        answer = self.warm_up(config)
        return answer | self.measure(config) if timed else answer

    def warm_up(self, config: ringstow.Config) -> dict[str, Any]:
        """Save and load a few MB; return the I/O mode in use with this setting."""
        path = self.directory / "warm-up"
        into = {name: torch.zeros_like(t) for name, t in self.small.items()}
        try:
            report = ringstow.save(self.small, path, config=config)
            ringstow.load_into(into, path, config=config)
            if not all(torch.equal(into[name], t) for name, t in self.small.items()):
                raise RuntimeError("the loaded bytes differ from the saved ones")
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return {
            "did": {
                "engine": report.engine,
                "direct": "on" if report.direct else "off",
                "fixed": "on" if report.fixed_buffers else "off",
            },
            "notes": [f"{f.got} instead of {f.wanted}: {f.reason}" for f in report.fallbacks],
        }

    def measure(self, config: ringstow.Config) -> dict[str, Any]:
        # Separate parents: recycled files are beside the checkpoint.
        path = self.directory / ("recycled" if config.recycle else "new") / "checkpoint"
        if config.recycle and not path.parent.exists():
            ringstow.save(self.state, path, config=config)
            ringstow.remove(path, config=config)
        os.sync()  # so that no setting pays for another's dirty pages
        try:
            report, save = clock(lambda: ringstow.save(self.state, path, config=config))
            save["bytes"] = report.file_bytes
            parts = report.seconds
            save["staged_seconds"] = parts.plan + parts.prepare + parts.stage
            forget(path)
            if self.drop_caches:
                Path("/proc/sys/vm/drop_caches").write_text("3")
            report, load = clock(lambda: ringstow.load_into(self.into, path, config=config))
            load["bytes"] = report.read_bytes
            if config.recycle:
                ringstow.remove(path, config=config)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return {"save": save, "load": load}


def serve(bench: Bench) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = bench.run(request["changes"], request["timed"])
        except (ringstow.UnsupportedError, ringstow.InvalidStateError) as refusal:
            answer = {"refused": str(refusal)}
        except Exception as failure:
            answer = {"failed": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--drop-caches", action="store_true")
    args = parser.parse_args()
    try:
        bench = Bench(args.directory, args.bytes, args.drop_caches)
        names = [field.name for field in dataclasses.fields(ringstow.Config)]
        defaults = {name: getattr(ringstow.Config(), name) for name in names}
        defaults["pool_bytes"] = ringstow.Config().staging_bytes  # of the plain saves measured here
        told = {"defaults": defaults, "cores": len(os.sched_getaffinity(0))}
        print(json.dumps(told | {"bytes": sum(t.nbytes for t in bench.state.values())}), flush=True)
        serve(bench)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
