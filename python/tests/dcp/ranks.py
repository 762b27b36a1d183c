"""A pool of gloo ranks: processes that stay alive across many tests.

A test passes a module's function to every rank::

    def save(rank, path): ...

    def test_it(ranks, tmp_path):
        results = ranks(2).run(save, tmp_path)

The ranks keep only their default process group between functions. A function's result must pickle;
`run` raises its exception. Of a test that does nothing else, all ranks run the body::

    @on_ranks(2)
    def test_it(rank, tmp_path): ...

Without a number, it is that of the test's parameter ``world_size``.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings

from forked import CONTEXT, leave_to_the_server

# A rank's limit for waiting for others. Shorter than `run`'s, so that the ranks report the cause.
# Both only end a test that hangs: a shared disk can make an fsync take a minute.
COLLECTIVE_S = 300
RUN_S = 400
THREADS_MAX = 100


def on_ranks(number=None):
    """Run a test's body on every rank of the pool; its parameter ``rank`` is the rank's number."""

    def decorate(body):
        def test(ranks, **given):
            world_size = given["world_size"] if number is None else number
            ranks(world_size).run(_run_body, body.__module__, body.__name__, given)

        given = [one for one in inspect.signature(body).parameters.values() if one.name != "rank"]
        first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *given])
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        return test

    return decorate


def _run_body(rank, module, name, given):
    getattr(importlib.import_module(module), name).body(rank=rank, **given)


def gathered(value):
    """Return what each rank has, on each."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raised(call):
    """Return the name and the text of what a call raises; None if it returns."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


class Ranks:
    """A pool of one world size."""

    def __init__(self, world_size):
        self.world_size = world_size
        self._processes = []
        self._pipes = []
        self._meeting = ""

    def run(self, function, *args, timeout=RUN_S):
        """Run ``function(rank, *args)`` on every rank; return the results by rank.

        Raises the error of the lowest rank that failed. If the pool does not answer in time, or its
        group has lost a connection, `run` ends it, and the next call starts another.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            outcomes = self._gather(timeout)
        except BaseException:
            self.stop()
            raise
        if any(_has_lost_its_group(trace) for _, _, trace in outcomes) or self._is_worn():
            self.stop()
        for rank, (_, error, trace) in enumerate(outcomes):
            if error is not None:
                error.add_note(f"raised by rank {rank} of {self.world_size}:\n{trace}")
                raise error
            assert trace is None, f"rank {rank} of {self.world_size}:\n{trace}"
        return [value for value, _, _ in outcomes]

    def _is_worn(self):
        """Whether gloo has left so many threads of groups that have ended.

        Each of them wakes up all the time: 500 of them in each of 4 ranks take one core of two.
        """
        try:
            return len(os.listdir(f"/proc/{self._processes[0].pid}/task")) > THREADS_MAX
        except OSError:  # a test has killed it
            return True

    def kill(self):
        """Kill the processes while another thread runs a function on them, which then raises."""
        for process in self._processes:
            process.kill()

    def stop(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self):
        # A file as the rendezvous, because ports can collide.
        self._meeting = tempfile.mkdtemp(prefix="ringstow-ranks-")
        meeting = os.path.join(self._meeting, "store")
        for rank in range(self.world_size):
            ours, theirs = CONTEXT.Pipe()
            # Not daemons, because daemons may not have children, which some tests need.
            process = CONTEXT.Process(target=_serve, args=(theirs, rank, self.world_size, meeting))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _gather(self, timeout):
        deadline = time.monotonic() + timeout
        outcomes = {}
        while len(outcomes) < self.world_size:
            waiting = [r for r in range(self.world_size) if r not in outcomes]
            left = max(deadline - time.monotonic(), 0)
            ready = multiprocessing.connection.wait([self._pipes[r] for r in waiting], left)
            if not ready:
                for rank in waiting:
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)  # prints its stack
                time.sleep(1)  # gives the ranks time to print; nothing depends on it
                raise TimeoutError(f"ranks {waiting} did not come back within {timeout} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    raise RuntimeError(f"rank {rank} died with exit code {code}") from None
        return [outcomes[rank] for rank in range(self.world_size)]


def _has_lost_its_group(trace):
    """Whether a collective failed: all later ones of the same process group would fail too."""
    return trace is not None and "distributed_c10d" in trace


def _serve(pipe, rank, world_size, meeting):
    leave_to_the_server()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MASTER_ADDR"] = "localhost"  # for process groups that torch starts by itself
    import datetime

    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
    )
    warnings.simplefilter("ignore")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_outcome(function, rank, args))


def _outcome(function, rank, args):
    """Return a function's result, its exception, and the exception's traceback as text."""
    try:
        return function(rank, *args), None, None
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            import pickle

            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, None, trace
        return None, error, trace
