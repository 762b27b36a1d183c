"""A run of the Trainer in a process of its own, which is killed at a moment that a test names."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal

import children
import transformers
from support import logged
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
    numbers = itertools.count(1)

    def act(*args):
        if next(numbers) == number:
            if moment == "failing":
                raise OSError(errno.ENOSPC, "No space left on device")
            if moment == "removing":
                os.unlink(os.path.join(args[0], "trainer_state.json"))
            children.die()

    children.before(*CALLS[moment], act)


class Signalled(transformers.TrainerCallback):
    """Sends this process SIGTERM within its fifth step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def run(rank, ranks, root, options, moment="", number=0, signalled=()):
    """Train to the end, from the newest checkpoint if there is one; return how it ended.

    The first rank can be killed, and others can get a signal.
    """
    if moment and rank == 0:
        kill_at(moment, number)
    options = dict(options)
    made = adapters() if options.pop("has_adapters", False) else model()
    if options.pop("is_quantized", False):
        import qlora_runs  # takes a second

        made = adapters(qlora_runs.base())
    callbacks = [Signalled()] if rank in signalled else []
    with logged("SIGTERM ends") as said:
        end = state(fit(root, model=made, callbacks=callbacks, **options))
    return {**end, "said": said}
