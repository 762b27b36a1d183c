"""The cost against the number of tensors: seconds of saves and loads of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from comparing.measuring import Rounds
from comparing.table import spread

TENSOR_BYTES = 4096
WIDTH = 22


def seconds(rounds: Rounds, name: str, what: str) -> list[float]:
    return [result["seconds"] for result in rounds.results(name, what)]


def cell(rounds: Rounds, name: str, what: str) -> str:
    limit = rounds.more_than(name, what)
    return spread(seconds(rounds, name, what)) if limit is None else f"> {limit:g}"


def skipped(found: Mapping[int, Rounds]) -> dict[str, str]:
    """Return the rows that were too slow with fewer tensors, and are skipped with more."""
    reasons: dict[str, str] = {}
    for count, rounds in found.items():
        for name, reason in rounds.stopped.items():
            reasons.setdefault(name, f"skipped: {reason} with {count:,} tensors")
    return reasons


def table(found: Mapping[int, Rounds]) -> Iterator[str]:
    """Yield a line for each row and operation: a column of seconds for each number of tensors."""
    names = list(dict.fromkeys(name for rounds in found.values() for name in rounds.names))
    yield f"{'seconds, by tensors':<{WIDTH}} " + " ".join(f"{n:>{WIDTH},}" for n in found)
    for what in ("save", "load"):
        for name in names:
            cells = [cell(rounds, name, what) for rounds in found.values()]
            if any(told != "-" for told in cells):
                label = f"{name}, {what}"
                yield f"{label:<{WIDTH}} " + " ".join(f"{told:>{WIDTH}}" for told in cells)
    for count, rounds in found.items():
        for name, reason in (rounds.failed | rounds.stopped).items():
            yield f"{name}, {count:,} tensors: {reason}"


def as_json(found: Mapping[int, Rounds]) -> list[dict[str, Any]]:
    """Return, for each number of tensors, the seconds of each row's saves and loads.

    `failed` and `stopped` say why a row has none, or too few.
    """
    return [
        {
            "tensors": count,
            "failed": rounds.failed,
            "stopped": rounds.stopped,
            "seconds": {
                name: {
                    what: seconds(rounds, name, what)
                    for what in ("save", "load")
                    if rounds.results(name, what)
                }
                for name in rounds.names
            },
        }
        for count, rounds in found.items()
    ]
