"""The handle of a background save by several ranks does all that the handle of one process does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
import resource

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
from ringstow import distributed
from ringstow._saving import _jobs

SIZE = 8 << 20
NEVER = ringstow.Config(write_rate=10, block_bytes=1 << 20)
"""No save of `SIZE` ends by itself: its first block takes a day."""


def state_of(rank, size=SIZE):
    return {f"rank {rank}": torch.full((size,), rank, dtype=torch.uint8), "shared": torch.ones(9)}


def endless_on(one, rank):
    """A state of which one rank alone has much."""
    return state_of(rank, SIZE if rank == one else 9)


@on_ranks(2)
def test_it_is_awaited_and_says_how_far_it_is(rank, tmp_path):
    path = tmp_path / "c"
    handle = distributed.save_async(state_of(rank), path, step=3)

    async def awaited():
        return await handle

    assert handle.wait_staged()
    assert handle.staged()
    report = asyncio.run(awaited())
    assert report == handle.result()
    assert handle.progress().written == handle.progress().total == report.file_bytes
    assert (handle.done(), handle.running(), handle.cancelled()) == (True, False, False)
    assert not handle.cancel()
    assert repr(handle) == f"<SaveHandle {str(path)!r} done>"
    assert report.step == 3


@on_ranks(2)
def test_copies_are_no_longer_in_use_once_the_result_is_known(rank, tmp_path):
    ringstow.release_memory()
    state = state_of(rank, 80 << 20)
    handle = distributed.save_async(state, tmp_path / "c", staging="snapshot")
    released = queue.SimpleQueue()
    handle.add_done_callback(lambda handle: released.put(ringstow.release_memory()))
    assert released.get() > 80 << 20


@on_ranks(2)
def test_one_rank_cancels_for_all(rank, tmp_path):
    path = tmp_path / "c"
    distributed.save({"old": torch.ones(5)}, path)
    handle = distributed.save_async(endless_on(rank, rank), path, config=NEVER)
    assert handle.wait_staged()
    assert (handle.staged(), handle.running(), repr(handle)[-8:]) == (True, True, " staged>")
    if rank == 1:
        assert handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError) as caught:
        handle.result()
    assert handle.done()
    assert not _jobs.unreported
    assert rank == 1 or str(caught.value).startswith("rank 1 has cancelled the save: ")
    assert list(ringstow.load(path)) == ["old"]


def fail_on_one(rank, path, by_dcp):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        if by_dcp:
            writer = ringstow.dcp.StorageWriter(config=NEVER)
            dcp.save(endless_on(rank, rank), checkpoint_id=path, storage_writer=writer)
        else:
            distributed.save(endless_on(rank, rank), path, config=NEVER)
    except (ringstow.Error, OSError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("by_dcp", [False, True])
def test_a_rank_that_fails_stops_the_others(ranks, tmp_path, by_dcp):
    first, second = ranks(2).run(fail_on_one, tmp_path / "c", by_dcp)
    if by_dcp:
        assert "StoppedError" in first
        assert "rank 1: OSError" in first
    else:
        assert first.startswith("Error: rank 1 failed: OSError: [Errno 27]")
        assert second.startswith("OSError: [Errno 27]")
        assert not (tmp_path / "c").exists()


@on_ranks(2)
def test_wait_staged_raises_what_the_save_failed_of(rank, tmp_path):
    path, config = tmp_path / "c", dataclasses.replace(NEVER, pool_bytes=2 << 20)
    # The pool is less than rank 1's tensor.
    handle = distributed.save_async(endless_on(1, rank), path, config=config)
    if rank == 0:
        assert handle.wait_staged()
    else:
        assert not handle.wait_staged(0.2)
        assert not handle.staged()
        assert handle.progress().staged < handle.progress().total
        assert handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.wait_staged() if rank == 1 else handle.result()
    assert not handle.cancel()
    del handle
    assert not _jobs.unreported


@on_ranks(2)
def test_the_report_has_what_waiting_for_the_save_has_cost(rank, tmp_path):
    config = ringstow.Config(write_rate=1 << 20)
    handle = distributed.save_async(endless_on(rank, rank), tmp_path / "c", config=config)
    assert handle.result().blocked_seconds > 1


@on_ranks(2)
def test_a_cancelled_save_that_nobody_asks_for_is_no_failure(rank, tmp_path):
    path = tmp_path / "c"
    handle = distributed.save_async(endless_on(1, rank), path, config=NEVER)
    if rank == 1:
        handle.cancel()
    while not handle.done():
        pass
    del handle
    assert str(path) not in [failure.path for failure in _jobs.unreported]


@pytest.mark.parametrize("canceller", [0, 1])
@on_ranks(2)
def test_a_step_takes_the_place_of_a_cancelled_one(rank, tmp_path, canceller):
    with ringstow.CheckpointManager(tmp_path / "run", config=NEVER) as manager:
        first = manager.save_async(1, endless_on(canceller, rank), on_busy="skip")
        assert manager.save_async(2, state_of(rank), on_busy="skip").skipped
        if rank == canceller:
            first.cancel()
        last = manager.save_async(3, {"small": torch.ones(5)}, on_busy="skip")
        assert not last.skipped
        last.cancel()


@on_ranks(2)
def test_a_forked_child_is_told_whose_it_is(rank, tmp_path):
    handle = distributed.save_async(state_of(rank), tmp_path / "c", config=NEVER)
    child = os.fork()
    if child == 0:
        try:
            handle.result()
        except ringstow.Error as error:
            os._exit(0 if "belongs to process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handle.cancel()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()
