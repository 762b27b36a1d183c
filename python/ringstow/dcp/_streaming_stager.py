"""The stager that copies almost nothing: the writer reads the tensors while training continues."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from ringstow import _native
from ringstow._core._errors import Error, UnsupportedError
from ringstow._saving._guard import SMALL, Hold
from ringstow._state.tensors import _cuda
from ringstow._state.tree._walk import Path, flat_name
from ringstow.dcp import _state_copies

# How long a save may take from stage() until it first reads the state. A later save fails, and
# optimizer steps no longer wait for it.
_UNCLAIMED_S = 10.0

Claim = Callable[["StagingFuture"], None]
"""Called in the thread of a save with the future of the state that it saves."""


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """Done when the tensors may be changed; returns the live state to the save before that.

    The save calls ``result()`` first, in its own thread. The future is done when that thread ends
    at the latest, whether the save succeeds or fails.
    """

    def __init__(self, state: dict[str, Any], hold: Hold, claim: Claim) -> None:
        super().__init__()
        self._claim = claim
        guarded = _Guarded()
        try:
            self._live: dict[str, Any] | None = _state_copies.rebuild(state, guarded.replace)
        except BaseException:
            guarded.wait()
            raise
        self.fence = _cuda.Fence(_cuda.devices_of(guarded.tensors()))
        """Saves GPU tensors with their values at the call."""
        self.watched: _native.Watch | None = _native.Watch(guarded.streamed)
        """The tensors that are not copied: the save fails if one changes while it is read."""
        self._kept: list[torch.Tensor] | None = guarded.copied
        self._hold = hold
        self.waited = hold.waited
        """How long the save has blocked training, in seconds."""
        self._since = time.monotonic()
        self._lock = threading.RLock()  # re-entrant: a signal handler may save, too
        self.is_elsewhere = False
        """Whether another process saves it."""

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the live state to the save; to other callers an empty dict, once it is staged.

        Raises:
            Exception: the save failed before everything was staged.
        """
        with self._lock:
            live, self._live = self._live, None
        if live is None:
            return super().result(timeout)
        self._claim(self)
        threading.Thread(
            target=self._watch,
            args=(threading.current_thread(),),
            name="ringstow-staging",
            daemon=True,
        ).start()
        return live

    def done(self) -> bool:
        """Return whether the state is staged; False after a failure, which ``result()`` raises.

        ``async_save`` treats a future that is already done as a success.
        """
        return self.is_over() and self.exception() is None

    def is_over(self) -> bool:
        """Return whether the tensors may be changed."""
        return super().done()

    def give_up_unclaimed(self) -> bool:
        """Fail a save that has not begun in time; return whether the tensors may be changed."""
        with self._lock:
            is_late = self._live is not None and time.monotonic() > self._since + _UNCLAIMED_S
            if is_late:
                self._live = None
        if is_late:
            self.fail(Error(f"the save had not begun {_UNCLAIMED_S} s after the state was staged"))
        return self.is_over()

    def staged(self) -> None:
        """Note that the last byte has left its tensor."""
        if not self.is_over():
            self._let_go()
            self.set_result({})

    def fail(self, error: BaseException) -> None:
        """Note that the save ended before everything was staged."""
        if not self.is_over():
            self.fence.wait()  # wait for the copies of small tensors
            self._let_go()
            self.set_exception(error)

    def _let_go(self) -> None:
        self.watched = self._kept = None
        self._hold.end()

    def _watch(self, thread: threading.Thread) -> None:
        thread.join()
        if self.is_elsewhere:
            self.staged()
        else:
            self.fail(
                Error(
                    "the save ended before it read the tensors, which may be changed: "
                    "upload_completion has its error"
                )
            )


class _Guarded:
    """The tensors of a state: copied at the call, or streamed."""

    def __init__(self) -> None:
        self.streamed: list[tuple[str, torch.Tensor]] = []
        self.copied: list[torch.Tensor] = []
        """The originals of the copied tensors."""
        self._copies: list[torch.Tensor] = []

    def replace(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """Return a tensor itself, or an equal one with copies of small parts."""
        parts = _state_copies.parts(tensor)
        if parts is None:
            return tensor
        taken = [self._take(part, path) for part in parts]
        if all(part is one for part, one in zip(parts, taken, strict=True)):
            return tensor
        return _state_copies.with_parts(tensor, taken)

    def tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors, as they were at the call."""
        return [*(tensor for _, tensor in self.streamed), *self.copied]

    def wait(self) -> None:
        """Wait for the copies that GPUs make; source and target must live until then."""
        _cuda.synchronize(_cuda.devices_of(self.copied))

    def _take(self, part: torch.Tensor, path: Path) -> torch.Tensor:
        is_small = part.numel() * part.element_size() <= SMALL
        if not is_small and not part.is_inference():
            self.streamed.append((flat_name(path), part))
            return part
        if part.numel() == 0:
            return part
        if _cuda.place_of(part) is not None:
            _cuda.refuse_capture("a state cannot be staged")
        _state_copies.check(part, path)
        self.copied.append(part)
        with torch.no_grad():
            self._copies.append(_cuda.clone(part))
        return self._copies[-1]


class StreamingStager(AsyncStager):
    """For ``dcp.async_save(storage_writer=writer, async_stager=writer.stager())``.

    Copies no large tensor: the writer streams them out of the model while it writes. The next
    ``step()`` of any torch optimizer waits until the writer has read them. Any other code that
    changes tensors must wait for ``staging_completion`` of the `AsyncSaveResponse`, which is also
    done, with an error, if the save fails. A tensor that changes earlier makes the save fail with
    `TornSaveError`.

    Tensors of up to 64 KiB, tensors without a version, and all other values are copied at the call.
    A save needs memory for these copies and for the writer's ``pool_bytes``, however large the
    state is.
    """

    _synchronize_after_execute = False

    def __init__(self, begin: Callable[[], Claim]) -> None:
        """Make a stager that calls ``begin`` for each save, and its result in the save's thread."""
        self._begin = begin

    def stage(self, state_dict: dict[str, Any]) -> StagingFuture:
        """Return a future whose ``result()`` is the live state, and which is done when staged.

        Tensors on GPUs are saved as the work queued so far on this thread's current streams leaves
        them.

        Raises:
            InvalidStateError: a value can't be copied; names its key.
            UnsupportedError: a CUDA graph is being captured; or the call comes from within an
                optimizer's step, which would change the tensors before they are read.
            TornSaveError: an optimizer's step in another thread did not end in time.
        """
        hold = Hold()
        try:
            with hold.waited.here():
                return self._stage(state_dict, hold)
        except BaseException:
            hold.end()
            raise

    def _stage(self, state_dict: dict[str, Any], hold: Hold) -> StagingFuture:
        if not hold.begin():
            raise UnsupportedError(
                "an optimizer's step is in progress, which would change the tensors while they "
                "are saved: save before or after it, or leave out async_stager=, so that the "
                "writer takes a snapshot"
            )
        hold.let_steps_end()
        future = StagingFuture(state_dict, hold, self._begin())
        hold.follow(future.give_up_unclaimed)
        return future

    def synchronize_staging(self) -> None:
        """Do nothing: ``staging_completion`` reports when staging ends."""

    def close(self) -> None:
        """Do nothing: the stager keeps nothing."""
