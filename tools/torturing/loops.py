"""One training loop with changes at random moments of a save, and the save's outcome."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ringstow
import torch
from ringstow import _native
from ringstow._state.tensors._memory import LazyTensor

from .changes import ORDINARY, SEEN, TRAINING, Change
from .trainer import Trainer, differences, frozen

Staging = Literal["guard", "snapshot", "wait", "unguarded"]
Outcome = Literal["saved", "refused", "cancelled"]

# The ways of staging that promise the values of the call.
USUAL: list[Staging] = [*["guard"] * 9, "snapshot", "wait"]  # type: ignore[list-item]
# With a pool of few small blocks, most of the state is not copied yet when the call returns.
SMALL_POOL = ringstow.Config(fillers=1, pool_bytes=4 << 20, block_bytes=1 << 20)
LARGE_POOL = ringstow.Config(pool_bytes=32 << 20, block_bytes=1 << 20)
# A pool that takes further memory: it has eight blocks of its own, each shard takes one, and most
# loops save more shards.
GROWING_POOL = ringstow.Config(block_bytes=32 << 20, shard_bytes=1 << 20)
Memory = Literal["off", "on", "short"]
"""Whether a save may take memory for all of its state: no, yes, or there is none left.

The last takes what all processes of the machine may take together.
"""
MEMORIES: dict[Memory, list[ringstow.Config]] = {
    "off": [SMALL_POOL, LARGE_POOL],
    "on": [GROWING_POOL],
    "short": [GROWING_POOL],
}
TIMEOUT_S = 60.0
MOMENT_MAX_S = 0.01
_OVERTAKEN = "modified by an inplace operation"


@dataclass
class Result:
    """The outcomes of one loop's saves."""

    seed: int
    staging: Staging
    memory: Memory
    optimizer: str
    outcomes: list[Outcome]
    changes: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Names of tensors with wrong values; empty if all is well."""


class Gate:
    """Provides a tensor that a save can copy only after a random delay.

    The delay prolongs the copying, so that changes hit it. It blocks nothing that a slow disk
    would not block.
    """

    def __init__(self, rng: random.Random) -> None:
        self._elements = rng.choice([1 << 8, 1 << 15, 1 << 17, 1 << 19])
        self._moment_s = rng.random() * MOMENT_MAX_S
        self.tensor = LazyTensor("F32", (self._elements,), 4 * self._elements, self._load)

    def _load(self) -> torch.Tensor:
        time.sleep(self._moment_s)
        return torch.zeros(self._elements)


def run(
    seed: int,
    folder: Path,
    changes: Sequence[Change] = SEEN,
    only: Staging | None = None,
    only_memory: Memory | None = None,
) -> Result:
    """Train, save and change tensors; check the committed values.

    Args:
        seed: seeds everything random except the scheduling of threads.
        folder: an empty directory for the checkpoints.
        changes: the changes to choose from.
        only: the way of staging; None picks one that promises the values of the call.
        only_memory: what memory the save may take; None picks one.

    Raises:
        TimeoutError: the save, or a thread that changes tensors, did not end within a minute.
    """
    rng = random.Random(seed)
    trainer = Trainer(rng)
    staging: Staging = rng.choice(USUAL) if only is None else only
    state = trainer.state()
    expected = frozen(state)
    for number in range(rng.choice([0, 1, 2])):
        state[f"gate{number}"] = Gate(rng).tensor
    memory: Memory = rng.choice(list(MEMORIES)) if only_memory is None else only_memory
    config = rng.choice(MEMORIES[memory])
    ringstow.release_memory()
    taken = _native.CopyMemory(_available_bytes()) if memory == "short" else None
    # Half of the loops make only ordinary changes: their saves must succeed.
    mix = ORDINARY if changes is SEEN and rng.random() < 0.5 else changes
    changers = [Changer(trainer, rng, mix) for _ in range(rng.choice([1, 1, 2, 3]))]
    # Sometimes two saves at once.
    targets = [Target(folder / f"step-{n}", rng) for n in range(rng.choice([1, 1, 1, 2]))]

    for target in targets:
        target.begin(state, config, staging)
    for changer in changers[1:]:
        changer.start()
    changers[0].change()  # in the thread that called `save_async`
    if rng.random() < 0.05:
        targets[0].handle.cancel()
    outcomes = [target.end() for target in targets]
    for changer in changers[1:]:
        changer.finish()
    _check_free(trainer)
    if taken is not None:
        taken.discard()
    del taken

    done = [name for changer in changers for name in changer.done]
    torn = [name for target in targets for name in target.torn(expected)]
    if "refused" in outcomes and (mix is ORDINARY or staging != "guard"):
        torn.append(f"refused although only {', '.join(sorted(set(done)))} ran")
    return Result(seed, staging, memory, trainer.kind, outcomes, done, torn)


def _available_bytes() -> int:
    """Return the machine's available memory, of which background saves may have half."""
    with open("/proc/meminfo") as told:
        (kib,) = [line.split()[1] for line in told if line.startswith("MemAvailable:")]
    return int(kib) << 10


class Target:
    """The path of a save; it may hold an earlier checkpoint."""

    handle: ringstow.SaveHandle
    outcome: Outcome

    def __init__(self, path: Path, rng: random.Random) -> None:
        self._path = path
        self._earlier: dict[str, Any] | None = None
        if rng.random() < 0.5:
            self._earlier = {"earlier": torch.full((1000,), rng.random())}
            ringstow.save(self._earlier, path)

    def begin(self, state: dict[str, Any], config: ringstow.Config, staging: Staging) -> None:
        """Start the save."""
        self.handle = ringstow.save_async(  # type: ignore[call-arg,unused-ignore]
            state, self._path, config=config, staging=staging
        )

    def end(self) -> Outcome:
        """Wait for the save and return its outcome."""
        try:
            self.handle.result(TIMEOUT_S)
            self.outcome = "saved"
        except ringstow.TornSaveError as error:
            if not error.tensors:
                raise AssertionError("the error of a torn save names no tensor") from error
            self.outcome = "refused"
        except ringstow.SaveCancelledError:
            self.outcome = "cancelled"
        return self.outcome

    def torn(self, expected: dict[str, Any]) -> list[str]:
        """Return the names of tensors that differ from the call's or the earlier checkpoint's."""
        if self.outcome == "saved":
            found = ringstow.load(self._path)
            for name in [name for name in found if name.startswith("gate")]:
                del found[name]
            return differences(found, expected)
        if self._earlier is not None:
            return differences(ringstow.load(self._path), self._earlier)
        return [f"{self._path} exists"] if (self._path / "manifest.json").exists() else []


def _check_free(trainer: Trainer) -> None:
    """Check that no optimizer step is still blocked."""
    thread = threading.Thread(target=trainer.optimizer.step, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError("an optimizer step is still blocked after the save ended")


class Changer:
    """Makes a few changes at random moments, in its own thread or the caller's."""

    def __init__(self, trainer: Trainer, rng: random.Random, changes: Sequence[Change]) -> None:
        self._trainer = trainer
        self._rng = random.Random(rng.randrange(1 << 30))
        picked = self._rng.choices(changes, k=self._rng.choice([1, 2, 4]))
        self._plan = [(self._rng.random() ** 2 * MOMENT_MAX_S, change) for change in picked]
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._error: BaseException | None = None
        self.done: list[str] = []

    def change(self) -> None:
        """Make the changes."""
        for moment_s, change in self._plan:
            if moment_s > MOMENT_MAX_S / 8:  # otherwise immediately
                time.sleep(moment_s)
            self.done.append(change.__name__)
            with self._trainer.lock if change in TRAINING else contextlib.nullcontext():
                self._make(change)

    def _make(self, change: Change) -> None:
        try:
            change(self._trainer, self._rng)
        except RuntimeError as error:
            # Another thread changed a weight between this one's forward and backward pass.
            if _OVERTAKEN not in str(error):
                raise

    def start(self) -> None:
        """Start making the changes in another thread."""
        self._thread.start()

    def finish(self) -> None:
        """Wait for that thread; raise its exception."""
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"a thread hangs in {self.done[-1]}")
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            self.change()
        except BaseException as error:
            self._error = error


__all__ = ["ORDINARY", "SEEN", "Result", "run"]
