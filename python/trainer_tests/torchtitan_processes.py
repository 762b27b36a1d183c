"""Runs of torchtitan on one or more ranks, each in a process of its own.

Run as a program, this module is a server: it imports all once and forks each rank, so that a rank
starts at once. It reads pickled requests from its standard input, and answers with exit codes.
(The server of `multiprocessing` is one for all tests of a process, and preloads Lightning.)
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings

_PATIENCE_S = 100


def results(ranks, function, *args, **options):
    """Run a function of a test's module on each rank, as ``function(rank, ranks, ...)``.

    All must end well. Returns what each has returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = exit_codes(ranks, function, *args, folder=folder, **options)
        assert codes == [0] * ranks
        return [pickle.loads(pathlib.Path(folder, f"{r}").read_bytes()) for r in range(ranks)]


def exit_codes(ranks, function, *args, folder=None, **options):
    """Do the same; return how the ranks have ended: a signal's number is negative."""
    server = _server()
    call = function.__module__, function.__name__, args, options
    pickle.dump((ranks, folder, *call), server.stdin)
    server.stdin.flush()
    return pickle.load(server.stdout)


@functools.cache
def _server():
    path = os.pathsep.join(filter(None, sys.path))
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    atexit.register(server.kill)
    return server


def fit(*args, **options):
    """Train; see `torchtitan_runs.fit`, which only the server imports."""
    import torchtitan_runs

    return torchtitan_runs.fit(*args, **options)


def _serve():
    import torch
    import torchtitan_runs  # noqa: F401

    import ringstow.integrations.torchtitan  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            ranks, *request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        children = [_fork(rank, ranks, port, *request) for rank in range(ranks)]
        pickle.dump(_ended(children), answers)
        answers.flush()


def _fork(rank, ranks, port, folder, module, function, args, options):
    if child := os.fork():
        return child
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        done = getattr(importlib.import_module(module), function)(rank, ranks, *args, **options)
        if folder is not None:
            pathlib.Path(folder, f"{rank}").write_bytes(pickle.dumps(done))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # at once: threads of a rank whose peer is dead may never end


def _ended(children):
    """Wait for ranks, and kill those that take too long; return their exit codes."""
    codes = {}

    def give_up(*_):
        for child in set(children) - set(codes):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE_S)
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
    signal.alarm(0)
    return [codes[child] for child in children]


if __name__ == "__main__":
    _serve()
