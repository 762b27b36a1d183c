"""Adapters that let training frameworks save with ringstow.

Each module imports its framework. Nothing else in the package imports these modules.
"""

from __future__ import annotations

import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    # Imported on first use, with its framework.
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    if name in modules and not name.startswith("_"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
