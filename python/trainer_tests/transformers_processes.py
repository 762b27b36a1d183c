"""A run of the Trainer in a process of its own, which is killed at a moment that a test names."""

from __future__ import annotations

import errno
import os
import shutil
import signal

import children
import torch
import transformers
from transformers_runs import adapters, fit, model, state

from ringstow.integrations import _rename_when_complete
from ringstow.integrations import transformers as integration
from ringstow.integrations._kit import _ranks
from ringstow.integrations._transformers import _adapters, _weights

children.preload(__name__)

# What is called at each moment of a save, in this order.
CALLS = {
    "preparing": (_rename_when_complete, "prepare"),
    "copying": (integration, "save_async"),
    "committed": (_weights, "write_index"),
    "filling": (_adapters, "_folder"),
    "sharding": (_ranks.Ranks, "save_async"),
    "complete": (_rename_when_complete, "take_name"),
    "named": (_rename_when_complete, "remove"),
    "removing": (shutil, "rmtree"),
    "failing": (_rename_when_complete, "sync"),
}


def kill_at(moment: str, number: int) -> None:
    """Kill this process right before a call of this number, from 1, or let the call fail."""
    module, name = CALLS[moment]
    call = getattr(module, name)
    calls = 0

    def counted(*args, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            if moment == "failing":
                raise OSError(errno.ENOSPC, "No space left on device")
            if moment == "removing":
                os.unlink(os.path.join(args[0], "trainer_state.json"))
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    setattr(module, name, counted)


def run(root, results, moment, number, options):
    """Do as `main` does, with options of the test's."""
    options = dict(options)
    if moment:
        kill_at(moment, number)
    os.makedirs(root, exist_ok=True)
    made = adapters() if options.pop("has_adapters", False) else model()
    if options.pop("is_quantized", False):
        import qlora_runs  # takes a second

        made = adapters(qlora_runs.base())
    torch.save(state(fit(root, model=made, **options)), f"{results}.0")


def main(root, results, moment="", number=0):
    """Train to the end, from the newest checkpoint if there is one, and store how it ended."""
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    if moment and rank == "0":
        kill_at(moment, number)
    os.makedirs(root, exist_ok=True)
    torch.save(state(fit(root, save_total_limit=2)), f"{results}.{rank}")


class Signalled(transformers.TrainerCallback):
    """Sends this process SIGTERM within its fifth step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(rank, ranks, root, results, signalled, options):
    """Train as one of several ranks, which may get a signal, and store how it ended."""
    os.makedirs(root, exist_ok=True)
    callbacks = [Signalled()] if rank in signalled else []
    torch.save(state(fit(root, callbacks=callbacks, **options)), f"{results}.{rank}")


def as_rank(rank, ranks, *args):
    """Do the same as one of several ranks."""
    main(*args)
