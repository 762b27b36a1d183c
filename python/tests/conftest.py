"""Fixtures of all tests here."""

import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from stores.fixtures import (  # noqa: F401
    azurite,
    bucket,
    container,
    each_bucket,
    each_place,
    google,
    google_bucket,
    moto,
    place,
    proxy,
    s3s,
)

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

# Whether a program shows progress depends on how fast the machine is. Tests of progress turn it on.
os.environ["RINGSTOW_PROGRESS"] = "off"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and each program of the tests would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Refuse names of tests with addresses in them: they differ between the processes of a run."""
    different = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if different:
        raise pytest.UsageError(f"give the parameters ids: {different[:3]}")


def pytest_collection_finish():
    """Keep the collector from all that was imported: it looks at a million objects for nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def at(tmp_path):
    return tmp_path


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a file system in memory, if this machine allows it."""
    from support import mounted

    folders = []

    def mount(options, kind="tmpfs"):
        mounted(tmp_path / "disk", options, kind)
        folders.append(tmp_path / "disk")
        return tmp_path / "disk"

    yield mount
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def seamed(tmp_path):
    """Return a directory with the package over an extension that can be killed at a call."""
    from support import cargo_build

    package = tmp_path / "package" / "ringstow"
    shutil.copytree(ROOT / "python" / "ringstow", package)
    shutil.copyfile(cargo_build("ringstow-python") / "lib_native.so", package / "_native.abi3.so")
    return package.parent


@pytest.fixture
def two_hosts(tmp_path):
    """Return a function from a seed to a share that two hosts mount."""
    from support import cargo_build, missing
    from two_hosts import Share

    if os.geteuid() != 0:
        missing("only root can mount")
    program = cargo_build("two-hosts") / "two-hosts"

    def share(seed):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        try:
            return Share(program, folder, seed)
        except OSError as error:
            missing(str(error))

    return share
