"""What a peer is: how it is installed, saves and loads. Imports no peer and no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
Finish = Callable[[], object]

# Who makes a save durable: the library itself; the library its files, the worker their directories;
# or the worker all of it.
Fsync = Literal["own", "own files", "added"]


def nothing_left() -> None:
    """A synchronous save is done when `begin` returns."""


def nothing_to_prepare() -> None:
    """What is installed runs as it is."""


def nothing_to_prewarm(state: State, directory: Path) -> None:
    """The library has no call that gets it ready."""


@dataclass(frozen=True)
class Peer:
    """One library, one way of calling it.

    `module` is imported before anything is measured, `distribution` is whose version is told.
    `requirements` are what pip installs into the peer's own environment; with none it runs in the
    project's. `prepare` builds or checks what an installation alone does not show.
    `prewarm` is what the library's guide has once before training, so that the first save finds its
    memory, or what a training has done by its third save; the directory is that of all checkpoints.
    Not measured. `note` is what a reader of the table should know of how it is set up.

    `begin` returns when training may change the weights; calling what it returned waits until the
    library is done. Whatever `fsync` says the library left out, the worker does after it, inside
    the measured time. None: the peer only loads, files that safetensors wrote. The checkpoint is a
    directory that `begin` makes.

    `load` reads all of it; where it can only load `in_place`, it is given tensors of the right
    shapes. None: nothing to check. `loads_as` names the row whose load is the same: this one's is
    checked, not told. `saves_as` likewise: this one's is made for the load, not told.
    """

    module: str
    distribution: str
    begin: Callable[[State, Path], Finish] | None
    load: Callable[[Path, State], State] | None
    fsync: Fsync = "added"
    in_place: bool = False
    loads_as: str | None = None
    saves_as: str | None = None
    requirements: tuple[str, ...] = ()
    prepare: Callable[[], None] = nothing_to_prepare
    prewarm: Callable[[State, Path], None] = nothing_to_prewarm
    note: str = ""
    by_default: bool = True
