"""A process's first save uses memory for the state, not for the whole pool."""

import os

from support import python

MEASURED = """
import sys
import numpy as np
import ringstow

def resident():
    with open("/proc/self/status") as status:
        lines = [line for line in status if line.startswith(("VmRSS", "RssAnon"))]
    return max(int(line.split()[1]) for line in lines) * 1024

state = {"w": np.ones(400_000, dtype=np.float32), "step": 1}
before = resident()
handle = ringstow.save_async(state, sys.argv[1])
handle.result()
print(resident() - before)
ringstow.save(state, sys.argv[1])
"""


def test_a_first_save_of_a_small_state_takes_little_memory(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("RINGSTOW_")}
    done = python(MEASURED, tmp_path / "ckpt", env=env, check=True)
    assert int(done.stdout) <= 16 << 20
