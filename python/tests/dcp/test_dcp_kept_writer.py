"""One writer for many saves: the path it uses, in which thread, and in which process."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import pickle
import threading

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load
from support import assert_same
from test_dcp_async import Held
from test_dcp_writer import MOMENTS, Failing, cause
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch_has import needs_background_process

import ringstow
from ringstow.dcp import StorageWriter, _private, _saves_in_progress

pytestmark = pytest.mark.torch_seam

SECONDS = 240


@pytest.fixture(params=["pools as they are", "other pools"])
def pools(request, monkeypatch):
    """Repeat a test with thread pools that store their calls as another Python version does."""
    if request.param == "other pools":
        monkeypatch.setattr(_private, "_pool_item", lambda: (None, ""))
        monkeypatch.setattr(_saves_in_progress, "_UNSEEN_S", 0.1)
    return request.param


def state_of(number):
    return {"a": torch.full((1000,), float(number)), "n": number}


def save(number, path, writer, **options):
    dcp.save(state_of(number), checkpoint_id=path, storage_writer=writer, **options)


def save_async(number, path, writer, **options):
    """Save in the background; return the future."""
    options |= {"checkpoint_id": path, "storage_writer": writer}
    return dcp.async_save(state_of(number), **options)


def assert_saved(number, path):
    assert_same(load(path, state_of(number)), state_of(number))


# The path.


def test_checkpoint_id_is_valid_for_one_save(tmp_path):
    writer = StorageWriter()
    save(1, tmp_path / "1", writer)
    assert writer.checkpoint_id == str(tmp_path / "1")
    with pytest.raises(CheckpointException, match="would replace it") as caught:
        dcp.save(state_of(2), storage_writer=writer)
    assert type(cause(caught)) is ringstow.InvalidStateError
    assert str(tmp_path / "1") in str(cause(caught))
    assert_saved(1, tmp_path / "1")
    save(2, tmp_path / "2", writer)
    assert_saved(2, tmp_path / "2")


def test_checkpoint_id_is_valid_for_one_async_save(tmp_path):
    writer = StorageWriter()
    save_async(1, tmp_path, writer).result(SECONDS)
    error = save_async(2, None, writer).exception(SECONDS)
    assert "would replace it" in str(error)
    assert_saved(1, tmp_path)


def test_writer_reuses_its_own_path(tmp_path):
    writer = StorageWriter(tmp_path)
    for number in range(3):
        dcp.save(state_of(number), storage_writer=writer)
        assert_saved(number, tmp_path)


def test_own_path_after_a_checkpoint_id_is_refused(tmp_path):
    writer = StorageWriter(tmp_path / "own")
    save(1, tmp_path / "1", writer)
    with pytest.raises(CheckpointException, match="the writer's own path is"):
        dcp.save(state_of(2), storage_writer=writer)
    save(2, tmp_path / "own", writer)


def test_reset_applies_to_one_save_in_any_thread(tmp_path):
    writer = StorageWriter()
    writer.reset(tmp_path / "1")
    dcp.async_save(state_of(1), storage_writer=writer).result(SECONDS)
    assert_saved(1, tmp_path / "1")
    for save in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result(SECONDS)):
        with pytest.raises(CheckpointException, match="would replace it"):
            save(state_of(2), storage_writer=writer)


def test_pickled_writer_keeps_its_path(tmp_path):
    writer = StorageWriter()
    writer.reset(tmp_path)
    twin = pickle.loads(pickle.dumps(writer))
    dcp.save(state_of(1), storage_writer=twin)
    for used in (writer, twin, pickle.loads(pickle.dumps(twin))):
        with pytest.raises(CheckpointException, match="would replace it"):
            dcp.save(state_of(2), storage_writer=used)


@pytest.mark.parametrize("moment", MOMENTS)
def test_checkpoint_id_may_be_given_again_after_failure(moment, tmp_path):
    writer = StorageWriter()
    with pytest.raises(CheckpointException):
        save(1, tmp_path, writer, planner=Failing(moment))
    save(2, tmp_path, writer)
    assert_saved(2, tmp_path)


# The thread.


@needs_background_process
def test_dcp_runs_background_saves_in_its_own_pool(tmp_path):
    """Fails if torch starts background saves in another way; then only a time limit works."""
    calls = []

    class Noting(DefaultSavePlanner):
        def create_local_plan(self):
            calls.append(_private.Call())
            return super().create_local_plan()

    save_async(1, tmp_path, StorageWriter(), planner=Noting()).result(SECONDS)
    assert [call.is_save for call in calls] == [True]
    assert not _private.Call().is_save


@pytest.mark.parametrize("way", ["reset", "stage", "stager", "close", "another writer"])
def test_reused_writer_has_ended_its_save(way, tmp_path):
    writer = StorageWriter(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save(state_of(1), storage_writer=writer, planner=Failing("create_local_plan"))
    save = writer._saves.latest
    with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(save.may_commit).result(SECONDS)
        assert elsewhere.submit(save.is_running).result(SECONDS)
        match way:
            case "reset":
                writer.reset()
            case "stage":
                writer.stage({})
            case "stager":
                writer.stager().stage({}).fail(RuntimeError("no save"))
            case "close":
                writer.close()
            case _:
                StorageWriter()
        assert not elsewhere.submit(save.may_commit).result(SECONDS)
        assert not elsewhere.submit(save.is_running).result(SECONDS)


class Stopping(StorageWriter):
    """Holds a save between two hooks, and after the last one."""

    def __init__(self, path):
        super().__init__(path)
        self.stops = [(threading.Event(), threading.Event()) for _ in range(2)]

    def _stop(self, number):
        reached, go_on = self.stops[number]
        reached.set()
        assert go_on.wait(SECONDS)

    def prepare_local_plan(self, plan):
        self._stop(0)
        return plan

    def finish(self, metadata, results):
        super().finish(metadata, results)
        self._stop(1)


@pytest.mark.parametrize("end", ["returns", "fails"])
def test_save_in_a_pool_runs_until_its_call_ends(end, tmp_path, monkeypatch):
    """async_save of torch 2.6 works like this: its pool has no name."""
    monkeypatch.setattr(_saves_in_progress, "_UNSEEN_S", 0.0)
    writer = Stopping(tmp_path)
    planner = Failing("finish_plan" if end == "fails" else "never")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(dcp.save, state_of(1), storage_writer=writer, planner=planner)
        for reached, go_on in writer.stops[: 1 if end == "fails" else 2]:
            assert reached.wait(SECONDS)
            assert writer._saves.latest.is_running()
            go_on.set()
        assert (done.exception(SECONDS) is None) == (end == "returns")
        pool.submit(int).result(SECONDS)
        assert not writer._saves.latest.is_running()


@pytest.mark.parametrize("function", [dcp.save, lambda *args, **kwargs: dcp.save(*args, **kwargs)])
def test_failed_save_in_idle_pool_blocks_no_writer(function, tmp_path):
    writers = StorageWriter(tmp_path), StorageWriter(tmp_path)
    planner = Failing("finish_plan")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        failed = pool.submit(function, state_of(1), storage_writer=writers[0], planner=planner)
        assert isinstance(failed.exception(SECONDS), CheckpointException)
        pool.submit(int).result(SECONDS)
        dcp.save(state_of(2), storage_writer=writers[1])
    assert_saved(2, tmp_path)


def test_background_save_takes_no_path_of_another_save(tmp_path):
    writer = StorageWriter(tmp_path / "own")
    staged = writer.stage(state_of(1))
    writer.reset(tmp_path / "other")
    with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(dcp.save, staged, storage_writer=writer).result(SECONDS)
    assert_saved(1, tmp_path / "own")
    dcp.save(state_of(2), storage_writer=writer)
    assert_saved(2, tmp_path / "other")


class Crossing(DefaultSavePlanner):
    """Holds saves between two hooks until all have arrived, or until a time limit."""

    def __init__(self, barrier):
        super().__init__()
        self._barrier = barrier

    def create_local_plan(self):
        with contextlib.suppress(threading.BrokenBarrierError):  # sequential saves are fine too
            self._barrier.wait(0.3)
        return super().create_local_plan()


def test_saves_of_one_writer_in_several_threads_never_mix(pools, tmp_path):
    writer = StorageWriter()
    barrier = threading.Barrier(3)
    errors = []

    def save_one(number):
        options = {"planner": Crossing(barrier), "no_dist": True}
        try:
            save(number, tmp_path / str(number), writer, **options)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save_one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert errors == []
    for number in range(3):
        assert_saved(number, tmp_path / str(number))


def test_no_save_removes_files_of_another_save(pools, tmp_path):
    writers = StorageWriter(), StorageWriter()
    planner = Held()
    first = save_async(1, tmp_path, writers[0], planner=planner)
    assert planner.reached.wait(SECONDS)
    with pytest.raises(CheckpointException) as caught:
        save(2, tmp_path, writers[1])
    assert type(cause(caught)) is ringstow.BusyError
    planner.go_on.set()
    first.result(SECONDS)
    assert_saved(1, tmp_path)


@pytest.mark.parametrize("moment", MOMENTS)
def test_failed_save_in_the_main_thread_blocks_no_other(moment, pools, tmp_path):
    writer = StorageWriter()
    with pytest.raises(CheckpointException) as kept:
        save(1, tmp_path, writer, planner=Failing(moment))
    save_async(2, tmp_path, writer).result(SECONDS)
    assert_saved(2, tmp_path)
    assert kept.value.failures


def test_hooks_in_threads_belong_to_the_latest_save(tmp_path):
    """Some programs run the hooks in their own threads; torch's functions do not."""
    writer = StorageWriter(tmp_path)

    def elsewhere(function, *args, **kwargs):
        results = []
        thread = threading.Thread(target=lambda: results.append(function(*args, **kwargs)))
        thread.start()
        thread.join(SECONDS)
        return results[0]

    planner = DefaultSavePlanner()
    planner.set_up_planner(state_of(1), writer.storage_meta(), True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = elsewhere(writer.prepare_global_plan, plans)
    results = elsewhere(writer.write_data, planner.finish_plan(plan), planner).wait()
    elsewhere(writer.finish, metadata, [results])
    assert_saved(1, tmp_path)


def test_hook_before_a_save_raises():
    with pytest.raises(ringstow.InvalidStateError, match="without set_up_storage_writer"):
        StorageWriter().prepare_global_plan([])


# The process.

FORKED = """
import os, sys, threading, torch, torch.distributed.checkpoint as dcp, ringstow.dcp
ringstow.dcp._snapshot._UNCLAIMED_S = 0.05  # saves need not wait for unclaimed snapshots
path, when = sys.argv[1:]
torch.set_num_threads(1)  # a forked child waits for its parent's threads, which it lacks
state = {"a": torch.ones(3_000_000)}
writer = ringstow.dcp.StorageWriter()
if when == "staged":
    writer.stage(state)
elif when == "saved":
    dcp.async_save(state, checkpoint_id=path + "/0", storage_writer=writer).result()
else:  # another thread holds the writer, its locks and the directory
    reached = threading.Event()
    class Held(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            reached.set()
            go_on.wait()
            return super().resolve_data(item)
    go_on = threading.Event()
    first = dcp.async_save(
        state, checkpoint_id=path + "/0", storage_writer=writer, planner=Held()
    )
    reached.wait()
child = os.fork()
if not child:
    try:
        staged = writer.stage(state)
        assert float(staged["a"].sum()) == 3_000_000
        dcp.async_save(state, checkpoint_id=path + "/1", storage_writer=writer).result()
        writer.close()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
if when == "saving":
    go_on.set()
    first.result()
dcp.async_save(state, checkpoint_id=path + "/2", storage_writer=writer).result()
"""


@pytest.mark.parametrize("when", ["staged", "saved", "saving"])
def test_forked_child_saves_with_its_parents_writer(when, tmp_path):
    done = forked.python(FORKED, tmp_path, when)
    assert done.returncode == 0, done.stderr
    for name in ["1", "2"] if when == "staged" else ["0", "1", "2"]:
        state = {"a": torch.ones(3_000_000)}
        assert_same(load(tmp_path / name, state), state)


@pytest.mark.parametrize("streams", [False, True])
def test_dicts_in_a_tuple_keep_their_types(streams, tmp_path):
    """To DCP a tuple is one value."""
    writer = StorageWriter()
    inner = collections.defaultdict(list, a=[torch.arange(3)])
    staged = (writer.stager() if streams else writer).stage({"t": (inner,)})
    (copied,) = (staged.result() if streams else staged)["t"]
    inner["a"][0].zero_()
    assert type(copied) is collections.defaultdict
    assert_same(copied["a"], [torch.arange(3)])
    if streams:
        staged.staged()
