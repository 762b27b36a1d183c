"""The rules of a manager, chosen at random, and which steps they surely keep or may keep.

`surely_keeps` and `may_keep` are two sides of what docs/manager.md promises. Between them lies what
it leaves open or what the caller does not know, such as whether a step is there to be counted.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import ringstow

if TYPE_CHECKING:
    from ringstow._core._arguments import StrPath

METRIC = "loss"


@dataclass(frozen=True)
class Rules:
    """What a run may change of its manager from start to start, and `on_busy` of its saves."""

    last: int | None = None
    every: int | None = None
    best: tuple[str, str, int] | None = None
    slim_after: int | None = None
    slim: tuple[str, ...] = ("optimizer",)
    links: bool = False
    """Whether saves link unchanged files of the step before."""
    full_every: int | None = None
    keep_there: int | None = None
    keep_here: int | None = None
    on_busy: Literal["wait", "skip"] = "wait"

    @classmethod
    def of(cls, rng: random.Random, has_tiers: bool) -> Rules:
        """Choose rules that a manager accepts."""
        last = rng.choice([None, 1, 1, 2, 3, 5])
        here = rng.choice([None, 1, 2, 3]) if has_tiers and rng.random() < 0.5 else None
        # Fewer there than here would be nowhere.
        least = max(last or 1, here or 1)
        there = least + rng.choice([0, 1, 3]) if has_tiers and rng.random() < 0.6 else None
        best = (METRIC, rng.choice(["min", "max"]), rng.choice([1, 2, 3]))
        links = rng.random() < 0.4
        return cls(
            last=last,
            every=rng.choice([None, None, 2, 4, 7]),
            best=best if rng.random() < 0.4 else None,
            slim_after=rng.choice([1, 2, 3]) if rng.random() < 0.35 else None,
            slim=rng.choice([("optimizer",), ("optimizer", "ema"), ("ema",)]),
            links=links,
            full_every=rng.choice([None, 1, 3]) if links else None,
            keep_there=there,
            keep_here=here,
            on_busy=rng.choice(["wait", "wait", "skip"]),
        )

    @classmethod
    def read(cls, values: dict[str, Any]) -> Rules:
        """Return rules from the JSON of `asdict`."""
        lists = {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
        return cls(**{**values, **lists})

    def arguments(self, places: Iterable[StrPath]) -> dict[str, Any]:
        """Return the arguments of a manager with these tiers."""
        there = {"keep": self.keep_there, "keep_here": self.keep_here} if places else {}
        base = ringstow.Previous(full_every=self.full_every) if self.links else None
        return {"keep": self._keep(), "tiers": ringstow.Tiers(places, **there), "base": base}

    def _keep(self) -> ringstow.Retention:
        best: Any = self.best
        return ringstow.Retention(
            last=self.last,
            every=self.every,
            best=best,
            slim_after=self.slim_after,
            drop=self.slim,
        )

    @property
    def here(self) -> Limits:
        """What stays in the run's directory."""
        return Limits(self.last, self.every, self.best)

    @property
    def there(self) -> Limits:
        """What stays on each tier."""
        if self.keep_there is None:
            return Limits()
        return Limits(self.keep_there, self.every, self.best)


@dataclass(eq=False)
class Saved:
    """A save of a step."""

    number: int
    """Rises from save to save: each save of a manager is the newest at its commit."""
    step: int
    loss: float | None
    lost: set[str] = dataclasses.field(default_factory=set)
    """Parts that `slim_after` may have dropped."""
    may_leave: bool = False
    """Whether it may be on the tiers alone, since `keep_here` was given."""

    def __str__(self) -> str:
        return f"step {self.step} (save {self.number}, loss {self.loss})"


@dataclass(frozen=True)
class Limits:
    """The rules for one place."""

    last: int | None = None
    every: int | None = None
    best: tuple[str, str, int] | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever removed."""
        return self == Limits()

    def surely_keeps(self, saved: Saved, among: Iterable[Saved]) -> bool:
        """Return whether these rules keep a step, whichever of the others are there."""
        if self.keeps_all or self._keeps_number(saved):
            return True
        others = [other for other in among if other is not saved]
        if sum(other.number > saved.number for other in others) < (self.last or 1):
            return True
        if self.best is None or not is_number(saved.loss):
            return False
        # Of equal ones the newer is the best; here each counts as better.
        return sum(self._is_better(other, saved, or_equal=True) for other in others) < self.best[2]

    def may_keep(self, saved: Saved, among: Iterable[Saved]) -> bool:
        """Return whether one of these rules can keep a step beside others that are there."""
        if self.keeps_all or self._keeps_number(saved):
            return True
        everything = list(among)
        if sum(other.number > saved.number for other in everything) < (self.last or 1):
            return True
        if self.best is None:
            return False
        if all(other.loss is None for other in everything):
            return True  # there is nothing to compare: none is removed
        if not is_number(saved.loss):
            return False
        better = sum(self._is_better(other, saved, or_equal=False) for other in everything)
        return better < self.best[2]

    def _keeps_number(self, saved: Saved) -> bool:
        return self.every is not None and saved.step % self.every == 0

    def _is_better(self, one: Saved, other: Saved, *, or_equal: bool) -> bool:
        assert self.best is not None
        if one.loss is None or other.loss is None or not is_number(one.loss):
            return False
        if one.loss == other.loss:
            return or_equal
        return (one.loss < other.loss) == (self.best[1] == "min")


def is_number(loss: float | None) -> TypeGuard[float]:
    """Whether a step can be the best by this."""
    return loss is not None and not math.isnan(loss)
