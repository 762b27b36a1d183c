"""A small model, and trainings of it by DeepSpeed on CPUs, on one gloo rank or more.

DeepSpeed compiles two operations when it starts. `_without_compiler` puts torch's own in place.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import types

os.environ["DS_ACCELERATOR"] = "cpu"  # else it looks for GPUs

import children
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder.builder import OpBuilder
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ringstow._saving import _jobs
from ringstow.integrations import deepspeed as ours

if "pytest" not in sys.modules:  # the server forks what takes seconds to import
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2

children.preload(__name__)

STEPS = 6
EVERY = 2  # steps between two saves
WIDTH = 256  # a weight is too large for the guard to copy it


def _without_compiler():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    OpBuilder._loaded_ops["utils"] = types.SimpleNamespace(
        flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors
    )


def config(stage=1, precision="bf16"):
    """Return the configuration of an engine."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }


def engine(stage=1, precision="bf16", stock=False, more=None, **options):
    """Return an engine that saves by ringstow, or as DeepSpeed does."""
    _without_compiler()
    deepspeed.utils.logger.setLevel("ERROR")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    settings = {**config(stage, precision), **(more or {})}
    parameters = model.parameters()
    made, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    return made if stock else ours.use(made, **options)


def step(made):
    """Train a step, whose data depends on its number and the rank alone."""
    seed = 100 * made.global_steps + dist.get_rank()
    data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
    made.backward(made(data.to(next(made.parameters()).dtype)).float().square().mean())
    made.step()


def end(made):
    """Return all that a rank has learned."""
    scheduler = made.lr_scheduler.state_dict()
    saved = {"steps": made.global_steps, "scheduler": scheduler, "model": made.module_state_dict()}
    states = made.optimizer.state_dict()
    states.pop("loss_scaler", None)
    return {**saved, "optimizer": states}


def fit(rank, ranks, options, folder, tag=None):
    """Train until the last step, from what is there; return where it began, and the end."""
    made = engine(**options)
    path, client = made.load_checkpoint(str(folder))
    begun = made.global_steps
    assert (path is None) == (begun == 0)
    assert client is None or client["says"] == begun
    while made.global_steps < STEPS:
        step(made)
        if made.global_steps % EVERY == 0:
            save(made, folder, tag)
    learned = end(made)
    dist.destroy_process_group()  # while the last save is in progress
    return begun, learned


def save(made, folder, tag=None):
    made.save_checkpoint(str(folder), tag=tag, client_state={"says": made.global_steps})


def killed(rank, ranks, options, folder, moment, victims, tag=None):
    """Train, and be killed at a moment of the second save."""
    from ringstow.integrations import _rename_when_complete
    from ringstow.integrations._deepspeed import _tags

    count, has_trained = 0, threading.Event()

    def at(name):
        def act(*_):
            nonlocal count
            count += name == "beginning"  # the save before has ended
            if rank in victims and moment == name and count == 2:
                if name == "training":
                    assert has_trained.wait(300)
                children.die()

        return act

    for name, owner, method in [
        ("beginning", ours.RingstowCheckpointEngine, "_begin"),
        ("writing", ours.RingstowCheckpointEngine, "save"),
        ("started", ours.RingstowCheckpointEngine, "_finish"),
        ("training", ours.RingstowCheckpointEngine, "_complete"),
        ("written", _tags, "publish"),
        ("renaming", _rename_when_complete, "take_name"),
        ("naming", _tags, "name_latest"),
    ]:
        children.before(owner, method, at(name))
    made = engine(**options)
    while made.global_steps < STEPS:
        step(made)
        has_trained.set()
        if made.global_steps % EVERY == 0:
            has_trained.clear()
            save(made, folder, tag)
    made.checkpoint_engine.wait()


def fail(rank, ranks, options, folder, victim, cause):
    """Fail to save on one rank, and save again; return what its calls raise, and what is left."""
    made = engine(**options)
    step(made)
    save(made, folder, "before")
    made.checkpoint_engine.wait()
    step(made)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == victim and cause == "value":
        state = made.optimizer.state_dict
        made.optimizer.state_dict = lambda: {**state(), "odd": type(made)}
    elif rank == victim:  # DeepSpeed's own scripts are smaller than the shards
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = {"full disk": 128 << 10, "full disk for scripts": 4 << 10}[cause]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit[1]))
    raised = []
    for call in (
        lambda: made.save_checkpoint(str(folder), tag="failed"),
        made.checkpoint_engine.wait,
        made.checkpoint_engine.wait,
    ):
        try:
            call()
            raised.append(None)
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if cause == "value":
        made.optimizer.state_dict = state if rank == victim else made.optimizer.state_dict
    found = sorted(os.listdir(folder))
    dist.barrier()
    save(made, folder, "after")
    made.checkpoint_engine.wait()
    return raised, found


def lose(rank, ranks, options, folder, call):
    """Let the last save fail, and destroy the engine by a call or by the garbage collector."""
    made = engine(**options)
    step(made)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    save(made, folder)
    has_raised = False
    try:
        getattr(made, call)()
    except OSError:
        has_raised = True
    assert has_raised == (call == "destroy")
    (failure,) = _jobs.unreported  # the exit reports it
    assert failure.path == f"{folder}/global_step1"
