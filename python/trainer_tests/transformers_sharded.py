"""Runs of a Trainer with FSDP2 on ranks of the CPU, each forked from a server.

Accelerate enters FSDP only from GPUs and the like: `arguments` says that there are some, once the
Trainer's arguments have found that there are none.
"""

from __future__ import annotations

import os
import resource
import threading

import accelerate
import children
import torch
import transformers
import transformers_processes as processes
from accelerate.utils import DistributedType
from support import assert_same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers_runs import EVERY, STEPS, RingstowTrainer, Rows, adapters
from transformers_runs import arguments as on_one_rank
from transformers_runs import model as made

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._transformers import _shards

children.preload(__name__)


def arguments(root, **options):
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = on_one_rank(root, fsdp=True, fsdp_config=config, **options)
    assert args.device.type == "cpu"  # the state of Accelerate is there from here on
    accelerate.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def trainer(root, *, kind=RingstowTrainer, callbacks=(), model=None, **options):
    return kind(
        model=made() if model is None else model,
        args=arguments(root, **options),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=list(callbacks),
    )


def fit(root, *, resume=None, **options):
    """Train to the end; all parameters are sharded."""
    os.makedirs(root, exist_ok=True)
    run = trainer(root, **options)
    run.train(resume_from_checkpoint=resume)
    assert all(isinstance(one, DTensor) for one in run.model.parameters())
    return run


def state(run):
    """Return what two runs must have equal at their end, in whole tensors."""
    options = StateDictOptions(full_state_dict=True)
    inner = run.optimizer.optimizer
    return {
        "model": get_model_state_dict(run.model, options=options),
        "optimizer": get_optimizer_state_dict(run.model, inner, options=options),
        "scheduler": run.lr_scheduler.state_dict(),
        "random": torch.random.get_rng_state(),
        "step": run.state.global_step,
    }


def store(run, results):
    end = state(run)
    torch.save(end, f"{results}.{run.args.process_index}")


def stopped(rank, ranks, root, results, signalled, options):
    """Do as `transformers_processes.stopped` does."""
    os.makedirs(root, exist_ok=True)
    callbacks = [processes.Signalled()] if rank in signalled else []
    resume = any(name.startswith("checkpoint-") for name in os.listdir(root))
    store(fit(root, resume=resume or None, callbacks=callbacks, **options), results)


def stock_and_ours(rank, ranks, root, results):
    """Compare whole runs, and resumed ones, with the stock Trainer's."""
    expected = state(fit(f"{root}/stock", kind=transformers.Trainer))
    run = fit(f"{root}/ours")
    assert_same(state(run), expected)
    store(run, results)
    for step in range(EVERY, STEPS, EVERY):
        assert_same(state(fit(f"{root}/again", resume=f"{root}/ours/checkpoint-{step}")), expected)
    resumed = fit(f"{root}/again", resume=f"{root}/stock/checkpoint-{EVERY}")
    assert_same(state(resumed)["model"], expected["model"])  # its betas come back as a list
    fit(f"{root}/only", save_only_model=True)
    only = fit(f"{root}/only", resume=f"{root}/only/checkpoint-{STEPS}", save_only_model=True)
    assert not only.optimizer.optimizer.state_dict()["state"]  # before `state` makes one
    assert_same(state(only)["model"], expected["model"])


def trained(rank, ranks, root, results, moment="", number=0, killed_rank=0, options=None):
    """Train from the newest checkpoint if there is one; be killed at a moment of a save."""
    if moment and rank == killed_rank:
        processes.kill_at(moment, number)
    newest = transformers.trainer_utils.get_last_checkpoint(root) if os.path.isdir(root) else None
    store(fit(root, resume=newest, **(options or {})), results)


def in_the_background(rank, ranks, root, results):
    """Let the first checkpoint get its name only after the next step has begun."""
    goes_on = threading.Event()
    take = _rename_when_complete.take_name

    def waits(*args):
        assert goes_on.wait(300)
        return take(*args)

    class Begins(transformers.TrainerCallback):
        def on_step_begin(self, args, one, control, **_):
            if one.global_step == EVERY:
                assert not os.path.exists(f"{root}/checkpoint-{EVERY}")
                goes_on.set()

    _rename_when_complete.take_name = waits
    store(fit(root, callbacks=[Begins()]), results)


def resumed_at_the_end(rank, ranks, root, results):
    """Resume from the last checkpoint, on any number of ranks: no step changes anything."""
    run = fit(root, resume=f"{root}/checkpoint-{STEPS}", ignore_data_skip=True)
    store(run, results)


def best_at_the_end(rank, ranks, root, results):
    run = fit(
        root,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first is the best: it must outlive all others
    )
    store(run, results)


def filling_the_disk(rank, ranks, root, results):
    """Let no file of rank 1 grow beyond a few bytes, from the second save on."""

    class Full(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2 * EVERY and args.process_index == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))

    try:
        fit(root, callbacks=[Full()])
    except BaseException as error:  # CheckpointException is no Exception
        with open(f"{results}.{rank}", "w") as stream:
            stream.write(repr(error))


def without_a_state(rank, ranks, root, results):
    """Let rank 1 fail before it saves: no rank may begin a save that waits for it."""

    def fails(*_):
        raise RuntimeError("no state")

    run = trainer(root)
    if rank == 1:
        _shards.state_of = fails
    try:
        run.train()
    except Exception as error:
        with open(f"{results}.{rank}", "w") as stream:
            stream.write(repr(error))


def refused(rank, ranks, root, results):
    """Store why a run is refused before its first step."""
    run = trainer(root, model=adapters(), save_on_each_node=True)
    try:
        run.train()
    except ringstow.UnsupportedError as error:
        assert run.state.global_step == 0
        with open(f"{results}.{rank}", "w") as stream:
            stream.write(str(error))


def stock_loads(rank, ranks, root, results):
    """Store why a Trainer without FSDP does not resume a checkpoint of shards."""
    run = RingstowTrainer(model=made(), args=on_one_rank(root), train_dataset=Rows())
    try:
        run.train(resume_from_checkpoint=f"{root}/checkpoint-{STEPS}")
    except ringstow.InvalidStateError as error:
        with open(f"{results}.{rank}", "w") as stream:
            stream.write(str(error))
