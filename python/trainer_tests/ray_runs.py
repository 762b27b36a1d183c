"""A Ray cluster on this machine, a tiny training, and workers that are killed while they save.

Ray's workers import this module, as the tests do.
"""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import signal
import sys
import threading
from unittest.mock import Mock

import children
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ringstow.dcp._private import flattened

children.preload(__name__)

WIDTH = 160  # a weight is too large for the guard to copy it
EPOCHS = 6


def start_cluster(address=None):
    """Start a cluster whose workers find this module, or connect to one; return Ray."""
    os.environ.update(
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.05",
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",  # one process less an attempt
        OMP_NUM_THREADS="1",
    )
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    place = {"address": address} if address else {"num_cpus": 2}  # it starts as many processes
    ray.init(**place, **options)
    return ray


def fit(train, root, *, workers=1, failures=0, keep=None, **config):
    """Run a training function on workers; return Ray's result."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    logging.getLogger("ray.train").setLevel("ERROR")
    return TorchTrainer(
        train,
        train_loop_config={"root": str(root), **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(root),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=keep),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    ).fit()


def checkpoints(root):
    return sorted(pathlib.Path(root).glob("run/checkpoint_2*"))


class Training:
    """A tiny training, which is the same on one worker and on several with the same data."""

    def __init__(self, sharded=False):
        torch.manual_seed(0)
        self.sharded = sharded
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def epoch(self, number):
        self.optimizer.zero_grad()
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self, epoch):
        if self.sharded:
            model, optimizer = get_state_dict(self.model, self.optimizer)
        else:
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "epoch": epoch}

    def load(self, state):
        model, optimizer = state["model"], state["optimizer"]
        if self.sharded:
            both = {"model_state_dict": model, "optim_state_dict": optimizer}
            set_state_dict(self.model, self.optimizer, **both)
        else:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)


def unbroken():
    """Return the last epoch's state of a training without Ray."""
    training = Training()
    for number in range(EPOCHS):
        training.epoch(number)
    return training.state(EPOCHS - 1)


def unbroken_shards(rank, ranks):
    """Return the last epoch's state of a sharded training without Ray, as one of its workers."""
    torch.distributed.init_process_group("gloo")
    training = Training(sharded=True)
    training.state(-1)  # torch makes the moments by a step, which counts
    for number in range(EPOCHS):
        training.epoch(number)
    state = flattened(training.state(EPOCHS - 1))[0]
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    torch.distributed.destroy_process_group()
    return whole


def attempt(root):
    """Note that this worker begins, and return how often it has begun before."""
    import ray.train

    path = pathlib.Path(root) / f"begun-{ray.train.get_context().get_world_rank()}"
    before = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        file.write("begun\n")
    return before


def note(root, text):
    """Add a line to what rank 0 has seen."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0:
        with (pathlib.Path(root) / "seen").open("a") as file:
            file.write(f"{text}\n")


def seen(root):
    return (pathlib.Path(root) / "seen").read_text().splitlines()


def train(config):
    """Train to the end; at each attempt, the worker that it names dies in the save it names.

    ``moments`` has for each attempt: the moment, the epoch whose save it is, and the rank.
    """
    import ray.train

    import ringstow.integrations.ray as ringstow_ray

    root, sharded = config["root"], config.get("sharded", False)
    moments, number = config.get("moments", []), attempt(root)
    training, first = Training(sharded), 0
    state = ringstow_ray.restore(into=training.state(-1) if sharded else None)
    if state is not None:
        training.load(state)
        first = state["epoch"] + 1
    note(root, first)
    moment, at, victim = moments[number] if number < len(moments) else (None, None, None)
    for epoch in range(first, EPOCHS):
        ray.train.get_all_reported_checkpoints()  # returns once Ray has counted all before
        if epoch == at and ray.train.get_context().get_world_rank() == victim:
            arrange(moment, root)
        loss = training.epoch(epoch)
        state = training.state(epoch)
        ringstow_ray.report({"loss": loss, "epoch": epoch}, state, step=epoch)


def die(*_args, **_more):
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def arrange(moment, root):
    """Let this worker die, or its disk be full, at a moment of its next save."""
    import ringstow.integrations.ray as ringstow_ray
    from ringstow._manager._one_process import Alone
    from ringstow._state.tensors._memory import LazyTensor
    from ringstow.distributed._commit import Shared
    from ringstow.distributed._save import _Save

    save, failure_of = Alone.save_async, ringstow_ray._failure_of
    trains = threading.get_ident()

    def hang():
        pipe = os.open(pathlib.Path(root) / "pipe", os.O_WRONLY)  # open until this worker ends
        os.write(pipe, b"saving")
        threading.Event().wait()

    def lazily(load):
        def save_lazily(self, state, *args):
            hold = LazyTensor("F32", (1 << 18,), 4 << 18, load)
            return save(self, {**state, "hold": hold}, *args)

        Alone.save_async = save_lazily

    def after_commit(handle):
        failure = failure_of(handle)
        if threading.get_ident() != trains:  # Ray's thread, which waits for the commit
            die()
        return failure

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    match moment:
        case "writing":
            lazily(die)
        case "hanging":
            lazily(hang)
        case "full":
            lazily(full)
        case "committed":
            ringstow_ray._failure_of = after_commit
        case "shard":
            _Save._write_share = die
        case "committing":
            Shared._commit = die
        case "full shard":
            _Save._write_share = full


# What each worker notes in `agree`.
AGREED = [
    "metrics alone",
    "rank 0's state",
    "refused by Ray",
    "InvalidStateError own.",
    "InvalidStateError worker 1",
    "InvalidStateError odd",
    "restored 2",
    "filled 2",
    "InvalidStateError all workers",
    "sharded",
    "InvalidStateError into=state",
    "KeyMismatchError",
    "filled shards",
    "restored 4",
]


def agree(config):
    """Report and restore in all ways, and note what this worker sees; at last, one save fails.

    The second attempt finds that the failed save does not count, and reports an odd value.
    """
    import ray.train
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import ringstow
    from ringstow.integrations.ray import report, restore

    rank = ray.train.get_context().get_world_rank()
    path = pathlib.Path(config["root"]) / f"noted-{rank}"

    def note(text):
        with path.open("a") as file:
            file.write(f"{text}\n")

    def refused(text, call, *args, **options):
        with pytest.raises(ringstow.Error, match=text) as caught:
            call(*args, **options)
        note(f"{caught.type.__name__} {text}".strip())

    def plain(number):
        return {"w": torch.full((1 << 16,), float(number)), "n": number, "by number": {0: number}}

    def sharded(number):
        mesh = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(torch.full((1 << 16,), float(number)), mesh, [Shard(0)])}

    if attempt(config["root"]):
        into = sharded(0)
        assert restore(into) is into
        note(f"restored {int(into['w'].full_tensor().max())}")
        report({}, {"w": torch.ones(2), "odd": agree})
    report({"n": 1})
    assert restore() is None
    note("metrics alone")
    report({"n": 2}, plain(2) if rank == 0 else None)
    note("rank 0's state")
    with pytest.raises(ValueError, match="Torch tensors as metrics"):
        report({"loss": torch.ones(1)}, plain(3))
    note("refused by Ray")
    refused("own.", report, {}, {"w": torch.ones(2), "own": {str(rank): 1}})
    refused("worker 1", report, {}, plain(3) if rank == 1 else None)
    refused("odd", report, {}, {"w": torch.ones(2), **({"odd": 1} if rank == 1 else {})})
    ray.train.get_all_reported_checkpoints()  # returns once Ray has counted all
    state = restore()
    assert state["by number"] == {0: 2}  # a number is still a number
    note(f"restored {state['n']}")
    into = plain(0)
    assert restore(into) is into
    note(f"filled {int(into['w'].max())}")
    shards = sharded(4)
    refused("all workers", report, {}, shards if rank == 0 else None)
    report({"n": 4}, shards)
    note("sharded")
    ray.train.get_all_reported_checkpoints()
    refused("into=state", restore)
    refused("", restore, {**sharded(0), "more": torch.ones(2)})
    into = sharded(0)
    assert restore(into)["w"].full_tensor().min() == 4
    note("filled shards")
    if rank == 1:
        arrange("full shard", config["root"])
    report({"n": 5}, shards)
    report({"n": 6}, shards)


def killed_driver(address, root):
    """Train as a driver that its parent kills while the worker saves."""
    start_cluster(address)
    fit(train, root, moments=[("hanging", 2, 0)])


if __name__ == "__main__":
    killed_driver(*sys.argv[1:])
