"""Errors that reach the other ranks.

DCP pickles a rank's exception and gathers it. The other ranks would wait forever for one that can't
be pickled, or not be unpickled.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ringstow._errors import Error

P = ParamSpec("P")
T = TypeVar("T")


def picklable(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise only errors that can be sent to another rank."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if survives(error):
                raise
            raise Error(f"{type(error).__name__}: {error}") from error

    return wrapper


def survives(error: BaseException) -> bool:
    """Tell whether another process gets the same error."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
