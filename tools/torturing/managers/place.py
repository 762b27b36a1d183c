"""Where a run is, and how all of its checkpoints are written."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringstow

from .rules import Rules
from .states import Shape

# By this metric each step says which save it is of, without a load.
SAVE = "save"
PIN = ".ringstow-keep-"
# Of every fourth run.
RANKS = 2


@dataclass(frozen=True)
class Place:
    """The directories of one run."""

    folder: Path
    tiers: tuple[Path, ...]
    shape: Shape
    config: ringstow.Config

    @classmethod
    def of(cls, rng: random.Random, seed: int, folder: Path) -> Place:
        """Choose one."""
        tiers = tuple(folder / f"tier{n}" for n in range(rng.choice([0, 0, 1, 2])))
        config = ringstow.Config(
            block_bytes=64 << 10,
            pool_bytes=1 << 20,
            shard_bytes=rng.choice([200_000, 1 << 30]),
            engine=rng.choice(["auto", "portable"]),
            recycle=rng.random() < 0.3,
        )
        ranks = rng.choice([1, 1, 1, RANKS])
        return cls(folder, tiers, Shape.of(rng, seed, ranks), config)

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.folder / "run"

    @property
    def ledger(self) -> Path:
        """The file of what the programs have done."""
        return self.folder / "ledger.jsonl"

    @property
    def log(self) -> Path:
        """The file of what the processes say."""
        return self.folder / "log.txt"

    def manager(self, rules: Rules, *, alone: bool = False) -> ringstow.CheckpointManager:
        """Return a new manager; ``alone`` leaves out the tiers."""
        tiers = () if alone else self.tiers
        return ringstow.CheckpointManager(self.run, config=self.config, **rules.arguments(tiers))

    def pinned(self) -> set[int]:
        """Return the steps that have a link by which `keep` keeps them."""
        if not self.run.is_dir():
            return set()
        links = [link for link in self.run.iterdir() if link.name.startswith(PIN)]
        return {int(link.name.rpartition("-")[2]) for link in links}


def label(metrics: Mapping[str, float], step: int | None) -> dict[str, Any]:
    """Return what a line says of a step that was found."""
    save = metrics.get(SAVE)
    return {"step": step, "save": None if save is None else int(save)}


def log_to_stderr() -> None:
    """Write what ringstow says to stderr, in a process whose stderr is the log of the run."""
    words = "%(asctime)s %(process)d %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=words, force=True)
