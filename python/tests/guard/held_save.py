"""A save that stops in the middle of its copying.

It stops at a tensor that loads only when the test releases it. The tensors after it are not copied
before that.
"""

from __future__ import annotations

import threading

import torch

import ringstow
from ringstow._state.tensors._memory import LazyTensor

# One filler, so that the save copies in the order of the state.
ONE = ringstow.Config(fillers=1, pool_bytes=4 << 20, block_bytes=1 << 20)
LARGE = 1 << 18  # elements of four bytes; the call does not copy tensors of this size
ROOM = ONE.pool_bytes // 2


class Held:
    """A save that copies nothing before `release`."""

    def __init__(self):
        self._may_go_on = threading.Event()
        # As large as any other here, because shards hold large tensors first.
        self.hold = LazyTensor("F32", (LARGE,), 4 * LARGE, self.load)

    def load(self):
        assert self._may_go_on.wait(60)
        return torch.zeros(LARGE)

    def release(self):
        self._may_go_on.set()

    def state(self, state):
        return {"hold": self.hold, **state}


def loaded(path, name):
    return ringstow.load(path, keys=[name])[name]
