"""Explains why a checkpoint does not fit a state dict, and what to do. Pure.

Nothing here runs unless something does not fit. `_similar_names` compares the names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ringstow._core._errors import KeyMismatchError
from ringstow._state.tree._joined_names import joins, kinds, turns
from ringstow._state.tree._named_leaves import Steps, steps_of, text_of
from ringstow._state.tree._select import by_slim, listed
from ringstow._state.tree._similar_names import (
    CANDIDATES_MAX,
    SHOWN_MAX,
    WRAPPERS,
    Gap,
    Pairs,
    above,
    count,
    extra_runs,
    rename_of,
    renamed,
    sample,
)
from ringstow._state.tree._walk import Path, describe, flat_name


class Call(NamedTuple):
    """The arguments of a load that may make a checkpoint fit. Advice names nothing else."""

    strict: str = ""
    """How the caller says ``strict=False``; empty if the call has no such argument."""
    takes: frozenset[str] = frozenset()
    """Which of ``cast``, ``prefix`` and ``rename`` the call takes."""
    instead: str = ""
    """A load into a state dict that takes all of these; empty if there is none."""
    load: str = "ringstow.load"
    """The load into new tensors."""

    def way(self, argument: str) -> str:
        """Return how to pass an argument, by this call or another; empty if impossible."""
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
        """Return whether it is less than half of the tensors."""
        return 2 * self.tensors < self.of_tensors


@dataclasses.dataclass
class Mismatch:
    """All that differs between a state dict and a checkpoint."""

    path: str
    """The checkpoint's path."""
    state: object
    """The state dict."""
    missing: Sequence[Gap]
    unexpected: Sequence[Gap]
    different: list[str]
    """Sentences on tensors and values that differ."""
    kinds: set[str]
    """The kinds of differences: ``size``, ``turned``, ``dtype``, ``cast``, ``kind``, ``object``,
    ``layout``."""
    call: Call
    leaves: Callable[[], Iterable[Gap]]
    """Returns all leaves of the state dict."""
    kind_of: Callable[[Any], object]
    """Returns the dtype and shape of a tensor as a tuple, and the type of anything else."""
    dropped: Sequence[str] = ()
    """Names that `slim` has dropped."""
    below: str = ""
    """The prefix whose part is loaded."""
    turned: Sequence[Path] = ()
    """Tensors whose two dimensions are swapped."""

    def error(self, *, strict: bool = True) -> KeyMismatchError:
        """Return the error that lists all differences and says why and what to do.

        Without ``strict``, missing names are no error, unless nothing would be filled.
        """
        if strict:
            return self._error("does not fit the state dict")
        call = self.call._replace(strict="")
        if self.different:
            rest = dataclasses.replace(self, missing=(), unexpected=(), call=call)
            return rest._error("does not fit the state dict")
        return dataclasses.replace(self, call=call)._error("would fill nothing of the state dict")

    def _error(self, what: str) -> KeyMismatchError:
        return KeyMismatchError(
            self._text(what),
            path=self.path,
            missing=[flat_name(path) for path, _ in self.missing],
            unexpected=[flat_name(path) for path, _ in self.unexpected],
            mismatched=self.different,
        )

    def warning(self, filled: Filled) -> str:
        """Return the warning for a load without ``strict`` that fills little."""
        counts = f"fills {filled.tensors} of the {filled.of_tensors} tensors of the state dict"
        return dataclasses.replace(self, call=self.call._replace(strict=""))._text(counts)

    def filled(self) -> Filled:
        """Return how much of the state dict a load without ``strict`` fills."""
        names = list(self.leaves())
        missing = {path for path, _ in self.missing}
        lost = [gap for gap in names if any(gap[0][:n] in missing for n in range(len(gap[0]) + 1))]
        tensors, lost_tensors = (
            sum(isinstance(self.kind_of(value), tuple) for _, value in gaps)
            for gaps in (names, lost)
        )
        return Filled(len(names) - len(lost), len(names), tensors - lost_tensors, tensors)

    def _text(self, what: str) -> str:
        """Return a message with the lists, and the advice: one sentence, or one a line."""
        subject = f"{self.path}, below {self.below!r}," if self.below else self.path
        text = "; ".join([f"{subject} {what}", *self._lists()])
        advice = self.advice()
        if len(advice) == 1:
            return f"{text}; {advice[0]}"
        return text + "".join(f"\n  {line}" for line in advice)

    def _lists(self) -> Iterator[str]:
        """Yield the lists; different names with the same text are shown in Python's notation."""
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
        slim = by_slim([flat_name(path) for path, _ in self.missing], self.dropped)
        said: list[str] = []
        is_new = False
        for optimizer, (ours, theirs) in _optimizers(self.state, here, there).items():
            one = _at(self.state, optimizer)
            if not one["state"]:
                said.append(self._of_new_optimizer(optimizer))
                is_new = True
            elif (names := _kinds(ours)) and names.isdisjoint(_kinds(theirs)):
                said.append(_of_other_optimizer(optimizer, names, _kinds(theirs)))
            else:
                continue
            for side, lot in ((here, ours), (there, theirs)):
                for steps in lot:
                    del side[steps]
        said += self._of_texts(here, there)
        said += self._of_steps(here, there)
        said += self._of_joined(here, there)
        said += self._of_renamed(here, there)
        said += self._of_kinds()
        if not is_new:
            said += self._of_rest(here, there, is_all=not said)
        return slim + said

    # Kinds of reasons. Each removes the names that it explains from ``here`` and ``there``.

    def _of_new_optimizer(self, optimizer: Steps) -> str:
        """Return how to load the moments of an optimizer that has none."""
        steps = [*filter(None, self.below.split(".")), *optimizer]
        loaded = f"{self.call.load}({self.path!r})"
        if steps:
            part = "".join(f"[{step!r}]" for step in steps)
            loaded = f"{self.call.load}({self.path!r}, prefix={text_of(tuple(steps))!r}){part}"
        return (
            f"{describe((*optimizer, 'state'))} is empty: a new optimizer has no moments to fill. "
            f"Leave it out here; optimizer.load_state_dict({loaded}) loads those of the checkpoint"
        )

    def _of_texts(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Compare names with the same text: text against number keys, dots against dicts."""
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
            if kind not in said:
                said[kind] = (
                    f"the keys read the same and are not: {describe(at)} in the checkpoint, "
                    f"{describe(path)} here; {kind}"
                )
            del here[steps], there[other]
        return list(said.values())

    def _of_keys(self, ours: object, theirs: object) -> str:
        """Return what to do about two keys with the same text."""
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
        """Find prefixes and other parts of names that only one side has."""
        runs, pairs = extra_runs(here, there, self.kind_of)
        if not runs:
            return []
        is_most = 2 * len(pairs) >= len(here)
        for ours, theirs in pairs:
            del here[ours], there[theirs]
        if is_most and self._has_nothing():
            part, whole = self._of_part(pairs), self._of_whole(pairs)
            if part or whole:  # the rest of the checkpoint, or of the state dict, is not wanted
                (there if part else here).clear()
                return [part or whole]
        said = "; ".join(_of_run(run, pairs) for run in runs)
        mapping = ", ".join(f'"{text_of(run)}": ""' for run in runs)
        way = self.call.way(f"rename={{{mapping}}}")
        it = "it" if len(runs) == 1 else "them"
        way = f"{way} strips {it}" if way else f"strip {it} from the names, or unwrap the model"
        return [f"{said}: {way}"]

    def _of_part(self, pairs: Pairs) -> str:
        """Return which part of the checkpoint matches the state dict; empty if none."""
        tops = {above(*pair) for pair in pairs}
        top = tops.pop()
        if tops or not top or top in WRAPPERS:
            return ""
        argument = self.call.way(f'prefix="{text_of(top)}"')
        way = f"{argument} loads that part" if argument else ""
        if "prefix" not in self.call.takes and len(top) == 1:
            way = f"pass {{{top[0]!r}: state_dict}}"
        said = f"the names here are those below {text_of(top)!r} in the checkpoint"
        return f"{said}: {way}" if way else ""

    def _of_whole(self, pairs: Pairs) -> str:
        """Return which part of the state dict matches the checkpoint; empty if none."""
        tops = {above(theirs, ours) for ours, theirs in pairs}
        top = tops.pop()
        if tops or len(top) != 1 or top in WRAPPERS or not isinstance(self.state, dict):
            return ""
        (name,) = top
        if not isinstance(self.state.get(name), dict):
            return ""
        return f"the checkpoint holds what is below {name!r} here: pass state_dict[{name!r}]"

    def _has_nothing(self) -> bool:
        """Return whether no name is on both sides."""
        return sum(1 for _ in self.leaves()) == len(self.missing)

    def _of_joined(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Find tensors of one side that are joined in the other, such as experts."""
        ours, theirs = kinds(here, self.kind_of), kinds(there, self.kind_of)
        said: list[str] = []
        for joined, found in ((True, joins(theirs, ours)), (False, joins(ours, theirs))):
            apart, whole = (there, here) if joined else (here, there)
            mapping: dict[str, str] = {}
            for one in found:
                names = [name for part in one.parts for name in part]
                if one.whole in whole and all(name in apart for name in names):
                    mapping |= [one.shown(joins=joined)]
                    del whole[one.whole]
                    for name in names:
                        del apart[name]
            if not mapping:
                continue
            text = ", ".join(f"{key}: {value}" for key, value in mapping.items())
            way = self.call.way(f"rename={{{text}}}") if len(mapping) <= SHOWN_MAX else ""
            where = "here" if joined else "in the checkpoint"
            guess = f"perhaps tensors that are apart on one side are one {where}"
            said.append(f"{guess}; if so, {way} maps them" if way else guess)
        return said

    def _of_renamed(self, here: dict[Steps, Gap], there: dict[Steps, Gap]) -> list[str]:
        """Pair names of equal dtype and shape: probably renamed layers."""
        pairs = renamed(here, there, self.kind_of)
        if not pairs:
            return []
        for old, new in pairs:
            del here[new], there[old]
        shown = [f"{text_of(old)} -> {text_of(new)}" for old, new in pairs[:SHOWN_MAX]]
        more = f", and {len(pairs) - SHOWN_MAX} more" if len(pairs) > SHOWN_MAX else ""
        said = f"perhaps renamed, by dtype, shape and name: {', '.join(shown)}{more}"
        lacking = {path for path, _ in self.missing}
        others = [steps_of(path) for path, _ in self.leaves() if path not in lacking]
        mapping = rename_of(pairs, sample(others, CANDIDATES_MAX))
        text = ", ".join(f'"{old}": "{new}"' for old, new in mapping.items())
        way = self.call.way(f"rename={{{text}}}") if len(mapping) <= SHOWN_MAX else ""
        return [f"{said}; if so, {way} maps {'it' if len(pairs) == 1 else 'them'}" if way else said]

    def _of_kinds(self) -> Iterator[str]:
        """Yield what to do about tensors and values that differ."""
        if "turned" in self.kinds:
            yield self._of_turned()
        if "size" in self.kinds:
            rest = f"; {self.call.strict} then loads the others" if self.call.strict else ""
            way = self.call.way('rename={"head": "old_head"}')
            way = f", or give their layer another name by {way}" if way else ""
            yield (
                "sizes differ: make the model with the checkpoint's sizes, or leave these out of "
                f"the state dict{way}{rest}"
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

    def _of_turned(self) -> str:
        """Return how to transpose the tensors that need it, and which others may."""
        turned = dict.fromkeys(steps_of(path) for path in self.turned)
        shapes: dict[Steps, tuple[int, ...]] = {}
        for path, value in (*self.leaves(), *self.unexpected):
            kind = self.kind_of(value)
            if isinstance(kind, tuple) and len(kind) == 2 and steps_of(path) not in turned:
                shapes[steps_of(path)] = kind[1]
        keys = turns(turned, shapes)
        mapping = ", ".join(f'"{key}": ringstow.Transpose("{key}")' for key in keys)
        way = self.call.way(f"rename={{{mapping}}}") if 0 < len(keys) <= SHOWN_MAX else ""
        said = f"two dimensions are swapped{f': {way} turns these' if way else ''}"
        ends = {steps[-1] for steps in turned}
        square = [
            f"{text_of(steps)} {list(shape)}"
            for steps, shape in shapes.items()
            if steps[-1] in ends and len(shape) == 2 and 1 < shape[0] == shape[1]
        ]
        if square:
            title = "square tensors fit either way: see which of these are swapped, too"
            said += f"; {listed(title, square)}"
        return said

    def _of_rest(
        self, here: dict[Steps, Gap], there: dict[Steps, Gap], *, is_all: bool
    ) -> list[str]:
        """Return what to do about names that only one side has."""
        if not here and not there:
            return []
        if is_all and self._has_nothing():
            return ["no name is on both sides: is it the checkpoint of this state dict?"]
        if not self.call.strict or "size" in self.kinds:
            return []
        first = "" if is_all else "once the others fit, "
        return [f"{first}{self.call.strict} loads what is in both"]


def _optimizers(
    state: object, here: Iterable[Steps], there: Iterable[Steps]
) -> dict[Steps, tuple[list[Steps], list[Steps]]]:
    """Return the state names that only the state dict's or only the checkpoint's optimizer has."""
    found: dict[Steps, tuple[list[Steps], list[Steps]]] = {}
    known: dict[Steps, bool] = {}
    for side, names in enumerate((here, there)):
        for steps in names:
            for at, step in enumerate(steps[:-1]):
                if step != "state":
                    continue
                optimizer = steps[:at]
                if optimizer not in known:
                    one = _at(state, optimizer)
                    known[optimizer] = isinstance(one, dict) and {"state", "param_groups"} <= {*one}
                if known[optimizer]:
                    found.setdefault(optimizer, ([], []))[side].append(steps)
                    break
    return {optimizer: sides for optimizer, sides in found.items() if sides[1]}


def _kinds(names: Iterable[Steps]) -> set[object]:
    """Return the name of an optimizer's state, such as ``exp_avg``."""
    return {steps[-1] for steps in names}


def _of_other_optimizer(optimizer: Steps, ours: set[object], theirs: set[object]) -> str:
    here, there = (", ".join(sorted(map(str, names))) for names in (ours, theirs))
    return (
        f"{describe((*optimizer, 'state'))} is that of another optimizer: it has {here} here, and "
        f"{there} in the checkpoint. Use the same optimizer, or leave it out of the state dict: it "
        "then begins without moments"
    )


def _at(state: Any, steps: Steps) -> Any:
    for step in steps:
        if not isinstance(state, dict):
            return None
        state = state.get(step)
    return state


def _of_run(run: Steps, pairs: Pairs) -> str:
    """Return which side has extra parts of names, and what adds them."""
    # A name may have these parts twice, and the other name once.
    some = sample(pairs, CANDIDATES_MAX)
    with_it = max(some, key=lambda pair: abs(count(pair[0], run) - count(pair[1], run)))
    is_theirs = count(with_it[1], run) > count(with_it[0], run)
    names = [pair[is_theirs] for pair in pairs]
    word = f"prefix '{text_of(run)}.'" if _is_prefix(run, names) else f"step '{text_of(run)}'"
    adds = f" ({WRAPPERS[run]})" if run in WRAPPERS else ""
    who, others = "the checkpoint's names have", "those here have not"
    if not is_theirs:
        who, others = "the names here have", "the checkpoint's have not"
    return f"{who} the {word}{adds}, and {others}"


def _is_prefix(run: Steps, names: list[Steps]) -> bool:
    """Return whether all names begin with these parts, or have them below the same key."""
    first = names[0]
    for at in range(min(2, len(first))):
        ahead = first[: at + len(run)]
        if ahead[at:] == run:
            return all(steps[: len(ahead)] == ahead for steps in names)
    return False
