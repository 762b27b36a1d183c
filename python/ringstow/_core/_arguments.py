"""Checks callers' arguments: paths, steps, and wrong calls, whose errors show the right call."""

from __future__ import annotations

import datetime
import functools
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from ringstow import _native
from ringstow._core._errors import InvalidStateError, NoCheckpointError

StrPath = str | os.PathLike[str]

# The maximum number in a manifest.
_PARTS_MAX = 64

# pathlib turns ``s3://bucket`` into ``s3:/bucket``.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_OBJECT_URL = re.compile(r"(s3a?|gs|az|abfss?):/+")


def absolute(path: StrPath, *, may_be_store: bool = False) -> str:
    """Return the absolute path: a later chdir must not move a background save.

    ``~`` and ``~user`` at its beginning are home directories.

    Args:
        path: the path.
        may_be_store: whether the URL of an object store is also allowed, for the message.

    Raises:
        InvalidStateError: the path is a URL, or the home of an unknown user.
        TypeError: not a path, or a path of bytes.
        ValueError: the path is empty, or has a null character.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"a path must be str or os.PathLike[str], not {type(path).__name__}")
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError(f"{text!r} is not a path: it has a null character")
    if _URL.match(text) and may_be_store:
        raise InvalidStateError(
            f"{text} is a URL, but not of an object store (s3://, gs://, az://, abfss://): mount "
            f"what it names, and give the directory (a directory of this name is ./{text})"
        )
    if _URL.match(text):
        raise InvalidStateError(
            f"{text} is a URL, and checkpoints are saved to and loaded from directories: mount the "
            "store and give the directory, or copy the checkpoint there once it is saved (a "
            f"directory of this name is ./{text})"
        )
    there = os.path.expanduser(text)
    if there.startswith("~"):
        user = text.partition("/")[0]
        raise InvalidStateError(
            f"{text}: the home directory {user} is unknown (a directory of this name is ./{text})"
        )
    return str(pathlib.Path(there).absolute())


def object_url(path: StrPath) -> str | None:
    """Return the URL of an object store, or None for any other path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    found = _OBJECT_URL.match(text) if isinstance(text, str) else None
    return found and f"{found[1]}://{text[found.end() :].rstrip('/')}"


def to_read(path: StrPath) -> str:
    """Return the absolute path or the URL of a checkpoint to read.

    Raises:
        NoCheckpointError: the path is None; see `of_checkpoint`.
    """
    return object_url(path) or of_checkpoint(path, may_be_store=True)


def directory_to_read(path: StrPath) -> str:
    """Return the absolute path or the URL of a directory of checkpoints."""
    return object_url(path) or absolute(path, may_be_store=True)


def of_checkpoint(path: StrPath, *, may_be_store: bool = False) -> str:
    """Return the absolute path of a checkpoint's directory.

    Raises:
        NoCheckpointError: the path is None, which `latest` returns without a checkpoint.
    """
    if path is None:
        raise NoCheckpointError(
            "there is no checkpoint: the path is None, as latest() returns it for a directory "
            "without one; start afresh, or call ringstow.steps() to see why none can be loaded"
        )
    return absolute(path, may_be_store=may_be_store)


def names_of_parts(names: Iterable[str], argument: str) -> list[str]:
    """Return names of parts of a state, such as ``optimizer``.

    Raises:
        TypeError: the argument is a string, or holds something other than strings.
        InvalidStateError: a name is empty or ends in a dot.
    """
    if isinstance(names, str):
        raise TypeError(f'{argument} is a list of names: {argument}=["{names}"]')
    listed = list(names)
    if len(listed) > _PARTS_MAX:
        raise InvalidStateError(f"{argument} has {len(listed)} names, more than {_PARTS_MAX}")
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{argument} is a list of names, not of {type(name).__name__}")
        if not name or name.endswith("."):
            raise InvalidStateError(
                f"{argument}: {name!r} is no name; a name includes all names below it, as in "
                '"optimizer"'
            )
    return listed


_BRIEF = 80


def brief(value: object) -> str:
    """Return a value for a message: its repr, or the beginning of a long one, such as a model's."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}..."


def integer(value: object, wrong: str) -> int:
    """Return an int, or anything with ``__index__``, as an int.

    Raises:
        TypeError: it is none, or a bool; begins with ``wrong``.
    """
    try:  # contextlib.suppress takes longer than all the rest, in each step of a training
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{wrong}, not {brief(value)}")
    return number


def span(given: object, name: str) -> datetime.timedelta:
    """Return a time such as ``"1h30min"``.

    Raises:
        TypeError, InvalidStateError: it is no positive time; begins with the argument ``name``.
    """
    how = f"{name} takes a time with its unit, such as '30s', '10min' or '1h30min'"
    if isinstance(given, str):
        try:
            return _native.parse_span(given)
        except (ValueError, OverflowError) as why:
            raise InvalidStateError(f"{how}, not {brief(given)}: {why}") from None
    if not isinstance(given, datetime.timedelta):
        raise TypeError(f"{how}, or a datetime.timedelta, not {brief(given)}")
    if given <= datetime.timedelta(0):
        raise InvalidStateError(f"{how}, not {brief(given)}: it must be more than zero")
    return given


def step_number(step: int | None, name: str = "step") -> int | None:
    """Return a step for the native side; accepts an int, or anything with ``__index__``.

    Raises:
        TypeError: the step is not an integer.
        ValueError: the step is negative, or has more than 64 bits.
    """
    if step is None:
        return None
    if isinstance(step, bool):
        raise TypeError(f"{name} is a number, not {step!r}")
    number = integer(step, f"{name} is an integer")
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} is from 0 to 2**64 - 1, not {number}")
    return number


def numbered(step: int) -> int:
    """Return a step for the native side, which is not None; see `step_number`."""
    number = step_number(step)
    if number is None:
        raise TypeError("step is an integer, not None")
    return number


_P = ParamSpec("_P")
_R = TypeVar("_R")

# Arguments of torch.load and torch.save, and what to use in ringstow instead.
LOAD_ARGUMENTS = {
    "map_location": 'say where the tensors go with device="cuda:0"; they go to the CPU without it',
    "weights_only": "leave it out: nothing is unpickled unless you pass allow_pickle=True",
    "pickle_module": "leave it out; allow_pickle=True uses Python's own",
    "strict": "only load_into has it: load returns what the checkpoint holds",
    "checkpoint_id": "the path comes first: load(path)",
}
LOAD_INTO_ARGUMENTS = {
    **LOAD_ARGUMENTS,
    "map_location": "leave it out: the tensors stay on their devices",
    "device": "leave it out: the tensors stay on their devices",
    "assign": "load makes new tensors; load_into fills existing ones",
    "keys": "use prefix= for a part, or strict=False for what is in both",
    "mmap": "leave it out; to read only a part, use prefix=",
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
    """Make a function raise, for wrong calls, a TypeError that shows the right call.

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
                    f"ringstow.{name}({', '.join(positional)}) takes other arguments by name, "
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
    """Return the keyword for which a positional argument was probably meant."""
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
