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


def ask(rank, path):
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
    return report.step


def test_it_is_awaited_and_says_how_far_it_is(ranks, tmp_path):
    assert ranks(2).run(ask, tmp_path / "c") == [3, 3]


def release(rank, path):
    ringstow.release_memory()
    handle = distributed.save_async(state_of(rank, 80 << 20), path, staging="snapshot")
    released = queue.SimpleQueue()
    handle.add_done_callback(lambda handle: released.put(ringstow.release_memory()))
    return released.get()


def test_copies_are_no_longer_in_use_once_the_result_is_known(ranks, tmp_path):
    assert all(released > 80 << 20 for released in ranks(2).run(release, tmp_path / "c"))


def cancel_on_one(rank, path):
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
    return str(caught.value)


def test_one_rank_cancels_for_all(ranks, tmp_path):
    said = ranks(2).run(cancel_on_one, tmp_path / "c")
    assert said[0].startswith("rank 1 has cancelled the save: ")
    assert list(ringstow.load(tmp_path / "c")) == ["old"]


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


def wait_in_vain(rank, path):
    config = dataclasses.replace(NEVER, pool_bytes=2 << 20)  # less than rank 1's tensor
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


def test_wait_staged_raises_what_the_save_failed_of(ranks, tmp_path):
    ranks(2).run(wait_in_vain, tmp_path / "c")


def wait_for_it(rank, path):
    config = ringstow.Config(write_rate=1 << 20)
    handle = distributed.save_async(endless_on(rank, rank), path, config=config)
    return handle.result().blocked_seconds


def test_the_report_has_what_waiting_for_the_save_has_cost(ranks, tmp_path):
    assert all(seconds > 1 for seconds in ranks(2).run(wait_for_it, tmp_path / "c"))


def nobody_asks(rank, path):
    handle = distributed.save_async(endless_on(1, rank), path, config=NEVER)
    if rank == 1:
        handle.cancel()
    while not handle.done():
        pass
    del handle
    return [failure.path for failure in _jobs.unreported if failure.path == str(path)]


def test_a_cancelled_save_that_nobody_asks_for_is_no_failure(ranks, tmp_path):
    assert ranks(2).run(nobody_asks, tmp_path / "c") == [[], []]


def cancel_and_save_again(rank, path, canceller):
    with ringstow.CheckpointManager(path, config=NEVER) as manager:
        first = manager.save_async(1, endless_on(canceller, rank), on_busy="skip")
        assert manager.save_async(2, state_of(rank), on_busy="skip").skipped
        if rank == canceller:
            first.cancel()
        last = manager.save_async(3, {"small": torch.ones(5)}, on_busy="skip")
        assert not last.skipped
        last.cancel()


@pytest.mark.parametrize("canceller", [0, 1])
def test_a_step_takes_the_place_of_a_cancelled_one(ranks, tmp_path, canceller):
    ranks(2).run(cancel_and_save_again, tmp_path / "run", canceller)


def ask_in_a_child(rank, path):
    handle = distributed.save_async(state_of(rank), path)
    child = os.fork()
    if child == 0:
        try:
            handle.result()
        except ringstow.Error as error:
            os._exit(0 if "belongs to process" in str(error) else 1)
        os._exit(2)
    handle.result()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_told_whose_it_is(ranks, tmp_path):
    assert ranks(2).run(ask_in_a_child, tmp_path / "c") == [0, 0]
