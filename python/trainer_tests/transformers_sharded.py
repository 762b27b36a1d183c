"""Runs of a Trainer with FSDP2 on ranks of the CPU, each forked from a server.

Accelerate enters FSDP only from GPUs and the like: `arguments` says that there are some, once the
Trainer's arguments have found that there are none.
"""

from __future__ import annotations

import functools
import os
import resource
import threading
from unittest.mock import Mock

import accelerate
import children
import pytest
import torch
import transformers
import transformers_processes as processes
from accelerate.utils import DistributedType
from support import assert_same, logged
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers_runs import EVERY, FIRST_IS_BEST, STEPS, RingstowTrainer, Rows, adapters
from transformers_runs import arguments as on_one_rank
from transformers_runs import model as made
from transformers_runs import trainer as trainer_of

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


trainer = functools.partial(trainer_of, arguments=arguments)


def fit(root, *, resume=None, **options):
    """Train to the end; all parameters are sharded."""
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


def run(rank, ranks, root, options, moment="", number=0, signalled=(), victim=0):
    """Do as `transformers_processes.run` does."""
    if moment and rank == victim:
        processes.kill_at(moment, number)
    newest = transformers.trainer_utils.get_last_checkpoint(root) if os.path.isdir(root) else None
    callbacks = [processes.Signalled()] if rank in signalled else []
    with logged("SIGTERM ends") as said:
        end = state(fit(root, resume=newest, callbacks=callbacks, **options))
    return {**end, "said": said}


def stock_and_ours(rank, ranks, root):
    """Compare whole runs, and resumed ones, with the stock Trainer's."""
    expected = state(fit(f"{root}/stock", kind=transformers.Trainer))
    end = state(fit(f"{root}/ours"))
    assert_same(end, expected)
    for step in range(EVERY, STEPS, EVERY):
        assert_same(state(fit(f"{root}/again", resume=f"{root}/ours/checkpoint-{step}")), expected)
    resumed = fit(f"{root}/again", resume=f"{root}/stock/checkpoint-{EVERY}")
    assert_same(state(resumed)["model"], expected["model"])  # its betas come back as a list
    fit(f"{root}/only", save_only_model=True)
    only = fit(f"{root}/only", resume=f"{root}/only/checkpoint-{STEPS}", save_only_model=True)
    assert not only.optimizer.optimizer.state_dict()["state"]  # before `state` makes one
    assert_same(state(only)["model"], expected["model"])
    return end


def in_the_background(rank, ranks, root):
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
    return state(fit(root, callbacks=[Begins()]))


def resumed_at_the_end(rank, ranks, root):
    """Resume from the last checkpoint, on any number of ranks: no step changes anything."""
    return state(fit(root, resume=f"{root}/checkpoint-{STEPS}", ignore_data_skip=True))


def best_at_the_end(rank, ranks, root):
    return state(fit(root, load_best_model_at_end=True, **FIRST_IS_BEST))


def filling_the_disk(rank, ranks, root):
    """Let no file of rank 1 grow beyond a few bytes, from the second save on."""

    class Full(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2 * EVERY and args.process_index == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))

    with pytest.raises(BaseException, match="File too large"):  # CheckpointException is none
        fit(root, callbacks=[Full()])


def without_a_state(rank, ranks, root):
    """Let rank 1 fail before it saves: no rank may begin a save that waits for it."""
    if rank == 1:
        _shards.state_of = Mock(side_effect=RuntimeError("no state"))
    with pytest.raises(Exception, match="no state"):
        trainer(root).train()


def refused(rank, ranks, root):
    """Return why a run is refused before its first step."""
    run = trainer(root, model=adapters(), save_on_each_node=True)
    with pytest.raises(ringstow.UnsupportedError) as caught:
        run.train()
    assert run.state.global_step == 0
    return str(caught.value)


def stock_loads(rank, ranks, root):
    """A Trainer without FSDP does not resume a checkpoint of shards."""
    run = RingstowTrainer(model=made(), args=on_one_rank(root), train_dataset=Rows())
    with pytest.raises(ringstow.InvalidStateError, match="holds shards"):
        run.train(resume_from_checkpoint=f"{root}/checkpoint-{STEPS}")
