"""Wrong calls that are easy to make, answered with the right one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What callers of torch.load and torch.save are used to, and what ringstow has instead.
LOAD_ARGUMENTS = {
    "map_location": 'say where the tensors go with device="cuda:0"; they go to the CPU without it',
    "weights_only": "leave it out: nothing is unpickled unless you pass allow_pickle=True",
    "mmap": "leave it out; to read only a part, use prefix=, keys= or ringstow.open(path)",
    "pickle_module": "leave it out; allow_pickle=True uses Python's own",
    "strict": "only load_into has it: load returns what the checkpoint holds",
    "checkpoint_id": "the path comes first: load(path)",
}
LOAD_INTO_ARGUMENTS = {
    **LOAD_ARGUMENTS,
    "map_location": "leave it out: the tensors stay on the devices that they are on",
    "device": "leave it out: the tensors stay on the devices that they are on",
    "assign": "load gives new tensors; load_into fills those that are there",
    "mmap": "leave it out; to read only a part, pass a state dict of that part and strict=False",
    "checkpoint_id": "the path comes second: load_into(state_dict, path)",
}
LOAD_INTO_ARGUMENTS.pop("strict")
SAVE_ARGUMENTS = {
    "pickle_module": "leave it out; allow_pickle=True uses Python's own",
    "pickle_protocol": "leave it out: tensors are never pickled",
    "checkpoint_id": "the path comes second: save(state_dict, path)",
    "pool_bytes": "pass config=ringstow.Config(pool_bytes=...)",
}


def explained(foreign: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function answer wrong calls with a TypeError that says what the right call is.

    Args:
        foreign: keyword arguments of other libraries' functions, and what to do instead.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        code = function.__code__
        positional = code.co_varnames[: code.co_argcount]
        named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        known = {*positional, *named}
        name = function.__name__

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > len(positional):
                extra = args[len(positional)]
                raise TypeError(
                    f"ringstow.{name}({', '.join(positional)}) takes all else by name, "
                    f"{_by_name(extra, named)}"
                )
            for word in kwargs.keys() - known:
                hint = foreign.get(word, f"it takes {', '.join((*positional, *named))}")
                raise TypeError(f"ringstow.{name} has no argument {word!r}: {hint}")
            if positional[0] == "state_dict" and _are_swapped(*args[:2]):
                raise TypeError(
                    f"the state dict comes first, then the path: ringstow.{name}(state_dict, path)"
                )
            return function(*args, **kwargs)

        return call

    return decorate


def _by_name(value: object, named: tuple[str, ...]) -> str:
    """Return the keyword that a positional argument seems to be meant for."""
    if type(value).__name__ == "Config" and "config" in named:
        return "such as config=Config(...)"
    if type(value).__module__.partition(".")[0] == "torch" and "device" in named:
        return f"such as device={str(value)!r}"
    if isinstance(value, str) and "prefix" in named:
        return f"such as prefix={value!r}"
    return f"such as {named[0]}=..."


def _are_swapped(*args: object) -> bool:
    return (
        len(args) == 2
        and isinstance(args[0], str | os.PathLike)
        and not isinstance(args[1], str | os.PathLike)
    )
