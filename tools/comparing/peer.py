"""The description of a peer: how to install it, save and load. Imports neither peers nor torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

CPU = "cpu"
State = dict[str, "torch.Tensor"]
Finish = Callable[[], object]

# Which side syncs a save: "own": the library syncs all of it. "own files": the library syncs its
# files, the worker syncs the directories. "added": the worker syncs all of it.
Fsync = Literal["own", "own files", "added"]


def nothing_left() -> None:
    """Do nothing: a synchronous save is done when `begin` returns."""


def nothing_to_prepare() -> None:
    """Do nothing: the package runs as installed."""


def nothing_to_prewarm(state: State, directory: Path) -> None:
    """Do nothing: the library needs no warm-up."""


@dataclass(frozen=True)
class Peer:
    """One library, one way of calling it.

    The worker imports `module` before it measures; the table reports the version of `distribution`.
    pip installs `requirements` into the peer's own environment; without any, the peer runs in the
    project's. `prepare` builds extensions or checks that they work.
    `prewarm` makes the calls that the library's guide recommends before training, or that a run
    has made by its third save. It gets the directory of all checkpoints and is not measured.
    `note` tells readers of the table how the peer is set up.

    `begin` creates the checkpoint's directory and returns when training may change the weights. It
    returns a function that waits until the library is done. Then the worker syncs, within the
    measured time, whatever `fsync` says the library does not. If `begin` is None, the peer only
    loads, from files that safetensors wrote.

    `load` reads the whole checkpoint onto a device. A peer that loads `in_place` gets tensors of
    the right shapes there. Only a peer with `gpu` takes tensors on a GPU, and devices other than
    `cpu`. If `load` is None, nothing is checked. `loads_as` names the row that reports the same
    load: this peer's load is checked but not reported. `saves_as` works alike: this peer saves only
    so that it can load.
    """

    module: str
    distribution: str
    begin: Callable[[State, Path], Finish] | None
    load: Callable[[Path, State, str], State] | None
    fsync: Fsync = "added"
    in_place: bool = False
    gpu: bool = False
    loads_as: str | None = None
    saves_as: str | None = None
    requirements: tuple[str, ...] = ()
    prepare: Callable[[], None] = nothing_to_prepare
    prewarm: Callable[[State, Path], None] = nothing_to_prewarm
    note: str = ""
    by_default: bool = True
