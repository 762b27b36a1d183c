"""The stager that makes no copy: training waits only until the writer has taken the last byte."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.staging import AsyncStager

from ringstow import _cuda
from ringstow._errors import Error
from ringstow.dcp import _copies

if TYPE_CHECKING:
    from ringstow.dcp._writer import StorageWriter


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """Done when the tensors may be changed; hands the live state to the save before that.

    The first call of ``result()`` is the save's, from the thread that it runs in. From then on
    the future is done at the latest when that thread ends, however the save fares.
    """

    def __init__(self, state: dict[str, Any], fence: _cuda.Fence) -> None:
        super().__init__()
        self.fence = fence
        """The moment of the call: the GPUs' tensors are saved as they are then."""
        self._live: dict[str, Any] | None = state
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

    def staged(self) -> None:
        """Note that the last byte has left its tensor."""
        if not self.is_over():
            self.set_result({})

    def fail(self, error: BaseException) -> None:
        """Note that the save ended before that."""
        if not self.is_over():
            self.set_exception(error)

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


class StreamingStager(AsyncStager):
    """For ``dcp.async_save(storage_writer=writer, async_stager=writer.stager())``.

    Takes no copy of the tensors: the writer streams them out of the model while it writes. Leave
    them alone until ``staging_completion`` of the `AsyncSaveResponse` is done: it is, with the
    failure, for a save that fails as well. All other values are taken at the call. The memory
    that a save needs is the writer's ``pool_bytes``, however large the state.
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
            UnsupportedError: a CUDA graph is being captured.
        """
        live = _copies.rebuild(state_dict, lambda tensor, _: tensor)
        future = StagingFuture(live, _cuda.Fence(_copies.devices(live)))
        self._writer._expect(future)
        return future

    def synchronize_staging(self) -> None:
        """Do nothing: ``staging_completion`` is what tells of the staging's end."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""
