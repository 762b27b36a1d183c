"""Functions of tests in processes of their own, on several ranks too.

The processes are forked from a server that has imported everything, so each starts at once.

A module whose functions run in such processes calls `preload` when it is imported. Pytest imports
all tests before it runs one, so the server knows all of these modules when it starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver

import torch
import torch._dynamo  # each optimizer imports it, which takes as long as a small run

_context = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(module):
    """Let the server import a module before it forks."""
    _preloaded.append(module)


def _start_server():
    _context.set_forkserver_preload(_preloaded)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # else it imports nothing
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def process(run, *args):
    """Start a function of a module; return the process."""
    _start_server()  # once
    one = _context.Process(target=_quiet, args=(run, *args))
    one.start()
    return one


def exit_code(run, *args):
    """Run a function of a module in a process; return how it ended."""
    return ended([process(run, *args)])[0]


def start(ranks, function, *args):
    """Start a function of a module on each rank; return the processes."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return [process(_as_rank, rank, ranks, port, function, *args) for rank in range(ranks)]


def exit_codes(ranks, function, *args):
    """Run a function on each rank; return how they ended."""
    return ended(start(ranks, function, *args))


def ended(processes):
    """Return how processes have ended, once they have."""
    for one in processes:
        one.join(300)
        if one.exitcode is None:
            one.kill()
            one.join()
    return [one.exitcode for one in processes]


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _as_rank(rank, ranks, port, function, *args):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    function(rank, ranks, *args)


def _quiet(run, *args):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run(*args)
