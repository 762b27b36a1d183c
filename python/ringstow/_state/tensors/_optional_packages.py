"""Optional packages that are imported on demand: torch and numpy."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ringstow._core._errors import UnsupportedError

_INSTEAD = {"torch": ', or tensors as arrays with framework="numpy"'}


def imported(name: str) -> Any:
    """Return the module of that name if the caller has imported it, otherwise None."""
    return sys.modules.get(name)


def require(name: str, key: str, remedy: str | None = None) -> Any:
    """Return the module of that name, imported now if necessary, to load the value at ``key``.

    Args:
        name: torch or numpy.
        key: the value that needs it.
        remedy: what to do without it; by default, to install it or to load the rest.

    Raises:
        UnsupportedError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = remedy or (
            f"install {name}, or load only what needs none with prefix= or "
            f"keys={_INSTEAD.get(name, '')}"
        )
        raise UnsupportedError(
            f"{key} needs {name}, which cannot be imported ({error}); {remedy}"
        ) from error
