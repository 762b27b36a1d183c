"""After a power cut in a conversion or DCP save, the old or the new checkpoint is complete.

The next operation works. ``power_cuts.py`` has the operations, ``tests/cut-disk`` the disks.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from support import missing

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
CUTS = os.environ.get("RINGSTOW_CUTS", "9")
SEED = os.environ.get("RINGSTOW_SEED", "1")


@pytest.fixture(scope="session")
def cut_disk():
    """Build the program that mounts the disks; return its path."""
    if os.geteuid() != 0:
        missing("only root can mount")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    command = ["cargo", "build", "-q", "-p", "cut-disk"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    except OSError as error:
        missing(f"no cargo: {error}")
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return target / "debug" / "cut-disk"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_power_cut_keeps_one_complete_checkpoint(kind, cut_disk, tmp_path):
    program = ["unshare", "--mount", sys.executable, HERE / "power_cuts.py"]
    done = subprocess.run(
        [*program, cut_disk, kind, CUTS, SEED, tmp_path], capture_output=True, text=True
    )
    if "no rig:" in done.stderr:
        missing(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    print(kind, done.stdout)
