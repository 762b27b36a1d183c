"""What the ranks of a sharded strategy do together: agree, save, load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ringstow._arguments import absolute
from ringstow._config import Config
from ringstow._errors import InvalidStateError
from ringstow._guard import Staging
from ringstow.dcp import LoadPlanner, StorageReader, _latest, _private
from ringstow.dcp import _ranks as _dcp_ranks
from ringstow.dcp._handle import RanksHandle
from ringstow.dcp._together import each, from_first, gathered
from ringstow.integrations._lightning._parts import META, MODEL, is_optimizers, optimizer_key
from ringstow.tree._mismatch import Call

_T = TypeVar("_T")


class Ranks:
    """All ranks, in a group that training does not use. All of them make it together."""

    def __init__(self, config: Config | None, staging: Staging, allow_pickle: bool) -> None:
        self._config = config
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self._saves = _dcp_ranks.Ranks(config, staging, allow_pickle, self._group)

    def meet(self, call: str, failure: BaseException | None) -> None:
        """Fail on all ranks if the save before failed on one, or if they call different things."""
        self._saves.meet((call,), failure, None)

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what a function returns on rank 0, or raise what it raises there, on all ranks."""
        return from_first(look, self._group)

    def save(self, state: dict[str, Any], path: str, step: int | None) -> None:
        """Save, and return at the commit."""
        self._saves.save(state, path, step, apart=filter(is_optimizers, state))

    def save_async(self, state: dict[str, Any], path: str, step: int | None) -> RanksHandle:
        """Save in the background."""
        return self._saves.save_async(state, path, step, apart=filter(is_optimizers, state))

    def load(
        self,
        path: str,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        strict: bool,
        allow_pickle: bool,
    ) -> dict[str, Any]:
        """Load into a sharded model and its optimizers; return Lightning's own values.

        Raises:
            KeyMismatchError: the checkpoint has other keys, or tensors of other shapes.
            InvalidStateError: it has no optimizers' state, and they want it.
            Exception: what else the first rank that fails cannot do, on all ranks.
        """
        _latest.agree_on(path, self._group)
        reader = StorageReader(path, config=self._config, allow_pickle=allow_pickle)
        saved = set(self._all(reader.read_metadata).state_dict_metadata)
        theirs = {name for name in saved if is_optimizers(name)}
        if optimizers and not theirs:
            raise InvalidStateError(
                f"{path} holds no optimizer's state, as save_weights_only=True saves it: it can be "
                "validated and tested, and not be trained further"
            )
        state = self._all(lambda: _wanted(model, optimizers, theirs))
        names = gathered(list(_private.flattened(state)[0]), self._group)
        # Flattening drops the keys of which a rank holds no element (FSDP1), and torch's planner
        # then takes the checkpoint for one of an older torch.
        planner = LoadPlanner(strict=strict, flatten_sharded_tensors=False)
        planner.elsewhere = set().union(*names) | (set() if optimizers else theirs)
        planner.call = Call("strict_loading = False of the module")
        try:
            load(
                state,
                checkpoint_id=path,
                storage_reader=reader,
                planner=planner,
                process_group=self._group,
            )
        except CheckpointException as error:
            raise _first_failure(error) from error
        self._all(lambda: _set(model, optimizers, state, strict=strict))
        (meta,) = state[META]
        return dict(meta)

    def close(self) -> None:
        """End the group, and give back the memory of saves."""
        self._saves.close()
        with contextlib.suppress(Exception):  # it may have ended with the ranks
            dist.destroy_process_group(self._group)

    def _all(self, call: Callable[[], _T]) -> _T:
        """Return what a function returns; if one rank fails, fail on all."""
        return each(call, self._group)


def _wanted(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], saved: set[str]
) -> dict[str, Any]:
    """Return the state to load into.

    A parameter that had no gradient yet has no state in an optimizer, and none in the checkpoint.
    torch makes some for every parameter before it loads.
    """
    state: dict[str, Any] = {MODEL: get_model_state_dict(model), META: None}
    above = {name[:at] for name in saved for at, one in enumerate(name) if one == "."}
    for number, one in enumerate(optimizers):
        key = optimizer_key(number)
        wanted = get_optimizer_state_dict(model, one)
        of: dict[Any, Any] = cast("Any", wanted.get("state", {}))
        for name in [name for name in of if f"{key}.state.{name}" not in above]:
            del of[name]
        state[key] = wanted
    return state


def _set(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    strict: bool,
) -> None:
    set_model_state_dict(model, state[MODEL], options=StateDictOptions(strict=strict))
    for number, one in enumerate(optimizers):
        # Not strict, because a parameter may have no state. The planner has compared the keys.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, one, state[optimizer_key(number)], options=options)


def _first_failure(error: CheckpointException) -> BaseException:
    """Return the first rank's error, which torch hides behind the traces of all of them."""
    failure: BaseException = error.failures[min(error.failures)][0]
    return failure


def kind_of(path: str) -> tuple[str, str]:
    """Return where a checkpoint is, and whether it is "ours" or "theirs".

    The stock strategies' under ``use_by_default()`` are "by default".

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        InvalidStateError: it is ringstow's, but not one of a sharded strategy's.
    """
    has_theirs = os.path.isfile(os.path.join(path, "meta.pt"))
    if not os.path.isfile(os.path.join(path, "manifest.json")):
        if os.path.isdir(path) and not has_theirs:
            StorageReader(path).read_metadata()  # raises what is wrong with it
        return path, "theirs"
    path = absolute(path)
    names = StorageReader(path).read_metadata().state_dict_metadata
    if META in names:
        return path, "ours"
    if has_theirs:
        return path, "by default"
    raise InvalidStateError(
        f"{path} was not saved by one of ringstow's sharded strategies: make a file of it with "
        f"`ringstow convert {path} FILE.ckpt`, which they load"
    )
