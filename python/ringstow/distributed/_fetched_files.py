"""Temporary directories for files that a node fetches from others: a stripe of the checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from ringstow._core import _files
from ringstow._ranks._group import Group
from ringstow.distributed import _nodes
from ringstow.distributed._node_files import Whole
from ringstow.distributed._nodes import Nodes

PREFIX = ".ringstow-fetched-"
"""The prefix of these directories' names."""
_MARKER = "companion.json"


class Room(NamedTuple):
    """A stripe with the files that a node lacks, as one of its ranks sees it."""

    stripe: str
    directory: str
    """The files' directory; files have their full length, with holes for bytes not fetched."""
    config: str
    """The settings, in JSON, with that stripe."""


@contextlib.contextmanager
def room(group: Group, nodes: Nodes, whole: Whole, path: str, config: str) -> Iterator[Room]:
    """Make sparse files on each node for the files that it lacks, until all ranks have left.

    All ranks of the group call it. Until bytes are fetched, reading them gives zeros, which no
    checksum accepts.

    Raises:
        Error: another rank failed.
        OSError: this rank cannot make the files.
    """
    run = _nodes.run_of(path)
    with contextlib.ExitStack() as opened:

        def make() -> str:
            if not nodes.leads(group.rank):
                return ""
            return opened.enter_context(_made(run, path, whole, group.rank))

        name = group.together(make)[nodes.ranks[0]]
        stripe = os.path.join(run, name)
        settings = json.loads(config)
        settings["stripe"] = [*settings.get("stripe", ()), stripe]
        directory = os.path.join(stripe, os.path.basename(os.path.realpath(path)))
        yield Room(stripe, directory, json.dumps(settings))


@contextlib.contextmanager
def _made(run: str, path: str, whole: Whole, rank: int) -> Iterator[str]:
    """Make the directory, lock it against removal by others, and remove it at the end."""
    _clear(run)
    with _locked(run, fcntl.LOCK_SH):  # `run` is no link: `run_of` has followed it
        stripe = tempfile.mkdtemp(prefix=PREFIX, dir=run)
        lock = _files.to_lock(stripe)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        real = os.path.realpath(path)
        directory = os.path.join(stripe, os.path.basename(real))
        os.mkdir(directory)
        for number in whole.lacks(rank):
            name, nbytes = whole.files[number]
            with _files.new(os.path.join(directory, name)) as file:
                file.truncate(nbytes)
        with _files.new(os.path.join(directory, _MARKER)) as marker:
            marker.write(json.dumps({"checkpoint": real}).encode())
        yield os.path.basename(stripe)
    finally:
        shutil.rmtree(stripe, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    lock = _files.to_lock(path)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _clear(run: str) -> None:
    """Remove the directories of killed loads, which have no lock."""
    alone = fcntl.LOCK_EX | fcntl.LOCK_NB
    # The run's lock ensures that no other load has made a directory and not yet locked it.
    with contextlib.suppress(BlockingIOError), _locked(run, alone):
        for name in filter(lambda name: name.startswith(PREFIX), os.listdir(run)):
            path = os.path.join(run, name)
            with contextlib.suppress(OSError), _locked(path, alone):
                shutil.rmtree(path, ignore_errors=True)
