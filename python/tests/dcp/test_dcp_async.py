"""Background saves: the snapshot, streaming from live tensors, and torch's own stagers."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import every_kind, load, plain
from support import assert_same
from test_dcp_writer import MOMENTS, Failing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch_has import needs_async_stager, needs_staging_options, stager_option

import ringstow
from ringstow._saving._guard import Hold
from ringstow.dcp import StorageWriter, _snapshot, _streaming_stager

pytestmark = pytest.mark.torch_seam

SECONDS = 240


class Held(DefaultSavePlanner):
    """Holds a save before it resolves its first tensor, until the test releases it."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def resolve_data(self, item):
        self.reached.set()
        assert self.go_on.wait(SECONDS)
        return super().resolve_data(item)


@pytest.fixture
def writer():
    writer = StorageWriter()
    yield writer
    writer.close()


def overwrite(value):
    """Change every mutable value of a state."""
    if isinstance(value, torch.Tensor):
        if value.numel() and not (value.dim() and value.stride()[0] == 0):
            value.detach().zero_()
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            overwrite(item)
        value.update(more=1) if isinstance(value, dict) else value.append(1)


def background(state, path, writer, stager=None, **options):
    """Save in the background; return the futures of its staging, or None, and of its end."""
    options |= stager_option(stager)
    found = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, **options)
    return getattr(found, "staging_completion", None), getattr(found, "upload_completion", found)


def default_stager(*, in_background):
    """Return torch's own stager."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(StagingOptions(False, False, in_background, False))


STAGERS = {
    "the writer": lambda writer: None,
    "streaming": lambda writer: writer.stager(),
    "blocking": lambda writer: BlockingAsyncStager(),
    "default": lambda writer: default_stager(in_background=False),
    "default in the background": lambda writer: default_stager(in_background=True),
}


WITH_STAGERS = [
    "the writer",
    *(pytest.param(name, marks=needs_async_stager) for name in ("streaming", "blocking")),
]
TORCHS = [name for name in STAGERS if name.startswith("default")]


@pytest.mark.parametrize(
    "which", [*WITH_STAGERS, *(pytest.param(name, marks=needs_staging_options) for name in TORCHS)]
)
def test_changes_after_staging_are_not_saved(which, writer, tmp_path):
    state = every_kind()
    if which == "blocking":
        del state["optimizer"]["param_groups"]  # this stager supports fewer types than DCP
    if which.startswith("default"):
        del state["model"]["conj"], state["model"]["neg"]  # it drops the conj and neg bits
    expected = plain(state)
    staging, upload = background(state, tmp_path, writer, STAGERS[which](writer))
    if staging is not None:
        staging.result(SECONDS)
    overwrite(state)
    upload.result(SECONDS)
    assert_same(load(tmp_path, expected), expected)


def test_snapshot_memory_is_reused(writer, tmp_path):
    state = {"a": torch.zeros(1 << 20), "b": torch.zeros(7)}
    addresses = set()
    for step in range(3):
        state["a"].fill_(step)
        staged = writer.stage(state)
        assert float(staged["a"].min()) == float(staged["a"].max()) == step
        addresses.add(staged["a"].data_ptr())
        del staged
    assert len(addresses) == 1


def test_snapshot_lives_while_one_of_its_tensors_does(writer, monkeypatch):
    held = writer.stage({"a": {"b": torch.ones(5)}})["a"]["b"]
    monkeypatch.setattr(_snapshot, "_UNCLAIMED_S", 0.05)
    writer.stage({"a": {"b": torch.zeros(5)}})
    assert_same(held, torch.ones(5))


def test_snapshot_that_dcp_drops_after_the_result_is_released_too(writer, monkeypatch):
    ringstow.release_memory()
    staged = [writer.stage({"a": torch.ones(20_000_000)})]
    lease = writer._snapshot._lease
    lease.end(lease.read())  # it is saved, and the thread is about to end the call
    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: staged.clear())
    monkeypatch.setattr(_snapshot, "time", clock)
    assert ringstow.release_memory() >= 80_000_000


def test_torch_save_of_one_snapshot_tensor_is_small(writer, tmp_path):
    staged = writer.stage({"a": torch.zeros(1 << 20), "b": torch.arange(7.0)})
    torch.save(staged["b"], tmp_path / "b")
    assert (tmp_path / "b").stat().st_size < 10_000


def test_tied_tensors_are_copied_once_in_a_snapshot(writer):
    ringstow.release_memory()
    weight = torch.arange(12.0).reshape(3, 4)
    staged = writer.stage({"a": weight, "b": {"c": weight}, "p": torch.nn.Parameter(weight)})
    assert staged["a"] is staged["b"]["c"]
    assert staged["p"].data_ptr() == staged["a"].data_ptr()
    assert writer._snapshot._memory.nbytes == 64
    weight.zero_()
    assert_same(staged["a"], torch.arange(12.0).reshape(3, 4))


def test_tuples_and_named_tuples_are_copied_too(writer):
    maximum = torch.return_types.max((torch.ones(1),) * 2)
    state = {"t": (torch.ones(2), [torch.ones(2)]), "s": maximum}
    staged = writer.stage(state)
    state["t"][0].zero_()
    state["t"][1][0].zero_()
    assert_same(staged["t"], (torch.ones(2), [torch.ones(2)]))


def test_next_snapshot_waits_for_the_save_of_the_last(writer, tmp_path):
    state = {"a": torch.ones(1000)}
    planner = Held()
    _, first = background(state, tmp_path / "1", writer, planner=planner)
    assert planner.reached.wait(SECONDS)
    state["a"].fill_(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        staged = pool.submit(writer.stage, state)
        with pytest.raises(concurrent.futures.TimeoutError):
            staged.result(0.1)
        planner.go_on.set()
        assert float(staged.result(SECONDS)["a"][0]) == 2
    first.result(SECONDS)
    assert_same(load(tmp_path / "1", state), {"a": torch.ones(1000)})


def test_back_to_back_saves_keep_each_calls_values(writer, tmp_path):
    state = {"a": torch.zeros(100_000), "step": 0}
    uploads = []
    for step in range(5):
        state["a"].fill_(step)
        state["step"] = step
        uploads.append(background(state, tmp_path / str(step), writer)[1])
    for step, upload in enumerate(uploads):
        upload.result(SECONDS)
        expected = {"a": torch.full((100_000,), float(step)), "step": step}
        assert_same(load(tmp_path / str(step), expected), expected)


@pytest.mark.parametrize("moment", MOMENTS)
def test_failed_save_does_not_delay_the_next_snapshot(moment, writer, tmp_path):
    state = {"a": torch.ones(1000)}
    _, failed = background(state, tmp_path, writer, planner=Failing(moment))
    error = failed.exception(SECONDS)  # kept: its frames hold the snapshot
    assert isinstance(error, CheckpointException)
    address = writer._snapshot._memory.address
    again = writer.stage(state)
    assert again["a"].data_ptr() == address
    dcp.save(again, checkpoint_id=tmp_path, storage_writer=writer)
    assert_same(load(tmp_path, state), state)


@needs_async_stager
@pytest.mark.parametrize("stager", ["the writer", "streaming", "blocking"])
def test_a_failure_is_logged_even_if_nobody_asks_the_future(stager, writer, tmp_path, caplog):
    (tmp_path / "c").write_text("in the way")
    _, upload = background({"a": torch.ones(9)}, tmp_path / "c", writer, STAGERS[stager](writer))
    concurrent.futures.wait([upload], SECONDS)
    said = [text for text in caplog.messages if text.startswith("the background save to ")]
    assert [f"{tmp_path / 'c'} failed: " in text for text in said] == [True]
    with pytest.raises(CheckpointException):
        dcp.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "c", storage_writer=writer)
    # Which raises, and logs nothing.
    assert len([text for text in caplog.messages if "background" in text]) == 1


def test_unsaved_snapshot_does_not_delay_the_next(writer, monkeypatch):
    kept = writer.stage({"a": torch.ones(1000)})
    monkeypatch.setattr(_snapshot, "_UNCLAIMED_S", 0.05)
    other = writer.stage({"a": torch.zeros(1000)})
    assert_same(kept["a"], torch.ones(1000))
    assert_same(other["a"], torch.zeros(1000))


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_that_looks_at_a_snapshot_does_not_count_as_its_save(writer, monkeypatch):
    staged = writer.stage({"a": torch.ones(1000)})
    in_thread(lambda: list(staged.items()))
    monkeypatch.setattr(_snapshot, "_UNCLAIMED_S", 0.05)
    writer.stage({"a": torch.full((1000,), 2.0)})
    assert_same(staged["a"], torch.ones(1000))


def test_a_snapshot_can_be_saved_twice_until_its_memory_has_the_next(writer, tmp_path):
    staged = writer.stage({"a": torch.ones(1000)})
    for name in "one", "two":
        options = {"checkpoint_id": tmp_path / name, "storage_writer": writer}
        in_thread(functools.partial(dcp.save, staged, **options))
        assert_same(load(tmp_path / name, {"a": torch.zeros(1000)}), {"a": torch.ones(1000)})
    other = writer.stage({"a": torch.full((1000,), 2.0)})
    assert other["a"].data_ptr() == staged["a"].data_ptr()
    with pytest.raises(ringstow.InvalidStateError, match="stage the state again for each save"):
        dcp.save(staged, checkpoint_id=tmp_path / "three", storage_writer=writer)
    dcp.save(other, checkpoint_id=tmp_path / "four", storage_writer=writer)


def test_a_second_save_of_a_snapshot_keeps_its_memory_until_it_has_read_it(writer, tmp_path):
    staged = writer.stage({"a": torch.ones(1000)})
    in_thread(lambda: dcp.save(staged, checkpoint_id=tmp_path / "one", storage_writer=writer))
    planner = Held()
    other = StorageWriter()
    other._snapshot = writer._snapshot
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(
            dcp.save, staged, checkpoint_id=tmp_path / "two", storage_writer=other, planner=planner
        )
        assert planner.reached.wait(SECONDS)
        assert not writer._snapshot._lease.is_over()
        planner.go_on.set()
        second.result(SECONDS)
    assert writer._snapshot._lease.is_over()
    assert_same(load(tmp_path / "two", {"a": torch.zeros(1000)}), {"a": torch.ones(1000)})


def test_the_collector_may_end_a_lease_while_another_thread_waits_for_it(writer, monkeypatch):
    """Without a lock: the collector runs in any thread, within the wait itself too."""
    writer._snapshot._lease = lease = _snapshot.Lease(lambda _: None)
    lease.read()
    monkeypatch.setattr(_snapshot.time, "sleep", lambda _: lease.gone())
    assert lease.wait()


def test_plain_save_does_not_free_the_snapshot(writer, tmp_path):
    planner = Held()
    state = {"a": torch.ones(1000)}
    _, upload = background(state, tmp_path / "1", writer, planner=planner)
    assert planner.reached.wait(SECONDS)
    other = StorageWriter(tmp_path / "2")
    dcp.save({"a": torch.zeros(5)}, storage_writer=other)
    assert not writer._snapshot._lease.is_over()
    planner.go_on.set()
    upload.result(SECONDS)


@needs_async_stager
def test_a_streamed_save_is_staged_before_it_is_committed(writer, tmp_path, monkeypatch):
    state = {"a": torch.ones(1000), "n": [1]}
    events = []
    finish = writer.finish
    held = threading.Event()

    def slow_finish(**arguments):
        assert held.wait(SECONDS)
        events.append("finish")
        finish(**arguments)

    monkeypatch.setattr(writer, "finish", slow_finish)
    staging, upload = background(state, tmp_path, writer, writer.stager())
    staging.result(SECONDS)
    events.append("staged")
    state["a"].zero_()
    state["n"].append(2)
    held.set()
    upload.result(SECONDS)
    assert events == ["staged", "finish"]
    assert_same(load(tmp_path, state), {"a": torch.ones(1000), "n": [1]})
    assert writer._snapshot._memory is None


def weights(numel=1 << 18):
    """Return an optimizer whose step does not bump its weights' versions, and the weights."""
    weight = torch.nn.Parameter(torch.ones(numel))
    weight.grad = torch.ones_like(weight)
    return torch.optim.AdamW([weight], 0.1, fused=True), weight


@needs_async_stager
def test_a_step_waits_for_a_streamed_save(writer, tmp_path, monkeypatch):
    optimizer, weight = weights()
    planner, wait = Held(), Hold.wait

    def go_on_then_wait(hold):
        planner.go_on.set()
        wait(hold)

    monkeypatch.setattr(Hold, "wait", go_on_then_wait)
    state = {"w": weight.detach(), "small": torch.ones(8), "inference": inference(1 << 18)}
    _, upload = background(state, tmp_path, writer, writer.stager(), planner=planner)
    state["small"].zero_()
    with torch.inference_mode():
        state["inference"].zero_()
    assert not planner.go_on.is_set()
    optimizer.step()
    assert planner.go_on.is_set()
    assert not weight.detach().eq(1).all()
    upload.result(SECONDS)
    back = ringstow.load(tmp_path)
    assert all(value.eq(1).all() for value in back.values())


def inference(numel):
    with torch.inference_mode():
        return torch.ones(numel)


@needs_async_stager
def test_tensor_changed_under_a_streamed_save_fails_it(writer, tmp_path):
    ringstow.save({"step": 1}, tmp_path)
    state, planner = {"w": torch.ones(1 << 18), "other": torch.ones(1 << 18)}, Held()
    staging, upload = background(state, tmp_path, writer, writer.stager(), planner=planner)
    state["w"].zero_()
    planner.go_on.set()
    assert isinstance(staging.exception(SECONDS), ringstow.TornSaveError)
    error = upload.exception(SECONDS)
    assert isinstance(error, CheckpointException)
    (torn,) = error.failures.values()
    assert (torn[0] if isinstance(torn, tuple) else torn).tensors == ["w"]
    writer.close()
    assert ringstow.load(tmp_path) == {"step": 1}


@needs_async_stager
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_streamed_save_that_failed_releases_the_tensors_and_no_step_waits(
    moment, writer, tmp_path
):
    optimizer, weight = weights()
    state = {"w": weight.detach(), "small": torch.ones(1000)}
    staging, upload = background(state, tmp_path, writer, writer.stager(), planner=Failing(moment))
    optimizer.step()
    error = staging.exception(SECONDS)
    assert isinstance(error, ringstow.Error)
    assert isinstance(upload.exception(SECONDS), CheckpointException)
    if moment == "resolve_data":
        assert "failed in resolve_data" in str(error)
    else:
        assert "upload_completion has its error" in str(error)


@needs_async_stager
def test_no_step_waits_for_a_save_that_never_begins(writer, monkeypatch):
    optimizer, weight = weights()
    monkeypatch.setattr(_streaming_stager, "_UNCLAIMED_S", 0.0)
    future = writer.stager().stage({"w": weight.detach()})
    optimizer.step()
    with pytest.raises(ringstow.Error, match="had not begun"):
        future.result(0)


@needs_async_stager
def test_streaming_from_within_a_step_is_refused(writer, tmp_path):
    optimizer, weight = weights()
    state = {"w": weight.detach()}
    optimizer.register_step_pre_hook(
        lambda *_: background(state, tmp_path, writer, writer.stager())
    )
    with pytest.raises(ringstow.UnsupportedError, match="leave out async_stager="):
        optimizer.step()
    assert not (tmp_path / "manifest.json").exists()
    optimizer, weight = weights()
    optimizer.step()


@needs_async_stager
def test_a_writer_without_a_path_fails_both_completions(writer):
    staging, upload = background({"a": 1}, None, writer, writer.stager())
    assert isinstance(staging.exception(SECONDS), ringstow.Error)
    assert "there is no path" in str(upload.exception(SECONDS))


def test_torch_accepts_the_writer_as_stager():
    """If a method is missing, torch silently falls back to its own stager."""
    from torch.distributed.checkpoint.staging import AsyncStager

    writer = StorageWriter()
    assert isinstance(writer, AsyncStager)
    assert isinstance(writer.stager(), AsyncStager)
    assert not writer.should_synchronize_after_execute
    writer.synchronize_staging()


def test_a_checkpointable_tensor_keeps_its_place(writer, tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3)
    tensor.global_shape, tensor.global_offsets = (2, 3), ((0, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((2, 3),)
    staged = writer.stage({"a": tensor, "b": tensor})
    assert staged["a"].global_shape == (2, 3)
    assert staged["a"].data_ptr() == staged["b"].data_ptr()
