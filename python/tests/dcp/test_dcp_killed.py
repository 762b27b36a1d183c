"""A rank is killed during a save: the earlier checkpoint stays, and no partial one counts.

Each test's pool dies with its rank; the next test gets another.
"""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow.dcp import _writer

VALUES = torch.arange(64.0)


def state_of(rank, world, sign):
    mesh = init_device_mesh("cpu", (world,))
    local = (VALUES * sign).chunk(world)[rank].clone()
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "step": sign}


def save(rank, path, world, sign):
    state = state_of(rank, world, sign)
    dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(path))


def save_and_die(rank, path, world, sign, victim, moment):
    """Save, and kill the victim's process at the given moment."""
    if rank == victim:
        # The other rank is killed too, once this one has died: it must have written before.
        die_at(moment, after=pathlib.Path(path) / f"rank{1 - rank:05}.done.part")
    save(rank, path, world, sign)


def die_at(moment, after=None):
    """Kill this process at a moment of its next save; "while writing" waits for a file."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_while_writing(*_, **__):
        while after is not None and not after.exists():
            os.sched_yield()
        die()

    native = _native.Session

    class Dying:
        """The coordinator's session, which dies at the commit."""

        def __init__(self, *args):
            self._session = native(*args)

        def commit(self, *args):
            if moment == "before the commit":
                die()
            self._session.commit(*args)
            die()

    if moment == "while writing":
        _native.start_write = die_while_writing
    elif moment == "after writing":
        _writer.Future = die  # dies before write_data returns its future
    elif moment == "while merging":
        _native.Receipts = die
    else:
        _native.Session = Dying


def kill(ranks, path, victim, moment):
    pool = ranks(2)
    with pytest.raises(RuntimeError, match=f"rank {victim} died with exit code -9"):
        pool.run(save_and_die, path, 2, -1, victim, moment)


@pytest.mark.parametrize(
    ("victim", "moment", "missing"),
    [
        (1, "while writing", "of 2 ranks, .*1 had not finished writing"),
        (0, "while writing", "of 2 ranks, ranks? 0.* had not finished writing"),
        (1, "after writing", None),
        (0, "while merging", "all 2 ranks had written their shares"),
        (0, "before the commit", "all 2 ranks had written their shares"),
    ],
)
def test_killed_rank_is_named_and_does_no_harm(ranks, tmp_path, victim, moment, missing):
    fresh, over = tmp_path / "fresh", tmp_path / "over"
    kill(ranks, fresh, victim, moment)
    # A coordinator that has noticed before its own end removes what was written.
    cleared = (FileNotFoundError,) if missing is None else ()
    with pytest.raises((ringstow.IncompleteCheckpointError, *cleared), match=missing):
        ringstow.load(fresh)
    assert ringstow.latest(tmp_path) is None
    assert not list(fresh.glob("*.safetensors"))

    ranks(2).run(save, over, 2, 1)
    kill(ranks, over, victim, moment)
    assert torch.equal(ringstow.load(over)["w"], VALUES)
    ranks(2).run(save, over, 2, 3)  # leftovers do not block the next save
    assert torch.equal(ringstow.load(over)["w"], VALUES * 3)
    assert len(list(over.glob("*.part"))) == 0


def test_coordinator_killed_after_the_commit_has_committed(ranks, tmp_path):
    kill(ranks, tmp_path, 0, "after the commit")
    assert torch.equal(ringstow.load(tmp_path)["w"], -VALUES)
