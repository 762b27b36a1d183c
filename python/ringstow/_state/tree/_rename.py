"""Maps names between a checkpoint and a state dict: prefixes, and renamed parts. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ringstow._core._arguments import brief
from ringstow._core._errors import KeyMismatchError
from ringstow._state.tree import _key_maps, _weight_tables
from ringstow._state.tree._key_maps import KeyMap, Stars
from ringstow._state.tree._named_leaves import Named, Steps, Tensors, text_of, view_of
from ringstow._state.tree._tensor_views import CannotJoinError
from ringstow._state.tree._walk import flat_name

Mapped = Mapping[str | tuple[str, ...], "str | KeyMap"]
Given = Mapping[Any, "str | KeyMap"] | Sequence[Any]
"""The argument ``rename``: a mapping, or a list of mappings and of transformers' transforms."""
_ANY = "*"


def below(node: Any, prefix: str) -> Any:
    """Return the part of a skeleton below a prefix, as if it were the root; None if there is none.

    Keys with dots are cut: ``below({"model": {"module.w": x}}, "model.module")`` is ``{"w": x}``.
    """
    prefix = prefix.removesuffix(".")
    part: dict[Any, Any] = {}
    for key, child in node.items() if isinstance(node, dict) else ():
        step = flat_name((key,))
        if step == prefix:
            return child if isinstance(child, dict) else None
        if step.startswith(f"{prefix}."):
            part[step[len(prefix) + 1 :]] = child
        elif prefix.startswith(f"{step}."):
            part |= below(child, prefix[len(step) + 1 :]) or {}
    return part or None


class Stage(Protocol):
    """One mapping of several, of which each gets the names that the one before has made."""

    joins: bool
    """Whether it may join or split tensors."""

    def there(self, steps: Steps) -> Steps:
        """Return the new name of a name of the checkpoint that is neither joined nor split."""

    def here(self, steps: Steps) -> Steps:
        """Return the mapped name of a name of the state dict."""

    def takes(self, steps: Steps) -> bool:
        """Return whether it joins or splits the tensor of this name."""

    def join_of(self, steps: Steps) -> Hashable:
        """Return what tells the tensors that become one from all others; None: it stays alone."""

    def apply(self, leaves: list[Named], tensors: Tensors) -> Iterator[Named]:
        """Yield the leaves with new names, and the joined and split tensors."""

    def idle(self) -> list[str]:
        """Return the keys that join or split, and by which `apply` has found no tensor."""


class Rename:
    """Maps whole parts of the checkpoint's names to names here.

    Parts mapped to nothing are left out of the names on both sides, so that either side may have
    them.
    """

    def __init__(self, given: Given) -> None:
        """Check and store the argument of a load.

        Raises:
            TypeError: it is not a mapping of names, or a list of mappings. ValueError: it maps an
                empty name, or names that no map can join or split so.
        """
        self._stages: list[Stage] = list(_stages(given))
        self.joins = any(stage.joins for stage in self._stages)
        """Whether it may join or split tensors."""

    def there(self, steps: Steps) -> Steps:
        """Return the new name of a name of the checkpoint."""
        for stage in self._stages:
            steps = stage.there(steps)
        return steps

    def here(self, steps: Steps) -> Steps:
        """Return the mapped name of a name of the state dict."""
        for stage in self._stages:
            steps = stage.here(steps)
        return steps

    def takes(self, steps: Steps) -> bool:
        """Return whether it joins or splits the tensor of this name."""
        for stage in self._stages:
            if stage.takes(steps):
                return True
            steps = stage.there(steps)
        return False

    def join_of(self, steps: Steps) -> Hashable:
        """Return what the tensor of this name has in common with those that it is joined with.

        None: it is joined with none.
        """
        for number, stage in enumerate(self._stages):
            if stage.takes(steps):
                join = stage.join_of(steps)
                return None if join is None else (number, join)
            steps = stage.there(steps)
        return None

    def apply(self, leaves: list[Named], tensors: Tensors, where: str) -> list[Named]:
        """Return the leaves by their new names, with a `View` for each joined or split tensor.

        Raises:
            KeyMismatchError: tensors to join or to split are missing, or do not fit.
        """
        if not self.joins:
            return [one._replace(steps=self.there(one.steps)) for one in leaves]
        try:
            for stage in self._stages:
                leaves = list(stage.apply(leaves, tensors))
        except CannotJoinError as error:
            raise KeyMismatchError(f"{where}: rename= {error}", path=where) from None
        return leaves

    def idle(self) -> list[str]:
        """Return the keys that join or split, and by which `apply` has found no tensor."""
        return [key for stage in self._stages for key in stage.idle()]


def _stages(given: Given) -> Iterator[Stage]:
    if isinstance(given, Mapping):
        yield _Mapping(given)
        return
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong(given)
    table: list[Any] = []
    for one in given:
        if _weight_tables.is_transform(one):
            table.append(one)
            continue
        if table:
            yield _weight_tables.Table(table)
            table = []
        if isinstance(one, str):
            raise _wrong(given)
        yield from _stages(one)
    if table:
        yield _weight_tables.Table(table)


def _wrong(given: object) -> TypeError:
    return TypeError(f'rename is a dict such as {{"module": ""}}, not {brief(given)}')


class _Rule(NamedTuple):
    """A key that joins or splits, and what becomes of its tensors."""

    key: str
    """The key, as Python writes it."""
    runs: list[Steps]
    to: KeyMap


class _Mapping:
    """A dict of ``rename=``."""

    def __init__(self, mapping: Mapped) -> None:
        runs: dict[Steps, Steps] = {}
        self._rules: list[_Rule] = []
        for old, new in mapping.items():
            names = (old,) if isinstance(old, str) else old
            if (
                not isinstance(names, tuple)
                or not names
                or not all(isinstance(name, str) for name in names)
            ):
                raise _wrong(mapping)
            keys = [_run(name) for name in names]
            if () in keys:
                raise ValueError(
                    'rename maps steps of the checkpoint\'s names, and "" is none. To leave out a '
                    'prefix that only the names here have, map it to "": rename={"module": ""}'
                )
            stars = {key.count(_ANY) for key in keys}
            if len(stars) > 1:
                raise ValueError(f"rename: the names of {old!r} have different numbers of *")
            if new != "":
                _key_maps.check(new, len(keys), *stars)
            if isinstance(new, str):
                runs |= dict.fromkeys(keys, _run(new))
            else:
                self._rules.append(_Rule(repr(old), keys, new))
        # The longest first: it is the most specific.
        self._runs = sorted(runs.items(), key=lambda pair: -len(pair[0]))
        self._gone = [(old, new) for old, new in self._runs if not new]
        self._keys = sorted(
            ((run, rule, number) for rule in self._rules for number, run in enumerate(rule.runs)),
            key=lambda key: -len(key[0]),
        )
        self._used: set[str] = set()
        self.joins = bool(self._rules)

    def there(self, steps: Steps) -> Steps:
        return _mapped(steps, self._runs) or steps  # a name is never empty

    def here(self, steps: Steps) -> Steps:
        return _mapped(steps, self._gone) or steps

    def takes(self, steps: Steps) -> bool:
        return self._found(steps) is not None

    def join_of(self, steps: Steps) -> Hashable:
        found = self._found(steps)
        if found is None:
            return None
        run, rule, _, at = found
        taken = _key_maps.taken_stars(rule.to, len(rule.runs))
        if not taken and len(rule.runs) == 1:
            return None
        stars = _stars(steps, at, run)
        return id(rule), steps[:at], steps[at + len(run) :], stars[: len(stars) - taken]

    def apply(self, leaves: list[Named], tensors: Tensors) -> Iterator[Named]:
        # For each rule, and each name around its keys: the tensors of the keys, and the first leaf.
        groups: dict[tuple[int, Steps, Steps], tuple[_Rule, list[dict[Stars, Named]]]] = {}
        order: list[Named | tuple[int, Steps, Steps]] = []
        for one in leaves:
            found = self._found(one.steps) if one.may_join else None
            view = None if found is None else view_of(one, tensors)
            if found is None or view is None:
                order.append(one._replace(steps=self.there(one.steps)))
                continue
            run, rule, number, at = found
            ahead, behind = one.steps[:at], one.steps[at + len(run) :]
            group = (id(rule), ahead, behind)
            if group not in groups:
                self._used.add(rule.key)
                groups[group] = rule, [{} for _ in rule.runs]
                order.append(group)
            groups[group][1][number][_stars(one.steps, at, run)] = one._replace(node=view)
        for entry in order:
            if isinstance(entry, Named):
                yield entry
            else:
                rule, found_by_key = groups[entry]
                yield from self._made(rule, found_by_key, entry[1], entry[2], tensors)

    def idle(self) -> list[str]:
        return [rule.key for rule in self._rules if rule.key not in self._used]

    def _made(
        self,
        rule: _Rule,
        found: list[dict[Stars, Named]],
        ahead: Steps,
        behind: Steps,
        tensors: Tensors,
    ) -> Iterator[Named]:
        """Yield the tensors of a rule around which names have these steps."""
        before, after = (_mapped(steps, self._runs) for steps in (ahead, behind))
        every = dict.fromkeys(stars for one in found for stars in one)
        for run, one in zip(rule.runs, found, strict=True):
            lacking = [stars for stars in every if stars not in one]
            if lacking:
                name = text_of((*ahead, *_filled(run, lacking[0]), *behind))
                raise CannotJoinError(f"joins {name}, which the checkpoint does not have")
        path = next(iter(found[0].values())).path

        def steps(name: str, stars: Stars) -> Steps:
            return _mapped((*before, *_filled(_run(name), stars), *after), self._gone)

        streams = [{stars: one.node for stars, one in by_stars.items()} for by_stars in found]

        def shape_of(name: str, stars: Stars) -> tuple[int, ...] | None:
            return tensors.shape(text_of(steps(name, stars)))

        try:
            shapes = shape_of if tensors.has_state else None
            results = list(_key_maps.run(rule.to, streams, shapes))
        except CannotJoinError as error:
            keys = ", ".join(text_of((*ahead, *run, *behind)) for run in rule.runs)
            raise CannotJoinError(f"cannot map {keys}: {error}") from None
        for name, stars, view in results:
            yield Named(steps(name, stars), path, view)

    def _found(self, steps: Steps) -> tuple[Steps, _Rule, int, int] | None:
        """Return the key that joins or splits this name, its rule and number, and where it is."""
        for run, rule, number in self._keys:
            if run[0] != _ANY and run[0] not in steps:
                continue
            for at in range(len(steps) - len(run) + 1):
                if _matches(steps, at, run):
                    return run, rule, number, at
        return None


def _run(text: str) -> Steps:
    return tuple(text.strip(".").split(".")) if text.strip(".") else ()


def _stars(steps: Steps, at: int, run: Steps) -> Stars:
    """Return the steps from ``at`` for which the ``*`` of a pattern stand."""
    return tuple(step for step, of in zip(steps[at:], run, strict=False) if of == _ANY)


def _filled(run: Steps, stars: Stars) -> Steps:
    """Return the steps of a pattern, with these in place of its ``*``."""
    rest = iter(stars)
    return tuple(next(rest) if step == _ANY else step for step in run)


def _matches(steps: Steps, at: int, run: Steps) -> bool:
    part = steps[at : at + len(run)]
    return part == run or (
        _ANY in run
        and len(part) == len(run)
        and all(of in (_ANY, step) for step, of in zip(part, run, strict=True))
    )


def _mapped(steps: Steps, runs: list[tuple[Steps, Steps]]) -> Steps:
    if all(old[0] not in steps and old[0] != _ANY for old, _ in runs):
        return steps
    mapped: list[object] = []
    at = 0
    while at < len(steps):
        for old, new in runs:
            if _matches(steps, at, old):
                mapped += _filled(new, _stars(steps, at, old)) if _ANY in old else new
                at += len(old)
                break
        else:
            mapped.append(steps[at])
            at += 1
    return tuple(mapped)
