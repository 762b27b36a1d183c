"""Sharded checkpoints of Lightning's strategies for FSDP and model parallelism.

Lightning commits the shards, and then writes its own values (loops, callbacks, hyperparameters) to
``meta.pt``: a kill between the two leaves a checkpoint that Lightning rejects. Here these values
are part of the checkpoint, under the key ``lightning``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow._core._arguments import absolute
from ringstow._core._config import Config, given
from ringstow._core._errors import InvalidStateError
from ringstow._reading._run_steps import remove
from ringstow._saving import _guard
from ringstow._saving._guard import Staging, check_staging
from ringstow.integrations._kit import _refusals, _values
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._lightning import _paths
from ringstow.integrations._lightning._parts import META, MODEL, is_optimizers, optimizer_key

if TYPE_CHECKING:
    from ringstow.integrations._lightning._ranks import Ranks

# The next class in the method resolution order: one of the framework's strategies.
_Strategy: Any = object

_RUNNING = "running"
# The framework's arguments for checkpoints in one file, and the values that select shards.
_SHARDS = {"state_dict_type": "sharded", "save_distributed_checkpoint": True}


class _Save(NamedTuple):
    """Rank 0's decision on how to save."""

    path: str
    beside: str | None
    """The directory to save to, and to rename afterwards."""
    is_awaited: bool
    """Whether the call returns at the commit."""


class Sharded(_Strategy):  # type: ignore[misc, unused-ignore]
    """Mixin for a Lightning strategy that saves and loads its sharded checkpoints.

    Args:
        args: the strategy's own.
        background: return from a save while it runs. The next optimizer step waits until it has
            read all tensors. The next save, or the end of the run, raises its failure on all ranks.
        config: ringstow's settings; None means the defaults.
        allow_pickle: pickle values that ringstow cannot save by itself, and unpickle them, which
            can run any code.
        staging: how a background save keeps the values of the call: ``"guard"``, ``"snapshot"`` or
            ``"wait"``; see `ringstow.save_async`.
        kwargs: the strategy's own.

    Raises:
        InvalidStateError: the arguments select checkpoints in one file, or a plugin.
    """

    def __init__(
        self,
        *args: Any,
        background: bool = True,
        config: Config | None = None,
        allow_pickle: bool = False,
        staging: Staging = "guard",
        **kwargs: Any,
    ) -> None:
        for name, shards in _SHARDS.items():
            if kwargs.get(name, shards) != shards:
                raise InvalidStateError(
                    f"{type(self).__name__} saves shards, so {name}={kwargs[name]!r} is not for "
                    "it: leave it out. RingstowCheckpointIO().load_checkpoint(path) returns all of "
                    "a checkpoint, and torch.save makes a file of that"
                )
        if kwargs.get("checkpoint_io") is not None:
            self.checkpoint_io = kwargs["checkpoint_io"]  # refuses it
        from ringstow.integrations._lightning import _ranks  # needs a newer torch than the plugin

        check_staging(staging, is_for_ranks=True)
        _refusals.refuse_tiers(config)
        super().__init__(*args, **kwargs)
        self._background = background
        self._config = config
        self._allow_pickle = allow_pickle
        self._staging: Staging = staging
        torn = f'In Lightning: {type(self).__name__}(staging="wait")'
        self._flight = InFlight(self._remove, torn)
        self._together = _ranks
        self._made: Ranks | None = None
        self._unraised: Exception | None = None

    @property
    def checkpoint_io(self) -> Any:
        """The framework's own plugin, which is not used."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise InvalidStateError(
            f"{type(self).__name__} saves by itself and would not ask {type(io).__name__}: leave "
            "the plugin out, and give the strategy config=, staging= or allow_pickle="
        )

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save a sharded checkpoint; all ranks call this.

        First waits for the previous save and its removals.

        Raises:
            TypeError: ``storage_options`` are given: ringstow writes to directories only.
            InvalidStateError: values that ringstow cannot save; names each with its key.
            BaseException: the previous save's failure, on all ranks.
        """
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} has no use for storage_options={storage_options!r}: "
                "leave them out"
            )
        ranks = self._ranks()
        ranks.meet(("save_checkpoint",), self._ended(), None)
        meta, state = _parted(checkpoint)
        plan = ranks.from_first(lambda: self._plan(filepath, meta))
        if self.is_global_zero:
            # A tuple, as in earlier checkpoints: DCP wrote them, and would have flattened a dict.
            state[META] = (meta,)
        step = meta.get("global_step")
        number = step if isinstance(step, int) else None
        apart = list(filter(is_optimizers, state))
        if plan.is_awaited:
            ranks.save(state, plan.beside or plan.path, number, apart=apart)
            if plan.beside is not None:
                ranks.from_first(lambda: _paths.put(plan.beside or "", plan.path))
            return
        self._flight.handle = handle = ranks.save_async(state, plan.path, number, apart=apart)
        if _values.has_large(meta):
            with contextlib.suppress(Exception):  # the next call raises it, on all ranks
                handle.wait_staged()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a sharded checkpoint into the model and the optimizers; all ranks call this.

        Args:
            checkpoint_path: a checkpoint of this class, from any number of ranks; or the shards or
                the file of the framework's own strategy.
            weights_only: passed to torch.load for the framework's checkpoints. In a ringstow
                checkpoint nothing is unpickled, unless ``allow_pickle=True`` was given and this is
                not True.

        Returns:
            The values that belong neither to the model nor to an optimizer.

        Raises:
            KeyMismatchError: the checkpoint has other keys, or tensors of other shapes.
            InvalidStateError: the checkpoint is not for this strategy, or has no optimizers.
            IncompleteCheckpointError: the directory holds no committed checkpoint.
            BaseException: the failure of a save in progress, or a rank's load error.
        """
        ranks = self._ranks()
        ranks.meet(("load_checkpoint",), self._ended(), None)
        path, kind = ranks.from_first(lambda: self._together.kind_of(os.fspath(checkpoint_path)))
        if kind == "theirs":
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return loaded
        if kind == "by default":  # a stock strategy's, under use_by_default()
            from ringstow.dcp import use_by_default

            with use_by_default():
                loaded = super().load_checkpoint(path, weights_only=weights_only)
            return loaded
        module = self.lightning_module
        return ranks.load(
            path,
            self.model,
            self.optimizers if module.trainer.state.fn == "fit" else [],
            strict=module.strict_loading,
            allow_pickle=self._allow_pickle and not weights_only,
        )

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, on rank 0: after the commit of a save in progress, otherwise now.

        The next call raises a failure, on all ranks: they must not wait for a rank 0 that raises.
        """
        if self.is_global_zero:
            try:
                self._flight.remove(absolute(filepath))
            except Exception as error:
                self._unraised = self._unraised or error

    def teardown(self) -> None:
        """Wait as `wait` does, and end the group of saves, at the end of each run."""
        try:
            self.wait()
        finally:
            if self._made is not None and self._flight.handle is None:
                self._made.close()
                self._made = None
            super().teardown()

    def wait(self) -> None:
        """Wait until the save in progress has committed, and its removals are done.

        Raises:
            BaseException: the save's failure, on all ranks; or a removal's failure, on rank 0. A
                failure is raised once.
        """
        failure = self._ended()
        if failure is not None:
            raise failure

    def _ended(self) -> BaseException | None:
        failure = self._flight.end()
        unraised, self._unraised = self._unraised, None
        return failure or unraised

    def _ranks(self) -> Ranks:
        """Return the ranks of saves, in a group of their own, which all ranks create together."""
        if self._made is None:
            self._made = self._together.Ranks(self._config, self._staging, self._allow_pickle)
        return self._made

    def _plan(self, filepath: str | os.PathLike[str], meta: dict[str, Any]) -> _Save:
        """Decide, on rank 0, how to save, and refuse Lightning values that cannot be saved."""
        path = absolute(filepath)
        who, allow_pickle = f"In Lightning: {type(self).__name__}", self._allow_pickle
        with _values.explaining_pickles(who, allow_pickle=allow_pickle):
            _values.check(META, (meta,), allow_pickle=allow_pickle)
        is_running = self.lightning_module.trainer.state.status == _RUNNING
        is_awaited = (
            not self._background
            or not is_running  # Lightning would not wait for it
            or _guard.is_stepping(sys._getframe())  # this step would change what is saved
            or _paths.needs_commit(path)
        )
        striped = bool(given(self._config).stripe)
        beside = _paths.place_for(path, striped=striped) if is_awaited else None
        return _Save(path, beside, is_awaited)

    def _remove(self, path: str) -> None:
        _paths.remove(path, lambda: remove(path, config=self._config))


def _parted(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Lightning's own values, and the model's and the optimizers' state."""
    meta = {key: one for key, one in checkpoint.items() if key not in (MODEL, "optimizer_states")}
    state = {MODEL: checkpoint[MODEL]}
    for number, one in enumerate(checkpoint.get("optimizer_states", [])):
        state[optimizer_key(number)] = one
    return meta, state
