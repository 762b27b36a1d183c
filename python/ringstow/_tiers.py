"""The places that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _rules
from ringstow._copier import Stays
from ringstow._promoter import Promoter
from ringstow._rules import Rules

if TYPE_CHECKING:
    from ringstow._config import Config

_log = logging.getLogger("ringstow")


def refuse_without(tiers: tuple[str, ...], **given: object) -> None:
    """Refuse options that say something about tiers where no tier is named.

    Raises:
        ValueError: one of them is given.
    """
    for name, value in given.items():
        if value is not None and not tiers:
            raise ValueError(f"{name} is for tiers, and none is named: name tiers, or leave it out")


class Plan(NamedTuple):
    """Where the steps of a run are copied to, and which of them stay there."""

    tiers: tuple[str, ...]
    rate: int
    """Bytes a second at most; 0 for no limit."""
    rules: Rules
    """What stays on each tier; all, if there is no rule."""
    here: Rules
    """What stays in the run's directory."""
    evicts: bool = False
    """Whether steps leave that once all tiers have them."""

    def stays(self) -> Stays:
        """Return which steps must get to the tiers, however many newer ones wait."""
        return not self.here.keeps_all, self.evicts, self.here.keep_every


def promoter(
    root: str, plan: Plan, config: Config | None, note_damage: Callable[[str], object]
) -> Promoter:
    """Return what copies a manager's steps. `CheckpointManager.close` waits for it."""

    def clear(tier: str) -> None:
        _rules.retain(tier, plan.rules, config, root)

    removes = None if plan.rules.keeps_all else clear
    return Promoter(
        root,
        plan.tiers,
        plan.rate,
        config,
        removes,
        stays=plan.stays(),
        note_damage=note_damage,
    )
