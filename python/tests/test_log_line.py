"""Each save and load logs one line with its figures, and a slow handler delays no other thread."""

import json
import logging
import re

import fake_native
import numpy as np
import pytest
from support import python, wait_for_saves

import ringstow
from ringstow import LoadReport, SaveReport
from ringstow._core import _formatting

STATE = {"w": np.arange(1000.0), "step": 1}


@pytest.fixture
def lines(caplog):
    """Return a function that returns the lines logged so far, once no save is logging any more."""
    caplog.set_level(logging.INFO, logger="ringstow")

    def logged():
        wait_for_saves()
        return [
            one.getMessage()
            for one in caplog.records
            if one.name == "ringstow" and one.levelno == logging.INFO
        ]

    return logged


def test_saves_log_their_reports(lines, at):
    report = ringstow.save(STATE, at / "c")
    assert report.blocked_seconds >= report.seconds.total
    background = ringstow.save_async(STATE, at / "c").result()
    assert lines() == [_formatting.of_save(report), _formatting.of_save(background)]


def test_loads_log_their_reports(lines, at):
    ringstow.save(STATE, at / "c")
    outcomes = []
    with ringstow.on_done(outcomes.append):
        ringstow.load(at / "c")
        into = ringstow.load_into({"w": np.zeros(1000), "step": 0}, at / "c")
    assert lines()[1:] == [_formatting.of_load(outcomes[0].report), _formatting.of_load(into)]
    assert "waited" not in lines()[1]


def test_load_of_objects_and_tensors_logs_one_line_for_all(lines, at):
    pickled = {"o": {1, 2}.__class__, "w": np.arange(1000.0)}
    ringstow.save(pickled, at / "c", allow_pickle=True)
    ringstow.load(at / "c", allow_pickle=True)
    assert len(lines()) == 2


def test_load_of_nothing_logs_no_bytes(lines, at):
    ringstow.save(STATE, at / "c")
    ringstow.load(at / "c", keys=["step"])
    assert re.fullmatch(rf"loaded {at}/c: 0 B in .*", lines()[1])


def test_failed_save_logs_no_line(lines, at):
    (at / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        ringstow.save(STATE, at / "file" / "c")
    with pytest.raises(NotADirectoryError):
        ringstow.save_async(STATE, at / "file" / "c").result()
    assert lines() == []


def reported(kind, **fields):
    text = fake_native.save_report if kind is SaveReport else fake_native.load_report
    report = {**text("/run/step-1000", 2, 3_410_000_000), **fields}
    return kind.from_json(json.dumps(report))


def test_line_has_size_time_rate_and_mode():
    mode = {"engine": "uring", "fixed_buffers": 64, "direct": True}
    report = reported(SaveReport, **mode, blocked_seconds=0.0123)
    assert _formatting.of_save(report) == (
        "/run/step-1000: 3.41 GB in 500 ms (6.82 GB/s, io_uring, fixed buffers, O_DIRECT), "
        "training waited 12 ms"
    )
    assert _formatting.of_save(reported(SaveReport), "rank 3") == (
        "/run/step-1000, rank 3: 3.41 GB in 500 ms (6.82 GB/s, fake, buffered)"
    )
    assert _formatting.of_load(reported(LoadReport)) == (
        "loaded /run/step-1000: 3.41 GB in 500 ms (6.82 GB/s, fake, buffered)"
    )
    assert _formatting.of_load(reported(LoadReport, cached_bytes=1_200_000_000)) == (
        "loaded /run/step-1000: 3.41 GB in 500 ms (6.82 GB/s, fake, buffered), "
        "1.20 GB from the page cache"
    )


@pytest.mark.parametrize("save", ["save", "save_async"])
def test_signal_handler_saves_while_a_logging_handler_is_locked(save, at):
    code = """
import logging, signal, sys, ringstow
handler = logging.StreamHandler()
logging.getLogger("ringstow").addHandler(handler)
logging.getLogger("ringstow").setLevel(logging.INFO)
def save(*_):
    saved = getattr(ringstow, sys.argv[2])({"a": 1}, sys.argv[1])
    if sys.argv[2] == "save_async":
        saved.result()
signal.signal(signal.SIGUSR1, save)
with handler.lock:
    signal.raise_signal(signal.SIGUSR1)
"""
    done = python(code, at / "c", save)  # fails if it hangs
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training waited") == 1


def test_logging_handler_that_fails_does_not_fail_the_save(at, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)

    class Broken(logging.Handler):
        def emit(self, record):
            raise RuntimeError("no log")

    log, handler = logging.getLogger("ringstow"), Broken()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        ringstow.save(STATE, at / "c")
        ringstow.load(at / "c")
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert [str(one.exc_value) for one in seen] == ["no log"] * 2


def test_logging_handler_that_fails_is_reported_by_the_interpreter_s_own_hook(at):
    code = """
import logging, sys, ringstow

class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError("no log")

logging.getLogger("ringstow").addHandler(Broken())
logging.getLogger("ringstow").setLevel(logging.INFO)
ringstow.save({"a": 1}, sys.argv[1])
print(ringstow.load(sys.argv[1]))
"""
    done = python(code, at / "c", check=True)
    assert done.stdout == "{'a': 1}\n"
    assert done.stderr.count("RuntimeError: no log") == 2


def test_log_handler_that_waits_for_a_thread_while_pools_are_replaced_gets_it(tmp_path):
    """Regression: the GIL was held while a replaced pool's threads ended, and these could log."""
    code = """
import logging, sys, threading
import numpy as np
import ringstow

asked, answered = threading.Event(), threading.Event()

def answer():
    while True:
        asked.wait()
        asked.clear()
        answered.set()

class Slow(logging.Handler):
    records = 0

    def emit(self, record):
        answered.clear()
        asked.set()
        assert answered.wait(60), "no other thread runs"
        Slow.records += 1

threading.Thread(target=answer, daemon=True).start()
logging.getLogger("ringstow").addHandler(Slow())
state = {"a": np.ones(1 << 16)}
for size in (8, 9, 10, 11):
    handles = []
    for path, extra in (("one", 0), ("other", 16)):
        # Each save and load warns that it cannot write its trace.
        trace = sys.argv[1] + "/none/trace"
        config = ringstow.Config(pool_bytes=(size + extra) << 20, trace=trace)
        handles.append(ringstow.save_async(state, f"{sys.argv[1]}/{path}", config=config))
    for handle in handles:
        handle.result()
    ringstow.load(f"{sys.argv[1]}/one", config=config)
assert Slow.records >= 12, Slow.records
"""
    done = python(code, tmp_path)  # fails if it hangs
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
