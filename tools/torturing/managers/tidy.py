"""What may be in the directories of a run after a manager has restored, saved once and closed."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import ringstow

from .look import Seen
from .oracle import Oracle
from .place import PIN, Place, log_to_stderr
from .rules import Limits, Rules, Saved
from .user import User

OWN = {".ringstow-history.jsonl", ".ringstow-run.json"}


def untidy(place: Place, oracle: Oracle, user: User, seen: Seen) -> list[str]:
    """Return what the rules do not allow to be there, after `Program.settle`."""
    found = _too_many(oracle, seen)
    for number, root in enumerate((place.run, *place.tiers)):
        steps = {entry.name for entry in seen.places[number]}
        for name in sorted(os.listdir(root)):
            if number == 0 and user.owns(name):
                continue
            if not _may_be(name, steps, root, place, oracle, user):
                found.append(f"{root / name} is left over: {_content(root / name)}")
    return found


def _too_many(oracle: Oracle, seen: Seen) -> list[str]:
    """Return the steps that no rule keeps."""
    rules, found = oracle.rules, []
    held = oracle.pinned | oracle.perhaps_pinned
    by_number = {saved.number: saved for saved in [*oracle.here, *oracle.there]}
    for number, entries in enumerate(seen.places):
        whole = [by_number.get(e.save or 0) for e in entries if e.status == "committed"]
        among = [saved for saved in whole if saved is not None]
        for saved in among:
            is_held = saved.step in held or (number == 0 and saved.step in oracle.linked)
            if not is_held and not _may_stay(saved, among, rules, is_here=number == 0):
                where = "the run" if number == 0 else f"tier {number}"
                found.append(
                    f"{saved} is in {where}, and no rule keeps it: {list(map(str, among))}"
                )
    return found


def _may_stay(saved: Saved, among: list[Saved], rules: Rules, *, is_here: bool) -> bool:
    if not is_here:
        # With `keep_here`, older steps get there after the newest, and go after the next.
        return rules.keep_here is not None or rules.there.may_keep(saved, among)
    may = rules.here.may_keep(saved, among)
    # The close has waited for the copies.
    return may and (rules.keep_here is None or Limits(rules.keep_here).may_keep(saved, among))


def _may_be(
    name: str, steps: set[str], root: Path, place: Place, oracle: Oracle, user: User
) -> bool:
    """Return whether an entry may be in a directory before `prune`."""
    if name in steps or name in OWN:
        return True
    if name.startswith(PIN):
        return int(name.rpartition("-")[2]) in oracle.pinned | oracle.perhaps_pinned
    if name == ".ringstow-spares":
        return place.config.recycle
    if name == ".ringstow-promotions":
        return root == place.run  # a copy that can go on
    path = root / name
    if not path.is_dir() or not name.startswith("step-"):
        return False
    left = set(os.listdir(path)) - user.has_in(path)
    return not left or _may_be_killed(name, root, place, oracle)


def _may_be_killed(name: str, root: Path, place: Place, oracle: Oracle) -> bool:
    """Return whether a killed save or copy may have left a directory until `prune`."""
    if root != place.run or oracle.rules.here.keeps_all:
        return True  # no `retain` passes
    newest = max(saved.step for saved in oracle.here)
    return int(name.rpartition("-")[2]) >= newest


def _content(path: Path) -> object:
    return sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else "a file"


def prune(place: Place, pipe: int) -> None:
    """Prune the run and its tiers; say what that has left, and says so."""
    log_to_stderr()
    roots = (place.run, *place.tiers)
    try:
        said = {"left": [one.path for root in roots for one in ringstow.prune(root).left]}
    except BaseException:
        said = {"error": [traceback.format_exc()]}
    os.write(pipe, json.dumps(said).encode())


def left_after_prune(place: Place, user: User, seen: Seen, told: list[str]) -> list[str]:
    """Return what is neither the user's nor of a step, and what `prune` has not told of."""
    found = []
    for number, root in enumerate((place.run, *place.tiers)):
        steps = {entry.name for entry in seen.places[number]}
        for name in sorted(os.listdir(root)):
            path, is_own = root / name, number == 0 and user.owns(name)
            if is_own or name in OWN or name.startswith(PIN):
                continue
            mine = user.has_in(path) if path.is_dir() else set()
            content = set(os.listdir(path)) - mine if path.is_dir() else {name}
            if name in steps:
                content = {one for one in content if one.endswith(".part")}
            elif name == ".ringstow-spares" and place.config.recycle:
                continue
            elif name == ".ringstow-promotions" and number == 0:
                content = {one for one in content if str(path / one) not in told}
            elif not mine and not content and _is_being_removed(path):
                content = {"."}
            # Any other empty directory may be the user's.
            if content:
                found.append(f"{path} is left over by prune: {sorted(content)}")
    return found


def _is_being_removed(directory: Path) -> bool:
    """Whether a removal has noted on a directory that it goes, where the file system can."""
    try:
        return "user.ringstow.removing" in os.listxattr(directory)
    except OSError:
        return False
