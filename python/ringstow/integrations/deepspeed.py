"""DeepSpeed's checkpoints by ringstow: ``engine = use(engine)``.

Needs the package ``deepspeed``. docs/trainers/deepspeed.md says what it gains and what it does not
support.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import ringstow
from ringstow import _native
from ringstow._core import _files
from ringstow._core._config import Config
from ringstow._core._errors import NoCheckpointError, UnsupportedError
from ringstow._saving._guard import Staging, check_staging
from ringstow._saving._save_future import SaveHandle
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._deepspeed import _seam, _tags
from ringstow.integrations._deepspeed._ranks import Ranks
from ringstow.integrations._deepspeed._states import packed, to_stock, unpacked
from ringstow.integrations._kit import _values
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._kit._refusals import refuse_places

__all__ = ["RingstowCheckpointEngine", "to_stock", "use"]

_Engine = TypeVar("_Engine", bound=DeepSpeedEngine)


def use(
    engine: _Engine,
    *,
    background: bool = True,
    config: Config | None = None,
    staging: Staging = "guard",
    allow_pickle: bool = False,
) -> _Engine:
    """Let an engine of DeepSpeed save and load by ringstow; call it on every rank.

    ::

        engine, *_ = deepspeed.initialize(...)
        engine = use(engine)

    Args:
        engine: what ``deepspeed.initialize`` returns.
        background: return from ``save_checkpoint`` while it runs. The next optimizer step waits
            until it has copied all tensors. The next save or load, or ``engine.destroy()``, raises
            its failure on all ranks.
        config: ringstow's settings; None means the defaults.
        staging: as in `ringstow.save_async`, without ``"unguarded"``.
        allow_pickle: pickle values that ringstow cannot save by itself, and unpickle them, which
            can run any code.

    Returns:
        The same engine.

    Raises:
        TypeError: it is no engine.
        InvalidStateError: the settings stripe checkpoints, ``staging`` is unknown, or the engine
            saves by ringstow already.
        UnsupportedError: the engine's configuration cannot be saved; the message has the remedy.
    """
    check_staging(staging, is_for_ranks=True)
    refuse_places(config)
    _seam.refuse_unsupported(engine)
    if isinstance(engine, PipelineEngine) and staging == "guard":
        staging = "wait"  # a pipeline's step does not ask the checkpoint engine before
    saver = RingstowCheckpointEngine(engine, background, config, staging, allow_pickle)
    engine.checkpoint_engine = saver
    engine.save_checkpoint = saver._saving(engine.save_checkpoint)
    engine.load_checkpoint = saver._loading(engine.load_checkpoint)
    return engine


class _Call:
    """One call of ``save_checkpoint``: where its files go, and their saves."""

    def __init__(self, part: str, final: str) -> None:
        self.part = part
        self.final = final
        self.handles: list[SaveHandle] = []
        self.error: Exception | None = None

    def place(self, path: str) -> str | None:
        """Return where a file goes before the tag has its name; None if it is not the tag's."""
        inner = os.path.relpath(os.path.abspath(path), self.final)
        return None if inner.split(os.sep)[0] == os.pardir else os.path.join(self.part, inner)

    def failure(self) -> BaseException | None:
        """Wait for all saves, and return what one failed of."""
        return next((one for one in [each.exception() for each in self.handles] if one), self.error)


class RingstowCheckpointEngine(CheckpointEngine):
    """DeepSpeed's checkpoint engine by ringstow; `use` makes it.

    It counts as decoupled, so that DeepSpeed leaves the file ``latest`` to it.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        background: bool,
        config: Config | None,
        staging: Staging,
        allow_pickle: bool,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._engine = engine
        self._stock = engine.checkpoint_engine
        self._background = background
        self._config = config
        self._staging = staging
        self._allow_pickle = allow_pickle
        self._ranks = Ranks()
        self._flight = InFlight()
        self._call: _Call | None = None
        self._unstaged: list[SaveHandle] = []

    def wait(self) -> None:
        """Wait until the save in progress has its name and ``latest`` names it.

        Raises:
            BaseException: what it failed of on any rank, on all ranks; once.
        """
        if (error := self._flight.end()) is not None:
            raise error

    # What DeepSpeed calls.

    def is_decoupled(self) -> bool:
        """Return True: the commit comes after ``save_checkpoint`` has returned."""
        return True

    def get_commit_info(self) -> None:
        """Wait until the tensors may change: DeepSpeed asks before each optimizer step."""
        handles, self._unstaged = self._unstaged, []
        for handle in handles:
            with contextlib.suppress(Exception):  # `wait` raises it, on all ranks
                handle.wait_staged()

    def preserves_storage_sharing(self) -> bool:
        """Return False: a view is saved without the rest of its memory, so nothing is cloned."""
        return False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: `use` has the call of ``save_checkpoint`` itself."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: what is no part of a tag is complete once it is saved."""
        return True

    def cleanup(self) -> None:
        """Wait for the save in progress: ``engine.destroy()`` calls this.

        Raises:
            BaseException: what it failed of. The process still exits with 1, because DeepSpeed
                drops the error if the engine is destroyed by the garbage collector.
        """
        if (error := self._flight.failure()) is not None:
            raise error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory; a tag's one is hidden until the tag is complete."""
        place = None if self._call is None else self._call.place(path)
        os.makedirs(place or path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Start to save a file of a tag; another file is DeepSpeed's own, as `save_16bit_model`'s.

        What fails is raised on all ranks once ``save_checkpoint`` has ended on all of them.
        """
        call = self._call
        place = None if call is None else call.place(path)
        if call is None or place is None:
            new = _rename_when_complete.hidden(os.path.abspath(path))
            _files.clear(new)
            self._stock.save(state_dict, new)
            _files.sync(new)
            os.rename(new, path)
            _native.sync_dir(os.path.dirname(os.path.abspath(path)))
            return
        try:
            handle = ringstow.save_async(
                packed(state_dict),
                place,
                config=self._config,
                staging=self._staging,
                allow_pickle=self._allow_pickle,
            )
            call.handles.append(handle)
        except Exception as error:  # the other ranks wait for this one in a barrier
            call.error = call.error or error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of ringstow's or of the stock engine.

        Args:
            path: the file; ringstow's is a directory.
            map_location: a device; a function or None means the CPU for ringstow's.
        """
        if not os.path.isdir(path):
            return self._stock.load(path, map_location)
        if isinstance(map_location, dict):
            raise TypeError(f"map_location for {path} must be a device, not a dict")
        device = None if callable(map_location) else map_location
        return unpacked(
            ringstow.load(path, config=self._config, device=device, allow_pickle=self._allow_pickle)
        )

    # What takes the place of the engine's methods.

    def _saving(self, stock: Callable[..., bool]) -> Callable[..., bool]:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def save_checkpoint(*args: Any, **kwargs: Any) -> bool:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not given["save_dir"]:
                return stock(**given)  # raises
            tag = given["tag"]
            given["tag"] = tag = f"global_step{self._engine.global_steps}" if tag is None else tag
            self.wait()
            call = self._begin(os.path.abspath(os.path.join(given["save_dir"], str(tag))))
            self._call, done = call, False
            try:
                done = stock(**given)
            except Exception as error:  # such as a full disk, when DeepSpeed writes its scripts
                call.error = error
                deepspeed.comm.barrier()  # the other ranks are in the last one of the call
            except BaseException:  # Ctrl-C
                self._discard(call)
                raise
            finally:
                self._call = None
            self._finish(call, given["save_dir"] if given["save_latest"] else None, str(tag))
            return done

        return save_checkpoint

    def _loading(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            self.wait()
            if not self._engine.load_universal_checkpoint():
                find = functools.partial(_tags.to_load, given["load_dir"], given["tag"])
                given["tag"] = tag = self._ranks.from_first(find)
                if tag is not None and not given["load_optimizer_states"]:
                    self._refuse_merge(os.path.join(given["load_dir"], tag))
            return self._ranks.each(lambda: stock(**given))

        return load_checkpoint

    def _refuse_merge(self, path: str) -> None:
        if self._engine.zero_optimization_partition_weights() and any(
            one.is_dir() and one.name.endswith(_tags.STATES) for one in os.scandir(path)
        ):
            raise UnsupportedError(
                f"ZeRO stage 3 merges the weights of {path} for load_optimizer_states=False, and "
                "reads the files by itself. Load the optimizer's states, too, or make stock files "
                "of the checkpoint: docs/trainers/deepspeed.md"
            )

    # A save.

    def _begin(self, final: str) -> _Call:
        """Make the hidden directory on rank 0, and see it on all ranks."""
        self._ranks.meet(("save_checkpoint", final), None, None)
        call = _Call(self._ranks.from_first(lambda: _rename_when_complete.begin(final)), final)
        is_seen = os.path.isdir(call.part)
        missing = f"this rank does not see {call.part}: all ranks need the same save_dir"
        self._ranks.agree(None if is_seen else NoCheckpointError(missing))
        return call

    def _finish(self, call: _Call, save_dir: str | None, tag: str) -> None:
        """Complete the save in the background, or fail on all ranks."""
        try:
            with _values.explaining_pickles("use", allow_pickle=self._allow_pickle):
                self._ranks.agree(call.error)
        except BaseException:
            self._discard(call)
            raise
        self._unstaged = list(call.handles)
        self._flight.run(call.final, lambda: self._complete(call, save_dir, tag))
        if not self._background:
            self.wait()

    def _complete(self, call: _Call, save_dir: str | None, tag: str) -> None:
        """Give the tag its name once all ranks' files are durable, and let ``latest`` name it."""
        try:
            self._ranks.settle(call.failure())
            error = None
            if self._ranks.is_first:
                try:
                    _tags.publish(call.part, call.final)
                    if save_dir is not None:
                        _tags.name_latest(save_dir, tag)
                except Exception as caught:
                    error = caught
            self._ranks.settle(error)
        except BaseException:
            self._discard(call)
            raise
        _rename_when_complete.end(call.final)

    def _discard(self, call: _Call) -> None:
        """Stop what this rank saves. Rank 0 removes the directory; the next save does, too."""
        for handle in call.handles:
            handle.cancel()
            handle.exception()
        if self._ranks.is_first:
            shutil.rmtree(call.part, ignore_errors=True)
            _rename_when_complete.end(call.final)
