"""Decides which rank writes what, and compares the ranks' states."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._ranks._group import Group
from ringstow._ranks._team import refuse_different
from ringstow._state.objects._optimizers import GROUPS, PARAMS
from ringstow._state.tensors import _cuda, _torch
from ringstow.distributed._rank_state import State

# Maximum size of a tensor whose copies are compared between ranks.
COMPARED_BYTES = 64 << 10
_SHOWN = 5

_log = logging.getLogger("ringstow")

T = TypeVar("T")
Holder = tuple[int, int] | None
"""This rank's position among the ranks with a tensor, and their number; None: it writes none."""


class Said(NamedTuple):
    """A rank's message to all others before a save."""

    structure: int
    """The hash of this name from `_native.outline`."""
    values: int
    replicated: str
    """A digest of the names, dtypes and shapes of tensors that are not sharded."""
    copies: str
    """A digest of the elements of the small tensors among them."""
    meshes: str
    """A digest of the ranks of sharded tensors that not all ranks have."""
    parts: tuple[str, ...]
    """Which ``droppable`` parts this rank has tensors of."""


class Deal(NamedTuple):
    """The information from other ranks before a rank writes."""

    sends_tree: bool
    """Whether the first rank needs this one's tree."""
    names: list[str]
    """The names of all tensors that this rank's tree refers to."""


class Own(NamedTuple):
    """A rank's results about its own state."""

    said: Said
    names: list[str]
    rows: list[tuple[str, str, tuple[int, ...], int | None]]


def looked_at(state: State, parts: list[str]) -> Own:
    """Return a rank's message about its state to the others."""
    structure, values, names = _native.outline(state.tree)
    rows = state.tensors.replicated(COMPARED_BYTES)
    had = tuple(part for part in parts if any(_is_below(name, part) for name in names))
    said = Said(
        structure,
        values,
        _digest([row[:3] for row in rows]),
        _digest([row[3] for row in rows]),
        _digest(sorted(state.meshes.items())),
        had,
    )
    return Own(said, names, rows)


def agreed(group: Group, call: tuple[object, ...], said: T, error: BaseException | None) -> list[T]:
    """Return the messages of all ranks, if none has failed and all make the same call.

    Raises:
        BaseException: this rank's own error.
        Error: another rank's error, with its number.
        InvalidStateError: the ranks make different calls.
    """
    all_said = group.agreed(error, (call, said))
    refuse_different_calls([other for other, _ in all_said])
    return [one for _, one in all_said]


def refuse_different_calls(calls: list[tuple[object, ...]]) -> None:
    """Raise InvalidStateError if the ranks make different calls."""
    hint = ""
    if len({(call[0], *call[2:]) for call in calls}) == 1:
        hint = ". If each node has a directory of its own, say so: nodes=ringstow.Nodes()"
    refuse_different(calls, hint)


def deal(
    group: Group, state: State, own: Own, all_said: list[Said], *, is_apart: bool = False
) -> Deal:
    """Reduce a state's tensors to the parts that this rank writes.

    Ranks exchange more than `Said` only if their states differ.

    Args:
        group: the ranks.
        state: this rank's state.
        own: this rank's message, and further results about its state.
        all_said: the messages of all ranks.
        is_apart: whether nodes share no directory. If so, the first rank with a small unsharded
            tensor writes it, since each node fetches all of these in a load.

    Raises:
        InvalidStateError: a tensor that is not sharded has another dtype or shape on another rank,
            or is sharded there; or ranks have different tensors of one name.
    """
    holders: dict[str, Holder] = {}
    if len({one.replicated for one in all_said}) > 1:
        holders = _holders(group, own, all_said)
    if len({one.meshes for one in all_said}) > 1:
        _refuse_different(group, state, all_said)
    if len({(one.replicated, one.copies) for one in all_said}) > 1:
        holders |= _differing(group, own, holders)
    if is_apart:
        for name, *_, summed in own.rows:
            number, _ = holders.get(name, (group.rank, group.size)) or (-1, 0)
            if summed is not None:
                holders[name] = (0, 1) if number == 0 else None
    if len({(one.structure, one.values) for one in all_said}) > 1:
        _warn_of_values(group, state, own.said)
    state.tensors.deal((group.rank, group.size), holders)
    first = next(one for one in all_said if one.structure == own.said.structure)
    sends = group.rank > 0 and first is all_said[group.rank]
    return Deal(sends, own.names)


def _holders(group: Group, own: Own, all_said: list[Said]) -> dict[str, Holder]:
    """Return, for each of this rank's tensors, its position among the ranks with that tensor."""
    asked = ("holders", tuple((one.replicated, one.structure) for one in all_said))
    known: dict[str, Holder] | None = group.known.get(asked)
    if known is None:
        ranks: dict[str, list[int]] = {}
        kinds: dict[str, tuple[int, tuple[object, ...]]] = {}
        plain = {row[0] for row in own.rows}
        sharded = set(own.names) - plain
        mixed = ""
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
                if name in sharded:
                    mixed = f"{name} is a sharded tensor here, and not on rank {rank}"
        group.agreed(InvalidStateError(f"{mixed}: give each its own name") if mixed else None, None)
        known = {row[0]: (ranks[row[0]].index(group.rank), len(ranks[row[0]])) for row in own.rows}
        group.known = {key: value for key, value in group.known.items() if key[0] != "holders"}
        group.known[asked] = known
    return dict(known)


def _refuse_different(group: Group, state: State, all_said: list[Said]) -> None:
    """Refuse different tensors with the same name: only one of them would be saved.

    Groups of ranks may have copies of a tensor, sharded alike, such as tensor parallelism within
    data parallelism. Stages of a pipeline may have different tensors with one name, such as
    an optimizer's, which numbers its parameters from 0 on in each stage.

    Raises:
        InvalidStateError: names one tensor.
    """
    asked = ("meshes", tuple(one.meshes for one in all_said))
    twins: set[str] | None = group.known.get(asked)
    if twins is None:
        first: dict[str, tuple[int, ...]] = {}
        twins = set()
        for meshes in group.gathered(state.meshes):
            twins |= {n for n, ranks in meshes.items() if first.setdefault(n, ranks) != ranks}
        group.known = {key: value for key, value in group.known.items() if key[0] != "meshes"}
        group.known[asked] = twins
    if not twins:
        return
    seen: dict[tuple[object, ...], tuple[int, int]] = {}
    all_regions = group.together(lambda: list(_checksums(state.tensors, twins)))
    for rank, regions in enumerate(all_regions):
        for name, offsets, shape, crc32 in regions:
            other, known = seen.setdefault((name, *offsets, *shape), (rank, crc32))
            if known != crc32:
                raise InvalidStateError(
                    f"{name} is one tensor on rank {other} and a different one on rank {rank}, and "
                    "only one of them would be saved: give each its own name, such as by the "
                    "stage of a pipeline; or save an optimizer's state by "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which "
                    "names it by parameters"
                )


def _checksums(
    tensors: _native.Tensors, names: set[str]
) -> Iterator[tuple[str, list[int], list[int], int]]:
    """Yield the name, offsets, shape and checksum of each region of these tensors."""
    for name, offsets, shape, summed in tensors.checksums(names):
        if not isinstance(summed, int):
            # The region's tensor on a GPU, or the copy that the call made there and that tensor.
            local = summed[0] if isinstance(summed, tuple) else summed
            (host,) = _cuda.to_host([local])
            memory = _torch.memory_of(host, name)
            alone = _native.Tensors()
            alone.add_region(name, memory, (memory.shape, (0,) * len(memory.shape)), (0, 1))
            ((_, _, _, summed),) = alone.checksums({name})
        yield name, offsets, shape, summed


def _differing(group: Group, own: Own, holders: dict[str, Holder]) -> dict[str, Holder]:
    """Return which rank writes small tensors whose copies differ: the first rank with them."""
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
    """Warn that ranks have different values of a name, once per structure of the state."""
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
    """Yield the name and a digest of each value of a tree that is not a tensor."""
    if isinstance(node, dict) and not any(key.startswith("$") for key in node):
        for key, child in node.items():
            yield from _values(child, f"{name}.{key}" if name else key)
    elif isinstance(node, dict) and "$dict" in node:
        for key, child in node["$dict"]:
            yield from _values(child, f"{name}.{key}" if name else str(key))
    elif isinstance(node, dict) and "$odict" in node:  # a model's keys may be split over ranks
        inner = node["$odict"]
        yield from _values({"$dict": inner} if isinstance(inner, list) else inner, name)
    elif not (isinstance(node, dict) and node.keys() & {"$tensor", "$ndarray", "$rank", "$each"}):
        yield name, _digest(_without_names(node) if name.endswith(f".{GROUPS}") else node)


def _without_names(groups: Any) -> Any:
    """Return an optimizer's groups without parameters, which differ between pipeline stages."""
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        return groups
    return [{name: one for name, one in group.items() if name != PARAMS} for group in groups]


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
