"""Saves a Trainer's steps as a policy says, and the last one after a signal.

It replaces the callback that ``enable_jit_checkpoint`` adds. With that callback, each rank saves
and stops as soon as it sees a signal of its own: perhaps in the middle of a step, and at another
step than the other ranks. Here all ranks save and stop after the same step.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from ringstow._core import _when
from ringstow._core._when import OnSignal, When
from ringstow._manager._when import Schedule

if TYPE_CHECKING:
    from ringstow._ranks._team import Team


class Stops(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Turns the answers of a policy into the flags by which the Trainer saves and stops."""

    def __init__(self, when: When, ranks: Team, root: str, early: Any = None) -> None:
        """Handle the signals of the policy; all ranks call it.

        Args:
            when: the policy, the same on all ranks.
            ranks: the ranks of the saves.
            root: the directory of the checkpoints, for messages.
            early: the manager of Transformers' callback, which may have got a signal before.
        """
        self.schedule = Schedule(when, ranks, root)
        self._early = early

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.schedule.restart()  # with `auto_find_batch_size` the Trainer begins anew

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._early is not None and self._early.is_checkpoint_requested:
            self.schedule.note(signal.SIGTERM)
        saves = self.schedule.asks(state.global_step)
        if self.schedule.stopping:
            # An evaluation would come before the save, and take from its time.
            control.should_evaluate, control.should_training_stop = False, True
            control.should_save = saves
        elif saves:
            control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.schedule.stopping:  # the step is saved, or there is no time for it
            control.should_save = control.should_evaluate = False


def policy(when: When | None, args: Any) -> When | None:
    """Return a Trainer's policy; ``enable_jit_checkpoint`` adds SIGTERM if it names no signal.

    Raises:
        TypeError: ``when`` is no policy.
    """
    when = _when.checked(when)
    if not getattr(args, "enable_jit_checkpoint", False):
        return when
    if when is None:
        return OnSignal()
    return when if _when.graces(when) else when | OnSignal()


def replaced(trainer: Any) -> Any:
    """Remove Transformers' own callback, and restore the handler from before it.

    Returns:
        Its manager, in which a signal shows that has come already; None if there is none.
    """
    for one in trainer.callback_handler.callbacks:
        if isinstance(one, JITCheckpointCallback):
            trainer.remove_callback(one)
            one.on_train_end(trainer.args, trainer.state, trainer.control)
            return one.jit_manager
    return None
