"""Has Lightning's handlers of signals run between two steps, on all ranks after the same one."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

from ringstow._core._when import OnSignal
from ringstow._manager._when import Schedule
from ringstow.integrations._kit import ranks_or_alone

if TYPE_CHECKING:
    from ringstow._ranks._team import Team


class Signals:
    """The hooks of the callback, without Lightning's base class.

    Lightning's own handlers save and communicate wherever they interrupt a rank: in a step, in a
    save, and on each rank at another step.
    """

    _ranks: Team | None = None
    _schedule: Schedule | None = None
    _step = -1

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Take the place of Lightning's handlers; all ranks call it."""
        self._ranks = ranks_or_alone()
        self._begin(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Ask after each optimizer step whether a signal has come to any rank."""
        schedule = self._schedule
        if schedule is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        schedule.asks(self._step)
        schedule.heed()  # Lightning saves
        if schedule.stopping:
            self._end()
            self._handlers[schedule.signal](schedule.signal, None)
            if not trainer.received_sigterm:  # it has requeued a job of Slurm's, and goes on
                self._begin(trainer)

    def on_train_end(self, *_: Any) -> None:
        """Give the handlers back; all ranks call it."""
        if self._schedule is not None:
            self._schedule.settle()
        self.on_exception()

    def on_exception(self, *_: Any) -> None:
        """Give the handlers back."""
        self._end()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _begin(self, trainer: Any) -> None:
        self._step = trainer.global_step
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._handlers: dict[int, Any] = {
            number: one for number, one in found.items() if _is_lightnings(one)
        }
        if not self._handlers or self._ranks is None:
            return
        early: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            early.append(number)

        for number in self._handlers:
            signal.signal(number, note)  # a handler of ringstow's calls the one before it
        numbers = [signal.Signals(number) for number in self._handlers]
        self._schedule = Schedule(OnSignal(*numbers), self._ranks, str(trainer.default_root_dir))
        for number in early:
            self._schedule.note(signal.Signals(number))

    def _end(self) -> None:
        schedule, self._schedule = self._schedule, None
        if schedule is not None:
            schedule.close()
            for number, one in self._handlers.items():
                signal.signal(number, one)


def _is_lightnings(handler: object) -> bool:
    """Return whether Lightning has set a handler."""
    return type(handler).__module__.endswith(".trainer.connectors.signal_connector")
