"""Programs on two hosts that share a network file system: ``tests/two-hosts`` plays it over FUSE.

Each host sees late what the other one has done, and locks stay on their host.
"""

import ctypes
import json
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import traceback

from forked import CONTEXT

_CLONE_NEWNS, _MS_BIND = 0x20000, 0x1000
LIMIT_S = 300


class Killed(Exception):
    """A program ended without an outcome."""


class Share:
    """The share that both hosts mount, at the same path. Use it as a context."""

    def __init__(self, program, folder, seed):
        """Mount it below a folder.

        Raises:
            OSError: this machine can't.
        """
        self.root = folder / "share"
        self._mounts = [folder / name for name in "ab"]
        self.root.mkdir()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = ["unshare", "--mount", program, folder, str(seed)]
        self._process = subprocess.Popen(command, **pipes)
        answer = self._answer()
        if answer != "done":
            raise OSError(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def _answer(self):
        # The process that answers the mounts inherits the pipe and ends its lines otherwise.
        return self._process.stdout.readline().strip()

    def _order(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer == "done", answer

    def set_rules(self, host, *, stale_requests=0, direct=True):
        """Say how a host behaves."""
        rules = {"stale_requests": stale_requests, "direct": direct}
        self._order("rules", host, json.dumps({**rules, "lose_every": 0, "shared_locks": False}))

    def refresh(self):
        """Let both hosts see what the other one has done."""
        self._order("refresh")

    def run(self, *jobs, in_turns=False):
        """Run a function on each host at the same time; return the outcomes.

        Args:
            jobs: for host 0 and host 1, a function and its arguments after the share's path.
            in_turns: whether the seed decides which host's request comes next. Then no program may
                wait for the other one.

        Returns:
            Per host, what the function returned, or its exception; `Killed` if it was killed.
        """
        if in_turns:
            for host, _ in enumerate(jobs):
                self._order("work", host)
        programs = [self._start(host, *job) for host, job in enumerate(jobs)]
        outcomes = [None] * len(jobs)
        waiting = dict(enumerate(programs))
        while waiting:
            pipes = {pipe: host for host, (_, pipe) in waiting.items()}
            ready = multiprocessing.connection.wait(list(pipes), LIMIT_S)
            if not ready:
                self._give_up(waiting)
            for pipe in ready:
                host = pipes[pipe]
                process, _ = waiting.pop(host)
                try:
                    outcomes[host] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    outcomes[host] = Killed()
                process.join()
                if in_turns:
                    self._order("rest", host)
        return outcomes

    def alone(self, host, function, *args):
        """Run a function on one host; return what it returns."""
        process, pipe = self._start(host, function, *args)
        if not pipe.poll(LIMIT_S):
            self._give_up({host: (process, pipe)})
        outcome = pickle.loads(pipe.recv_bytes())
        process.join()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _start(self, host, function, *args):
        ours, theirs = CONTEXT.Pipe()
        here = (self._process.pid, str(self._mounts[host]), str(self.root))
        process = CONTEXT.Process(target=_live, args=(theirs, here, function, args))
        process.start()
        theirs.close()
        return process, ours

    def _give_up(self, waiting):
        for process, _ in waiting.values():
            os.kill(process.pid, signal.SIGABRT)
        raise TimeoutError(f"host(s) {list(waiting)} did not end within {LIMIT_S} s")


def _live(pipe, here, function, args):
    """Be a program of a host."""
    _enter(*here)
    try:
        outcome = function(pathlib.Path(here[-1]), *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        outcome = error
    pipe.send_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)


def _enter(owner, mount, root):
    """Enter the namespace of a share, and see a host's mount of it where all hosts have it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *args):
        if getattr(libc, name)(*args):
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    namespace = os.open(f"/proc/{owner}/ns/mnt", os.O_RDONLY)
    call("setns", namespace, _CLONE_NEWNS)
    os.close(namespace)
    call("unshare", _CLONE_NEWNS)
    call("mount", mount.encode(), root.encode(), None, _MS_BIND, None)
