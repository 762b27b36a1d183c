"""What is tested with every trainer: the snippets of its page, and checkpoints that are slimmed."""

from __future__ import annotations

import inspect
import os
import pathlib
import shutil

import snippets
from support import assert_same

import ringstow

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "trainers"


def run_page(name, section="", edit=str, **names):
    """Run the snippets of a page or of a section, edited; return the names that they leave."""
    page = PAGES / name
    for line, code in snippets.snippets(page, section):
        exec(compile("\n" * (line - 1) + edit(code), str(page), "exec"), names)
    return names


def assert_slims(source, path, *parts):
    """Slim a copy of a checkpoint of several ranks: it frees room, and all else is as before."""
    shutil.copytree(source, path)
    whole, room = ringstow.load(path), size(path)
    assert set(parts) < set(whole)
    ringstow.slim(path, drop=parts)
    assert_same(ringstow.load(path), {key: one for key, one in whole.items() if key not in parts})
    assert ringstow.verify(path).ok
    assert size(path) < room / 2  # two moments are larger than the weights


def size(path):
    return sum(one.stat().st_size for one in os.scandir(path) if one.name.endswith(".safetensors"))


def assert_same_parameters(one, other):
    """Two functions take the same arguments, with the same defaults and in the same ways."""
    mine, theirs = (inspect.signature(each).parameters.values() for each in (one, other))
    assert [(p.name, p.default, p.kind) for p in mine] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
