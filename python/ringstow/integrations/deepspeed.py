"""DeepSpeed's checkpoints by ringstow: ``engine = use(engine)``.

Needs the package ``deepspeed``. See docs/trainers/large-scale.md for benefits and limits.
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
    """Make a DeepSpeed engine save and load by ringstow; call it on every rank.

    ::

        engine, *_ = deepspeed.initialize(...)
        engine = use(engine)

    Args:
        engine: the engine that ``deepspeed.initialize`` returns.
        background: return from ``save_checkpoint`` while it runs. The next optimizer step waits
            until it has copied all tensors. The next save or load, or ``engine.destroy()``, raises
            its failure on all ranks.
        config: ringstow's settings; None means the defaults.
        staging: how a background save keeps the values of the call: ``"guard"``, ``"snapshot"`` or
            ``"wait"``; see `ringstow.save_async`.
        allow_pickle: pickle values that ringstow cannot save by itself, and unpickle them, which
            can run any code.

    Returns:
        The same engine.

    Raises:
        TypeError: ``engine`` is not a DeepSpeed engine.
        InvalidStateError: the settings stripe checkpoints, ``staging`` is unknown, or the engine
            already saves by ringstow.
        UnsupportedError: the engine's configuration cannot be saved; the message has the remedy.
    """
    check_staging(staging, is_for_ranks=True)
    refuse_places(config)
    _seam.refuse_unsupported(engine)
    if isinstance(engine, PipelineEngine) and staging == "guard":
        staging = "wait"  # a pipeline's step does not wait for the checkpoint engine
    saver = RingstowCheckpointEngine(engine, background, config, staging, allow_pickle)
    engine.checkpoint_engine = saver
    engine.save_checkpoint = saver._saving(engine.save_checkpoint)
    engine.load_checkpoint = saver._loading(engine.load_checkpoint)
    return engine


class _Call:
    """One call of ``save_checkpoint``: its directories and the saves of its files."""

    def __init__(self, part: str, final: str) -> None:
        self.part = part
        self.final = final
        self.handles: list[SaveHandle] = []
        self.error: Exception | None = None

    def place(self, path: str) -> str | None:
        """Return a file's path before the tag is renamed; None if it is not the tag's."""
        inner = os.path.relpath(os.path.abspath(path), self.final)
        return None if inner.split(os.sep)[0] == os.pardir else os.path.join(self.part, inner)

    def failure(self) -> BaseException | None:
        """Wait for all saves, and return the failure of one of them."""
        return next((one for one in [each.exception() for each in self.handles] if one), self.error)


class RingstowCheckpointEngine(CheckpointEngine):
    """ringstow's checkpoint engine for DeepSpeed; `use` makes it.

    It is a decoupled engine, so that DeepSpeed does not write the file ``latest`` itself.
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
        """Wait until the save in progress is renamed and ``latest`` names it.

        Raises:
            BaseException: the failure of any rank, on all ranks; once.
        """
        if (error := self._flight.end()) is not None:
            raise error

    # The methods that DeepSpeed calls.

    def is_decoupled(self) -> bool:
        """Return True: the commit comes after ``save_checkpoint`` has returned."""
        return True

    def get_commit_info(self) -> None:
        """Wait until the tensors may change: DeepSpeed calls this before each optimizer step."""
        handles, self._unstaged = self._unstaged, []
        for handle in handles:
            with contextlib.suppress(Exception):  # `wait` raises it, on all ranks
                handle.wait_staged()

    def preserves_storage_sharing(self) -> bool:
        """Return False: a view is saved without the rest of its memory, so nothing is cloned."""
        return False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: `use` replaces ``save_checkpoint`` itself."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: a file outside a tag is complete once it is saved."""
        return True

    def cleanup(self) -> None:
        """Wait for the save in progress: ``engine.destroy()`` calls this.

        Raises:
            BaseException: the save's failure. The process still exits with 1, because DeepSpeed
                drops the error if the garbage collector destroys the engine.
        """
        if (error := self._flight.failure()) is not None:
            raise error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory; a tag's directory is hidden until the tag is complete."""
        place = None if self._call is None else self._call.place(path)
        os.makedirs(place or path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Start to save a file of a tag; DeepSpeed saves other files, such as `save_16bit_model`'s.

        A failure is raised on all ranks once ``save_checkpoint`` has ended on all of them.
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
            map_location: the device; for ringstow's files, a function or None means the CPU.
        """
        if not os.path.isdir(path):
            return self._stock.load(path, map_location)
        if isinstance(map_location, dict):
            raise TypeError(f"map_location for {path} must be a device, not a dict")
        device = None if callable(map_location) else map_location
        return unpacked(
            ringstow.load(path, config=self._config, device=device, allow_pickle=self._allow_pickle)
        )

    # The replacements of the engine's methods.

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
            except Exception as error:  # for example a full disk, when DeepSpeed writes its scripts
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
                "of the checkpoint: docs/trainers/large-scale.md"
            )

    # The steps of a save.

    def _begin(self, final: str) -> _Call:
        """Make the hidden directory on rank 0, and check that all ranks see it."""
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
        """Rename the tag once all ranks' files are durable, and write its name to ``latest``."""
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
        """Stop this rank's saves. Rank 0, or the next save, removes the directory."""
        for handle in call.handles:
            handle.cancel()
            handle.exception()
        if self._ranks.is_first:
            shutil.rmtree(call.part, ignore_errors=True)
            _rename_when_complete.end(call.final)
