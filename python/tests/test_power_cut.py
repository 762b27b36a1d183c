"""After a power cut in a conversion or DCP save, the old or the new checkpoint is complete.

The next operation works. ``power_cuts.py`` has the operations, ``tests/cut-disk`` the disks.
"""

import os
import pathlib

import forked
import pytest
from support import cargo_build, missing

HERE = pathlib.Path(__file__).parent
# With so few, each file system has other operations: all three together have each of them.
CUTS = os.environ.get("RINGSTOW_CUTS", "3")
SEED = os.environ.get("RINGSTOW_SEED", "1")


@pytest.fixture(scope="session")
def cut_disk():
    """Build the program that mounts the disks; return its path."""
    if os.geteuid() != 0:
        missing("only root can mount")
    return cargo_build("cut-disk") / "cut-disk"


@pytest.mark.timeout(600 + 30 * int(CUTS))
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_power_cut_keeps_one_complete_checkpoint(kind, cut_disk, tmp_path):
    program = HERE / "power_cuts.py"
    started = forked.Program(forked.SCRIPT, cut_disk, kind, CUTS, SEED, tmp_path, name=program)
    done = started.wait(timeout=600 + 30 * int(CUTS))
    if "no rig:" in done.stderr:
        missing(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    print(kind, done.stdout)
