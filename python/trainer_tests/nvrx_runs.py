"""Ranks that save local checkpoints by NVRx with ringstow, and resume; some of them are killed.

NVRx asks CUDA for its device and waits for it. Here there is none, so that is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
from unittest.mock import Mock

import children
import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

from ringstow._state.tensors._memory import LazyTensor
from ringstow.integrations import nvrx
from ringstow.integrations.nvrx import LocalCheckpointManager

children.preload(__name__)

LARGE = 1 << 16
ITERATIONS = 4


class OnCpu(BasicTensorAwareStateDict):
    """NVRx's own state dict, for tensors on the CPU."""

    def __init__(self, state_dict):
        self.state_dict = state_dict
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking=True):
        pass


class Held:
    """What only a pickle can keep."""

    def __init__(self, number):
        self.number = number


class Odd(OnCpu):
    """A state dict with an attribute that only a pickle can keep."""

    def __init__(self, state_dict, number):
        super().__init__(state_dict)
        self.held = Held(number)


def without_cuda():
    """Let NVRx do with the CPU what it does with CUDA."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    empty_like = torch.empty_like

    def on_cpu(tensor, *args, device=None, **more):
        return empty_like(tensor, *args, device="cpu" if device == "cuda" else device, **more)

    torch.empty_like = on_cpu


@contextlib.contextmanager
def group():
    """Be one rank of a group."""
    without_cuda()
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def manager(root, *, replicas=False, **options):
    strategy = None
    if replicas:
        strategy = CliqueReplicationStrategy.from_replication_params(1, dist.get_world_size())
    options = {"state_dicts": [OnCpu], **options}
    return LocalCheckpointManager(root, "session", repl_strategy=strategy, **options)


def state_at(rank, iteration):
    """Return what a rank's training has after an iteration."""
    return {"w": torch.full((LARGE,), 100.0 * rank + iteration), "parts": [iteration, "text"]}


def wrapped(rank, iteration):
    return OnCpu(state_at(rank, iteration))


def folder(root, rank):
    return pathlib.Path(root) / "session" / str(rank)


def names(root, rank):
    return sorted(path.name for path in folder(root, rank).iterdir())


def train(rank, ranks, root, mode="sync", until=ITERATIONS, arrange=None):
    """Resume, train to the end and save each iteration; return where it began, and the end.

    Args:
        mode: ``"sync"``, ``"forked"`` or ``"persistent"``: how NVRx runs the save.
        until: the number of iterations.
        arrange: called with the rank and the iteration before each save.
    """
    with group():
        one = manager(root)
        queue = None if mode == "sync" else AsyncCallsQueue(persistent=mode == "persistent")
        begun = one.find_latest()
        state = state_at(rank, begun)
        if begun != -1:
            loaded, ckpt_id = one.load()
            assert ckpt_id == (begun, rank, "session")
            state = loaded.state_dict
        for iteration in range(begun + 1, until):
            state["w"] = state["w"] + 1
            state["parts"][0] += 1
            if arrange is not None:
                arrange(rank, iteration)
            save(one, queue, OnCpu(dict(state)), iteration)
        if queue is not None:
            queue.close()
    return begun, state


def save(one, queue, state, iteration):
    if queue is None:
        one.save(state, iteration)
    else:
        queue.schedule_async_request(one.save(state, iteration, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)


def killed(rank, ranks, root, moment, at, victims, mode):
    """Train, and be killed at a moment of a save, in the process that does it."""

    def arrange(rank, iteration):
        if rank in victims and iteration == at:
            die_at(moment)

    train(rank, ranks, root, mode=mode, arrange=arrange)


def die_at(moment):
    saves = nvrx.save

    def starting(*_args, **_more):
        children.die()

    def writing(packed, path, **more):
        hold = LazyTensor("F32", (LARGE,), 4 * LARGE, children.die)
        saves({**packed, "hold": hold}, path, **more)

    def committed(*args, **more):
        saves(*args, **more)
        children.die()

    if moment == "removing":
        nvrx.remove = lambda path, **_: (
            os.rename(f"{path}/manifest.json", f"{path}/manifest.json.retired"),
            os.kill(os.getpid(), signal.SIGKILL),
        )
    else:
        nvrx.save = {"starting": starting, "writing": writing, "committed": committed}[moment]


def full_disk(rank, ranks, root, mode):
    """Fail to save on rank 1: all ranks raise it, remove what they have, and go on."""
    saves = nvrx.save
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    with group():
        one = manager(root)
        save(one, None, wrapped(rank, 1), 1)
        queue = None if mode == "sync" else AsyncCallsQueue(persistent=False)
        if rank == 1:
            nvrx.save = full
        with pytest.raises(CheckpointingException) as caught:
            save(one, queue, wrapped(rank, 2), 2)
        has_cause = isinstance(caught.value.__cause__, OSError)
        assert has_cause == (mode == "sync" and rank == 1)
        nvrx.save = saves
        save(one, queue, wrapped(rank, 2), 2)  # of the same number, again
        assert one.find_latest() == 2
        assert one.load()[0].state_dict["w"].max() == 100 * rank + 2
        if queue is not None:
            queue.close()


def newest(rank, ranks, root, options):
    """Return what is found, and loaded: the weights, or the error."""
    with group():
        one = manager(root, **options)
        found = one.find_latest()
        try:
            return found, one.load()[0].state_dict["w"]
        except CheckpointingException as error:
            return found, str(error)


def saved(rank, ranks, root, iterations, options):
    """Save iterations, and keep all of them."""
    with group():
        one = manager(root, **options)
        one._cleanup = lambda _: None
        for iteration in iterations:
            one.save(wrapped(rank, iteration), iteration)


def unlisted(rank, ranks, root):
    """Save and load state dicts of other classes."""
    with group():
        strict, lax = manager(root), manager(root, allow_pickle=True)
        with pytest.raises(CheckpointingException) as caught:
            strict.save(Odd({"w": torch.ones(LARGE)}, 7), 1)
        assert "allow_pickle=True" in str(caught.value.__cause__)
        state = Odd({"w": torch.ones(LARGE)}, 7)
        lax.save(state, 1)
        assert not state.is_hollow
        lax.find_latest()
        back, _ = lax.load()
        assert (type(back), back.held.number) == (Odd, 7)
        assert torch.equal(back.state_dict["w"], torch.ones(LARGE))
        for other, reason in ((strict, "allow_pickle"), (manager(root, state_dicts=[]), "pickle")):
            assert other.find_latest() == 1
            with pytest.raises(CheckpointingException, match=reason):
                other.load()
