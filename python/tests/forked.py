"""Run programs in forked processes that have torch imported, because importing it takes seconds.

A server imports torch and ringstow once and forks a process for each program. Tests of imports or
of the interpreter's exit use a new interpreter instead: `support.python`.
"""

import gc
import multiprocessing
import multiprocessing.reduction
import os
import subprocess
import sys
import tempfile
import types

CONTEXT = multiprocessing.get_context("forkserver")
# Each optimizer imports `torch._dynamo`, which takes as long as most programs of the tests.
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.pipelining", "torch._dynamo"]
PRELOADED += ["ringstow.dcp", "ringstow.distributed", "ringstow.convert"]
CONTEXT.set_forkserver_preload(PRELOADED)

PROGRAM = "from ringstow._program import _cli; _cli.main()"
SCRIPT = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"


class Program:
    """A program that runs in a forked process and collects its output.

    What it writes to stderr goes to the descriptor ``terminal``, if there is one.
    """

    def __init__(self, code, *args, name="-c", env=None, cwd=None, terminal=None):
        self._args = [str(name), *map(str, args)]
        self._output = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        numbers = [file.fileno() for file in self._output]
        if terminal is not None:
            numbers[1] = terminal
        handles = [multiprocessing.reduction.DupFd(number) for number in numbers]
        there = dict(env or os.environ), str(cwd or os.getcwd())
        self._process = CONTEXT.Process(target=_run, args=(code, self._args, *there, *handles))
        self._process.start()

    def is_running(self):
        """Return whether it has not ended."""
        return self._process.is_alive()

    def kill(self):
        """Send SIGKILL."""
        self._process.kill()

    def send_signal(self, number):
        """Send another signal."""
        os.kill(self._process.pid, number)

    def wait(self, timeout=300):
        """Return the completed process, with text; kill it after the timeout."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._args, timeout)
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return subprocess.CompletedProcess(self._args, self._process.exitcode, *texts)


def python(code, *args, check=False, **options):
    """Run Python code; return the completed process, with text."""
    done = Program(code, *args, **options).wait()
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def ringstow(*words, **options):
    """Run the program `ringstow`; return the completed process, with text."""
    return python(PROGRAM, *words, name="ringstow", **options)


def on_ranks(count, code, *args, env=None, **options):
    """Run Python code on ranks with torchrun's environment variables; return how each ended."""
    import torch

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    same = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    same |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    started = []
    for rank in map(str, range(count)):
        own = {**(env or os.environ), **same, "RANK": rank, "LOCAL_RANK": rank}
        started.append(Program(code, *args, env=own, **options))
    return [program.wait() for program in started]


def torchrun(count, *words):
    """Run torchrun itself, whose ranks are new interpreters; return the completed process."""
    options = [f"--nproc-per-node={count}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return python("from torch.distributed.run import main; main()", *options, *words)


def script(path, *args, **options):
    """Run a Python file as a program; return the completed process, with text."""
    return python(SCRIPT, *args, name=path, **options)


def leave_to_the_server():
    """Keep the collector from what the server imported: each page that it looks at is copied."""
    gc.freeze()


def _run(code, argv, env, cwd, *handles):
    leave_to_the_server()
    for number, handle in enumerate(handles, start=1):
        os.dup2(handle.detach(), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    if argv[0] != "-c":
        sys.path.insert(0, os.path.dirname(argv[0]))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
