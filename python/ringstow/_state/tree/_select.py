"""Selects the requested part of a skeleton, by exact names or by a prefix. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from ringstow._core._errors import KeyMismatchError
from ringstow._state.tree._walk import (
    COMPOSITE,
    Box,
    Path,
    children,
    flat_name,
    leaf_name,
    leaves,
    like,
    metadata_of,
)

# Maximum number of names among which to search close matches, which is slow.
_CANDIDATES_MAX = 5_000
_SUGGESTED_FOR_MAX = 3
_NOTHING: Any = object()


def by_prefix(
    skeleton: dict[Any, Any], prefix: str, path: str, dropped: Sequence[str] = ()
) -> dict[Any, Any]:
    """Return the skeleton with only the leaves whose flat name is the prefix, or below it.

    A prefix matches whole parts of a name: ``"model"`` selects ``model`` and ``model.*``, but not
    ``model_ema.*``. ``"model."`` selects the same without ``model`` itself.

    Raises:
        KeyMismatchError: no leaf matches. ``path`` is the checkpoint's path, and ``dropped`` the
            names that `slim` has dropped, for the message.
    """
    below = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    part = _restrict(skeleton, (), lambda name: name == prefix or name.startswith(below))
    if part is not _NOTHING:
        return part  # type: ignore[no-any-return]
    if not skeleton:
        return skeleton
    shown = f"any name that is {prefix!r} or starts with {below!r}"
    raise missing_names([prefix], [shown], skeleton, path, dropped)


def is_below(name: str, part: str) -> bool:
    """Return whether a flat name is a part's name, or below it."""
    return name == part or name.startswith(f"{part}.")


def by_keys(
    skeleton: dict[Any, Any], keys: Iterable[str], path: str, dropped: Sequence[str] = ()
) -> dict[Any, Any]:
    """Return the skeleton with only the leaves whose flat names are among the keys.

    Raises:
        KeyMismatchError: names all keys that no leaf has.
    """
    wanted = dict.fromkeys(keys)
    found: set[str] = set()

    def is_wanted(name: str) -> bool:
        if name in wanted:
            found.add(name)
        return name in wanted

    part = _restrict(skeleton, (), is_wanted)
    missing = [key for key in wanted if key not in found]
    if missing:
        raise missing_names(missing, missing, skeleton, path, dropped)
    return {} if part is _NOTHING else part


def _restrict(node: Any, path: Path, wanted: Any) -> Any:
    """Remove unwanted leaves from dicts; a list or tuple is kept or removed as a whole."""
    pairs = children(node)
    if pairs is None:
        return node if wanted(leaf_name(path, node)) else _NOTHING
    if not isinstance(node, dict):
        # Call it for every leaf, since it also records which keys were found.
        hits = [wanted(leaf_name(at, leaf)) for at, leaf in leaves(node, path)]
        if isinstance(node, Box) and node.tag == COMPOSITE:  # a tensor, too
            hits.append(wanted(flat_name(path)))
        return node if any(hits) else _NOTHING
    part: dict[Any, Any] = like(node, ())
    for key, child in pairs:
        kept = _restrict(child, (*path, key), wanted)
        if kept is not _NOTHING:
            part[key] = kept
    metadata = metadata_of(node)
    if metadata is not None and isinstance(part, collections.OrderedDict):
        part._metadata = metadata  # type: ignore[attr-defined]
    return part or _NOTHING


def missing_names(
    missing: list[str],
    shown: list[str],
    skeleton: dict[Any, Any],
    path: str,
    dropped: Sequence[str] = (),
) -> KeyMismatchError:
    """Return the error for names that no leaf has, with names that are close."""
    names = [leaf_name(at, leaf) for at, leaf in leaves(skeleton)]
    hints = [_hint(name, names) for name in missing[:_SUGGESTED_FOR_MAX]]
    hints += [f"; {lost}" for lost in by_slim(missing, dropped)]
    text = f"{path} does not hold what was asked for; {listed('not in the checkpoint', shown)}"
    return KeyMismatchError(text + "".join(hints), path=path, missing=missing)


def by_slim(missing: Iterable[str], dropped: Iterable[str]) -> list[str]:
    """Return the sentence that says which of the missing names `slim` has dropped, if any."""
    names = [name.removesuffix(".") for name in missing]
    lost = [part for part in dropped if any(is_below(name, part) for name in names)]
    return [said_of_slim(lost)] if lost else []


def said_of_slim(dropped: Iterable[str]) -> str:
    """Return a sentence with the names that `slim` has dropped."""
    return f"`slim` has dropped {' and '.join(dropped)} from this checkpoint"


def _hint(name: str, names: list[str]) -> str:
    below = f"{name}."
    if any(other.startswith(below) for other in names):
        return f"; {name!r} is a group: ringstow.load(path, prefix={below!r}) loads it"
    import difflib

    close = difflib.get_close_matches(name, names[:_CANDIDATES_MAX])
    return f"; instead of {name!r} perhaps {' or '.join(map(repr, close))}" if close else ""


def listed(title: str, names: list[str]) -> str:
    """Return ``title (count): names``, with at most twenty names."""
    shown = ", ".join(names[:20])
    more = f", and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{title} ({len(names)}): {shown}{more}"
