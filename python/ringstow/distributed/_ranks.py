"""How several ranks save and load for a `CheckpointManager`: without a planner.

What ranks have saved each by itself loads by torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringstow import foreign
from ringstow._alone import Attempt
from ringstow._arguments import object_url
from ringstow._config import with_tiers
from ringstow._errors import InvalidStateError
from ringstow.dcp import _paths, _ranks
from ringstow.dcp._together import agree, gathered
from ringstow.distributed._load import fill
from ringstow.distributed._save import save, save_async
from ringstow.tree._mismatch import Call

if TYPE_CHECKING:
    from ringstow._base import Base
    from ringstow._catalog_report import Step
    from ringstow._report import SaveReport
    from ringstow.dcp._handle import RanksHandle

# What `CheckpointManager.restore` takes on several ranks.
RESTORE = Call(
    "strict=False", instead="ringstow.distributed.load_into", load="ringstow.distributed.load"
)


class Ranks(_ranks.Ranks):
    """The ranks of one process group, each of which knows what it writes and reads."""

    _stages_by_dcp = False
    _node_local = False

    def __init__(self, arguments: Mapping[str, object], *given: Any) -> None:
        """Make it of what the base class is made of, once all ranks have the same arguments."""
        super().__init__(*given)
        all_arguments = gathered(dict(arguments), self._group)
        for name in arguments:
            values = [each.get(name) for each in all_arguments]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise InvalidStateError(
                    f"the ranks make managers with different {name}: {told}. Give all of them the "
                    "same"
                )

    _noted: Mapping[str, Any]
    """What the next save gets beside its state and path."""

    def _note(
        self,
        step: int | None,
        metrics: Mapping[str, Any] | None,
        base: Base | None,
        apart: Iterable[str] | None,
    ) -> None:
        self._noted = {
            "group": self._given,
            "step": step,
            "metrics": metrics,
            "base": base,
            "node_local": self._node_local,
            "apart": self._apart if apart is None else tuple(apart),
            "config": self._config,
            "allow_pickle": self._allow_pickle,
        }

    def _save(self, state: dict[Any, Any], path: str) -> SaveReport:
        return save(state, path, **self._noted)

    def _start(self, state: dict[Any, Any], path: str) -> RanksHandle:
        handle: RanksHandle | None = None
        failure: BaseException | None = None
        try:
            handle = save_async(state, path, staging=self._staging, **self._noted)
        except BaseException as error:  # Ctrl-C, too: the others must not wait for this rank
            failure = error
        try:
            agree(failure, self._group)
        except BaseException:
            if handle is not None:
                # The call raises its failure. The failed rank may never have joined the save.
                handle.add_done_callback(lambda ended: ended.exception())
            raise
        assert handle is not None
        return handle

    def load(
        self,
        found: Step,
        into: dict[Any, Any] | None,
        tiers: Sequence[str] = (),
        *,
        strict: bool = True,
        call: Call | None = None,
    ) -> Attempt:
        assert into is not None
        if not self._is_ours(found.path):
            return super().load(found, into, tiers, strict=strict, call=call)
        error: BaseException | None = None
        attempt = Attempt(into)
        try:
            report = fill(
                into,
                found.path,
                call or RESTORE,
                group=self._given,
                strict=strict,
                config=with_tiers(self._config, tiers),
                allow_pickle=self._allow_pickle,
            )
            attempt = Attempt.of(into, report)
        except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
            error = caught
        return self._attempt(found.path, error, attempt)

    def _is_ours(self, path: str) -> bool:
        """Whether the ranks load it without DCP's planner: also what DCP's own writer left."""

        def look() -> bool:
            is_here = os.path.exists(os.path.join(path, _paths.MANIFEST))
            return is_here or (not _ranks.is_ours(path) and foreign.kind_of(path) == "dcp")

        return object_url(path) is not None or self.first(look)
