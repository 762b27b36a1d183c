"""Sizes as people write them: one parser, that of variables, ``ringstow.toml`` and the program."""

from __future__ import annotations

from ringstow import _native
from ringstow._errors import InvalidStateError


def in_bytes(size: int | str) -> int:
    """Return a size in bytes: ``"4M"`` and ``"4MiB"`` are 4 * 2^20, ``"4MB"`` is 4 * 10^6.

    Raises:
        InvalidStateError: the text is no size.
    """
    if isinstance(size, int):
        return size
    try:
        return _native.parse_size(size)
    except ValueError as why:
        raise InvalidStateError(f"{size!r}: {why}") from None
