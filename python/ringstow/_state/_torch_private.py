"""The undocumented parts of torch that torch's formats and the ranks need.

A new torch may rename any of them. Reads and writes of torch's formats then raise ImportError or
AttributeError, which name them; the others fall back.
"""

from __future__ import annotations

import datetime
import inspect
import logging
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.constants import default_pg_timeout

from ringstow._state.tree import _cycles

_log = logging.getLogger("ringstow")
# The prefix of torch.load(weights_only=True)'s actual error, within a page of advice.
_UNPICKLER = "WeightsUnpickler error: "


def refusal_of(error: Exception) -> str:
    """Return the error of torch.load(weights_only=True) for a pickle, in one line.

    Returns the first line if the message has another layout.
    """
    text = str(error)
    lines = (text.partition(_UNPICKLER)[2] or text).strip().splitlines()
    return lines[0].partition(" Please use ")[0] if lines else "torch does not say what"


_F = TypeVar("_F", bound=Callable[..., Any])


def rebound(function: _F, **names: object) -> _F:
    """Return a copy of a Python function that finds these global names elsewhere.

    So one call of torch can behave differently, without affecting other threads.

    Raises:
        AttributeError: the function of this torch version does not use such a name.
    """
    there: Any = function
    if lacks := names.keys() - _names_in(there.__code__):
        raise AttributeError(f"{function} does not use {', '.join(sorted(lacks))}")
    made = types.FunctionType(
        there.__code__,
        {**there.__globals__, **names},
        there.__name__,
        there.__defaults__,
        there.__closure__,
    )
    made.__kwdefaults__ = there.__kwdefaults__
    return made  # type: ignore[return-value]


def _names_in(code: types.CodeType) -> set[str]:
    """Return the global names of a function, and those of the functions in it."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def loader(allowed: Mapping[str, Any], decode_long: Callable[[bytes], int]) -> Callable[..., Any]:
    """Return ``torch.load`` with an unpickler of its own, to be called with ``weights_only=True``.

    torch has one list of allowed classes for its restricted unpickler, for all threads. This
    unpickler has its own list: torch's usual classes, and these by name. If torch has another
    structure, this returns ``torch.load`` itself, which allows only the program's classes.

    Args:
        allowed: the allowed classes, by name.
        decode_long: decodes long integers, or refuses them.
    """
    try:
        from torch import _weights_only_unpickler as stock

        own = types.ModuleType(stock.__name__)
        names = {"_get_user_allowed_globals": lambda: allowed, "decode_long": decode_long}
        load = rebound(stock.Unpickler.load, **names)
        own.__dict__.update(vars(stock))
        unpickler = type("Unpickler", (stock.Unpickler,), {"load": load})
        vars(own).update(Unpickler=unpickler, load=rebound(stock.load, Unpickler=unpickler))
        legacy = rebound(torch.serialization._legacy_load, _weights_only_unpickler=own)
        return rebound(torch.load, _weights_only_unpickler=own, _legacy_load=legacy)
    except (ImportError, AttributeError):
        return torch.load


class _Silent:
    """Replaces the module ``warnings``."""

    @staticmethod
    def warn(*_: object, **__: object) -> None:
        """Ignore the warning."""


def save_alone(state: dict[str, Any], writer: Any, planner: Any) -> None:
    """Save by torch's own writer in one process, without its warning about a single process."""
    # Not warnings.catch_warnings, which changes the filters of all threads.
    try:
        save = rebound(inspect.unwrap(state_dict_saver.save), warnings=_Silent)
    except AttributeError:
        save = state_dict_saver.save
    save(state, storage_writer=writer, planner=planner, no_dist=True)


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return an item's place in torch's own format: a file, an offset and a length in bytes."""
    return filesystem._StorageInfo(name, offset, length)


def flattened(state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state's values by flat name, and the path of each, as DCP's planner has them.

    Raises:
        InvalidStateError: a value contains itself; names its key.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    with _cycles.naming_cycles(state):
        return flatten_state_dict(state)


def set_element(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value at a path of a nested state, as DCP's planner does."""
    from torch.distributed.checkpoint import _traverse

    _traverse.set_element(state, path, value)


def read_items(name: str, stored: Any, chunks: list[Any]) -> list[Any]:
    """Return the read items of a stored tensor that fill these chunks."""
    from torch.distributed.checkpoint import planner_helpers

    return planner_helpers.create_read_items_for_chunk_list(name, stored, chunks)


def limit(group: dist.ProcessGroup | None, seconds: float | None) -> None:
    """Limit each collective that begins in a group from now on; None means torch's own limit.

    If this torch has no such function, the limit stays what it is.
    """
    change = getattr(dist, "set_timeout", None)
    change = change or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        own = default_pg_timeout if seconds is None else datetime.timedelta(seconds=seconds)
        change(own, group)


def beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of a group. Only these ranks call this.

    torch derives a group's name from the groups that a process knows, which differ between ranks:
    members could wait for each other under different names, and then all ranks in their next
    ``new_group``. So the first rank chooses a name, and torch's count of groups is unchanged. If a
    newer torch names groups in another way, this returns the group itself, with a warning.
    """
    name = [uuid.uuid4().hex]
    try:
        new_group = rebound(
            dist.distributed_c10d._new_group_with_tag, _process_group_name=lambda *_, **__: name[0]
        )
    except AttributeError:
        _log.warning(
            "this torch gives ringstow no group of its own: do not communicate in the group of a "
            "save while it runs in the background"
        )
        return group
    dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
    ranks = dist.get_process_group_ranks(group)
    made: Any = new_group(ranks, backend="gloo", use_local_synchronization=True)
    return cast("dist.ProcessGroup", made)
