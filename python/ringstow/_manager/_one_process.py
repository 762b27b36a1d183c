"""Saves and loads of one process for a `CheckpointManager`; `_many_ranks` has those of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ringstow._core._config import with_tiers
from ringstow._core._damage import is_damage
from ringstow._core._errors import InvalidStateError
from ringstow._ranks import _concurrent_saves
from ringstow._ranks._team import Team
from ringstow._reading._load import fill, loaded
from ringstow._reading._names import Names
from ringstow._saving._save import save, save_async
from ringstow._state.tree._mismatch import Call
from ringstow._state.tree._select import listed, said_of_slim

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._reports._checkpoint_reports import Step
    from ringstow._reports._io_reports import LoadReport, SaveReport
    from ringstow._saving._base import Base
    from ringstow._saving._guard import Staging
    from ringstow._saving._save_future import SaveHandle
    from ringstow._state.tree._rename import Given

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")
_Handle = TypeVar("_Handle", covariant=True)
_State = dict[Any, Any]
_Metrics = Mapping[str, Any] | None
# The arguments of `CheckpointManager.restore`.
_RESTORE = Call("strict=False", frozenset({"rename"}), instead="ringstow.load_into")


class Attempt(NamedTuple):
    """One attempt to load a step."""

    state: dict[Any, Any] | None = None
    """The state; None after an error."""
    error: BaseException | None = None
    """Why it failed."""
    is_damage: bool = False
    """Whether the failure is damage: an earlier step may be intact."""
    dropped: tuple[str, ...] = ()
    """Names below which `slim` had dropped everything before the load."""
    missing: tuple[str, ...] = ()
    """Names of the state that the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the state lacks."""

    @classmethod
    def of(cls, state: dict[Any, Any], report: LoadReport) -> Attempt:
        """Return a successful attempt; warn of the names that it has not filled, and why."""
        if report.dropped:
            _log.warning("%s: %s", report.path, said_of_slim(report.dropped))
        for names, what in (
            (report.missing, "not in the checkpoint, left as it was"),
            (report.unexpected, "only in the checkpoint, not loaded"),
        ):
            if names:
                _log.warning("%s: %s", report.path, listed(what, list(names)))
        return cls(
            state, dropped=report.dropped, missing=report.missing, unexpected=report.unexpected
        )


class Side(Protocol[_Handle]):
    """The interface that `CheckpointManager` needs of one process or of several ranks.

    It is a `Team` as well, whose methods have the same names.
    """

    doing: str
    """What the ranks are doing, with its path: a wait that takes long logs it."""

    @property
    def rank(self) -> int:
        """Which of them this process is."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def is_first(self) -> bool:
        """Whether this process copies steps to further tiers, and removes old ones there."""

    @property
    def leads(self) -> bool:
        """Whether this process removes old steps in its directory."""

    def check(self) -> None:
        """Raise InvalidStateError if the ranks are not those for which the manager was made."""

    def meet(self, call: tuple[object, ...], failure: BaseException | None, said: _T) -> list[_T]:
        """Raise the failure of the previous save on all ranks; return each rank's answer."""

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what the first rank that can read the directory finds there."""

    def from_first(self, look: Callable[[], _T]) -> _T:
        """Call a function on the first rank; return its result, or raise its error, on all."""

    def begin_max(self, values: list[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of all ranks' numbers; return what waits for them."""

    def prepare_end(self) -> None:
        """Prepare to name ranks that are lost in the last save of a training."""

    def begin_end(self, left_s: float | None) -> None:
        """Note that the next save is the last one, and the seconds for it; None for no limit."""

    def finish_end(self) -> None:
        """End what `prepare_end` has made."""

    def each(self, work: Callable[[], _T]) -> _T:
        """Call a function on every rank; fail on all ranks if it fails on one."""

    def save(
        self, state: _State, path: str, step: int, metrics: _Metrics, base: Base | None = None
    ) -> SaveReport:
        """Save a step."""

    def save_async(
        self,
        state: _State,
        path: str,
        step: int,
        metrics: _Metrics,
        base: Base | None = None,
        *,
        staging: Staging | None = None,
    ) -> _Handle:
        """Start to save a step; staging is the side's own if None."""

    def check_into(self, into: dict[Any, Any] | None) -> None:
        """Raise InvalidStateError if a load needs a state dict to fill, and there is none."""

    def load(
        self,
        found: Step,
        into: dict[Any, Any] | None,
        tiers: Sequence[str] = (),
        *,
        strict: bool = True,
        rename: Given | None = None,
    ) -> Attempt:
        """Try to load a step; ``tiers`` are the tiers with copies of it."""

    def close(self) -> None:
        """Free the memory and the groups that saves keep."""


class Alone(Team):
    """One process."""

    leads = True

    def __init__(
        self, config: Config | None, staging: Staging, allow_pickle: bool, apart: tuple[str, ...]
    ) -> None:
        self._config = config
        self._staging = staging
        self._allow_pickle = allow_pickle
        self._apart = apart

    def check(self) -> None:
        ranks = _concurrent_saves.ranks()
        if ranks is not None:
            raise InvalidStateError(
                f"this is rank {ranks[0]} of {ranks[1]}, and the manager was made before "
                "torch.distributed was initialized: make it after init_process_group, on every rank"
            )

    def first(self, look: Callable[[], _T]) -> _T:
        return look()

    def save(
        self, state: _State, path: str, step: int, metrics: _Metrics, base: Base | None = None
    ) -> SaveReport:
        return save(state, path, **self._options(step, metrics, base))

    def save_async(
        self,
        state: _State,
        path: str,
        step: int | None,
        metrics: _Metrics,
        base: Base | None = None,
        *,
        staging: Staging | None = None,
    ) -> SaveHandle:
        options = self._options(step, metrics, base)
        return save_async(state, path, staging=staging or self._staging, **options)

    def _options(self, step: int | None, metrics: _Metrics, base: Base | None) -> dict[str, Any]:
        return {
            "step": step,
            "metrics": metrics,
            "droppable": self._apart,
            "base": base,
            "config": self._config,
            "allow_pickle": self._allow_pickle,
        }

    def check_into(self, into: dict[Any, Any] | None) -> None:
        pass

    def load(
        self,
        found: Step,
        into: dict[Any, Any] | None,
        tiers: Sequence[str] = (),
        *,
        strict: bool = True,
        rename: Given | None = None,
        call: Call = _RESTORE,
    ) -> Attempt:
        """Try to load a step; ``call`` has the caller's arguments."""
        config = with_tiers(self._config, tiers)
        options: dict[str, Any] = {"config": config, "allow_pickle": self._allow_pickle}
        try:
            if into is None:
                return Attempt.of(*loaded(found.path, rename=rename, **options))
            names = Names(rename=rename)
            return Attempt.of(into, fill(into, found.path, call, names, strict=strict, **options))
        except Exception as error:
            return Attempt(error=error, is_damage=is_damage(error))
