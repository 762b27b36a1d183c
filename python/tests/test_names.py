"""The names that ringstow promises are those of `__all__`, of docs/python.md and of `dir`."""

from __future__ import annotations

import pathlib
import re

import ringstow

PAGE = pathlib.Path(__file__).parents[2] / "docs/python.md"


def promised():
    """Return the names that the page lists: those of the errors, and all others."""
    page = PAGE.read_text()
    errors = re.findall(r"^\| `(\w+Error)`", page, re.M)
    rows = page.partition("## All names")[2].splitlines()
    return {*errors, *re.findall(r"`(\w+)`", "\n".join(row for row in rows if row[:1] == "|"))}


def test_page_lists_what_is_exported():
    assert promised() == {*ringstow.__all__, *ringstow._MODULES}


def test_dir_has_every_name_and_each_is_there():
    assert promised() | {"__version__"} <= set(dir(ringstow))
    assert [name for name in ringstow.__all__ if not hasattr(ringstow, name)] == []


def test_every_handle_is_a_save_handle(tmp_path):
    with ringstow.CheckpointManager(tmp_path) as manager:
        assert isinstance(manager.save_async(1, {"a": 1}), ringstow.SaveHandle)
    lacking = [
        name
        for name, value in vars(ringstow.SaveHandle).items()
        if not name.startswith("_") and not getattr(value, "__doc__", "")
    ]
    assert lacking == []
