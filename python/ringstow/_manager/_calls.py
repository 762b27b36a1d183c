"""The calls of a manager: one at a time, each after the save in progress has ended on all ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._core._call_lock import Turn
from ringstow._core._errors import InvalidStateError
from ringstow._core._metrics import metrics_of
from ringstow._core._waiting import patiently

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ringstow._manager._after_save import Upkeep
    from ringstow._manager._one_process import Side
    from ringstow._manager._run_directory import RunLock
    from ringstow._saving._copy_queue import Copier
    from ringstow._saving._save_future import SaveHandle

_log = logging.getLogger("ringstow")


class Saving(NamedTuple):
    """The background save in progress, and whether its removal of old steps has ended."""

    handle: SaveHandle
    is_over: threading.Event


class Calls:
    """The calls of a manager, and the save in progress that they wait for."""

    def __init__(
        self, root: str, side: Side[Any], upkeep: Upkeep, copier: Copier, lock: RunLock
    ) -> None:
        """Store the parts of the manager of the run at ``root``, which the last call closes."""
        self._root = root
        self._side = side
        self._upkeep = upkeep
        self._copier = copier
        self._lock = lock
        self.turn = Turn(root)
        self.saving: Saving | None = None
        self.left_out: int | None = None
        """The last step, if ``on_busy="skip"`` skipped it."""

    @contextlib.contextmanager
    def one(self, name: str, *arguments: object) -> Iterator[None]:
        """Run one method, once the save in progress has ended on all ranks."""
        with self.turn.taken(name):
            self._side.check()
            self._side.doing = f"{name}() of the manager of {self._root}"
            try:
                failure = self._ended()
                reports = self._side.meet((name, *arguments), failure, self._upkeep.report)
                self._upkeep.report = reports[0]
                yield
            finally:
                if name == "close" and self.saving is None:
                    self._upkeep.close()
                    self._shut()

    def _ended(self) -> BaseException | None:
        """Wait for the save in progress; return its failure if it has not been reported."""
        saving = self.saving
        if saving is None:
            return None
        who = f"rank {self._side.rank} of the manager"
        patiently(
            saving.is_over.wait,
            f"{who} waits for the save to {saving.handle.path}, and the removals after it",
        )
        failure = saving.handle._unasked_failure()
        self.saving = None
        return failure

    def _has_its_ranks(self) -> bool:
        try:
            self._side.check()
        except InvalidStateError:
            return False
        return True

    def close(self) -> None:
        """Make the last call, without the other ranks if the process group has ended."""
        if self.turn.is_closed and self.turn.is_own():
            return
        if self._has_its_ranks():
            with self.one("close"):
                pass
        else:
            self._close_alone()

    def _close_alone(self) -> None:
        """Close without the other ranks: the process group has ended."""
        with self.turn.taken("close"):
            try:
                failure = self._ended()
                if failure is not None:
                    raise failure
            finally:
                if self.saving is None:  # Ctrl-C did not end the wait
                    self._upkeep.close()
                    self._shut()

    def give_up(self) -> None:
        """Wait for the save in progress without the other ranks, and log its failure."""
        with self.turn.taken("__exit__"):
            failure = self._ended()
            if failure is not None:
                _log.error("the last save to %s failed: %s", self._root, failure, exc_info=failure)
            self._shut()

    def skipped(self, step: int, metrics: Mapping[str, Any] | None) -> SaveHandle | None:
        """Return the handle of a skipped step, on all ranks; None if the step must be saved."""
        with self.turn.taken("save_async"):
            self._side.check()
            saving = self.saving
            # Ask twice: the first rank may have answered "busy" long before the last rank arrived.
            for _ in range(2):
                said = "over" if saving is None or saving.is_over.is_set() else "busy"
                if saving is not None and saving.handle._was_cancelled:
                    said = "cancelled"  # it ends soon: this step replaces it
                all_said = self._side.meet(("save_async", step, "skip"), None, said)
                if all_said[0] != "busy" or "cancelled" in all_said:
                    return None
            noted: dict[str, float] = {}
            self._side.each(lambda: noted.update(metrics_of(metrics)))
            from ringstow._saving._handle import skip  # imports futures, which takes a while

            # On ranks other than the first, the save may have ended.
            before = "the step before" if saving is None else saving.handle.path
            is_first, self.left_out = self.left_out is None, step
            path = _native.usual_path(self._root, step)
            return skip(path, step, noted, before, is_first=is_first)

    def _shut(self) -> None:
        if self.left_out is not None and self._side.is_first:
            _log.warning(
                "the last step of %s, %d, is not saved: the previous save was in progress, and "
                'on_busy="skip" skips it. End a training with save(), which waits',
                self._root,
                self.left_out,
            )
        self.turn.is_closed = True
        self._copier.end_retries()
        self._side.close()
        self._lock.release()
        _native.release_memory()
