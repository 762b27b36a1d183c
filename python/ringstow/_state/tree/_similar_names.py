"""Guesses which names of a checkpoint match which names of a state dict.

Pure. Names are compared part by part. The work is bounded: of many names only some thousand are
compared with others, and the rest with one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringstow._state.tree._named_leaves import Steps, starred, text_of
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._walk import Path

Gap = tuple[Path, Any]
"""A path that only one side has, and its value."""
Pairs = list[tuple[Steps, Steps]]
"""Names here, and names of the checkpoint."""

CANDIDATES_MAX = 4_000
SHOWN_MAX = 5
_SAMPLE = 24
_NEAREST_MAX = 50
# Parts that wrappers add to a model's names, and the wrapper.
WRAPPERS: dict[Steps, str] = {
    ("module",): "DistributedDataParallel and DataParallel add it",
    ("_orig_mod",): "torch.compile adds it",
    ("_checkpoint_wrapped_module",): "activation checkpointing adds it",
    ("_fsdp_wrapped_module",): "FSDP1 adds it",
    ("_forward_module",): "Lightning Fabric adds it",
    ("base_model", "model"): "PEFT adds it",
    ("base_layer",): "PEFT adds it",
    ("default",): "PEFT adds it, the adapter's name",
}


def sample(names: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most ``count`` items, spread over the sequence."""
    return names[:: max(1, -(-len(names) // most))]


def extra_runs(
    here: dict[Steps, Gap], there: dict[Steps, Gap], kind_of: Callable[[Any], object]
) -> tuple[list[Steps], Pairs]:
    """Return the parts of names without which names are equal, and the pairs of these names."""
    if not here or not there:
        return [], []
    some = [*sample([*here], CANDIDATES_MAX), *sample([*there], CANDIDATES_MAX)]
    runs = [run for run in WRAPPERS if any(_has(steps, run) for steps in some)]
    pairs = _pairs_without(runs, here, there)
    found = _inserted_run(runs, here, there, pairs)
    if found:
        more = _pairs_without([*runs, found], here, there)
        are_alike = [
            kind_of(here[ours][1]) == kind_of(there[theirs][1])
            for ours, theirs in sample(more, _SAMPLE)
        ]
        gained = len(more) - len(pairs)
        is_most = 2 * gained >= min(len(here), len(there)) - len(pairs)
        if gained > 0 and is_most and 2 * sum(are_alike) >= len(are_alike):
            runs, pairs = [*runs, found], more
    for run in runs[:] if len(runs) > 1 else ():  # drop runs that change nothing
        fewer = _pairs_without([one for one in runs if one != run], here, there)
        if len(fewer) >= len(pairs):
            runs.remove(run)
    return (runs, pairs) if pairs else ([], [])


def _inserted_run(
    runs: list[Steps], here: Iterable[Steps], there: Iterable[Steps], pairs: Pairs
) -> Steps:
    """Return the run of steps that most often turns one name into the other; empty if none does."""
    bare = _without(runs)
    known = {steps for pair in pairs for steps in pair}
    ours = [bare(steps) for steps in here if steps not in known]
    by_last: dict[object, list[Steps]] = {}
    for steps in sample([bare(steps) for steps in there if steps not in known], CANDIDATES_MAX):
        by_last.setdefault(steps[-1], []).append(steps)
    counted = collections.Counter(
        run
        for steps in sample(ours, _SAMPLE)
        for other in by_last.get(steps[-1], ())
        if (run := _inserted(*sorted((steps, other), key=len)))
    )
    return counted.most_common(1)[0][0] if counted else ()


def count(steps: Steps, run: Steps) -> int:
    """Return how often a name has a run of steps."""
    return sum(steps[at : at + len(run)] == run for at in range(len(steps)))


def _has(steps: Steps, run: Steps) -> bool:
    return run[0] in steps and count(steps, run) > 0


def _inserted(short: Steps, long: Steps) -> Steps:
    """Return the run of steps that turns one name into the other; empty if none does."""
    extra = len(long) - len(short)
    at = 0
    while at < len(short) and short[at] == long[at]:
        at += 1
    run = long[at : at + extra]
    fits = short[at:] == long[at + extra :] and all(isinstance(step, str) for step in run)
    return run if fits else ()


def _without(runs: Iterable[Steps]) -> Callable[[Steps], Steps]:
    return Rename({text_of(run): "" for run in runs}).here


def _pairs_without(runs: Iterable[Steps], here: Iterable[Steps], there: Iterable[Steps]) -> Pairs:
    """Return the names that are equal without these runs."""
    bare = _without(runs)
    ours = {bare(steps): steps for steps in here}
    theirs = {bare(steps): steps for steps in there}
    return [(ours[one], theirs[one]) for one in theirs if one in ours]


def above(part: Steps, name: Steps) -> Steps:
    """Return the steps of a name above the steps of its part; empty if it is not a part."""
    extra = len(name) - len(part)
    return name[:extra] if extra > 0 and name[extra:] == part else ()


def renamed(
    here: dict[Steps, Gap], there: dict[Steps, Gap], kind_of: Callable[[Any], object]
) -> Pairs:
    """Return pairs of old and new names of equal kind, in order or by similarity."""
    if not here or not there:
        return []
    ours = {steps: kind_of(value) for steps, (_, value) in here.items()}
    theirs = {steps: kind_of(value) for steps, (_, value) in there.items()}
    pairs: Pairs = []
    for by_last in (True, False):
        groups: dict[object, tuple[list[Steps], list[Steps]]] = {}
        for side, names in enumerate((theirs, ours)):
            for steps, kind in names.items():
                group = (kind, steps[-1] if by_last else None)
                groups.setdefault(group, ([], []))[side].append(steps)
        for (kind, _), (old, new) in groups.items():  # type: ignore[misc]
            for pair in _paired(old, new, is_tensor=isinstance(kind, tuple)):
                pairs.append(pair)
                del theirs[pair[0]], ours[pair[1]]
    order = {steps: number for number, steps in enumerate(there)}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def _paired(old: list[Steps], new: list[Steps], *, is_tensor: bool) -> Pairs:
    """Pair names of one kind: all in order, or a few by similarity."""
    if not old or not new:
        return []
    if is_tensor and len(old) == len(new):
        return list(zip(old, new, strict=True))
    import difflib  # slow import, rarely needed

    pairs: Pairs = []
    left = {text_of(steps): steps for steps in old[:_NEAREST_MAX]}
    for steps in new[:_NEAREST_MAX]:
        for text in difflib.get_close_matches(text_of(steps), left, n=1):
            pairs.append((left.pop(text), steps))
    return pairs


def rename_of(pairs: Pairs, names: Sequence[Steps]) -> dict[str, str]:
    """Return the fewest runs of steps that turn old names into new ones, and change no others."""
    cores = {_core(old, new) for old, new in pairs}
    for start in (False, True):
        mapping = {run[start]: run[2 + start] for run in cores}
        is_free = not any(_has(steps, run) for run in mapping for steps in names)
        texts = {text_of(old): text_of(new) for old, new in mapping.items()}
        if is_free and all(texts) and len(texts) <= SHOWN_MAX:
            there = Rename(texts).there
            if all(there(old) == new for old, new in pairs):
                return texts
    stars = {text_of(starred(old)): text_of(starred(new)) for old, new in pairs}
    if _have_stars_alike(stars):
        by_stars = Rename(stars).there
        if all(by_stars(old) == new for old, new in pairs):
            return stars
    return {text_of(old): text_of(new) for old, new in pairs}


def _have_stars_alike(mapping: dict[str, str]) -> bool:
    stars = [[text.split(".").count("*") for text in pair] for pair in mapping.items()]
    return all(old == new for old, new in stars)


def _core(old: Steps, new: Steps) -> tuple[Steps, Steps, Steps, Steps]:
    """Return the differing steps of an old and a new name, with all steps before them."""
    ends = 0
    while ends + 1 < min(len(old), len(new)) and old[-1 - ends] == new[-1 - ends]:
        ends += 1
    old, new = old[: len(old) - ends], new[: len(new) - ends]
    at = 0
    while at + 1 < min(len(old), len(new)) and old[at] == new[at]:
        at += 1
    return old[at:], old, new[at:], new
