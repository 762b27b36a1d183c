"""Saves and loads for a `CheckpointManager` by ranks on nodes that share no directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError
from ringstow._manager._many_ranks import Ranks
from ringstow._manager._node_copies import AfterCommit
from ringstow._manager._node_run_directory import NodeRun
from ringstow._ranks._group import Group, end, group_of
from ringstow._state._torch_private import beside
from ringstow.distributed import _nodes

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringstow._manager._tiers import Plan
    from ringstow._saving._guard import Staging

_T = TypeVar("_T")


class NodeRanks(Ranks):
    """The ranks of one process group, each with the directory of its node."""

    _node_local = True

    def __init__(
        self,
        root: str,
        copies: int,
        plan: Plan,
        same: Mapping[str, object],
        config: Config | None,
        staging: Staging,
        allow_pickle: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(config, staging, allow_pickle, group, same=same)
        ranks = group_of(self.group)
        with ranks.turn.held():
            nodes = _nodes.meet(ranks, root)
        self._leads = nodes.leads(self.rank)
        self.run = NodeRun(root, config, ranks)
        self.steps = NodeRun(root, config, ranks, plan.tiers)
        count = len(nodes.found)
        if count < copies:
            raise InvalidStateError(
                f"Nodes(replicas={copies}) needs as many nodes, and these ranks are on {count}: "
                f"{_nodes.text_of(nodes.found)}"
            )
        # A group of its own: copies are sent while the next save communicates.
        self._beside: dist.ProcessGroup | None = beside(cast("Any", self.group))
        to = Group(self._beside)
        self.copier = AfterCommit(to, root, copies, plan, config, leads=self._leads)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node, which removes old steps there."""
        return self._leads

    def first(self, look: Callable[[], _T]) -> _T:
        """Return this rank's own result: `NodeRun` asks all ranks."""
        return look()

    def _knows(self, path: str) -> bool:
        return True

    def close(self) -> None:
        super().close()
        if self._beside is not None and self.copier.wait(0):
            end(self._beside)
        self._beside = None
