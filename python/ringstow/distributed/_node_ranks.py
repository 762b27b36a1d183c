"""How ranks on nodes that share no directory save and load for a `CheckpointManager`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

from ringstow._config import Config
from ringstow._errors import InvalidStateError
from ringstow.dcp import _private
from ringstow.distributed import _nodes
from ringstow.distributed._after import AfterCommit
from ringstow.distributed._group import Group, group_of
from ringstow.distributed._node_run import NodeRun
from ringstow.distributed._ranks import Ranks

if TYPE_CHECKING:
    from ringstow._guard import Staging
    from ringstow._tiers import Plan

_T = TypeVar("_T")


class NodeRanks(Ranks):
    """The ranks of one process group, each with the directory of its node."""

    _node_local = True

    def __init__(
        self,
        root: str,
        copies: int,
        plan: Plan,
        arguments: Mapping[str, object],
        config: Config | None,
        staging: Staging,
        allow_pickle: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(arguments, config, staging, allow_pickle, group)
        self._ranks = group_of(group)
        with self._ranks.turn.held():
            nodes = _nodes.meet(self._ranks, root)
        # The first rank of a node removes old steps there.
        self.leads = self._ranks.rank == nodes.ranks[0]
        self.run = NodeRun(root, config, self._ranks)
        self.steps = NodeRun(root, config, self._ranks, plan.tiers)
        count = len(nodes.found)
        if count < copies:
            raise InvalidStateError(
                f"Nodes(replicas={copies}) needs as many nodes, and these ranks are on {count}: "
                f"{_nodes.text_of(nodes.found)}"
            )
        # A group of its own: copies travel while the next save communicates.
        beside = dist.new_group(backend="gloo") if group is None else _private.beside(group)
        self._beside: dist.ProcessGroup | None = cast("dist.ProcessGroup", beside)
        ranks = Group(self._beside)
        self.copier = AfterCommit(ranks, root, copies, plan, config, leads=self.leads)

    def from_first(self, look: Callable[[], _T]) -> _T:
        """Return what the first rank sees, on all ranks."""
        return super().first(look)

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what this rank sees: `NodeRun` asks all ranks."""
        return look()

    def _knows(self, path: str) -> bool:
        return True

    def close(self) -> None:
        super().close()
        if self._beside is not None and dist.is_initialized() and self.copier.wait(0):
            with contextlib.suppress(Exception):  # it may have ended with the ranks
                dist.destroy_process_group(self._beside)
        self._beside = None
