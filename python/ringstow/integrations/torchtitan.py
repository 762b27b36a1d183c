"""torchtitan's checkpoints by ringstow: `CheckpointManager` in place of torchtitan's own.

Needs the package ``torchtitan``. See docs/trainers/large-scale.md for benefits and limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import tyro
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.checkpointer import CheckpointManager as _Stock
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import filesystem

import ringstow
from ringstow._core import _when
from ringstow._core._arguments import absolute
from ringstow._core._errors import InvalidStateError
from ringstow._manager._when import Schedule
from ringstow._saving._guard import Staging
from ringstow._saving._save_future import SaveHandle
from ringstow._state.tree._mismatch import Call
from ringstow.dcp._drop_in import StockReader
from ringstow.integrations._kit import _refusals
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._kit._ranks import names_in
from ringstow.integrations._torchtitan import _seam
from ringstow.integrations._torchtitan._ranks import Ranks
from ringstow.integrations._torchtitan._steps import Steps, kind_of

__all__ = ["CheckpointManager"]

_log = logging.getLogger("ringstow")

_Mode = Literal["disabled", "async", "async_with_pinned_mem"]

_seam.check(BaseCheckpointManager, _Stock)
# The parts that `ringstow.slim` can drop later.
_APART = {OPTIMIZER}
_TORN = (
    "In torchtitan: call trainer.checkpointer.maybe_wait_for_staging() before you change weights "
    'outside of optimizers.step(), or set async_mode="async_with_pinned_mem".'
)


class _Source(NamedTuple):
    """Rank 0's decision on what to load."""

    path: str
    step: int | None
    """The step's number; None for the initial checkpoint."""
    model_only: bool
    in_hf: bool = False


class CheckpointManager(BaseCheckpointManager):
    """Saves and loads torchtitan's checkpoints by ringstow.

    ::

        checkpoint=CheckpointManager.Config(enable=True, interval=500)

    A save returns while it runs, and the next optimizer step waits until it has copied all tensors.
    The next save or load, `maybe_wait_for_saving` or `close` raises its failure, on all ranks.

    Raises:
        UnsupportedError: a setting that ringstow cannot honour; the message has the remedy.
        InvalidStateError: settings that contradict each other.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings, and ringstow's own."""

        async_mode: _Mode = "async"
        """``"async"`` reads the tensors while training continues; ``"async_with_pinned_mem"``
        copies them first, into pinned memory that it keeps; ``"disabled"`` returns at the
        commit."""

        allow_pickle: bool = False
        """Pickle values that ringstow cannot save by itself, and unpickle them when it loads, which
        can run any code."""

        ringstow_config: Annotated[ringstow.Config | None, tyro.conf.Suppress] = None
        """ringstow's settings, set in code; None means the defaults."""

        ringstow_when: Annotated[ringstow.When | None, tyro.conf.Suppress] = None
        """When to save besides ``interval``, and at which signal or deadline to stop, such as
        ``OnSignal(signal.SIGTERM, grace="60s")``; see `ringstow.CheckpointManager`."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            mode: Any = self.async_mode.lower()
            if mode not in get_args(_Mode):
                raise ValueError(f"async_mode={mode!r} is not one of {get_args(_Mode)}")
            self.async_mode = mode

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.folder = filesystem.join(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        _seam.refuse_unsupported(config, self.folder, sd_adapter)
        _refusals.refuse_tiers(config.ringstow_config)
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self._config = config
        self._steps = Steps(absolute(self.folder), config.ringstow_config)
        self._flight = InFlight(self._steps.remove, _TORN)
        staging: Staging = "snapshot" if config.async_mode == "async_with_pinned_mem" else "guard"
        self._ranks = Ranks(config.ringstow_config, staging, config.allow_pickle)
        self._staging: SaveHandle | None = None
        """The save in progress, until something has waited for its copies."""
        self._is_closed = False
        when = None if config.load_only else _when.checked(config.ringstow_when)
        self._schedule = None if when is None else Schedule(when, self._ranks, self.folder)

    @property
    def stopping(self) -> bool:
        """Whether a signal or a deadline of ``ringstow_when`` ends the training.

        torchtitan's Trainer then ends its loop. From then on a save returns once it is durable.
        """
        return self._schedule is not None and self._schedule.is_stopping()

    @property
    def save_future(self) -> Any:
        """The future of the background save in progress; None if there is none."""
        return self._flight.handle

    # The methods that torchtitan's trainer calls; the base class checks `enable` first.

    @sl.log_trace_span("checkpoint_save")
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save a step if it is due; return whether it was saved.

        Raises:
            Exception: the previous save's failure, or a rank's failure, on all ranks.
        """
        is_asked = self._schedule is not None and self._schedule.asks(curr_step)
        if self.stopping and hasattr(self.states.get("train_state"), "should_continue_training"):
            # The trainer is its own train state, and asks itself before each step.
            self.states["train_state"].should_continue_training = lambda: False
        if not is_asked and not self._is_due(curr_step, last_step):
            return False
        sl.add_step_tag("checkpoint_save")
        self._meet("save", curr_step, last_step)
        if self._schedule is not None:
            self._schedule.heed()
        path = self._steps.path(curr_step)
        if last_step:
            self._save_last(path, curr_step)
            return True
        state = self._values()
        apart = _APART & state.keys()
        if self._config.async_mode == "disabled":
            with _noted(path):
                self._ranks.save(state, path, curr_step, apart=apart)
        else:
            self._staging = self._ranks.save_async(state, path, curr_step, apart=apart)
            self._flight.handle = self._staging
            if self._schedule is not None:
                self._schedule.follow(self._staging)
        if self._ranks.is_first:
            for old in self._steps.stale(self._config.keep_latest_k, curr_step):
                self._flight.remove(old)
        if self.stopping:
            self._meet("stop", curr_step)
        return True

    @sl.log_trace_span("checkpoint_load")
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a step, or the newest complete one; return whether there was anything to load.

        Raises:
            NoCheckpointError: the step is not complete; names the complete ones.
            Exception: a rank's failure, on all ranks.
        """
        self._meet("load", step)
        if self._schedule is not None:
            self._schedule.restart()
        states = self._states_to_load()
        source = self._ranks.from_first(lambda: self._source(step))
        if source is None:
            return False
        _log.info("loading %s", source.path)
        if source.in_hf:
            self._load_hf(source.path)
        else:
            self._load_values({} if source.model_only else states, source.path)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Wait until the save in progress has copied this rank's tensors.

        A failure is raised later, by all ranks: if one rank raised it here, the others would wait.
        """
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                staging.wait_staged()
            except Exception as error:
                _log.warning("%s is not saved, which the next save raises: %s", staging.path, error)

    def _wait_for_saving(self) -> None:
        """Wait until the save in progress has committed, and older steps are removed.

        Raises:
            Exception: a rank's failure, on all ranks, once.
        """
        if (failure := self._ended()) is not None:
            raise failure

    def _close(self) -> None:
        """Wait as `_wait_for_saving` does, and free all memory.

        If another error is about to end the training, a failure is logged.

        Raises:
            Exception: a rank's failure, on all ranks, once.
        """
        if self._is_closed:
            return
        failure = self._ended()
        self._is_closed = True
        try:
            if self._schedule is not None:
                # After an error here, the other ranks may never come.
                self._schedule.close(settles=sys.exc_info()[1] is None)
        finally:
            self._ranks.close()
        if failure is not None and sys.exc_info()[1] is not None:
            _log.error("the last save failed, too: %s", failure, exc_info=failure)
        elif failure is not None:
            raise failure

    # Saves.

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        is_first = step == 1 and config.enable_first_step_checkpoint
        return is_first or last_step or step % config.interval == 0

    def _values(self) -> dict[str, Any]:
        """Return the values of all states, the model's tensors by name, as torchtitan does."""
        return {**self._others(self.states), **self._model()}

    def _others(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all states except the model."""
        others = {key: one for key, one in states.items() if key != MODEL}
        values: dict[str, Any] = self._ranks.each(
            lambda: {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in others.items()}
        )
        return values

    def _model(self) -> dict[str, Any]:
        """Return the model's tensors. The ranks may communicate: nothing else here may fail."""
        tensors: dict[str, Any] = self._ranks.each(self.states[MODEL].state_dict)
        return tensors

    def _save_last(self, path: str, step: int) -> None:
        """Save the last step, and return at the commit. As in torchtitan, remove no older step."""
        config = self._config
        if not config.last_save_model_only:
            state = self._values()
            with _noted(path):
                self._ranks.save(state, path, step, apart=_APART & state.keys())
            return
        dtype = TORCH_DTYPE_MAP[config.export_dtype]
        state = {
            key: one.to(dtype) if torch.is_tensor(one) and one.is_floating_point() else one
            for key, one in self._model().items()
        }
        if not config.last_save_in_hf:
            with _noted(path):
                self._ranks.save(state, path, step)
            return

        def write(part: str) -> None:  # torchtitan's own export, which uses only `sd_adapter`
            _Stock.dcp_save(self, state, part, AsyncMode.DISABLED, to_hf=True)

        self._ranks.export(write, path)

    def _ended(self) -> BaseException | None:
        """Wait for the save in progress and its removals; return the failure, once."""
        path = getattr(self._flight.handle, "path", "")
        if (failure := self._flight.end()) is not None:
            failure.add_note(f"{path} was not saved.")
        return failure

    def _meet(self, *call: object) -> None:
        """Begin a call on all ranks, once the save in progress has ended on all of them."""
        if self._is_closed:
            raise InvalidStateError(f"the checkpoint manager of {self.folder} is closed")
        self._ranks.meet(call, self._ended(), None)

    # Loads.

    def _states_to_load(self) -> dict[str, Any]:
        """Return all states except the excluded ones.

        Raises:
            InvalidStateError: there is no such state.
        """
        excluded = self._config.exclude_from_loading
        if unknown := [key for key in excluded if key not in self.states]:
            raise InvalidStateError(
                f"checkpoint.exclude_from_loading names {', '.join(unknown)}; the states are "
                f"{', '.join(self.states)}"
            )
        return {key: one for key, one in self.states.items() if key not in excluded}

    def _source(self, step: int) -> _Source | None:
        """Decide, on rank 0, what to load, as torchtitan does; None if there is nothing."""
        if step != -1:
            self._steps.check(step)
        newest = self._steps.newest()
        chosen = newest if step == -1 else step
        if chosen is None:
            return self._initial()
        if newest is not None and chosen < newest:
            _log.warning(
                "%s has newer steps than %d, up to %d. They stay, and the next start loads the "
                "newest: remove them if this run replaces them",
                self.folder,
                chosen,
                newest,
            )
        path = self._steps.path(chosen)
        source = _Source(path, chosen, model_only=chosen == 0)  # step 0 is the seed
        if not source.model_only:
            self._refuse_model_only(source)
        return source

    def _initial(self) -> _Source | None:
        config = self._config
        path = config.initial_load_path
        if path is None and config.initial_load_in_hf:
            path = self.sd_adapter.hf_assets_path
        if not path:
            return None
        if not os.path.isdir(path):
            raise InvalidStateError(f"the initial checkpoint {path} is no directory")
        return _Source(path, None, config.initial_load_model_only, config.initial_load_in_hf)

    def _refuse_model_only(self, source: _Source) -> None:
        """Refuse a step that holds only the model: training cannot continue from it.

        Raises:
            InvalidStateError: the step holds only the model.
        """
        wanted = tuple(f"{key}." for key in self._states_to_load() if key != MODEL)
        is_hf = self._steps.kind(source.step or 0) == "hf"
        if not wanted and not is_hf:
            return
        if is_hf or not any(name.startswith(wanted) for name in self._names(source.path)):
            raise InvalidStateError(
                f"{source.path} holds the model only, as the last step of a run does with "
                "last_save_model_only=True. To go on from an earlier step, set "
                "checkpoint.load_step. To start a new run with this model, set another "
                f"checkpoint.folder, and initial_load_path={source.path}"
            )

    def _names(self, path: str) -> set[str]:
        """Return the names of all values in a checkpoint of ringstow's or torch's."""
        if kind_of(path) == "torch":
            return set(StockReader(path).read_metadata().state_dict_metadata)
        return names_in(path, self._config.ringstow_config)

    def _load_values(self, states: dict[str, Any], path: str) -> None:
        """Load the model and other states, from a checkpoint that may hold more.

        The load gets values, not objects: an object that failed during the load would leave the
        other ranks waiting.
        """
        ranks = self._ranks
        values = {**self._others(states), **self._model()}
        ranks.fill(values, path, Call(), ignored=lambda name: True)

        def give(*keys: str) -> None:
            for key in keys:
                if isinstance(one := states[key], Stateful):
                    one.load_state_dict(values[key])

        # The ranks may communicate while they load values into the optimizer or the model.
        ranks.each(lambda: give(*(key for key in states if key not in (OPTIMIZER, MODEL))))
        if OPTIMIZER in states:
            ranks.each(lambda: give(OPTIMIZER))
        ranks.each(lambda: self.states[MODEL].load_state_dict(values))

    def _load_hf(self, path: str) -> None:
        ranks, adapter, model = self._ranks, self.sd_adapter, self._model()
        state = ranks.each(lambda: adapter.to_hf(model))
        is_quantized = self._config.initial_load_in_hf_quantized
        reader = ranks.each(lambda: adapter.get_hf_storage_reader(path, is_quantized))
        ranks.load_hf(state, path, reader)
        loaded = ranks.each(lambda: adapter.from_hf(state))
        ranks.each(lambda: self.states[MODEL].load_state_dict(loaded))


@contextlib.contextmanager
def _noted(path: str) -> Iterator[None]:
    """Add to a failure which save it has ended."""
    try:
        yield
    except Exception as failure:
        failure.add_note(f"{path} was not saved.")
        raise
