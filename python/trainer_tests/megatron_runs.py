"""Trainings whose states are Megatron-Core's ShardedTensors, on gloo ranks without a GPU.

Megatron's own writer and its queue of background saves call CUDA. `without_cuda` replaces these
calls; the rest is Megatron's.
"""

from __future__ import annotations

import os
import resource
import signal

import children
import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from ringstow._saving import _jobs
from ringstow.integrations import _rename_when_complete, megatron
from ringstow.integrations.megatron import save

children.preload(__name__)

STEPS = 6
EVERY = 2  # steps between two saves
ROWS, WIDTH = 8, 20_000  # each rank's shard is too large for the guard to copy it


def begin():
    """Start a rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")


class Training:
    """A weight that the ranks share by rows, and a bias that all have, with Adam."""

    def __init__(self):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(ROWS, WIDTH, generator=generator)
        rows = ROWS // self.ranks
        self.weight = torch.nn.Parameter(whole[self.rank * rows :][:rows].clone())
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))
        self.optimizer = torch.optim.Adam([self.weight, self.bias], lr=0.01)
        self.steps = 0
        for one in (self.weight, self.bias):
            one.grad = torch.zeros_like(one)
        self.optimizer.step()  # so that it has a state

    def step(self):
        # Each element learns by itself, so that any number of ranks learns the same.
        self.weight.grad = (self.weight.detach() - self.steps).cos()
        self.bias.grad = (self.bias.detach() + self.steps).cos()
        self.steps += 1
        self.optimizer.step()

    def _shard(self, key, tensor):
        return ShardedTensor.from_rank_offsets(key, tensor, (0, self.rank, self.ranks))

    def _replica(self, key, tensor):
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=self.rank)

    def state(self):
        moments = self.optimizer.state
        return {
            "model": {
                "weight": self._shard("weight", self.weight.data),
                "bias": self._replica("bias", self.bias.data),
            },
            "optimizer": {
                key: {
                    "weight": self._shard(f"optimizer.{key}.weight", moments[self.weight][key]),
                    "bias": self._replica(f"optimizer.{key}.bias", moments[self.bias][key]),
                }
                for key in ("exp_avg", "exp_avg_sq")
            },
            "adam_steps": self._replica("adam_steps", moments[self.bias]["step"]),
            "rng": ShardedObject(
                "rng",
                {"numpy": numpy.random.RandomState(7).get_state(), "torch": torch.ones(3)},
                (1,),
                (0,),
                replica_id=self.rank,
            ),
            "steps": self.steps,
        }

    def take(self, state):
        self.steps = state["steps"]
        self.weight.data.copy_(state["model"]["weight"])
        self.bias.data.copy_(state["model"]["bias"])
        for key in ("exp_avg", "exp_avg_sq"):
            for name, one in (("weight", self.weight), ("bias", self.bias)):
                self.optimizer.state[one][key].copy_(state["optimizer"][key][name])
        for one in (self.weight, self.bias):
            self.optimizer.state[one]["step"] = state["adam_steps"].clone()

    def end(self):
        """Return what has been learned, whole, on any number of ranks."""
        states = self.optimizer.state
        mine = [self.weight.data, *(states[self.weight][k] for k in ("exp_avg", "exp_avg_sq"))]
        whole = []
        for one in mine:
            parts = [torch.empty_like(one) for _ in range(self.ranks)]
            dist.all_gather(parts, one.contiguous())
            whole.append(torch.cat(parts))
        others = [states[self.bias][key] for key in ("exp_avg", "exp_avg_sq", "step")]
        return [*whole, self.bias.data, *others]


def newest(folder):
    """Return the newest checkpoint that Megatron takes for one."""
    names = sorted(one for one in os.listdir(folder) if one.startswith("iter_"))
    paths = [os.path.join(folder, one) for one in names]
    # There is no other directory with such a name.
    assert all(dist_checkpointing.check_is_distributed_checkpoint(one) for one in paths)
    return paths[-1] if paths else None


def resume(training, folder):
    path = newest(folder) if os.path.isdir(folder) else None
    if path is not None:
        training.take(dist_checkpointing.load(training.state(), path))
    return training.steps


def train(folder, how="background", fixed=False, stock=False):
    """Resume, and save each second step; return the end, and where it began."""
    training, queue = Training(), AsyncCallsQueue()
    begun = resume(training, folder)
    dist.barrier()  # before one rank looks for checkpoints, none may begin one
    while training.steps < STEPS:
        training.step()
        queue.maybe_finalize_async_calls(blocking=False)
        if training.steps % EVERY == 0:
            queue.maybe_finalize_async_calls(blocking=True)
            path = f"{folder}/iter_{0 if fixed else training.steps:07}"
            if stock:
                os.makedirs(path, exist_ok=True)
                dist.barrier()
                dist_checkpointing.save(training.state(), path)
            elif how == "background":
                request = save(training.state(), path, async_sharded_save=True)
                queue.schedule_async_request(request)
            else:
                save(training.state(), path)
    queue.close()
    return begun, training.end()


def fit(rank, ranks, folder, how="background", fixed=False, stock=False):
    begin()
    return train(folder, how, fixed, stock)


def killed(rank, ranks, folder, moment, victims, how="background", fixed=False):
    """Train, and be killed at a moment of the second save."""
    begin()
    from ringstow.distributed._commit import Shared
    from ringstow.distributed._save import _Save

    begin()
    count = 0

    def at(name):
        def act(*_):
            nonlocal count
            count += name == "beginning"
            if rank in victims and moment == name and count == 2:
                children.die()

        return act

    children.before(megatron.RingstowSaveStrategy, "_begin", at("beginning"))
    children.before(_Save, "_write_share", at("writing"))
    children.before(Shared, "_commit", at("committing"))
    children.before(megatron, "_complete", at("finalizing"))
    children.before(_rename_when_complete, "take_name", at("renaming"))
    train(folder, how, fixed)


def fail(rank, ranks, folder, victim, how):
    """Let one rank's disk be full, and save again; return the error, and what is left."""
    begin()
    training, queue = Training(), AsyncCallsQueue()
    save(training.state(), f"{folder}/iter_0000001")
    if rank == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    said = ""
    try:
        request = save(
            training.state(), f"{folder}/iter_0000002", async_sharded_save=how == "background"
        )
        if request is not None:
            queue.schedule_async_request(request)
            queue.close()
    except BaseException as error:
        said = f"{type(error).__name__}: {error} {getattr(error, 'failures', '')}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert not _jobs.unreported
    found = sorted(os.listdir(folder))
    dist.barrier()
    save(training.state(), f"{folder}/iter_0000002")
    return said, found


def call(rank, ranks, function, *args):
    """Run a function of a test's module as a rank."""
    begin()
    function(rank, ranks, *args)
