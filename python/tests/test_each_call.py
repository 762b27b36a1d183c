"""A Python program that is killed at any call to the system, or that any call fails, loses nothing.

``each_call.py`` has the programs, and does some of the calls here; ``make torture-calls-python``
does all.
"""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
PASSES = os.environ.get("RINGSTOW_PASSES", "0")
SEED = os.environ.get("RINGSTOW_SEED", "1")
MINUTES = os.environ.get("RINGSTOW_MINUTES", "600")


@pytest.mark.timeout(36_000)
def test_each_call_that_fails_or_kills_leaves_old_or_new(tmp_path, seamed):
    done = subprocess.run(
        [sys.executable, HERE / "each_call.py", PASSES, SEED, MINUTES, tmp_path / "calls"],
        env={**os.environ, "PYTHONPATH": str(seamed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
