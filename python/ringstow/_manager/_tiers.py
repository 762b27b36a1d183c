"""The places that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringstow._core._errors import InvalidStateError
from ringstow._saving._copy_queue import Stays
from ringstow._saving._tier_copies import Promoter

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._core._policies import Retention, Tiers


def refuse_without(places: tuple[str, ...], tiers: Tiers) -> None:
    """Refuse fields that describe places if no place is named.

    Raises:
        InvalidStateError: such a field is given.
    """
    for name in ("keep", "keep_here", "rate"):
        if getattr(tiers, name) is not None and not places:
            raise InvalidStateError(
                f"Tiers.{name} needs places, and none is named: name places, or leave it out"
            )


class Plan(NamedTuple):
    """The places to copy the steps of a run to, and which steps stay in each."""

    tiers: tuple[str, ...]
    rate: int
    """Maximum bytes a second; 0 for no limit."""
    there: Retention
    """The rules for each tier; without rules, all steps stay."""
    here: Retention
    """The rules for the run's directory."""
    evicts: bool = False
    """Whether steps are removed from the run's directory once all tiers have a copy."""

    def stays(self) -> Stays:
        """Return which steps must be copied even if newer steps wait."""
        return not self.here.keeps_all, self.evicts, self.here.every


def promoter(
    root: str, plan: Plan, config: Config | None, note_damage: Callable[[str], object]
) -> Promoter:
    """Return the copier of a manager's steps. `CheckpointManager.close` waits for it."""
    return Promoter(
        root,
        plan.tiers,
        plan.rate,
        config,
        plan.there,
        stays=plan.stays(),
        note_damage=note_damage,
    )
