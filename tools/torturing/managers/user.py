"""The user of a run, who has files, copies and links of their own in its directory.

Does with them what users do, and knows what each holds. Never touches a step of the manager, but to
copy it, to link to it, or to put a file into its directory.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from .place import Place

# What is at a path: the names in it and what they hold.
Holds = dict[str, tuple[str, int]]

THINGS_MAX = 9
# A directory of theirs, for copies of steps under their own names.
KEPT = "kept"
NAMES = ["best", "step-3", "step-00000003.bak", "z-backup-of-3", "final", "epoch"]


class User:
    """Has things in a run, and checks that they stay."""

    def __init__(self, place: Place, rng: random.Random) -> None:
        self._place = place
        self._rng = rng
        self._things: dict[Path, Holds] = {}
        self._steps: dict[Path, int] = {}
        """Links to steps."""
        self._made = 0
        self._had: set[Path] = set()
        place.run.mkdir(parents=True)

    @property
    def linked(self) -> set[int]:
        """The steps that have a link."""
        return set(self._steps.values())

    def owns(self, name: str) -> bool:
        """Whether an entry of the run's directory is the user's."""
        return self._place.run / name in self._things or name == KEPT

    def has_had(self, name: str) -> bool:
        """Whether an entry of the run's directory is or was the user's."""
        return self._place.run / name in self._had

    def has_in(self, directory: Path) -> set[str]:
        """Return the names of the user's things in a step's directory."""
        return {path.name for path in self._things if path.parent == directory}

    def lost(self) -> list[str]:
        """Return what has changed of the user's things."""
        return [
            f"{path} of the user's is changed or gone: {_difference(holds, held(path))}"
            for path, holds in self._things.items()
            if held(path) != holds
        ]

    def act_between(self, steps: dict[str, int]) -> str | None:
        """Do something while no program runs; ``steps`` are those in the run, by name."""
        acts: list[Callable[[], str | None]] = [self._make, self._move, self._delete]
        if steps:
            name = self._rng.choice(sorted(steps))
            source = self._place.run / name
            acts += [lambda: self._copy(source)] * 2 + [lambda: self._note(source)]
            acts += [lambda: self._link(source, steps[name])]
        return self._act(acts)

    def act_beside(self) -> str | None:
        """Do something while a program runs: only with what is the user's alone."""
        return self._act([self._make, self._move, self._delete])

    def _act(self, acts: list[Callable[[], str | None]]) -> str | None:
        if len(self._things) >= THINGS_MAX:
            return self._delete()
        return self._rng.choice(acts)()

    def _free(self, names: list[str]) -> Path | None:
        path = self._place.run / self._rng.choice(names)
        return None if os.path.lexists(path) else path

    def _keep(self, path: Path) -> None:
        self._had.add(path)
        self._things[path] = held(path)

    def _copy(self, step: Path) -> str | None:
        """Copy a step, or link its files."""
        if any(name.endswith(".part") or name not in _listed(step) for name in os.listdir(step)):
            return None  # a kill has left this, which `prune` removes from a copy, too
        soon = int(step.name.rpartition("-")[2]) + self._rng.randrange(1, 9)
        path = self._free([*NAMES, *[f"step-{soon:08}"] * 2, f"{KEPT}/{step.name}"])
        if path is None:
            return None
        by_link = self._rng.random() < 0.3
        shutil.copytree(step, path, copy_function=os.link if by_link else shutil.copy2)
        self._keep(path)
        return f"copies {step.name} to {path.name}{' by hard links' if by_link else ''}"

    def _link(self, step: Path, number: int) -> str | None:
        path = self._free(["favourite", "newest", "paper"])
        if path is None:
            return None
        path.symlink_to(step.name)
        self._keep(path)
        self._steps[path] = number
        return f"makes the link {path.name} to {step.name}"

    def _note(self, step: Path) -> str | None:
        path = step / "notes.txt"
        if os.path.lexists(path):
            return None
        path.write_text(f"mine, number {self._made}")
        self._keep(path)
        return f"writes {step.name}/notes.txt"

    def _make(self) -> str | None:
        self._made += 1
        path = self._free(
            [f"own-{self._made}", "config.json", "plots", f"weights-{self._made}.bin"]
        )
        if path is None:
            return None
        if self._rng.random() < 0.3:
            path.mkdir()
            for number in range(self._rng.choice([0, 1, 3])):
                (path / f"{number}.txt").write_text(f"number {self._made}")
        elif self._rng.random() < 0.2:
            outside = self._place.folder / f"outside-{self._made}"
            outside.write_text("far away")
            path.symlink_to(outside)
        else:
            path.write_bytes(self._rng.randbytes(self._rng.choice([0, 10, 5000])))
        self._keep(path)
        return f"makes {path.name}"

    def _move(self) -> str | None:
        own = [path for path in self._top() if path not in self._steps]
        path = self._free([f"moved-{self._made}", "old", "step-00000099.old"])
        if not own or path is None:
            return None
        thing = self._rng.choice(own)
        thing.rename(path)
        self._things[path] = self._things.pop(thing)
        return f"renames {thing.name} to {path.name}"

    def _delete(self) -> str | None:
        if not self._things:
            return None
        path = self._rng.choice(sorted(self._things))
        del self._things[path]
        self._steps.pop(path, None)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return f"deletes {path.relative_to(self._place.run)}"

    def _top(self) -> list[Path]:
        """Return the things that are in the run's directory itself."""
        return sorted(path for path in self._things if path.parent == self._place.run)


def held(path: Path) -> Holds:
    """Return what is at a path, all that is below it included."""
    found: Holds = {}
    waiting = [path]
    while waiting:
        at = waiting.pop()
        name = "" if at == path else str(at.relative_to(path))
        if at.is_symlink():
            found[name] = (f"link to {os.readlink(at)}", 0)
        elif at.is_dir():
            found[name] = ("directory", 0)
            waiting += at.iterdir()
        elif at.exists():
            content = at.read_bytes()
            found[name] = (f"{len(content)} bytes", zlib.crc32(content))
    return found


def _listed(step: Path) -> set[str]:
    """Return the names in a step's directory that `prune` leaves."""
    manifest = json.loads((step / "manifest.json").read_bytes())
    own = {name for name in os.listdir(step) if not name.endswith(".safetensors")}
    return own | {file["name"] for file in manifest["files"]}


def _difference(before: Holds, after: Holds) -> str:
    names = [n for n in before.keys() | after.keys() if before.get(n) != after.get(n)]
    return ", ".join(f"{n or '.'}: {before.get(n)} to {after.get(n)}" for n in sorted(names)[:4])
