"""The training that is killed: one process that makes a manager and calls it at random.

It notes each call before and after it. It never checks anything but what a call returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import ringstow

from .ledger import Ledger, Silence
from .place import SAVE, Place, label, log_to_stderr
from .rules import METRIC, Rules

# Saves of one process; the numbers of the next process are above them.
SAVES_MAX = 10_000


@dataclasses.dataclass
class Pending:
    """A background save whose result nobody knows yet."""

    number: int
    handle: ringstow.SaveHandle


class Program:
    """Calls a manager until it is killed, or has made so many calls."""

    def __init__(self, place: Place, number: int, pipe: int, rank: int = 0) -> None:
        log_to_stderr()
        self._place = place
        is_alone = place.shape.ranks == 1
        self._shape = dataclasses.replace(place.shape, is_whole=is_alone)
        # All ranks throw the same dice, and must throw them alike.
        self._rng = random.Random(f"program {place.shape.seed} {number}")
        self._is_first = rank == 0
        self._ledger = Ledger(place.ledger, pipe) if self._is_first else Silence()
        self._save_number = number * SAVES_MAX
        self._pending: Pending | None = None
        self._newest = 0
        self._rules = Rules()
        self._manager: ringstow.CheckpointManager

    def train(self, rules: Rules, calls: int, *, reopens: bool = True) -> None:
        """Open, restore, and make random calls; sometimes close and open with other rules."""
        with self._failures_noted():
            self._open(rules)
            self._begin()
            for _ in range(calls):
                if reopens and self._rng.random() < 0.04:
                    self._close()
                    self._open(self._other_rules())
                    self._begin()
                self._call()
            self._close()

    def settle(self, rules: Rules) -> None:
        """Open, restore, save once and close: what must leave the run tidy."""
        with self._failures_noted():
            self._open(rules)
            self._restore()
            while not self._save(self._newest + 1):
                self._newest += 1
            self._close()

    @contextlib.contextmanager
    def _failures_noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._ledger.write("program", "failed", error=traceback.format_exc())
            raise

    @contextlib.contextmanager
    def _noted(self, what: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Note a call before and after it, and what is put into the dict."""
        self._ledger.write(what, "begin", **about)
        returned: dict[str, Any] = {}
        yield returned
        self._ledger.write(what, "end", **about, **returned)
        self._note_result()

    def _note_result(self) -> None:
        """Note a background save that has ended. Most calls wait for it."""
        if self._pending is not None and self._pending.handle.done():
            self._pending.handle.result()
            self._ledger.write("result", "end", save=self._pending.number)
            self._pending = None

    # Managers.

    def _open(self, rules: Rules) -> None:
        with self._noted("open", rules=dataclasses.asdict(rules)):
            self._manager = self._place.manager(rules)
        self._rules = rules

    def _other_rules(self) -> Rules:
        return Rules.of(self._rng, has_tiers=bool(self._place.tiers))

    def _close(self) -> None:
        with self._noted("close"):
            self._manager.close()

    def _begin(self) -> None:
        # Only the newest of this directory needs no restore: tiers may have newer ones.
        if not self._place.tiers and self._rng.random() < 0.1:
            self._latest()
        else:
            self._restore()

    def _call(self) -> None:
        calls: dict[Callable[[], object], float] = {
            self._save_next: 6,
            self._save_in_background: 7,
            self._restore: 0.5,
            self._go_back: 1.5,
            self._keep: 1.2,
            self._release: 1,
            self._latest: 0.5,
            self._best: 0.5,
            self._steps: 0.5,
            self._wait: 0.5,
            self._pause: 1,
        }
        if self._place.tiers:
            calls[self._wait_promoted] = 0.7
        (call,) = self._rng.choices(list(calls), list(calls.values()))
        call()

    # Saves.

    def _next_step(self) -> int:
        dice = self._rng.random()
        if dice < 0.06:
            return self._newest
        if dice < 0.1:
            return max(0, self._newest - self._rng.choice([1, 2, 5]))
        return self._newest + self._rng.choice([1, 1, 1, 2, 5])

    def _saved(self, step: int) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
        """Return the next save's state and metrics, and what its lines say."""
        self._save_number += 1
        loss = self._rng.choice([None, float("nan"), 0.25, 0.5, *[self._rng.random()] * 6])
        metrics = {SAVE: float(self._save_number)}
        if loss is not None:
            metrics[METRIC] = loss
        about = {"step": step, "save": self._save_number, "loss": loss}
        return self._shape.state(step, self._save_number), metrics, about

    def _save_next(self) -> None:
        self._save(self._next_step())

    def _save(self, step: int) -> bool:
        """Save; return False if a copy or a link of the user's has the name."""
        state, metrics, about = self._saved(step)
        with self._noted("save", **about) as returned:
            try:
                self._manager.save(step, state, metrics=metrics)
            except ringstow.Error as error:
                returned["refused"] = _refusal(error)
        if "refused" in returned:
            return False
        self._newest = step
        return True

    def _save_in_background(self) -> None:
        step = self._next_step()
        state, metrics, about = self._saved(step)
        with self._noted("save_async", **about) as returned:
            try:
                handle = self._manager.save_async(
                    step, state, metrics=metrics, on_busy=self._rules.on_busy
                )
            except ringstow.Error as error:
                returned["refused"] = _refusal(error)
                return
            returned["skipped"] = handle.skipped
            if not handle.skipped:
                # The call has waited for the save before.
                self._note_result()
                self._pending = Pending(about["save"], handle)
                self._newest = step
        self._follow(state)

    def _follow(self, state: dict[str, Any]) -> None:
        """Do what a training does beside a save."""
        overwrites, waits = self._rng.random() < 0.2, self._rng.random() < 0.3
        if self._pending is None:
            return
        if overwrites and self._pending.handle.wait_staged():
            for part in ("model", "optimizer", "ema"):
                for tensor in state[part].values():
                    if isinstance(tensor, np.ndarray):
                        tensor.fill(7)
        if waits:
            self._pending.handle.result()
            self._note_result()

    # Other calls.

    def _restore(self) -> None:
        with self._noted("restore") as returned:
            restored = self._manager.restore(**self._into())
            returned["found"] = None if restored is None else self._described(restored)
        self._newest = 0 if restored is None else restored.step

    def _go_back(self) -> None:
        older = self._committed()[:-1]
        if not older:
            return
        step = self._rng.choice(older)
        drops = self._rng.random() < 0.4
        with self._noted("go_back", step=step, drops=drops) as returned:
            restored = self._manager.restore(step, drop_newer=drops, **self._into())
            assert restored is not None
            returned["found"] = self._described(restored)
        self._newest = step
        if self._rng.random() < 0.7:
            self._save(step + 1)

    def _into(self) -> dict[str, Any]:
        """Return what `restore` takes: ranks need a state to fill, which may have dropped parts."""
        return {} if self._shape.is_whole else {"into": self._shape.state(0, 0), "strict": False}

    def _described(self, restored: ringstow.Restored) -> dict[str, Any]:
        kept = {name: part for name, part in restored.state.items() if name not in restored.dropped}
        wrong = self._shape.wrong(kept, restored.dropped)
        found = label(restored.metrics, restored.step)
        return {**found, "dropped": restored.dropped, "wrong": wrong}

    def _committed(self) -> list[int]:
        found = [step for step in self._manager.steps() if step.status == "committed"]
        self._note_result()
        return [step.step for step in found if step.step is not None]

    def _keep(self) -> None:
        if steps := self._committed():
            step = self._rng.choice(steps)
            with self._noted("keep", step=step):
                self._manager.keep(step)

    def _release(self) -> None:
        if steps := sorted(self._place.pinned()):
            step = self._rng.choice(steps)
            with self._noted("release", step=step) as returned:
                returned["was_kept"] = self._manager.release(step)

    def _latest(self) -> None:
        with self._noted("latest") as returned:
            found = self._manager.latest()
            returned["found"] = None if found is None else label(found.metrics, found.step)
        self._newest = 0 if found is None else found.step or 0

    def _best(self) -> None:
        mode = self._rng.choice(["min", "max"])
        with self._noted("best", mode=mode) as returned:
            found = self._manager.best(METRIC, cast(Any, mode))
            returned["found"] = None if found is None else label(found.metrics, found.step)

    def _steps(self) -> None:
        with self._noted("steps") as returned:
            found = [step for step in self._manager.steps() if step.status == "committed"]
            returned["found"] = [label(step.metrics, step.step) for step in found]

    def _wait(self) -> None:
        with self._noted("wait"):
            self._manager.wait()

    def _wait_promoted(self) -> None:
        if not self._is_first:
            return  # the first rank alone copies
        with self._noted("wait_promoted") as returned:
            returned["all"] = self._manager.wait_promoted()

    def _pause(self) -> None:
        time.sleep(self._rng.random() * 0.01)
        self._note_result()


def _refusal(error: ringstow.Error) -> str:
    """Return why a save is refused whose name a copy or a link of the user's has.

    Raises:
        Error: it is refused for another reason.
    """
    if "is a copy of" in str(error) or "is a link" in str(error):
        return str(error)
    raise error
