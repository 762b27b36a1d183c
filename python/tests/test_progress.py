"""Progress bars: on a terminal while the work is long, and nothing of them afterwards."""

import fcntl
import os
import pty
import struct
import termios

import forked
import numpy as np
import pytest

import ringstow
from ringstow import _native

# A bar appears at once, and the moments at which progress is shown come often.
CODE = """
import os, signal, sys, threading, numpy as np, ringstow, torch
from ringstow._saving import _jobs
from ringstow._reports import _progress
from ringstow._state.tensors._memory import LazyTensor
_progress._PATIENCE_S = float(os.environ.get("PATIENCE", "0"))
shown = threading.Event()
move = _progress.Progress.__call__
def moved(self, done, total):
    move(self, done, total)
    if self._bar is not None or len(sys.argv) > 3:
        shown.set()
_progress.Progress.__call__ = moved
what, path = sys.argv[1:3]
"""

SAVE = """
interrupted = threading.Event()
def interrupt(*_):
    interrupted.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def load():
    if what == "interrupted":
        assert shown.wait(300)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(300)  # the main thread cancels before it lets this one go on
    if what != "off":
        assert shown.wait(300)
    if what == "failed":
        raise RuntimeError("no such tensor")
    return torch.zeros(1 << 20)
state = {"a": LazyTensor("F32", (1 << 20,), 4 << 20, load)}
try:
    if what == "async":
        shown.set()
        ringstow.save_async(state, path, staging="unguarded").result()
    else:
        ringstow.save(state, path)
except (RuntimeError, KeyboardInterrupt) as error:
    print(type(error).__name__)
"""


def on_terminal(code, *args, **env):
    """Run code with a terminal as stderr; return its exit code, its stdout and the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {**os.environ, "RINGSTOW_PROGRESS": "on", **env}
    process = forked.Program(CODE + code, *args, env=environment, terminal=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    done = process.wait()
    return done.returncode, done.stdout, shown.decode()


def left_on(shown):
    """Return what a terminal shows in the end."""
    lines = [""]
    column = 0
    for character in shown.replace("\x1b[A", ""):
        if character == "\r":
            column = 0
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return "".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("what", "said"),
    [("save", ""), ("failed", "RuntimeError\n"), ("interrupted", "KeyboardInterrupt\n")],
)
def test_save_shows_a_bar_and_clears_it_also_when_it_fails(what, said, at):
    code, out, shown = on_terminal(SAVE, what, at / "step-1000")
    assert (code, out) == (0, said), shown
    assert "saving step-1000" in shown
    assert "0%|" in shown  # with the total
    assert left_on(shown) == ""


@pytest.mark.parametrize(
    ("what", "variables"),
    [
        ("async", {}),
        ("off", {"PATIENCE": "3600"}),
        *(("off", {"RINGSTOW_PROGRESS": value}) for value in ("0", "off", "False")),
    ],
    ids=str,
)
def test_background_and_short_saves_and_those_that_may_not_show_no_bar(what, variables, at):
    code, _, shown = on_terminal(SAVE, what, at / "c", **variables)
    assert (code, shown) == (0, "")


def test_other_ranks_show_no_bar(at):
    shown = on_terminal(SAVE, "off", at / "rank00001", RANK="1")[2]
    assert "saving" not in shown


READ = """
into = {"a": np.zeros(1 << 20)}
if what == "load":
    ringstow.load(path)
elif what == "load_into":
    ringstow.load_into(into, path)
else:
    ringstow.verify(path)
print(shown.is_set())
"""


@pytest.mark.parametrize("what", ["load", "load_into", "verify"])
def test_long_read_shows_a_bar_and_clears_it(what, at):
    ringstow.save({"a": np.zeros(1 << 20)}, at / "step-1000")
    code, out, shown = on_terminal(READ, what, at / "step-1000")
    assert code == 0, shown
    verb = "verifying" if what == "verify" else "loading"
    assert out == "True\n"
    assert f"{verb} step-1000" in shown
    assert left_on(shown) == ""


def test_without_a_terminal_there_is_no_bar(at):
    environment = {**os.environ, "RINGSTOW_PROGRESS": "on"}
    done = forked.python(CODE + SAVE, "off", at / "c", env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_begins_before_the_work_has_ended(tmp_path):
    """Regression: a load waited for its end before it looked at signals or showed progress."""
    ringstow.save({"w": np.zeros(128 << 20, np.uint8)}, tmp_path / "c")
    shown = []
    _native.verify(
        str(tmp_path / "c"), ringstow.Config().to_json(), progress=lambda *one: shown.append(one)
    )
    done, total = shown[0]
    assert done < total or total == 0
