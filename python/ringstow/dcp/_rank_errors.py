"""Errors that reach the other ranks.

DCP pickles a rank's exception and gathers it. The other ranks would wait forever for an exception
that can't be pickled or unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ringstow._ranks._team import sendable

P = ParamSpec("P")
T = TypeVar("T")


def picklable(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise only errors that can be sent to another rank."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if (sent := sendable(error)) is error:
                raise
            raise sent from error

    return wrapper
