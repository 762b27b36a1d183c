"""A slow handler of `logging` delays its own save or load, and no other thread."""

from support import python


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
