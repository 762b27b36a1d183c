"""The places that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringstow._core._errors import InvalidStateError
from ringstow._manager import _rules
from ringstow._saving._copy_queue import Stays
from ringstow._saving._tier_copies import Promoter

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._core._policies import Retention, Tiers

_log = logging.getLogger("ringstow")


def refuse_without(places: tuple[str, ...], tiers: Tiers) -> None:
    """Refuse fields that say something about places where none is named.

    Raises:
        InvalidStateError: one of them is given.
    """
    for name in ("keep", "keep_here", "rate"):
        if getattr(tiers, name) is not None and not places:
            raise InvalidStateError(
                f"Tiers.{name} is for places, and none is named: name places, or leave it out"
            )


class Plan(NamedTuple):
    """Where the steps of a run are copied to, and which of them stay there."""

    tiers: tuple[str, ...]
    rate: int
    """Bytes a second at most; 0 for no limit."""
    there: Retention
    """What stays on each tier; all, if there is no rule."""
    here: Retention
    """What stays in the run's directory."""
    evicts: bool = False
    """Whether steps leave that once all tiers have them."""

    def stays(self) -> Stays:
        """Return which steps must get to the tiers, however many newer ones wait."""
        return not _rules.keeps_all(self.here), self.evicts, self.here.every


def promoter(
    root: str, plan: Plan, config: Config | None, note_damage: Callable[[str], object]
) -> Promoter:
    """Return what copies a manager's steps. `CheckpointManager.close` waits for it."""
    return Promoter(
        root,
        plan.tiers,
        plan.rate,
        config,
        _rules.native(plan.there),
        stays=plan.stays(),
        note_damage=note_damage,
    )
