"""Prevents a background save from mixing the values of two steps.

Three measures work together. Small values, and values whose changes cannot be detected, are copied
before the call returns. torch's optimizers wait before their next step until the rest is copied.
Then the save compares the version and the memory address of each tensor, and fails if a tensor has
changed nevertheless.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Literal, get_args

from ringstow import _native
from ringstow._core._errors import InvalidStateError, TornSaveError
from ringstow._core._waiting import Patience
from ringstow._reports._blocked_time import Waited
from ringstow._state.tensors import _cuda
from ringstow._state.tensors._memory import Address
from ringstow._state.tensors._optional_packages import imported

if TYPE_CHECKING:
    import torch

Staging = Literal["guard", "snapshot", "wait", "unguarded"]

# Copied at the call: kernels change small tensors, such as norm statistics, without a new version.
SMALL = 64 << 10

_OPTIMIZERS = "torch.optim.optimizer"
# How long an optimizer's step waits before it checks again whether it still must.
_SLICE_S = 1.0
# How long a save waits for optimizer steps in other threads, and how often it checks.
_STEP_MAX_S = 60.0
_PAUSE_S = 0.001
_U64_MAX = (1 << 64) - 1


def check_staging(staging: object, *, is_for_ranks: bool = False) -> None:
    """Refuse an unknown kind of staging, or a kind that several ranks cannot use.

    Raises:
        InvalidStateError: names the known kinds, or what to use instead.
    """
    if staging not in get_args(Staging):
        known = ", ".join(map(repr, get_args(Staging)))
        raise InvalidStateError(f"staging={staging!r} is not one of {known}")
    if is_for_ranks and staging == "unguarded":
        raise InvalidStateError(
            'staging="unguarded" is not for several ranks: use "guard", which copies no large '
            'tensor either, or "snapshot"'
        )


def stage(
    tensors: _native.Tensors, staging: Staging, path: str, hold: Hold, pool_bytes: int = 0
) -> bool:
    """Copy the tensors that must be copied at the call; return whether the call may then return.

    GPUs make their copies later, and the save waits for them; if it fails, `Hold.wait_copied` does.

    Raises:
        TornSaveError: another thread changed a tensor while it was copied.
        OSError: no memory is left for the copies.
    """
    if staging == "unguarded":
        return True
    _native.watch(tensors)
    if staging == "wait":
        return False
    if staging == "snapshot":
        return _native.copy_now(tensors, path, _U64_MAX, _U64_MAX, _to_host)
    on_gpu = functools.partial(_on_gpu, hold=hold)
    return _native.copy_now(tensors, path, SMALL, pool_bytes // 2, on_gpu)


def _on_gpu(tensors: list[torch.Tensor], hold: Hold) -> list[tuple[Address, object]] | None:
    """Queue copies of small tensors in their GPUs' memory; None if it lacks space."""
    _cuda.refuse_capture("a state cannot be saved")
    try:
        copies = _cuda.copy_all(tensors)
    except _cuda.runtime().OutOfMemoryError:
        return None
    hold.copies = _cuda.Fence(_cuda.devices_of(tensors))
    address_of = _cuda.finder()
    # Keep the original as well: its allocator may have recorded another stream than the copy's.
    pairs = zip(copies, tensors, strict=True)
    return [(address_of(copy), (copy, tensor)) for copy, tensor in pairs]


def _to_host(tensors: list[torch.Tensor]) -> list[tuple[Address, object]]:
    """Copy tensors from GPUs to host memory, as the current streams leave them."""
    _cuda.refuse_capture("a state cannot be saved")
    copies = _cuda.to_host(tensors)
    return [(copy.data_ptr(), copy) for copy in copies]


class Hold:
    """Makes the optimizers of all threads wait before their next step, from `begin` to `end`."""

    def __init__(self) -> None:
        self.path = ""
        """The save's path, once it is known."""
        self._patience: Patience | None = None
        self._over = threading.Event()
        self._is_over: Callable[[], bool] = lambda: False
        self._caller: int | None = threading.get_ident()
        self.waited = Waited()
        """How long the save has blocked the program."""
        self.copies: _cuda.Fence | None = None
        """The events after which GPUs have copied small tensors."""

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, *, may_wait: bool = True) -> bool:
        """Begin, and return whether the caller's next step will wait.

        Within a step it is too late for that: the caller must wait itself.
        """
        _holds.append(self)
        if is_stepping(sys._getframe()):
            return False
        return _install(may_wait)

    @staticmethod
    def let_steps_end() -> None:
        """Wait for steps that other threads have already begun: they can no longer be made to wait.

        Raises:
            TornSaveError: a step did not end in time.
        """
        deadline = time.monotonic() + _STEP_MAX_S
        while _others_are_stepping():
            if time.monotonic() >= deadline:
                raise TornSaveError(
                    f"nothing was saved: another thread has been in an optimizer's step for "
                    f"{_STEP_MAX_S:.0f} s, and changes tensors at any moment. Save between steps"
                )
            _pause()

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Note that the call is over; ``is_over`` returns whether the save no longer reads tensors.

        A waiting step polls it, in case the save cannot call `end`.
        """
        self._is_over, self._caller = is_over, None

    def wait_copied(self) -> None:
        """Wait until GPUs have copied small tensors: before that, neither side may be freed."""
        if self.copies is not None:
            self.copies.wait()

    def end(self) -> None:
        """Let the optimizers continue; may be called again."""
        with contextlib.suppress(ValueError):
            _holds.remove(self)
        self._over.set()

    def is_for(self, thread: int) -> bool:
        """Return whether a thread must wait: all except the thread that is still in the call."""
        return thread != self._caller

    def wait(self) -> None:
        """Wait for the end; log the reason once, however many steps wait."""
        self._patience = self._patience or Patience(
            f"an optimizer's step waits for the save to {self.path or 'a checkpoint'}, which has "
            "not copied all tensors"
        )
        while not self._over.wait(_SLICE_S):
            self._patience.check()
            # The hold may be gone, for example in a forked child.
            if self not in _holds or self._is_over():
                self.end()


# Saves that are reading tensors. List operations are atomic, so it needs no lock. A lock could be
# held by the thread that a signal handler interrupts.
_holds: list[Hold] = []
_is_installed = False


def before_step(*_: object) -> None:
    """Wait until no save reads tensors. torch calls this before every optimizer's step."""
    if _holds:
        _wait()


def _wait() -> None:
    me = threading.get_ident()
    while hold := next((hold for hold in list(_holds) if hold.is_for(me)), None):
        with hold.waited.here():
            hold.wait()


def _install(may_wait: bool) -> bool:
    """Make torch call `before_step` from now on, and return whether it does.

    The hook is never removed: torch iterates over its table of hooks while a step waits in a hook,
    and fails if the table changes meanwhile. For the same reason the hook is not installed within a
    step and, where possible, not during another thread's step: the call waits for that step, or a
    later save installs the hook.
    """
    global _is_installed
    if _is_installed:
        return True
    optimizers = imported(_OPTIMIZERS)
    register = getattr(optimizers, "register_optimizer_step_pre_hook", None)
    if register is None:  # torch is not imported, or is being imported
        return imported("torch") is None
    if not may_wait and _others_are_stepping():
        return False
    with contextlib.suppress(TornSaveError):
        Hold.let_steps_end()
    register(before_step)
    _is_installed = True
    return True


def is_stepping(frame: FrameType | None) -> bool:
    """Return whether a stack is within an optimizer's step, after `before_step`."""
    while frame is not None:
        if frame.f_code is before_step.__code__:
            return False
        if frame.f_globals.get("__name__") == _OPTIMIZERS:
            return True
        frame = frame.f_back
    return False


def _others_are_stepping() -> bool:
    frames = sys._current_frames()
    # A frame that refers to itself is a cycle, which would keep its variables, and so the handle.
    del frames[threading.get_ident()]
    return any(map(is_stepping, frames.values()))


def _pause() -> None:
    time.sleep(_PAUSE_S)


def forget_after_fork() -> None:
    """In a forked child, forget the parent's saves: they do not read the child's tensors."""
    _holds.clear()
