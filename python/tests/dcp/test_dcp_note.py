"""The step and the metrics that a writer notes for its next save."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from test_dcp_async import background
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch_has import needs_use_collectives

import ringstow
from ringstow.dcp import StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SECONDS = 240
STATE = {"w": torch.arange(5.0)}


def noted(root):
    return [(found.step, found.metrics) for found in ringstow.steps(root)]


def test_note_is_for_the_next_save_alone(tmp_path):
    writer = StorageWriter()
    for step in (1, 2):
        writer.note(step=step, metrics={"loss": torch.tensor(step / 4)})
        dcp.save(STATE, checkpoint_id=tmp_path / f"any-{step}x", storage_writer=writer)
    dcp.save(STATE, checkpoint_id=tmp_path / "bare", storage_writer=writer)
    assert noted(tmp_path) == [(1, {"loss": 0.25}), (2, {"loss": 0.5})]
    with ringstow.open(tmp_path / "bare") as checkpoint:
        assert (checkpoint.info.step, checkpoint.info.metrics) == (None, {})


def test_constructor_notes_the_first_save(tmp_path):
    writer = StorageWriter(tmp_path / "a", step=7, metrics={"loss": 1})
    dcp.save(STATE, storage_writer=writer)
    assert noted(tmp_path) == [(7, {"loss": 1.0})]


def test_last_note_before_a_save_counts(tmp_path):
    writer = StorageWriter()
    writer.note(step=1, metrics={"loss": 1.0})
    writer.note(step=2)
    dcp.save(STATE, checkpoint_id=tmp_path / "a", storage_writer=writer)
    assert noted(tmp_path) == [(2, {})]


@pytest.mark.parametrize("stager", ["snapshot", "stream", "torch's"])
def test_background_saves_each_get_the_note_of_their_call(tmp_path, stager):
    writer, chosen = StorageWriter(), None
    if stager != "snapshot":
        if "async_stager" not in inspect.signature(dcp.async_save).parameters:
            pytest.skip("this torch's async_save has no async_stager")
        other = BlockingAsyncStager(cache_staged_state_dict=False)
        chosen = writer.stager() if stager == "stream" else other
    uploads = []
    for step in range(4):
        if step != 2:
            writer.note(step=step, metrics={"loss": float(step)})
        uploads.append(background(STATE, tmp_path / f"s{step}x", writer, chosen)[1])
        if stager == "torch's":  # it does not say whose state it staged
            uploads[-1].result(SECONDS)
    for upload in uploads:
        upload.result(SECONDS)
    assert noted(tmp_path) == [(step, {"loss": float(step)}) for step in (0, 1, 3)]


def test_note_goes_with_the_pickle(tmp_path):
    writer = StorageWriter(tmp_path / "here")
    writer.note(step=3, metrics={"loss": float("inf")})
    elsewhere = pickle.loads(pickle.dumps(writer))
    dcp.save(STATE, checkpoint_id=tmp_path / "there", storage_writer=elsewhere)
    dcp.save(STATE, storage_writer=writer)
    assert noted(tmp_path) == [(3, {"loss": float("inf")})]


def test_wrong_note_is_refused_at_the_call(tmp_path):
    writer = StorageWriter()
    for wrong, error in (
        ({"metrics": {"loss": True}}, ringstow.InvalidStateError),
        ({"metrics": {"": 1}}, ringstow.InvalidStateError),
        ({"step": -1}, ValueError),
        ({"step": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            writer.note(**wrong)
        with pytest.raises(error):
            StorageWriter(**wrong)
    dcp.save(STATE, checkpoint_id=tmp_path / "a", storage_writer=writer)
    assert ringstow.latest(tmp_path).path == str(tmp_path / "a")


@needs_use_collectives
@on_ranks(2)
def test_coordinators_note_counts(rank, tmp_path):
    writer = StorageWriter()
    state = {"own": torch.full((10,), float(rank))}
    for step, name, options in ((1, "ax", {"use_collectives": False}), (2, "bx", {})):
        writer.note(step=step, metrics={"rank": rank})
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer, **options)
        dist.barrier()
    assert noted(tmp_path) == [(1, {"rank": 0.0}), (2, {"rank": 0.0})]
    with ringstow.open(tmp_path / "ax" / "rank00001") as checkpoint:
        assert checkpoint.info.metrics == {"rank": 1.0}
