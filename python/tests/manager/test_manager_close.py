"""A manager closes whatever has become of the process group."""

from __future__ import annotations

import forked
import pytest
import torch

import ringstow
from ringstow._ranks import _concurrent_saves

AFTER_DESTROY = """
import sys
import torch
import torch.distributed as dist
import ringstow

root, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=int(rank), world_size=2)
manager = ringstow.CheckpointManager(f"{root}/run", keep=1, tiers=[f"{root}/tier"])
manager.save(1, {"w": torch.ones(3)})
handle = manager.save_async(2, {"w": torch.ones(3)})
handle.result()
dist.barrier()
dist.destroy_process_group()
try:
    manager.save(3, {"w": torch.ones(3)})
except ringstow.InvalidStateError as error:
    print(error)
manager.close()
manager.close()
print(repr(manager))
"""


def test_after_the_process_group_has_ended(tmp_path):
    programs = [forked.Program(AFTER_DESTROY, tmp_path, rank) for rank in range(2)]
    for ran in [program.wait() for program in programs]:
        assert ran.returncode == 0, ran.stderr
        refused, closed = ran.stdout.splitlines()
        assert "close the manager first" in refused
        assert closed.endswith("run' closed>")
    assert ringstow.latest(tmp_path / "tier").path.endswith("step-00000002")


@pytest.fixture
def late(monkeypatch):
    """Return a function after which this process is one of two ranks."""
    return lambda: monkeypatch.setattr(_concurrent_saves, "ranks", lambda: (0, 2))


def test_if_the_process_group_came_after_it(tmp_path, late):
    manager = ringstow.CheckpointManager(tmp_path / "run")
    handle = manager.save_async(1, {"w": torch.ones(3)})
    late()
    with pytest.raises(ringstow.InvalidStateError, match="make it after init_process_group"):
        manager.steps()
    manager.close()
    assert handle.done()
    assert "closed" in repr(manager)
    assert ringstow.latest(tmp_path / "run").path.endswith("step-00000001")


def test_the_failure_of_the_last_save_is_raised_and_the_manager_is_closed(tmp_path, late):
    manager = ringstow.CheckpointManager(tmp_path / "run")
    manager.save(1, {"w": torch.ones(3)})
    (tmp_path / "run" / "step-00000002").write_text("in the way")
    with pytest.raises(OSError, match="step-00000002"):  # noqa: PT012 - either call may raise it
        manager.save_async(2, {"w": torch.ones(3)})
        late()
        manager.close()
    late()
    manager.close()
    assert "closed" in repr(manager)


def test_a_failed_copy_is_raised_to_who_asks_after_the_end(tmp_path, caplog):
    (tmp_path / "file").touch()
    with ringstow.CheckpointManager(tmp_path / "run", tiers=[tmp_path / "file/run"]) as manager:
        manager.save(1, {"w": torch.ones(3)})
    with pytest.raises(NotADirectoryError):
        manager.raise_failures()
    assert "is saved, but not copied to" in caplog.text
