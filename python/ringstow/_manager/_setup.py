"""The parts of a `CheckpointManager`, for one process, several ranks, or several nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ringstow._core._config import Config, native_json
from ringstow._core._errors import InvalidStateError
from ringstow._manager._one_process import Alone, Side
from ringstow._manager._run_directory import Run
from ringstow._manager._tiers import Plan, promoter
from ringstow._ranks import _concurrent_saves
from ringstow._saving._copy_queue import Copier
from ringstow._saving._guard import Staging

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringstow._core._policies import Nodes

OnBusy = Literal["wait", "skip"]
"""What `CheckpointManager.save_async` does while the previous save is in progress."""


class Setup(NamedTuple):
    """The parts that save, load and list steps."""

    side: Side[Any]
    run: Run
    """The steps in the run's directory."""
    steps: Run
    """The steps in the run's directory and on the tiers."""
    copier: Copier


class Saves(NamedTuple):
    """The settings of saves and loads."""

    config: Config | None
    staging: Staging
    allow_pickle: bool


def for_ranks(
    root: str,
    plan: Plan,
    apart: tuple[str, ...],
    same: Mapping[str, object],
    saves: Saves,
    group: dist.ProcessGroup | None,
    note_damage: Callable[[str], object],
) -> Setup:
    """Return the setup of one process, or of ranks that all see the directory.

    Args:
        root: the directory of the run.
        plan: which steps to copy where. The first rank copies.
        apart: names of parts of the state that get files of their own.
        same: arguments that must be equal on all ranks.
        saves: the settings of saves and loads.
        group: the ranks; None means all, or this process if there are no ranks.
        note_damage: called with the path of each step that cannot be copied.
    """
    side: Side[Any] = Alone(*saves, apart)
    if group is not None or _concurrent_saves.ranks() is not None:
        from ringstow._manager._many_ranks import Ranks

        side = Ranks(*saves, group, apart=apart, same=same)
    run = Run(root, saves.config)
    steps = Run(root, saves.config, plan.tiers)
    copied = plan if side.is_first else plan._replace(tiers=())
    return Setup(side, run, steps, promoter(root, copied, saves.config, note_damage))


def for_nodes(
    root: str,
    plan: Plan,
    replicas: int,
    same: Mapping[str, object],
    saves: Saves,
    group: dist.ProcessGroup | None,
) -> Setup:
    """Return the setup of ranks on nodes that share no directory.

    Args:
        root: the directory of the run, on each node's own disk.
        plan: which steps to copy where. The first rank of each node copies its files.
        replicas: how many nodes hold the files of each node.
        same: arguments that must be equal on all ranks.
        saves: the settings of saves and loads.
        group: the ranks; None means all.
    """
    from ringstow._manager._node_ranks import NodeRanks

    side = NodeRanks(root, replicas, plan, same, *saves, group)
    return Setup(side, side.run, side.steps, side.copier)


def check_on_busy(on_busy: object) -> None:
    """Raise InvalidStateError for a value that `OnBusy` does not have."""
    if on_busy not in get_args(OnBusy):
        raise InvalidStateError(f'on_busy is "wait" or "skip", not {on_busy!r}')


def check_nodes(nodes: Nodes | None, config: Config | None, **others: object) -> None:
    """Refuse arguments that are not supported on nodes that share no directory."""
    if nodes is None:
        return
    if not _concurrent_saves.has_group():
        raise InvalidStateError(
            "nodes is for several ranks: call torch.distributed.init_process_group first, or leave "
            "it out"
        )
    from ringstow.distributed import _nodes

    _nodes.refuse(native_json(config), **others)
