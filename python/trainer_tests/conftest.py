"""Tests with the real training frameworks: ``make test-trainers`` installs them.

python/tests runs without any of them, and lends its helpers.
"""

import os
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist

TESTS = pathlib.Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "guard")]
# Whether a program shows progress depends on how fast the machine is.
os.environ["RINGSTOW_PROGRESS"] = "off"


@pytest.fixture(autouse=True, scope="session")
def one_thread_of_torch():
    """Compute in one thread, as the children do: another number gives other sums."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def group():
    """Make this process a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def held():
    """Return a save's tensor that is not copied before the test releases it."""
    from held_save import Held

    from ringstow._saving import _jobs

    one = Held()
    yield one
    one.release()
    _jobs.unreported.clear()


# Each case of these is a run of several processes that import a framework: half a minute of a core.
ONE_CASE_IN_CI = ("_killed", "_stops", "_quantized", "_step_time")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
    """Mark all cases of a test but the first as long: each adapter is killed in CI, too."""
    seen = set()
    for item in items:
        if item.path.stem.endswith(ONE_CASE_IN_CI):
            test = (item.path, item.originalname)
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)
