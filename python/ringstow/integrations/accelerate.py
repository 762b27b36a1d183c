"""Hugging Face's Accelerator with ringstow's saves: ``RingstowAccelerator`` for ``Accelerator``.

Needs the package ``accelerate``. docs/trainers/accelerate.md says what it gains and what it does
not support.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
from accelerate import Accelerator

from ringstow._arguments import absolute
from ringstow._config import Config
from ringstow._errors import InvalidStateError, TornSaveError, UnsupportedError
from ringstow._guard import Staging, check_staging
from ringstow.integrations import _named, _saves, _values
from ringstow.integrations._accelerate import _limits, _places, _states, _whole
from ringstow.integrations._accelerate._together import Together

__all__ = ["RingstowAccelerator"]

_log = logging.getLogger("ringstow")
_DOCS = "docs/trainers/accelerate.md has the versions that work"

# What the Accelerator does not document and this module uses: its methods with their arguments,
# and its attributes.
_METHODS = {
    "save_state": ["output_dir", "safe_serialization", "save_model_func_kwargs"],
    "load_state": ["input_dir", "load_kwargs", "load_model_func_kwargs"],
    "prepare": ["args", "device_placement"],
    "end_training": [],
    "unwrap_model": ["model", "keep_fp32_wrapper", "keep_torch_compile"],
}
_ATTRIBUTES = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_models",
    "_optimizers",
    "_save_model_state_pre_hook",
    "_schedulers",
    "is_fsdp2",
    "project_configuration",
    "scaler",
    "step",
)


def _check_seam(kind: type[Accelerator]) -> None:
    """Refuse an Accelerator that saves in another way."""
    for name, arguments in _METHODS.items():
        method = getattr(kind, name, None)
        if method is None or list(inspect.signature(method).parameters)[1:] != arguments:
            raise UnsupportedError(
                f"accelerate {accelerate.__version__} saves in another way: its {name} is not "
                f"{name}({', '.join(arguments)}). {_DOCS}"
            )


_check_seam(Accelerator)


class RingstowAccelerator(Accelerator):  # type: ignore[misc, unused-ignore]
    """Hugging Face's ``Accelerator`` that saves by ringstow.

    ::

        accelerator = RingstowAccelerator(project_config=configuration)

    ``save_state`` returns while the save runs, and the next optimizer step waits until it has
    copied all tensors. The directory appears when it is complete. The next save,
    `wait_for_checkpoint` or ``end_training`` raises the failure of a save.

    Args:
        args: the Accelerator's own.
        background: return from ``save_state`` while it runs; False returns once the directory is
            complete.
        config: ringstow's settings; None means the defaults.
        staging: how a background save keeps the values of the call: as in `ringstow.save_async`,
            without ``"unguarded"``.
        allow_pickle: pickle values of registered objects that ringstow cannot save by itself, and
            unpickle them, which can run any code.
        kwargs: the Accelerator's own.

    Raises:
        InvalidStateError: the settings stripe checkpoints, or ``staging`` is unknown.
        UnsupportedError: this ``accelerate`` saves in another way. By ``prepare``, ``save_state``
            and ``load_state``: DeepSpeed, Megatron-LM, FSDP1, XLA and others.
    """

    def __init__(
        self,
        *args: Any,
        background: bool = True,
        config: Config | None = None,
        staging: Staging = "guard",
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        check_staging(staging)
        if staging == "unguarded":
            raise InvalidStateError(
                'staging="unguarded" is not for RingstowAccelerator: use "guard", which copies no '
                "large tensor either"
            )
        _saves.refuse_stripes(config, "")
        super().__init__(*args, **kwargs)
        if gone := [name for name in _ATTRIBUTES if not hasattr(self, name)]:
            raise UnsupportedError(
                f"accelerate {accelerate.__version__} saves in another way: its Accelerator has no "
                f"{', '.join(gone)}. {_DOCS}"
            )
        self._ringstow_background = background
        self._ringstow_config = config
        self._ringstow_staging: Staging = staging
        self._ringstow_pickles = allow_pickle
        self._ringstow_saves = _saves.Saves("accelerate", "total_limit")
        self._ringstow_ranks = Together()

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as the Accelerator does.

        Raises:
            UnsupportedError: their states could not be saved.
        """
        _limits.refuse_unsupported(self)
        prepared = super().prepare(*args, **kwargs)
        _limits.refuse_unsupported(self)
        return prepared

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save all that ``load_state`` needs; call it on every rank.

        Waits first for the save before. With automatic naming, the oldest checkpoints over
        ``total_limit`` are removed once this one is complete.

        Args:
            output_dir: the checkpoint's directory, which the save replaces as a whole; ignored
                with automatic naming, as by the Accelerator.
            safe_serialization: False is refused.
            save_model_func_kwargs: refused; they are DeepSpeed's.

        Returns:
            The checkpoint's directory, which appears when it is complete.

        Raises:
            BaseException: what the save before this one failed of, on all ranks.
            InvalidStateError: there is no ``output_dir``; it holds more than a checkpoint; or a
                registered object has a value that ringstow cannot save.
            UnsupportedError: as ``prepare`` says.
            ValueError: automatic naming has used this number already.
        """
        _limits.refuse_unsupported(self)
        if not safe_serialization:
            raise UnsupportedError(
                "safe_serialization=False is not for RingstowAccelerator, which writes safetensors "
                "files and no pickles: leave it out"
            )
        if save_model_func_kwargs:
            raise TypeError(
                f"RingstowAccelerator has no use for {', '.join(save_model_func_kwargs)} in "
                "save_state: leave them out"
            )
        self.wait_for_checkpoint()
        ranks = self._ringstow_ranks
        shown = ranks.first(lambda: self._prepare_place(output_dir))
        final = absolute(shown)
        part = _named.hidden(final)
        try:
            self._start(part, final)
        except BaseException:  # also after Ctrl-C
            if ranks.is_first:
                shutil.rmtree(part, ignore_errors=True)
            raise
        self.project_configuration.iteration += 1
        if not self._ringstow_background:
            self.wait_for_checkpoint()
        return Path(shown)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what ``save_state`` saved; call it on every rank.

        Loads the stock Accelerator's checkpoints, too. With automatic naming, the next save gets a
        number above all that are there.

        Args:
            input_dir: the checkpoint's directory; None for the newest one of automatic naming.
            load_kwargs: for the stock Accelerator's checkpoints.
            load_model_func_kwargs: ``strict=False`` loads the weights whose names are in both;
                ``map_location`` as for the Accelerator. The rest is for its own checkpoints.

        Raises:
            ValueError: there is no such directory.
            FileNotFoundError: automatic naming has no complete checkpoint.
            InvalidStateError: the checkpoint lacks something that is prepared or registered here,
                or another kind of run saved it.
            CorruptCheckpointError: the bytes on disk are not those that were written.
        """
        _limits.refuse_unsupported(self)
        self.wait_for_checkpoint()
        ranks = self._ringstow_ranks
        path, mark = ranks.first(lambda: self._to_load(input_dir))
        if mark is None:
            super().load_state(path, load_kwargs, **load_model_func_kwargs)
        else:
            self._load(path, mark, strict=_strict(load_model_func_kwargs))
        if self._is_named():
            number = ranks.first(lambda: _places.next_number(self._root()))
            configuration = self.project_configuration
            configuration.iteration = max(configuration.iteration, number)

    def latest_checkpoint(self) -> str | None:
        """Return the newest complete checkpoint of automatic naming; None if there is none.

        Waits first for the save in flight. Call it on every rank: all get the same answer.

        Raises:
            BaseException: what the save in flight failed of.
            InvalidStateError: the Accelerator has no automatic naming.
        """
        self.wait_for_checkpoint()
        return self._ringstow_ranks.first(self._newest)

    def wait_for_checkpoint(self) -> None:
        """Wait until the save in flight is complete; call it on every rank.

        Raises:
            BaseException: what the save failed of, on all ranks; once.
        """
        error = self._ringstow_saves.end()
        causes = getattr(error, "failures", {}).values()
        torn = [error, *(cause for cause, _ in causes)]
        if error is not None and any(isinstance(one, TornSaveError) for one in torn):
            error.add_note(f'In Accelerate: {type(self).__name__}(staging="wait")')
        self._ringstow_ranks.agree(error)

    def end_training(self) -> None:
        """Wait as `wait_for_checkpoint` does, and end the training as the Accelerator does."""
        try:
            self.wait_for_checkpoint()
        finally:
            self._ringstow_ranks.close()
            super().end_training()

    # A save.

    def _root(self) -> str:
        """Return the directory of automatic naming."""
        if self.project_dir is None:
            raise InvalidStateError(
                "automatic_checkpoint_naming needs a directory: give "
                "ProjectConfiguration(project_dir=...)"
            )
        return os.path.join(os.path.expanduser(self.project_dir), "checkpoints")

    def _place(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the directory to save to; rank 0 decides for all."""
        if self._is_named():
            path = os.path.join(self._root(), f"checkpoint_{self.save_iteration}")
            if os.path.lexists(path):
                raise ValueError(
                    f"{path} exists already: call load_state() before the first save, or set "
                    "accelerator.project_configuration.iteration to a higher number"
                )
            return path
        if output_dir is None:
            raise InvalidStateError(
                "save_state needs output_dir=, or an Accelerator with "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        path = os.fspath(output_dir)
        _places.check_replaced(absolute(path))
        return path

    def _prepare_place(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Make the hidden directory, on rank 0; return the path that it gets."""
        shown = self._place(output_dir)
        final = absolute(shown)
        names = re.compile(re.escape(os.path.basename(final)))
        if self._is_named():
            names = _places.NAMES
        os.mkdir(os.path.join(_named.prepare(final, names), _places.HOOKS))
        return shown

    def _start(self, part: str, final: str) -> None:
        """Run the hooks, and start the save."""
        ranks = self._ringstow_ranks
        folder = os.path.join(part, _places.HOOKS)
        weights, own = ranks.each(lambda: (self._run_hooks(folder), _states.own(self)))
        all_own = ranks.gathered(own)

        def meta() -> dict[str, Any]:
            """Return all that belongs to no model and no optimizer, on rank 0."""
            count = len(self._models) if self.is_fsdp2 else len(weights)
            names = _places.hooks_files(part)
            counts = _states.counts(self, count)
            _places.Mark(self.num_processes, self.is_fsdp2, counts, names).write(folder)
            return {**_states.common(self), "ranks": all_own}

        start = self._start_shards if self.is_fsdp2 else self._start_whole
        try:
            handle = start(part, meta, weights)
        except InvalidStateError as error:
            _values.explain_pickles(
                error, f"In Accelerate: {type(self).__name__}", allow_pickle=self._ringstow_pickles
            )
            raise
        if ranks.is_first:
            limit = self.project_configuration.total_limit if self._is_named() else None
            self._ringstow_saves.start(
                handle,
                part,
                final,
                seal=lambda: _places.seal(part),
                stale=lambda: _places.stale(final, limit),
                may_replace=_places.check_replaced,
            )
        elif handle is not None:
            self._ringstow_saves.follow(handle)

    def _start_whole(
        self, part: str, meta: Callable[[], dict[str, Any]], weights: list[dict[str, Any]]
    ) -> Any:
        """Start to save, on rank 0."""

        def start() -> Any:
            if not self._ringstow_ranks.is_first:
                return None
            more = meta()
            is_large = self._ringstow_staging == "guard" and _values.has_large(more)
            return _whole.start(
                self,
                weights,
                more,
                part,
                step=self._step(),
                config=self._ringstow_config,
                staging="wait" if is_large else self._ringstow_staging,
                allow_pickle=self._ringstow_pickles,
            )

        return self._ringstow_ranks.each(start)

    def _start_shards(
        self, part: str, meta: Callable[[], dict[str, Any]], weights: list[dict[str, Any]]
    ) -> Any:
        """Start to save, on all ranks."""
        from ringstow.integrations._accelerate import _shards

        ranks = self._ringstow_ranks

        def collect() -> dict[str, Any]:
            if not ranks.is_first:
                return _shards.collect(self, None)
            more = meta()
            _shards.check(more, allow_pickle=self._ringstow_pickles)
            return _shards.collect(self, more)

        state = ranks.each(collect)
        writers = ranks.writers(
            self._ringstow_config, self._ringstow_staging, self._ringstow_pickles
        )
        handle = writers.save_async(state, part, self._step(), None)
        if _values.has_large(state.get(_states.ACCELERATOR)):
            handle.wait_staged()
        return handle

    def _run_hooks(self, folder: str) -> list[dict[str, Any]]:
        """Call the save hooks; return the weights that they leave to the save."""
        weights = [] if self.is_fsdp2 else _whole.weights(self)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, folder)
        return weights

    def _is_named(self) -> bool:
        return bool(self.project_configuration.automatic_checkpoint_naming)

    def _step(self) -> int | None:
        """Return the number that the manifest notes."""
        return self.save_iteration if self._is_named() else None

    # A load.

    def _newest(self) -> str | None:
        if not self._is_named():
            raise InvalidStateError(
                "latest_checkpoint needs ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        found, halves = _places.newest(self._root(), len(self._custom_objects))
        if halves:
            _log.warning(
                "passed over, as the saves were killed or more objects are registered now: %s",
                ", ".join(halves),
            )
        return found

    def _to_load(self, input_dir: str | os.PathLike[str] | None) -> tuple[str, _places.Mark | None]:
        """Return where the checkpoint is, and its mark if it is ours; rank 0 looks for all."""
        if input_dir is not None:
            path = os.path.expanduser(os.fspath(input_dir))
            found = _places.to_load(path)
            if found is None:
                raise ValueError(f"Tried to find {path} but folder does not exist")
        elif not self._is_named():
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        else:
            found = self._newest()
            if found is None:
                raise FileNotFoundError(
                    errno.ENOENT, "No complete checkpoint is in the directory", self._root()
                )
        mark = _places.mark_of(found)
        if mark is None and os.path.exists(os.path.join(found, "manifest.json")):
            raise InvalidStateError(
                f"{found} was not saved by RingstowAccelerator: load it by ringstow.load or "
                "ringstow.dcp"
            )
        return found, mark

    def _load(self, path: str, mark: _places.Mark, *, strict: bool) -> None:
        ranks = self._ringstow_ranks
        if mark.is_sharded != self.is_fsdp2:
            kinds = {True: "FSDP2", False: "one process or DDP"}
            raise InvalidStateError(
                f"{path} was saved by {kinds[mark.is_sharded]}, and this is "
                f"{kinds[self.is_fsdp2]}, which keeps its optimizer in another way: use "
                'ringstow.load(path, prefix="model") for the weights'
            )
        models = [] if self.is_fsdp2 else list(self._models)
        hooks = list(self._load_model_state_pre_hook.values())

        def load() -> dict[str, Any]:
            options = {
                "strict": strict,
                "config": self._ringstow_config,
                "allow_pickle": self._ringstow_pickles,
            }
            if self.is_fsdp2:
                from ringstow.integrations._accelerate import _shards

                _states.check_counts(self, mark.counts, len(self._models), path)
                meta = _shards.load_into(self, path, ranks.group, **options)
            for hook in hooks:
                hook(models, path)
            if not self.is_fsdp2:
                _states.check_counts(self, mark.counts, len(models), path)
                meta = _whole.load_into(self, models, path, **options)
            _states.put_common(self, meta)
            _states.put_own(self, meta["ranks"], path)
            return meta

        ranks.each(load)


def _strict(options: dict[str, Any]) -> bool:
    """Return whether all weights must match.

    Raises:
        TypeError: other options, which only the stock Accelerator's checkpoints take.
    """
    others = options.keys() - {"strict", "map_location"}
    if others:
        raise TypeError(
            f"RingstowAccelerator has no use for {', '.join(sorted(others))} in load_state for a "
            "checkpoint of ringstow's: leave them out"
        )
    if options.get("map_location") not in (None, "cpu", "on_device"):
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            "`'on_device'`"
        )
    return bool(options.get("strict", True))
