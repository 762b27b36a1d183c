"""Chooses the native module: the compiled one, or the stand-in where it has not been built."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def _is_compiled() -> bool:
    spec = importlib.util.find_spec("ringstow")
    assert spec is not None, "install the package first: pip install ./python"
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    return any(any(folder.glob("_native*.so")) for folder in folders)


COMPILED = _is_compiled()
if not COMPILED:
    if os.environ.get("RINGSTOW_TEST_FAKE") != "1":
        raise pytest.UsageError(
            "ringstow._native is not compiled: run `pip install ./python`, or set "
            "RINGSTOW_TEST_FAKE=1 to run what needs none against a stand-in"
        )
    import fake_native

    sys.modules["ringstow._native"] = fake_native


def pytest_report_header() -> str:
    return f"ringstow._native: {'compiled' if COMPILED else 'STAND-IN'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if COMPILED:
        return
    for item in items:
        if item.get_closest_marker("native"):
            item.add_marker(pytest.mark.skip(reason="needs the compiled module"))
