"""Processes of tests, and groups of ranks, that start at once.

They are forked from a server that has imported what the tests need. Each import of torch and a
framework takes seconds.

A module whose functions run in such processes calls `preload` when it is imported. Pytest imports
all tests before it runs one, so the server knows all of these modules when it starts.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
from multiprocessing import forkserver

import torch
import torch._dynamo  # each optimizer imports it, which takes as long as a small run

_LIMIT_S = 300

_context = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(module):
    """Let the server import a module before it forks."""
    _preloaded.append(module)


def start(run, *args, output=None):
    """Start a function of a module.

    Args:
        run: the function.
        args: its arguments.
        output: the file for all that the process prints; None keeps the errors only.
    """
    _start_server()  # once
    one = _context.Process(target=_run, args=(output, run, args))
    one.start()
    return one


def start_ranks(count, run, *args, outputs=None):
    """Start a function as each rank of a group, with its rank and their number before `args`.

    A count of 0 starts one process without a group: as rank 0 of 1.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    files = outputs or [None] * (count or 1)
    return [
        start(_as_rank, rank, count, port, run, args, output=files[rank])
        for rank in range(count or 1)
    ]


def ended(processes):
    """Return how processes have ended, once they have."""
    for one in processes:
        one.join(_LIMIT_S)
        if one.exitcode is None:
            one.kill()
            one.join()
    return [one.exitcode for one in processes]


def exit_code(run, *args, **options):
    """Run a function of a module in a process; return how it ended."""
    return ended([start(run, *args, **options)])[0]


def exit_codes(count, run, *args, **options):
    """Run a function as each rank of a group; return how they ended."""
    return ended(start_ranks(count, run, *args, **options))


def results(count, run, *args):
    """Run a function as each rank of a group, which must end well; return what each returns."""
    ranks = range(count or 1)
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"log.{rank}") for rank in ranks]
        codes = exit_codes(count, _keep, f"{folder}/result", run, args, outputs=logs)
        assert codes == [0 for _ in ranks], [log.read_text() for log in logs]
        return [torch.load(f"{folder}/result.{rank}", weights_only=False) for rank in ranks]


def on_ranks(count):
    """Run a test's body as each rank of a group; it may take ``rank`` and ``ranks``, their number.

    A count of 0 is one process without a group.
    """

    def decorate(body):
        def test(**given):
            results(count, _run_body, body.__module__, body.__name__, given)

        given = [one for one in _parameters(body).values() if one.name not in ("rank", "ranks")]
        test.__signature__ = inspect.Signature(given)
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        return test

    return decorate


def result(run, *args):
    """Run a function in a process, which must end well; return what it returns."""
    return results(0, _without_rank, run, args)[0]


def before(owner, name, act):
    """Let a function be called before each call of another, with the arguments of that call."""
    call = getattr(owner, name)

    def wrapper(*args, **options):
        act(*args)
        return call(*args, **options)

    setattr(owner, name, wrapper)


def die():
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


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


def _run(output, run, args):
    gc.freeze()  # the collector would copy each page of what the server imported
    with open(output or os.devnull, "w") as stream:
        os.dup2(stream.fileno(), 1)
        if output is not None:
            os.dup2(stream.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # a test may wait for a line
    torch.set_num_threads(1)
    run(*args)


def _as_rank(rank, count, port, run, args):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "OMP_NUM_THREADS": 1}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    if count:
        os.environ.update({name: str(value) for name, value in {**place, **ranks}.items()})
    run(rank, count or 1, *args)


def _keep(rank, ranks, path, run, args):
    torch.save(run(rank, ranks, *args), f"{path}.{rank}")


def _parameters(function):
    return inspect.signature(function).parameters


def _run_body(rank, ranks, module, name, given):
    body = getattr(importlib.import_module(module), name).body
    given |= {"rank": rank, "ranks": ranks}
    return body(**{name: given[name] for name in _parameters(body)})


def _without_rank(rank, ranks, run, args):
    return run(*args)
