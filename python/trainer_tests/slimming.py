"""What every trainer's sharded checkpoints promise: `ringstow.slim` drops the optimizer's state."""

from __future__ import annotations

import os
import shutil

from support import assert_same

import ringstow


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
