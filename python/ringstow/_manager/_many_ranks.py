"""Saves and loads of several ranks for a `CheckpointManager` and for adapters, without a planner.

Rank 0 lists the directory and removes old steps. Before each call the ranks exchange which method
they call and what has failed, so that all fail together. torch.distributed.checkpoint loads
checkpoints to which each rank has written by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.stateful import Stateful

from ringstow import _native
from ringstow._core._arguments import object_url
from ringstow._core._config import Config, native_json, with_tiers
from ringstow._core._damage import is_damage
from ringstow._core._errors import Error, InvalidStateError, UnsupportedError
from ringstow._core._policies import Nodes
from ringstow._manager._one_process import Attempt
from ringstow._ranks._group import Group, end, end_beside, of_all_ranks
from ringstow._ranks._roll_call import keep_forever
from ringstow._reading._names import Names
from ringstow._saving._guard import check_staging
from ringstow._state.tree._mismatch import Call
from ringstow.dcp import _paths, _private
from ringstow.dcp._metadata import dropped_from
from ringstow.dcp._planner import LoadPlanner
from ringstow.dcp._reader import StorageReader
from ringstow.distributed._load import fill
from ringstow.distributed._save import save, save_async

if TYPE_CHECKING:
    from ringstow._reports._checkpoint_reports import Step
    from ringstow._reports._io_reports import SaveReport
    from ringstow._saving._base import Base
    from ringstow._saving._guard import Staging
    from ringstow._saving._save_future import SaveHandle
    from ringstow._state.tree._rename import Given

_T = TypeVar("_T")

# The arguments of `CheckpointManager.restore` on several ranks.
RESTORE = Call(
    "strict=False",
    frozenset({"rename"}),
    instead="ringstow.distributed.load_into",
    load="ringstow.distributed.load",
)


class Ranks(Group):
    """The ranks of one process group; each rank itself derives what it writes and reads."""

    _node_local = False

    def __init__(
        self,
        config: Config | None = None,
        staging: Staging = "guard",
        allow_pickle: bool = False,
        group: dist.ProcessGroup | None = None,
        *,
        apart: tuple[str, ...] = (),
        same: Mapping[str, object] | None = None,
    ) -> None:
        """Make the team on all ranks of a group; None means all ranks, in a new group.

        Args:
            config: the settings of saves and loads.
            staging: how a save that does not say keeps the values of the call.
            allow_pickle: whether values are pickled and unpickled.
            group: a group that training does not use: background saves communicate in it.
            apart: names of parts of the state that get files of their own in each save.
            same: arguments that must be equal on all ranks, by name.
        """
        check_staging(staging, is_for_ranks=True)
        self._config = config
        self._staging = staging
        self._allow_pickle = allow_pickle
        self._apart = apart
        super().__init__(of_all_ranks() if group is None else group)
        self._is_own = group is None
        if self.rank < 0:
            raise InvalidStateError(
                f"rank {dist.get_rank()} is not in the manager's group: make the manager on the "
                "group's ranks only"
            )
        all_same = self.gathered(dict(same)) if same else []
        for name in same or ():
            values = [one.get(name) for one in all_same]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise InvalidStateError(
                    f"the ranks make managers with different {name}: {told}. Give all of them the "
                    "same"
                )

    @property
    def leads(self) -> bool:
        """Whether this process removes old steps in its directory."""
        return self.is_first

    def check(self) -> None:
        if not dist.is_initialized():
            raise InvalidStateError(
                "the process group has ended, and the manager needs it: close the manager first"
            )

    def first(self, look: Callable[[], _T]) -> _T:
        return self.from_first(look)

    def save(
        self,
        state: dict[Any, Any],
        path: str,
        step: int | None,
        metrics: Mapping[str, Any] | None = None,
        base: Base | None = None,
        apart: Iterable[str] | None = None,
    ) -> SaveReport:
        """Save; ``apart`` is the same on all ranks, and None means the team's ``apart``."""
        return save(state, path, **self._options(step, metrics, base, apart))

    def save_async(
        self,
        state: dict[Any, Any],
        path: str,
        step: int | None,
        metrics: Mapping[str, Any] | None = None,
        base: Base | None = None,
        apart: Iterable[str] | None = None,
        *,
        staging: Staging | None = None,
    ) -> SaveHandle:
        """Save in the background, as `save` does; fail at the call on all ranks."""
        handle: SaveHandle | None = None
        failure: BaseException | None = None
        options = self._options(step, metrics, base, apart)
        try:
            handle = save_async(state, path, staging=staging or self._staging, **options)
        except BaseException as error:  # Ctrl-C, too: the others must not wait for this rank
            failure = error
        try:
            self.agree(failure)
        except BaseException:
            if handle is not None:
                # The call raises its failure. The failed rank may never have joined the save.
                handle.add_done_callback(lambda ended: ended.exception())
            raise
        assert handle is not None
        return handle

    def _options(
        self,
        step: int | None,
        metrics: Mapping[str, Any] | None,
        base: Base | None,
        apart: Iterable[str] | None,
    ) -> dict[str, Any]:
        return {
            "group": self.group,
            "step": step,
            "metrics": metrics,
            "base": base,
            "nodes": Nodes() if self._node_local else None,
            "droppable": self._apart if apart is None else tuple(apart),
            "config": self._config,
            "allow_pickle": self._allow_pickle,
        }

    def check_into(self, into: dict[Any, Any] | None) -> None:
        error = None
        if not isinstance(into, dict):
            error = InvalidStateError(
                "several ranks restore into a state dict, which says which shards each of them "
                "has: restore(into={'model': model, 'optimizer': optimizer})"
            )
        self.agree(error)

    def load(
        self,
        found: Step,
        into: dict[Any, Any] | None,
        tiers: Sequence[str] = (),
        *,
        strict: bool = True,
        rename: Given | None = None,
        call: Call | None = None,
    ) -> Attempt:
        assert into is not None
        config = with_tiers(self._config, tiers)
        error: BaseException | None = None
        attempt = Attempt(into)
        try:
            if self._knows(found.path):
                report = fill(
                    into,
                    found.path,
                    call or RESTORE,
                    Names(rename=rename),
                    group=self.group,
                    strict=strict,
                    config=config,
                    allow_pickle=self._allow_pickle,
                )
                attempt = Attempt.of(into, report)
            elif rename is not None:
                raise UnsupportedError(
                    f"{found.path} holds each rank's part by itself, whose names restore cannot "
                    "map: leave out rename=, and map the names of the state dict"
                )
            else:
                dropped = self._load_by_dcp(found, into, config, strict=strict, call=call)
                attempt = Attempt(into, dropped=dropped)
        except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
            error = caught
        return self._attempt(found.path, error, attempt)

    def _knows(self, path: str) -> bool:
        """Return whether ranks load it without DCP's planner, also if DCP's own writer wrote it."""

        def look() -> bool:
            is_here = os.path.exists(os.path.join(path, _paths.MANIFEST))
            return is_here or (not _is_of_ranks(path) and _native.foreign_kind(path) == "dcp")

        return object_url(path) is not None or self.first(look)

    def _load_by_dcp(
        self,
        found: Step,
        into: dict[Any, Any],
        config: Config | None,
        *,
        strict: bool,
        call: Call | None,
    ) -> tuple[str, ...]:
        """Load what each rank saved by itself; return the names that `slim` dropped."""
        kind = self.first(
            lambda: None if _is_of_ranks(found.path) else _native.foreign_kind(found.path)
        )
        if kind is not None:
            raise InvalidStateError(
                f"{found.path} is a checkpoint of another program ({kind}), and several ranks "
                "restore ringstow's and torch.distributed.checkpoint's: load it by "
                "ringstow.load(path) on each rank and put it into the model, or convert it once "
                "by `ringstow convert`"
            )
        planner = LoadPlanner(strict=strict)
        planner.must_fill = not strict
        planner.call = call or Call("strict=False")
        planner.elsewhere = self._names(into)
        if found.status != "committed":  # DCP hides the reason: open it once to get it
            knobs = native_json(self._config)
            self.first(lambda: str(_native.Checkpoint(found.path, knobs).kind))
        reader = StorageReader(config=config, allow_pickle=self._allow_pickle)
        self.see(found.path, is_found=True)
        load_by_dcp(
            into,
            checkpoint_id=found.path,
            storage_reader=reader,
            planner=planner,
            process_group=self.group,
        )
        return () if planner.metadata is None else dropped_from(planner.metadata)

    def _attempt(self, path: str, error: BaseException | None, loaded: Attempt) -> Attempt:
        """Return the outcome of a load on all ranks; ``error`` is this rank's."""
        said = self.told(error, error is not None and _is_damage(error))
        failed = [(rank, *one) for rank, one in enumerate(said) if one[1] is not None]
        if not failed:
            return loaded
        if error is None:
            rank, _, other = failed[0]
            error = Error(f"rank {rank} could not load {path}: {other}")
        return Attempt(error=error, is_damage=all(is_damage for _, is_damage, _ in failed))

    def _names(self, into: dict[Any, Any]) -> set[str]:
        """Return the keys of all ranks' state dicts: each may have some of its own."""
        states = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in into.items()}
        return set().union(*self.gathered(list(_private.flattened(states)[0])))

    def close(self) -> None:
        """End the groups; no save is in progress."""
        if self._is_own and self.group is not None:
            end_beside(self.group)
            # Its end would wait for the other ranks, which may never come.
            (keep_forever if self.is_awaited else end)(self.group)
            # The last reference closes its connections: ranks that wait for this one notice.
            self.group = None


def _is_damage(error: BaseException) -> bool:
    """Return whether all failed ranks found damage: DCP raises one error for all."""
    if isinstance(error, CheckpointException):
        return all(is_damage(one) for one, _ in error.failures.values())
    # The cause of another rank's failure is that rank's own error.
    return any(is_damage(one) for one in (error, error.__cause__) if one is not None)


def _is_of_ranks(path: str) -> bool:
    """Return whether a directory is a ringstow checkpoint, also one of independent ranks."""
    return any(
        os.path.exists(os.path.join(one, _paths.MANIFEST))
        for one in (path, _paths.of_rank(path, 0))
    )
