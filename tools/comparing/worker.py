"""Measure one peer once. compare.py starts a new process in the peer's environment for each
measurement, so that memory and caches are clean:

    PYTHONPATH=tools python -m comparing.worker save torch.save DIR --bytes 1000000000
    PYTHONPATH=tools python -m comparing.worker load torch.save DIR

A save or load that takes longer than --seconds ends the process by SIGALRM.
With --fill-page-cache it reads its standard input into the page cache just before it measures.
It prints one JSON object as its last line, or {"failed": reason} if the peer fails. It never drops
caches or removes files: the caller does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from comparing.durable import fsync_tree
from comparing.memory import PageCache
from comparing.peer import CPU, Peer, State, nothing_left
from comparing.peers import PEERS
from comparing.state import (
    STATES,
    destination,
    digest,
    make_state,
    on_device,
    synchronize,
    touch,
)
from comparing.usage import cpu_seconds, memory_bytes, peak_bytes, reset_peak

DIGEST = "digest.json"
Returned = TypeVar("Returned")


def prepare(peer: Peer) -> dict[str, Any]:
    """Check that the peer imports and builds; return its version."""
    importlib.import_module(peer.module)
    peer.prepare()
    return {"version": importlib.metadata.version(peer.distribution)}


def save_for_loaders(directory: Path, state: State) -> dict[str, Any]:
    """Save with safetensors, unmeasured, for a peer that only loads."""
    begin = PEERS["safetensors"].begin
    assert begin is not None
    small = make_state(0, seed=1)
    begin(small, directory / "warm-up")()
    begin(state, directory / "checkpoint")()
    (directory / DIGEST).write_text(json.dumps([digest(small), digest(state)]))
    return {}


@contextmanager
def limited(seconds_max: float) -> Iterator[None]:
    """End this process by SIGALRM if the block takes longer.

    A Python handler would have to wait until the library returns from native code. The limit is
    here and not in the caller, so that making the state and checking the bytes do not count.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds_max)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure_save(
    peer: Peer,
    directory: Path,
    state: State,
    device: str,
    settle: Callable[[], None],
    seconds_max: float,
) -> dict[str, Any]:
    if peer.begin is None:
        return save_for_loaders(directory, state)
    small = on_device(make_state(0, seed=1), device)
    state = on_device(state, device)
    importlib.import_module(peer.module)
    rss_before = memory_bytes("VmRSS")
    peer.begin(small, directory / "warm-up")()  # starts thread pools, allocates reused buffers
    peer.prewarm(state, directory)
    os.sync()  # so that the save does not pay for earlier dirty pages
    settle()
    reset_peak()
    cpu_before = cpu_seconds()

    with limited(seconds_max):
        start = time.perf_counter()
        finish = peer.begin(state, directory / "checkpoint")
        blocked = time.perf_counter()
        finish()
        done = time.perf_counter()
        if peer.fsync != "own":
            fsync_tree(directory / "checkpoint")
        durable = time.perf_counter()

    result = {
        "bytes": sum(t.nbytes for t in state.values()),
        "seconds": durable - start,
        "seconds_without_our_fsync": done - start,
        # A synchronous save blocks until it is durable, including the worker's own fsync.
        "blocked_seconds": (durable if finish is nothing_left else blocked) - start,
        "cpu_seconds": cpu_seconds() - cpu_before,
        "extra_ram_bytes": max(0, peak_bytes() - rss_before),
    }
    (directory / DIGEST).write_text(json.dumps([digest(small), digest(state)]))
    return result


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float


def cost_of(action: Callable[[], Returned]) -> tuple[Returned, Cost]:
    """Return what `action` returns, and what it costs."""
    cpu, start = cpu_seconds(), time.perf_counter()
    returned = action()
    seconds = time.perf_counter() - start
    return returned, Cost(seconds, cpu_seconds() - cpu)


def without_loop(load: float, touch: float, again: float) -> float:
    """Return what a load costs with the reads that its first touch causes.

    The first touch reads what a lazy load has not read yet. It also runs a loop over the tensors,
    which is the tool's own: 0.09 s for 100,000 of them. The second touch runs the same loop and
    reads nothing, so it is subtracted.
    """
    return load + max(0.0, touch - again)


def measure_load(
    peer: Peer, directory: Path, device: str, settle: Callable[[], None], seconds_max: float
) -> dict[str, Any]:
    load_peer = peer.load
    assert load_peer is not None

    def load_checkpoint(path: Path, like: State) -> State:
        state = load_peer(path, like, device)
        synchronize(device)
        return state

    small, expected = json.loads((directory / DIGEST).read_text())
    load_checkpoint(directory / "warm-up", destination(small, device) if peer.in_place else {})
    like = destination(expected, device) if peer.in_place else {}
    synchronize(device)
    settle()
    rss_before = memory_bytes("VmRSS")
    reset_peak()

    with limited(seconds_max):
        state, load = cost_of(lambda: load_checkpoint(directory / "checkpoint", like))
        _, first = cost_of(lambda: touch(state))
    _, second = cost_of(lambda: touch(state))

    result = {
        "seconds": without_loop(load.seconds, first.seconds, second.seconds),
        "cpu_seconds": without_loop(load.cpu_seconds, first.cpu_seconds, second.cpu_seconds),
        "loop_seconds": second.seconds,
    }
    size = sum(t.nbytes for t in state.values())
    extra = peak_bytes() - rss_before - (0 if peer.in_place or device != CPU else size)
    if digest(state) != expected:
        raise RuntimeError("the loaded bytes differ from the saved ones")
    return result | {"bytes": size, "extra_ram_bytes": max(0, extra)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    peer = PEERS[args.peer]
    settle = PageCache(sys.stdin.fileno()).fill if args.fill_page_cache else lambda: None
    if args.operation == "prepare":
        return prepare(peer)
    if args.operation == "save":
        state = STATES[args.state](args.bytes)
        return measure_save(peer, args.directory, state, args.device, settle, args.seconds)
    return measure_load(peer, args.directory, args.device, settle, args.seconds)


def one_line(failure: BaseException) -> str:
    """Return its type and the first and last line of its message.

    A traceback from another process ends with the error, so the last line matters.
    """
    lines = [" ".join(line.split()) for line in str(failure).splitlines() if line.strip()]
    told = lines[:1] + [line for line in lines[-1:] if len(lines) > 1]
    return ": ".join([type(failure).__name__, *(line[:150] for line in told)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation", choices=["prepare", "save", "load"])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--state", choices=list(STATES), default="transformer")
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--fill-page-cache", action="store_true")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of the measured part")
    args = parser.parse_args()
    try:
        result = run(args)
    except Exception as failure:
        traceback.print_exc()
        result = {"failed": one_line(failure)}
    print("\n" + json.dumps(result), flush=True)
    sys.stderr.flush()
    # Not sys.exit, which would wait for a library's background threads and processes. The caller
    # ends those.
    os._exit(1 if "failed" in result else 0)


if __name__ == "__main__":
    main()
