"""The stager that copies next to nothing: the writer reads the tensors while training goes on."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from ringstow import _cuda, _native
from ringstow._errors import Error, UnsupportedError
from ringstow._guard import SMALL, Hold
from ringstow._state import Path, flat_name
from ringstow.dcp import _copies

if TYPE_CHECKING:
    from ringstow.dcp._writer import StorageWriter


# How long a save may take from stage() to its first look at the state. Later it finds no state, and
# steps wait for it no more.
_UNCLAIMED_S = 10.0


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """Done when the tensors may be changed; hands the live state to the save before that.

    The first call of ``result()`` is the save's, from the thread that it runs in. From then on
    the future is done at the latest when that thread ends, however the save fares.
    """

    def __init__(self, state: dict[str, Any], hold: Hold) -> None:
        super().__init__()
        guarded = _Guarded()
        self._live: dict[str, Any] | None = _copies.rebuild(state, guarded.replace)
        self.fence = _cuda.Fence(_copies.devices(self._live))
        """The moment of the call: the GPUs' tensors are saved as they are then."""
        self.watched: _native.Watch | None = _native.Watch(guarded.streamed)
        """The tensors that are not copied: the save fails if one is changed under it."""
        self._kept: list[torch.Tensor] | None = guarded.copied
        self._hold = hold
        self._since = time.monotonic()
        self._takes = threading.Lock()
        self.thread: threading.Thread | None = None
        self.is_elsewhere = False
        """Whether another process saves it."""

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the live state to the save; to all others an empty dict, once it is staged.

        Raises:
            Exception: what the save failed of before everything was staged.
        """
        with self._takes:
            live, self._live = self._live, None
        if live is None:
            return super().result(timeout)
        self.thread = threading.current_thread()
        watch = threading.Thread(target=self._watch, name="ringstow-staging", daemon=True)
        watch.start()
        return live

    def done(self) -> bool:
        """Tell whether it is staged. A failure is told by ``result()`` and by callbacks only.

        ``async_save`` takes a future that is done when it returns for one that went well.
        """
        return self.is_over() and self.exception() is None

    def is_over(self) -> bool:
        """Tell whether the tensors may be changed."""
        return super().done()

    def give_up_unclaimed(self) -> bool:
        """Fail a save that was not begun; returns whether nothing reads the tensors any more."""
        with self._takes:
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
        """Note that the save ended before that."""
        if not self.is_over():
            self._let_go()
            self.set_exception(error)

    def _let_go(self) -> None:
        self.watched = self._kept = None
        self._hold.end()

    def _watch(self) -> None:
        assert self.thread is not None
        self.thread.join()
        if self.is_elsewhere:
            self.staged()
        else:
            self.fail(
                Error(
                    "the save ended before it read the tensors, which may be changed: "
                    "upload_completion says what it failed of"
                )
            )


class _Guarded:
    """What a state consists of that is copied at the call, and what is streamed."""

    def __init__(self) -> None:
        self.streamed: list[tuple[str, torch.Tensor]] = []
        self.copied: list[torch.Tensor] = []
        """The originals of what was copied."""

    def replace(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """Return what stands for a tensor: itself, or one with copies of small parts."""
        parts = _copies.parts(tensor)
        if parts is None:
            return tensor
        taken = [self._take(part, path) for part in parts]
        if all(part is one for part, one in zip(parts, taken, strict=True)):
            return tensor
        return _copies.with_parts(tensor, taken)

    def _take(self, part: torch.Tensor, path: Path) -> torch.Tensor:
        is_small = part.numel() * part.element_size() <= SMALL
        if not is_small and not part.is_inference():
            self.streamed.append((flat_name(path), part))
            return part
        if part.numel() == 0:
            return part
        _copies.check(part, path)
        self.copied.append(part)
        with torch.no_grad():
            return _cuda.clone(part)


class StreamingStager(AsyncStager):
    """For ``dcp.async_save(storage_writer=writer, async_stager=writer.stager())``.

    Takes no copy of the tensors: the writer streams them out of the model while it writes. The next
    ``step()`` of any torch optimizer waits until it has. What else changes them is to wait for
    ``staging_completion`` of the `AsyncSaveResponse`: it is done, with the failure, for a save that
    fails as well. A tensor that is seen to change before makes the save fail with `TornSaveError`.

    Tensors of up to 64 KiB, tensors without a version, and all other values are copied at the call.
    The memory that a save needs is these copies and the writer's ``pool_bytes``, however large the
    state.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: StorageWriter) -> None:
        self._writer = writer

    def stage(self, state_dict: dict[str, Any]) -> StagingFuture:
        """Return a future whose ``result()`` is the live state, and which is done when staged.

        Of tensors on GPUs, what the work queued so far on this thread's current streams makes of
        them is saved.

        Raises:
            InvalidStateError: a value that can't be copied, named by its key.
            UnsupportedError: a CUDA graph is being captured; or the call comes from within an
                optimizer's step, which would change the tensors before they are read.
            TornSaveError: another thread is in an optimizer's step that does not end.
        """
        hold = Hold()
        try:
            if not hold.begin():
                raise UnsupportedError(
                    "an optimizer's step is under way, which would change the tensors while they "
                    "are saved: save before or after it, or leave out async_stager=, so that the "
                    "writer takes a snapshot"
                )
            hold.let_steps_end()
            future = StagingFuture(state_dict, hold)
            self._writer._expect(future)
            hold.follow(future.give_up_unclaimed)
        except BaseException:
            hold.end()
            raise
        return future

    def synchronize_staging(self) -> None:
        """Do nothing: ``staging_completion`` is what tells of the staging's end."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""
