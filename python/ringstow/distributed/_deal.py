"""Which rank writes what, and what the ranks' states have in common."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any, NamedTuple, TypeVar

from ringstow import _native
from ringstow._errors import InvalidStateError
from ringstow.distributed._group import Group
from ringstow.distributed._state import State

# The largest tensor whose copies on the ranks are compared.
COMPARED_BYTES = 64 << 10
_SHOWN = 5

_log = logging.getLogger("ringstow")

T = TypeVar("T")
Holder = tuple[int, int] | None
"""Which of how many ranks with a tensor this one is; None if another one writes it."""


class Said(NamedTuple):
    """What a rank tells all others before a save."""

    structure: int
    """A hash of what `_native.outline` calls so."""
    values: int
    replicated: str
    """A digest of the names, dtypes and shapes of tensors that are not sharded."""
    copies: str
    """A digest of the elements of the small ones among them."""
    parts: tuple[str, ...]
    """Which of the parts to set apart the rank has something of."""


class Deal(NamedTuple):
    """What a rank knows of the others before it writes."""

    sends_tree: bool
    """Whether the first rank needs this one's tree."""
    names: list[str]
    """Of all tensors that this rank's tree refers to."""


class Own(NamedTuple):
    """What a rank knows of its own state."""

    said: Said
    names: list[str]
    rows: list[tuple[str, str, tuple[int, ...], int | None]]


def looked_at(state: State, parts: list[str]) -> Own:
    """Return what a rank tells the others of its state."""
    structure, values, names = _native.outline(state.tree)
    rows = state.tensors.replicated(COMPARED_BYTES)
    had = tuple(part for part in parts if any(_is_below(name, part) for name in names))
    said = Said(
        structure,
        values,
        _digest([row[:3] for row in rows]),
        _digest([row[3] for row in rows]),
        had,
    )
    return Own(said, names, rows)


def agreed(group: Group, call: tuple[object, ...], said: T, error: BaseException | None) -> list[T]:
    """Return what all ranks say, if none has failed and all make the same call.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's, with its rank.
        InvalidStateError: the ranks make different calls.
    """
    all_said = group.agreed(error, (call, said))
    if any(other != call for other, _ in all_said):
        calls = "; ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(all_said))
        raise InvalidStateError(
            f"the ranks do not make the same call: {calls}. Call it on every rank, in the same "
            "order and with the same arguments"
        )
    return [one for _, one in all_said]


def deal(group: Group, state: State, own: Own, all_said: list[Said]) -> Deal:
    """Leave in a state's tensors what this rank writes of them.

    Only ranks whose states differ say more to each other than `Said`.

    Raises:
        InvalidStateError: a tensor that is not sharded has another dtype or shape on another rank.
    """
    holders: dict[str, Holder] = {}
    if len({one.replicated for one in all_said}) > 1:
        holders = _holders(group, own, all_said)
    if len({(one.replicated, one.copies) for one in all_said}) > 1:
        holders |= _differing(group, own, holders)
    if len({(one.structure, one.values) for one in all_said}) > 1:
        _warn_of_values(group, state, own.said)
    state.tensors.deal((group.rank, group.size), holders)
    first = next(one for one in all_said if one.structure == own.said.structure)
    sends = group.rank > 0 and first is all_said[group.rank]
    return Deal(sends, own.names)


def _holders(group: Group, own: Own, all_said: list[Said]) -> dict[str, Holder]:
    """Return, for each of this rank's tensors, which of how many ranks with it this one is."""
    asked = ("holders", tuple(one.replicated for one in all_said))
    known: dict[str, Holder] | None = group.known.get(asked)
    if known is None:
        ranks: dict[str, list[int]] = {}
        kinds: dict[str, tuple[int, tuple[object, ...]]] = {}
        for rank, rows in enumerate(group.gathered([row[:3] for row in own.rows])):
            for name, *kind in rows:
                first, of_first = kinds.setdefault(name, (rank, tuple(kind)))
                if of_first != tuple(kind):
                    raise InvalidStateError(
                        f"{name} is {_shown(of_first)} on rank {first} and "
                        f"{_shown(tuple(kind))} on rank {rank}: "
                        "give each its own name, or make it a PerRank"
                    )
                ranks.setdefault(name, []).append(rank)
        known = {row[0]: (ranks[row[0]].index(group.rank), len(ranks[row[0]])) for row in own.rows}
        group.known = {key: value for key, value in group.known.items() if key[0] != "holders"}
        group.known[asked] = known
    return dict(known)


def _differing(group: Group, own: Own, holders: dict[str, Holder]) -> dict[str, Holder]:
    """Return who writes small tensors whose copies differ: the first rank that has them."""
    seen: dict[str, int | None] = {}
    differ: set[str] = set()
    for copies in group.gathered({row[0]: row[3] for row in own.rows if row[3] is not None}):
        for name, crc32 in copies.items():
            if seen.setdefault(name, crc32) != crc32:
                differ.add(name)
    _warn(group, "tensors", sorted(differ))
    ours = differ.intersection(row[0] for row in own.rows)
    everywhere = (group.rank, group.size)
    is_first = {name: (holders.get(name) or everywhere)[0] == 0 for name in ours}
    return {name: (0, 1) if is_first[name] else None for name in ours}


def _warn_of_values(group: Group, state: State, said: Said) -> None:
    """Warn once for each structure that ranks have different values of a name."""
    asked = ("values", said.structure)
    is_new = any(group.gathered(asked not in group.known))
    if not is_new:
        return
    group.known[asked] = True
    seen: dict[str, str] = {}
    differ: set[str] = set()
    for values in group.gathered(dict(_values(json.loads(state.tree), ""))):
        for name, digest in values.items():
            if seen.setdefault(name, digest) != digest:
                differ.add(name)
    _warn(group, "values", sorted(differ))


def _values(node: Any, name: str) -> Any:
    """Yield the name and a digest of each value of a tree that is no tensor."""
    if isinstance(node, dict) and not any(key.startswith("$") for key in node):
        for key, child in node.items():
            yield from _values(child, f"{name}.{key}" if name else key)
    elif isinstance(node, dict) and "$dict" in node:
        for key, child in node["$dict"]:
            yield from _values(child, f"{name}.{key}" if name else str(key))
    elif not (isinstance(node, dict) and node.keys() & {"$tensor", "$ndarray", "$rank"}):
        yield name, _digest(node)


def _warn(group: Group, what: str, names: list[str]) -> None:
    if not names or not group.is_first:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    _log.warning(
        "the ranks have different %s of %s%s: the first rank's are saved. "
        "ringstow.distributed.PerRank(value) saves those of each rank",
        what,
        ", ".join(names[:_SHOWN]),
        more,
    )


def _shown(kind: tuple[object, ...]) -> str:
    dtype, shape = kind
    return f"{dtype} {list(shape)}"  # type: ignore[call-overload]


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
