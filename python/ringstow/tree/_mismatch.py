"""Why a checkpoint does not fit a state dict, and what to do about it. Pure.

Nothing here runs unless something does not fit. The work is bounded: of many names it compares
only some thousand.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ringstow._errors import KeyMismatchError
from ringstow.tree._rename import Rename, Steps, steps_of
from ringstow.tree._select import by_slim, listed
from ringstow.tree._walk import Path, describe, flat_name

Gap = tuple[Path, Any]
"""A path that only one side has, and what is there."""

_CANDIDATES_MAX = 4_000
_SAMPLE = 24
_SHOWN_MAX = 5
_NEAREST_MAX = 50
# Runs of steps that wrappers add to a model's names, and what adds them.
_WRAPPERS: dict[Steps, str] = {
    ("module",): "DistributedDataParallel and DataParallel add it",
    ("_orig_mod",): "torch.compile adds it",
    ("_checkpoint_wrapped_module",): "activation checkpointing adds it",
    ("_fsdp_wrapped_module",): "FSDP1 adds it",
    ("_forward_module",): "Lightning Fabric adds it",
    ("base_model", "model"): "PEFT adds it",
    ("base_layer",): "PEFT adds it",
    ("default",): "PEFT adds it, the adapter's name",
}


class Call(NamedTuple):
    """What a load takes that may make a checkpoint fit. Advice names nothing else."""

    strict: str = ""
    """How the caller says ``strict=False``; empty if the call has no such argument."""
    takes: frozenset[str] = frozenset()
    """Which of ``cast``, ``prefix`` and ``rename`` it takes."""
    instead: str = ""
    """A load into a state dict that takes all of these; empty if there is none."""
    load: str = "ringstow.load"
    """The load into new tensors."""

    def way(self, argument: str) -> str:
        """Return how to pass an argument: by this call, or by another; empty if by none."""
        if argument.partition("=")[0] in self.takes:
            return argument
        return f"{self.instead}(state_dict, path, {argument})" if self.instead else ""


LOAD_INTO = Call("strict=False", frozenset({"cast", "prefix", "rename"}))


class Filled(NamedTuple):
    """How much of a state dict a load fills."""

    names: int
    of_names: int
    tensors: int
    of_tensors: int

    def is_little(self) -> bool:
        """Whether it is less than half of the tensors."""
        return 2 * self.tensors < self.of_tensors


@dataclasses.dataclass
class Mismatch:
    """All that differs between a state dict and a checkpoint."""

    path: str
    """The checkpoint's."""
    state: object
    """The state dict."""
    missing: Sequence[Gap]
    unexpected: Sequence[Gap]
    different: list[str]
    """Sentences on tensors and values that are not alike."""
    kinds: set[str]
    """Of these: ``size``, ``dtype``, ``cast``, ``kind`` and ``object``."""
    call: Call
    leaves: Callable[[], Iterable[Gap]]
    """Returns all of the state dict."""
    kind_of: Callable[[Any], object]
    """Returns the dtype and shape of a tensor as a tuple, and the type of anything else."""
    dropped: Sequence[str] = ()
    """What `slim` has dropped."""
    below: str = ""
    """The prefix whose part is loaded."""

    def error(self, *, strict: bool = True) -> KeyMismatchError:
        """Return the error that lists all of it and says why and what to do.

        Without ``strict`` names that one side lacks are no reason, unless nothing would be filled.
        """
        what = "does not fit the state dict"
        if not strict and self.different:
            return dataclasses.replace(self, missing=[], unexpected=[]).error()
        if not strict:
            what = "would fill nothing of the state dict"
        return KeyMismatchError(
            "; ".join([f"{self.path} {what}", *self._lists()]) + self.shown_advice(),
            path=self.path,
            missing=[flat_name(path) for path, _ in self.missing],
            unexpected=[flat_name(path) for path, _ in self.unexpected],
            mismatched=self.different,
        )

    def filled(self) -> Filled:
        """Return how much of the state dict a load without ``strict`` fills."""
        names = list(self.leaves())
        tensors, lost = (
            sum(isinstance(self.kind_of(value), tuple) for _, value in gaps)
            for gaps in (names, self.missing)
        )
        return Filled(len(names) - len(self.missing), len(names), tensors - lost, tensors)

    def shown_advice(self) -> str:
        """Return the advice as the end of a message: one sentence, or one a line."""
        advice = self.advice()
        if len(advice) == 1:
            return f"; {advice[0]}"
        return "".join(f"\n  {line}" for line in advice)

    def _lists(self) -> Iterator[str]:
        """Yield the lists; names that read the same and differ are shown as Python has them."""
        here = {flat_name(path) for path, _ in self.missing}
        reads_same = any(flat_name(path) in here for path, _ in self.unexpected)
        show = describe if reads_same else flat_name
        lists = {
            "not in the checkpoint": [show(path) for path, _ in self.missing],
            "only in the checkpoint": [show(path) for path, _ in self.unexpected],
            "different": self.different,
        }
        return (listed(title, names) for title, names in lists.items() if names)

    def advice(self) -> list[str]:
        """Return a sentence for each reason."""
        here = {steps_of(gap[0]): gap for gap in self.missing}
        there = {steps_of(gap[0]): gap for gap in self.unexpected}
        said = by_slim((flat_name(path) for path, _ in self.missing), self.dropped)
        new = _new_optimizers(self.state, there)
        for optimizer, below in new.items():
            said.append(self._of_new_optimizer(optimizer))
            for steps in below:
                del there[steps]
        said += self._of_texts(here, there)
        said += self._of_steps(here, there)
        said += self._of_renamed(here, there)
        said += self._of_kinds()
        if not new:
            said += self._of_rest(here, there)
        return said

    # Kinds of reasons. Each takes out of ``here`` and ``there`` what it explains.

    def _of_new_optimizer(self, optimizer: Steps) -> str:
        """Say how to load the moments of an optimizer that has none."""
        steps = [*filter(None, self.below.split(".")), *optimizer]
        loaded = f"{self.call.load}({self.path!r})"
        if steps:
            part = "".join(f"[{step!r}]" for step in steps)
            loaded = f"{self.call.load}({self.path!r}, prefix={_text(tuple(steps))!r}){part}"
        return (
            f"{describe((*optimizer, 'state'))} is empty: a new optimizer has no moments to fill. "
            f"Leave it out here; optimizer.load_state_dict({loaded}) loads those of the checkpoint"
        )

    def _of_texts(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Compare names that read the same: text against number keys, dots against dicts."""
        by_text = {flat_name(path): steps for steps, (path, _) in there.items()}
        said: dict[str, str] = {}
        for steps, (path, _) in list(here.items()):
            other = by_text.get(flat_name(path))
            if other is None:
                continue
            at = there[other][0]
            pairs = [(a, b) for a, b in zip(steps, other, strict=False) if a != b]
            ours, theirs = pairs[0] if pairs else ("", "")
            kind = self._of_keys(ours, theirs)
            said.setdefault(
                kind,
                f"the keys read the same and are not: {describe(at)} in the checkpoint, "
                f"{describe(path)} here; {kind}",
            )
            del here[steps], there[other]
        return list(said.values())

    def _of_keys(self, ours: object, theirs: object) -> str:
        """Say what to do about two keys that read the same."""
        if isinstance(theirs, str) and not isinstance(ours, str):
            return "its keys are text, and these numbers: make these text, {str(key): value, ...}"
        if isinstance(ours, str) and not isinstance(theirs, str):
            return (
                "its keys are numbers, and these text: make these numbers, {int(key): value, ...}"
            )
        said = "one has dicts where the other has dots in its keys: "
        way = self.call.way("rename={}")
        return said + (f"{way} takes these for one name" if way else "change those here")

    def _of_steps(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Find prefixes and other steps that only one side has."""
        runs, pairs = _extra_runs(here, there, self.kind_of)
        if not runs:
            return []
        is_all = len(pairs) == len(here)
        longest = max(pairs, key=lambda pair: max(map(len, pair)))
        for ours, theirs in pairs:
            del here[ours], there[theirs]
        if len(runs) == 1 and runs[0] not in _WRAPPERS and is_all:
            part = self._of_part(".".join(map(str, runs[0])), len(runs[0]), pairs)
            if part:
                there.clear()  # the rest of the checkpoint is not wanted
                return [part]
        said = "; ".join(_of_run(run, pairs, longest) for run in runs)
        mapping = ", ".join(f'"{".".join(map(str, run))}": ""' for run in runs)
        way = self.call.way(f"rename={{{mapping}}}")
        way = f"{way} strips" if way else "in the state dict of the wrapped model it is not: strip"
        return [f"{said}: {way} {'it' if len(runs) == 1 else 'them'}"]

    def _of_part(self, text: str, length: int, pairs: list[tuple[Steps, Steps]]) -> str:
        """Say that one side is a part of the other; empty if it is not."""
        if all(text == ".".join(map(str, theirs[:length])) for _, theirs in pairs):
            argument = f'prefix="{text}"'
            way = f"pass {{{text!r}: state_dict}}"
            if "prefix" in self.call.takes:
                way = f"{argument} loads that part"
            return f"the names here are those below {text!r} in the checkpoint: {way}"
        is_nested = isinstance(self.state, dict) and isinstance(self.state.get(text), dict)
        if is_nested and all(text == ours[0] for ours, _ in pairs):
            return (
                f"the checkpoint holds what is below {text!r} here: pass that part, "
                f"state_dict[{text!r}]"
            )
        return ""

    def _of_renamed(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Pair names of equal dtype and shape: layers that have another name now."""
        pairs = _renamed(here, there, self.kind_of)
        if not pairs:
            return []
        for old, new in pairs:
            del here[new], there[old]
        shown = [f"{_text(old)} -> {_text(new)}" for old, new in pairs[:_SHOWN_MAX]]
        more = f", and {len(pairs) - _SHOWN_MAX} more" if len(pairs) > _SHOWN_MAX else ""
        said = f"perhaps renamed, by equal dtype and shape: {', '.join(shown)}{more}"
        lacking = {path for path, _ in self.missing}
        others = [steps_of(path) for path, _ in self.leaves() if path not in lacking]
        mapping = _mapping(pairs, _sample(others, _CANDIDATES_MAX))
        text = ", ".join(f'"{old}": "{new}"' for old, new in mapping.items())
        way = self.call.way(f"rename={{{text}}}") if len(mapping) <= _SHOWN_MAX else ""
        return [f"{said}; if so, {way} maps {'it' if len(pairs) == 1 else 'them'}" if way else said]

    def _of_kinds(self) -> Iterator[str]:
        """Say what to do about tensors and values that are not alike."""
        if "size" in self.kinds:
            rest = f"; {self.call.strict} then loads the others" if self.call.strict else ""
            yield (
                "sizes differ: make the model with the checkpoint's sizes, or leave these out of "
                f"the state dict{rest}"
            )
        if "cast" in self.kinds:
            way = self.call.way("cast=True")
            yield (
                f"{way} converts floating-point elements to the dtype that is here"
                if way
                else "dtypes differ: load in the checkpoint's dtype, and convert the model after it"
            )
        if "dtype" in self.kinds:
            yield (
                "dtypes differ that no load converts: make the tensors here of the checkpoint's "
                "dtype, and convert them after the load"
            )
        if "kind" in self.kinds:
            yield "kinds differ: put a value of the checkpoint's kind in the place"

    def _of_rest(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Say what to do about names that one side has more than the other."""
        if not here and not there:
            return []
        if self.filled().names == 0:
            return ["no name is on both sides: is it the checkpoint of this state dict?"]
        if not self.call.strict:
            return []
        first = "once the others fit, " if self.different else ""
        return [f"{first}{self.call.strict} loads what is in both"]


def _new_optimizers(state: object, there: Iterable[Steps]) -> dict[Steps, list[Steps]]:
    """Return the optimizers without state, and the checkpoint's names that are for them."""
    found: dict[Steps, list[Steps]] = {}
    known: dict[Steps, bool] = {}
    for steps in there:
        for at, step in enumerate(steps[:-1]):
            if step != "state":
                continue
            above = steps[:at]
            if above not in known:
                known[above] = _is_new_optimizer(_at(state, above))
            if known[above]:
                found.setdefault(above, []).append(steps)
                break
    return found


def _is_new_optimizer(value: object) -> bool:
    return isinstance(value, dict) and value.get("state") == {} and "param_groups" in value


def _at(state: object, steps: Steps) -> object:
    for step in steps:
        if not isinstance(state, dict):
            return None
        state = state.get(step)
    return state


def _sample(names: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most so many, from all over the sequence."""
    return names[:: max(1, -(-len(names) // most))]


Pairs = list[tuple[Steps, Steps]]
"""Names here, and those of the checkpoint."""


def _extra_runs(
    here: dict[Steps, Gap], there: dict[Steps, Gap], kind_of: Callable[[Any], object]
) -> tuple[list[Steps], Pairs]:
    """Return the runs of steps without which names are equal, and the pairs of these names."""
    if not here or not there:
        return [], []
    some = [*_sample([*here], _CANDIDATES_MAX), *_sample([*there], _CANDIDATES_MAX)]
    runs = [run for run in _WRAPPERS if any(_has(steps, run) for steps in some)]
    pairs = _pairs_without(runs, here, there)
    found = _inserted_run(runs, here, there, pairs)
    if found:
        more = _pairs_without([*runs, found], here, there)
        are_alike = [
            kind_of(here[ours][1]) == kind_of(there[theirs][1])
            for ours, theirs in _sample(more, _SAMPLE)
        ]
        gained = len(more) - len(pairs)
        is_most = 2 * gained >= min(len(here), len(there)) - len(pairs)
        if gained > 0 and is_most and 2 * sum(are_alike) >= len(are_alike):
            runs, pairs = [*runs, found], more
    for run in runs[:]:
        fewer = _pairs_without([one for one in runs if one != run], here, there)
        if len(fewer) >= len(pairs):
            runs.remove(run)
    return runs, pairs


def _inserted_run(
    runs: list[Steps], here: Iterable[Steps], there: Iterable[Steps], pairs: Pairs
) -> Steps:
    """Return the run that most often makes one name the other; empty if none does."""
    bare = _without(runs)
    known = {steps for pair in pairs for steps in pair}
    ours = [bare(steps) for steps in here if steps not in known]
    by_last: dict[object, list[Steps]] = {}
    for steps in _sample([bare(steps) for steps in there if steps not in known], _CANDIDATES_MAX):
        by_last.setdefault(steps[-1], []).append(steps)
    counted = collections.Counter(
        run
        for steps in _sample(ours, _SAMPLE)
        for other in by_last.get(steps[-1], ())
        if (run := _inserted(*sorted((steps, other), key=len)))
    )
    # Of those as frequent, the one that most names have in common.
    return counted.most_common(1)[0][0] if counted else ()


def _has(steps: Steps, run: Steps) -> bool:
    return any(steps[at : at + len(run)] == run for at in range(len(steps)))


def _inserted(short: Steps, long: Steps) -> Steps:
    """Return the run of steps that makes the one name the other; empty if none does."""
    extra = len(long) - len(short)
    at = 0
    while at < len(short) and short[at] == long[at]:
        at += 1
    run = long[at : at + extra]
    fits = short[at:] == long[at + extra :] and all(isinstance(step, str) for step in run)
    return run if fits else ()


def _without(runs: Iterable[Steps]) -> Callable[[Steps], Steps]:
    return Rename({".".join(map(str, run)): "" for run in runs}).here


def _pairs_without(runs: Iterable[Steps], here: Iterable[Steps], there: Iterable[Steps]) -> Pairs:
    """Return the names that are equal without these runs."""
    bare = _without(runs)
    ours = {bare(steps): steps for steps in here}
    theirs = {bare(steps): steps for steps in there}
    return [(ours[one], theirs[one]) for one in theirs if one in ours]


def _of_run(run: Steps, pairs: Pairs, longest: tuple[Steps, Steps]) -> str:
    """Say which side has a run, and what adds it."""
    with_it = [pair for pair in pairs if _has(pair[0], run) != _has(pair[1], run)] or [longest]
    is_theirs = _has(with_it[0][1], run)
    names = [pair[is_theirs] for pair in with_it]
    text = ".".join(map(str, run))
    word = f"prefix '{text}.'" if _is_prefix(run, names) else f"step '{text}'"
    adds = f" ({_WRAPPERS[run]})" if run in _WRAPPERS else ""
    who, others = "the checkpoint's names have", "those here have not"
    if not is_theirs:
        who, others = "the names here have", "the checkpoint's have not"
    return f"{who} the {word}{adds}, and {others}"


def _is_prefix(run: Steps, names: list[Steps]) -> bool:
    """Whether all names have a run first, or below the same key."""
    first = names[0]
    for at in range(min(2, len(first))):
        ahead = first[: at + len(run)]
        if ahead[at:] == run:
            return all(steps[: len(ahead)] == ahead for steps in names)
    return False


def _renamed(
    here: dict[Steps, Gap], there: dict[Steps, Gap], kind_of: Callable[[Any], object]
) -> Pairs:
    """Return pairs of an old and a new name of equal kind: in order, or else the nearest names."""
    ours = {steps: kind_of(here[steps][1]) for steps in _sample([*here], _CANDIDATES_MAX)}
    theirs = {steps: kind_of(there[steps][1]) for steps in _sample([*there], _CANDIDATES_MAX)}
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
    """Pair names of one kind: all of them in order, or a few by how near they are."""
    if not old or not new:
        return []
    if is_tensor and len(old) == len(new):
        return list(zip(old, new, strict=True))
    pairs: Pairs = []
    left = {_text(steps): steps for steps in old[:_NEAREST_MAX]}
    for steps in new[:_NEAREST_MAX]:
        for text in difflib.get_close_matches(_text(steps), left, n=1):
            pairs.append((left.pop(text), steps))
    return pairs


def _mapping(pairs: Pairs, names: Iterable[Steps]) -> dict[str, str]:
    """Return the fewest runs of steps that make the old names new, and no other name another."""
    mapping: dict[str, str] = {}
    for old, new in pairs:
        ends = 0
        while ends + 1 < min(len(old), len(new)) and old[-1 - ends] == new[-1 - ends]:
            ends += 1
        run = old[: len(old) - ends]
        if any(_has(steps, run) for steps in names):  # other names have it, too
            run, ends = old, 0
        mapping[_text(run)] = _text(new[: len(new) - ends])
    return mapping


def _text(steps: Steps) -> str:
    return ".".join(step if isinstance(step, str) else repr(step) for step in steps)
