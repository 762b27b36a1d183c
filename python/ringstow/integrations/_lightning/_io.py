"""The saves, loads and removals of one Trainer, without Lightning's base class."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, ClassVar

from ringstow._core._arguments import absolute
from ringstow._core._config import Config, given
from ringstow._core._errors import InvalidStateError
from ringstow._reading._load import load
from ringstow._reading._run_steps import remove
from ringstow._saving._guard import Staging, check_staging
from ringstow._saving._save import save, save_async
from ringstow.integrations._kit import _refusals, _values
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._lightning import _parts, _paths, _placement

# The parts of a checkpoint whose tensors only an optimizer's step changes.
_OF_STEPS = ("state_dict", "optimizer_states")


class Saves:
    """Saves checkpoints as ringstow's directories; loads these and torch.save's files.

    Args:
        background: return from a save while it runs. The next optimizer step waits until it has
            copied all tensors; a failure is raised by the next save, or at the end of the run.
            A few saves still wait for the commit: see docs/trainers/lightning.md.
        config: ringstow's settings; None means the defaults.
        allow_pickle: pickle values that ringstow cannot save by itself, such as a module or a
            function among the hyperparameters. Loading them can run any code.
        staging: how a background save keeps the values of the call; see `ringstow.save_async`.
            ``"wait"`` is for code that changes weights between the save and the next step.
    """

    _stock: ClassVar[type[Any]]
    """Makes the framework's own plugin, which loads files of torch.save."""

    _of_files: ClassVar[tuple[CodeType, ...]] = ()
    """``save_checkpoint`` of strategies that save by a plugin, but load only files."""

    _of_threads: ClassVar[tuple[CodeType, ...]] = ()
    """The function that a wrapping plugin calls in its thread to save."""

    def __init__(
        self,
        *,
        background: bool = True,
        config: Config | None = None,
        allow_pickle: bool = False,
        staging: Staging = "guard",
    ) -> None:
        check_staging(staging)
        _refusals.refuse_tiers(config)
        self._background = background
        self._config = config
        self._allow_pickle = allow_pickle
        self._staging: Staging = staging
        self._flight = self._new_flight()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: strategies that spawn processes pickle the plugin."""
        return {name: one for name, one in vars(self).items() if name != "_flight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._flight = self._new_flight()

    def _new_flight(self) -> InFlight:
        return InFlight(self._remove, f'In Lightning: {type(self).__name__}(staging="wait")')

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save a checkpoint as a directory of this name.

        First waits for the previous save and its removals.

        Raises:
            TypeError: ``storage_options`` are given: ringstow writes to directories only.
            InvalidStateError: values that ringstow cannot save; names each with its key. Or the
                strategy could not load what this plugin saves, or AsyncCheckpointIO is around it.
            Exception: the previous save's failure.
        """
        self._refuse_callers()
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} has no use for storage_options={storage_options!r}: "
                "leave them out"
            )
        self.wait()
        where = absolute(path)
        step = checkpoint.get("global_step")
        options: dict[str, Any] = {
            "step": step if isinstance(step, int) else None,
            "config": self._config,
            "allow_pickle": self._allow_pickle,
        }
        who = f"In Lightning: {type(self).__name__}"
        with _values.explaining_pickles(who, allow_pickle=self._allow_pickle):
            if not self._background or _paths.needs_commit(where):
                striped = bool(given(self._config).stripe)
                _paths.save_now(where, lambda to: save(checkpoint, to, **options), striped=striped)
            else:
                staging = self._staging_of(checkpoint)
                self._flight.handle = save_async(checkpoint, where, staging=staging, **options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of ringstow's, or a file that torch.save wrote.

        A checkpoint of a sharded strategy is returned whole, as a Trainer without shards saves it.

        Args:
            path: the directory, or a file or URL that Lightning's own plugin loads.
            map_location: where to load tensors, the same as in torch.load; None means the CPU. A
                ringstow checkpoint does not record devices: a callable or a dict sees each tensor
                on ``"cpu"``.
            weights_only: passed to torch.load for its files. In a ringstow checkpoint nothing is
                unpickled, unless ``allow_pickle=True`` was given to this plugin and this is not
                True.

        Raises:
            FileNotFoundError: the path does not exist.
            UnsupportedError: the checkpoint has pickled values, and they may not be unpickled.
            IncompleteCheckpointError: the directory holds no committed checkpoint.
            Exception: the failure of the save in progress.
        """
        self.wait()
        if not os.path.isdir(path):
            place = _placement.stay if map_location is None else map_location
            stock = self._stock()
            loaded: dict[str, Any] = stock.load_checkpoint(path, place, weights_only)
            return loaded
        device, move = _placement.resolve(map_location)
        unpickles = self._allow_pickle and not weights_only
        state = load(path, config=self._config, allow_pickle=unpickles, device=device)
        if _parts.is_sharded(state):
            state = _parts.unsharded(state)
        if move is not None:
            _placement.apply(state, move)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: after the commit of a save in progress, otherwise now.

        Removes ringstow checkpoints, files of torch.save, directories of DCP, and links to a
        checkpoint (not their targets). Does nothing if the path does not exist.

        Raises:
            InvalidStateError: the path is something else.
        """
        self._flight.remove(absolute(path))

    def teardown(self) -> None:
        """Wait as `wait` does: Lightning calls this at the end of each run."""
        self.wait()

    def wait(self) -> None:
        """Wait until the save in progress has committed, and its removals are done.

        Raises:
            Exception: the failure of the save or of a removal. A failure is raised once.
        """
        failure = self._flight.end()
        if failure is not None:
            raise failure

    def _refuse_callers(self) -> None:
        """Refuse to save for a strategy that would not load it, or within AsyncCheckpointIO.

        Lightning does not tell a plugin about either.
        """
        own = type(self).__name__
        caller: FrameType | None = sys._getframe(1)
        while caller is not None:
            if caller.f_code in self._of_files:
                name = caller.f_code.co_qualname.partition(".")[0]
                raise InvalidStateError(
                    f"{name} loads an unsharded checkpoint from a file only, and "
                    f"{own} saves directories: use Ringstow{name}(), which saves shards, or leave "
                    "the plugin out"
                )
            if caller.f_code in self._of_threads:
                name = caller.f_code.co_qualname.partition(".")[0]
                raise InvalidStateError(
                    f"{name} copies every tensor, and removes older checkpoints before {own} has "
                    f"saved the newer one: give the Trainer {own}() itself, which saves in the "
                    "background"
                )
            caller = caller.f_back

    def _remove(self, path: str) -> None:
        _paths.remove(path, lambda: remove(path, config=self._config))

    def _staging_of(self, checkpoint: dict[str, Any]) -> Staging:
        """Return how to keep the values of the call.

        Callbacks that average weights keep large tensors of their own in the checkpoint. They
        change them, or swap them with the model's, before the next optimizer step.
        """
        others = {key: one for key, one in checkpoint.items() if key not in _OF_STEPS}
        return "wait" if self._staging == "guard" and _values.has_large(others) else self._staging
