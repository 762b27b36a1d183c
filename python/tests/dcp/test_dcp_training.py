"""Training during a streamed save of sharded state: the next step waits, and is not saved."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layouts import INPUT, differences, load, trained, whole
from ranks import on_ranks
from test_dcp_async import Held, background
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch_has import needs_async_stager

import ringstow
from ringstow._saving import _guard
from ringstow.dcp import StorageWriter

pytestmark = pytest.mark.torch_seam

SECONDS = 240
# Enough rows that each rank's shard is streamed instead of copied at the call.
HIDDEN = 40_000


@contextlib.contextmanager
def _released_by_a_step(planner):
    """Release the save once a step waits for it; yield a list of the waits."""
    wait, waits = _guard.Hold.wait, []

    def go_on_then_wait(hold):
        waits.append(True)
        planner.go_on.set()
        wait(hold)

    with patch.object(_guard.Hold, "wait", go_on_then_wait):
        yield waits


@needs_async_stager
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_a_step_waits_for_the_shards_of_its_rank(rank, tmp_path, layout):
    model, optimizer = trained(layout, HIDDEN, seed=1)
    expected, parts = whole(model, optimizer), get_state_dict(model, optimizer)
    planner = Held()
    writer = StorageWriter()
    state = {"model": parts[0], "optim": parts[1], "step": 7}
    options = {"process_group": dist.new_group(backend="gloo"), "planner": planner}
    _, upload = background(state, tmp_path, writer, writer.stager(), **options)
    with _released_by_a_step(planner) as waits:
        model(torch.randn(5, INPUT)).square().sum().backward()
        assert not waits
        optimizer.step()
        assert waits
    upload.result(SECONDS)
    found = load(rank, layout, tmp_path, HIDDEN)
    assert rank or differences(expected, found) == []


def _local(value):
    if hasattr(value, "to_local"):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return value


@on_ranks(2)
def test_a_rank_saves_its_own_shards_while_it_trains(rank, tmp_path):
    model, optimizer = trained("fsdp2", HIDDEN, seed=1)
    state = [_local(part) for part in get_state_dict(model, optimizer)]
    expected = _frozen(state)
    handle = ringstow.save_async({"state": state}, tmp_path / str(rank))
    model(torch.randn(5, INPUT)).square().sum().backward()
    optimizer.step()
    handle.result()
    found = ringstow.load(tmp_path / str(rank))["state"]
    assert differences(expected, found) == []


def _frozen(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return [_frozen(item) for item in value] if type(value) is list else value
